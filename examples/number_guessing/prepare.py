"""Makes what this run needs: a tiny model and tokenizer, games to learn the rules from, numbers to
find."""

import random
from pathlib import Path

from tunesmith.guide.recipes.arithmetic import make_model, write_lines

HERE = Path(__file__).parent
PROMPT = "?"


def turns(rng: random.Random) -> list[dict[str, object]]:
    """Up to four guesses as examples. Half of them heed what was answered, half are any number at
    all."""
    secret = rng.randrange(10)
    low = 0
    high = 9
    said = PROMPT
    made: list[dict[str, object]] = []
    for _ in range(4):
        guess = rng.randint(low, high) if rng.random() < 0.5 else rng.randrange(10)
        made.append({"prompt": said, "completion": str(guess)})
        if guess == secret:
            break
        if guess < secret:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
        # What the policy wrote ends with its end-of-sequence token; the environment's answer
        # follows.
        said += f"{guess}<eos>{'+' if guess < secret else '-'}"
    return made


def main() -> None:
    rng = random.Random(0)
    write_lines(HERE / "examples.jsonl", [turn for _ in range(4000) for turn in turns(rng)])
    write_lines(
        HERE / "train.jsonl", [{"prompt": PROMPT, "secret": secret} for secret in range(10)] * 4
    )
    write_lines(
        HERE / "held_out.jsonl", [{"prompt": PROMPT, "secret": secret} for secret in range(10)]
    )
    make_model(HERE / "model", seed=0, hidden=64, layers=2, alphabet="0123456789?+-")


if __name__ == "__main__":
    main()
