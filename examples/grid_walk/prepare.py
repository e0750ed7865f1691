"""Makes what this run needs: a tiny model and tokenizer, walks to learn the moves from, goals to
reach."""

import random
from pathlib import Path

from tunesmith.guide.recipes.arithmetic import make_model, write_lines

HERE = Path(__file__).parent
FAR = 3
MOVES = {"E": (-1, 0), "W": (1, 0), "N": (0, -1), "S": (0, 1)}


def shown(east: int, north: int) -> str:
    """The way that is left, as the environment says it."""
    return f"{east:+d}{north:+d}:"


def goals() -> list[tuple[int, int]]:
    reach = range(-FAR, FAR + 1)
    return [(east, north) for east in reach for north in reach if 0 < abs(east) + abs(north) <= 4]


def walk(rng: random.Random) -> list[dict[str, object]]:
    """Steps as examples: some lead nearer, more go anywhere, and nothing says which are better."""
    east, north = rng.choice(goals())
    said = shown(east, north)
    made = []
    for _ in range(6):
        nearer = [
            m
            for m, (x, y) in MOVES.items()
            if abs(east + x) + abs(north + y) < abs(east) + abs(north)
        ]
        move = rng.choice(nearer if nearer and rng.random() < 0.4 else sorted(MOVES))
        made.append({"prompt": said, "completion": move})
        east = east + MOVES[move][0]
        north = north + MOVES[move][1]
        # What the policy wrote ends with its end-of-sequence token; the environment's answer
        # follows.
        said += f"{move}<eos>{shown(east, north)}"
    return made


def main() -> None:
    rng = random.Random(0)
    write_lines(HERE / "examples.jsonl", [step for _ in range(2000) for step in walk(rng)])
    tasks: list[dict[str, object]] = [
        {"prompt": shown(e, n), "east": e, "north": n} for e, n in goals()
    ]
    write_lines(HERE / "train.jsonl", tasks)
    write_lines(HERE / "held_out.jsonl", tasks)
    make_model(HERE / "model", seed=0, hidden=64, layers=2, alphabet="0123456789+-:ENSW")


if __name__ == "__main__":
    main()
