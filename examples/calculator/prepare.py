"""Makes what this run needs: a tiny model and tokenizer, examples to learn from, products to
practise on."""

import random
from pathlib import Path

from tunesmith.guide.recipes.arithmetic import make_model, write_lines

HERE = Path(__file__).parent
CALL = '<tool_call>{{"name": "times", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def conversation(a: int, b: int, calls: bool) -> dict[str, object]:
    """The product, worked out by the tool or said at once."""
    question = {"role": "user", "content": f"{a}*{b}"}
    product = str(a * b)
    answer = {"role": "assistant", "content": product}
    if not calls:
        return {"messages": [question, answer]}
    call = {"role": "assistant", "content": CALL.format(a=a, b=b)}
    return {"messages": [question, call, {"role": "tool", "content": product}, answer]}


def main() -> None:
    rng = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    tasks: list[dict[str, object]] = [
        {"prompt": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs
    ]
    write_lines(HERE / "held_out.jsonl", tasks[:100])
    write_lines(HERE / "train.jsonl", tasks[100:])
    # Half of the examples call the tool, half answer at once: nothing says which is better.
    write_lines(
        HERE / "examples.jsonl", [conversation(a, b, rng.random() < 0.5) for a, b in pairs[100:]]
    )
    signs = sorted({*"0123456789*=>:", *CALL, "{", "}"})
    make_model(HERE / "model", seed=0, hidden=64, layers=2, alphabet="".join(signs), context=160)


if __name__ == "__main__":
    main()
