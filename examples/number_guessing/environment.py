"""A number from 0 to 9 is to be found; a wrong guess is answered with ``+`` (higher) or ``-``
(lower)."""


class GuessNumber:
    """The right guess is paid 1; one that the answers so far rule out costs a quarter."""

    def reset(self, secret: int) -> None:
        self.secret = secret
        self.low = 0
        self.high = 9

    def step(self, action: str) -> tuple[str, float, bool]:
        if not (action.isdigit() and len(action) == 1):
            return "", -0.5, True
        guess = int(action)
        if guess == self.secret:
            return "", 1.0, True
        reward = 0.0 if self.low <= guess <= self.high else -0.25
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
            return "+", reward, False
        self.high = min(self.high, guess - 1)
        return "-", reward, False
