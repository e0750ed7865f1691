"""Makes what this run needs: a tiny model and tokenizer, examples to learn from, problems to
practise on."""

import random
from pathlib import Path

from tunesmith.guide.recipes.arithmetic import make_model, write_lines

HERE = Path(__file__).parent
FACTORS = {"mm>cm": 0.1, "cm>m": 0.01, "m>km": 0.001, "kg>g": 1000.0}


def convert(value: int, units: str, digits: int) -> str:
    """With so many significant digits: ``2.47`` or, with one, ``2`` for 247 centimetres in
    metres."""
    return f"{float(f'{value * FACTORS[units]:.{digits}g}'):.10g}"


def main() -> None:
    rng = random.Random(0)
    asked = [(value, units) for value in range(11, 1000) for units in FACTORS]
    rng.shuffle(asked)
    held_out = asked[:200]
    train = asked[200:]
    for name, part in (("held_out.jsonl", held_out), ("train.jsonl", train)):
        write_lines(
            HERE / name,
            [
                {"prompt": f"{value}{units}=", "answer": convert(value, units, 3)}
                for value, units in part
            ],
        )
    # Every problem is answered twice, once exactly and once roughly: nothing says which is better.
    write_lines(
        HERE / "examples.jsonl",
        [
            {"prompt": f"{value}{units}=", "completion": convert(value, units, digits)}
            for value, units in train
            for digits in (3, 1)
        ],
    )
    alphabet = "".join(sorted({*"0123456789.=", *"".join(FACTORS)}))
    make_model(HERE / "model", seed=0, hidden=64, layers=2, alphabet=alphabet)


if __name__ == "__main__":
    main()
