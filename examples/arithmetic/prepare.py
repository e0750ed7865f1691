"""Makes what this run needs: a tiny model and tokenizer, examples to learn from, problems to
practise on."""

import random
from pathlib import Path

from tunesmith.guide.recipes.arithmetic import make_model, write_lines

HERE = Path(__file__).parent


def worked(a: int, b: int) -> str:
    """The sum with its working, every digit in its place: ``;7+8+0=15;3+5+1=09;95`` for 37 + 58."""
    ones = a % 10 + b % 10
    carry = ones // 10
    tens = a // 10 + b // 10 + carry
    return f";{a % 10}+{b % 10}+0={ones:02};{a // 10}+{b // 10}+{carry}={tens:02};{a + b}"


def main() -> None:
    rng = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    held_out = pairs[:200]
    train = pairs[200:]
    tasks = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    write_lines(HERE / "held_out.jsonl", tasks[: len(held_out)])
    write_lines(HERE / "train.jsonl", tasks[len(held_out) :])
    # Half of the examples show their working, half answer at once: nothing says which is better.
    answers = [worked(a, b) if rng.random() < 0.5 else str(a + b) for a, b in train]
    write_lines(
        HERE / "examples.jsonl",
        [
            {"prompt": f"{a}+{b}=", "completion": answer}
            for (a, b), answer in zip(train, answers, strict=True)
        ],
    )
    make_model(HERE / "model", seed=0, hidden=64, layers=2)


if __name__ == "__main__":
    main()
