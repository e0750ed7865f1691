"""An environment of OpenEnv: guess a number, which the seed determines."""

from __future__ import annotations

import os

from openenv.core import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class HotAndCold(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret = 0

    def reset(self, seed=None, flood=0, **_):
        self.secret = (seed or 0) % 10
        return Hint(hint="go" + "!" * flood)

    def step(self, action, **_):
        if action.number == 99:
            os._exit(3)
        right = action.number == self.secret
        said = "right" if right else "higher" if action.number < self.secret else "lower"
        return Hint(hint=said, done=right, reward=1.0 if right else -0.1)

    @property
    def state(self):
        return State()


app = create_fastapi_app(HotAndCold, Guess, Hint, max_concurrent_envs=16)
