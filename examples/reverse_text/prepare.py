"""Makes what this run needs: a tiny model and tokenizer, examples to learn from, words to practise
on."""

import random
from pathlib import Path

from tunesmith.guide.recipes.arithmetic import make_model, write_lines

HERE = Path(__file__).parent
LETTERS = "abcdefghijkl"


def main() -> None:
    rng = random.Random(0)
    words = list(
        dict.fromkeys("".join(rng.choices(LETTERS, k=rng.randint(3, 6))) for _ in range(4000))
    )
    tasks = [{"prompt": f"{word}>", "word": word} for word in words]
    write_lines(HERE / "held_out.jsonl", tasks[:200])
    write_lines(HERE / "train.jsonl", tasks[200:])
    # Half of the examples reverse the word, half repeat it as it is: nothing says which is better.
    answers = [word[:: rng.choice((1, -1))] for word in words[200:]]
    write_lines(
        HERE / "examples.jsonl",
        [
            {"prompt": f"{word}>", "completion": answer}
            for word, answer in zip(words[200:], answers, strict=True)
        ],
    )
    make_model(HERE / "model", seed=0, hidden=64, layers=2, alphabet=f"{LETTERS}>")


if __name__ == "__main__":
    main()
