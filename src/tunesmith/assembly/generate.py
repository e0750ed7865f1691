"""``tunesmith generate``, put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tunesmith.assembly.common import run_async
from tunesmith.assembly.opening import announce
from tunesmith.assembly.rewards import add_rewards
from tunesmith.assembly.sampler import SamplingRun, answer_tasks, identity, open_sampling, resolve_sampling
from tunesmith.config.generation import GenerateConfig
from tunesmith.data.chat import end_of_turn_id
from tunesmith.data.formats import Example
from tunesmith.data.prompts import choose_template
from tunesmith.data.tokens import encode
from tunesmith.errors import ConfigError
from tunesmith.loop.usage import Usage, total_of
from tunesmith.offline.generation import (
    BLOCK,
    LineWriter,
    answer,
    claim,
    given_records,
    read_lines,
    records_of,
    repair,
    score_given,
    scored_line,
    window_of,
    write_whole,
)
from tunesmith.offline.selection import MADE, Choice, level_borders, usable
from tunesmith.storage import read_json, write_json

_PART = "run"


@dataclass(frozen=True, slots=True)
class Generated:
    """What ``tunesmith generate`` leaves. ``counts`` says what became of the lines."""

    run_dir: Path
    output: Path
    lines: int
    counts: dict[str, float]
    usage: dict[str, float] = field(default_factory=dict[str, float], compare=False)
    """Seconds by phase and peak memory of all calls, by the names of metrics; see ``Usage``."""
    earlier: float = field(default=0.0, compare=False)
    """Seconds that calls before this one took."""


def run_generate(path: Path | None, overrides: Sequence[str] = ()) -> Generated:
    """``tunesmith generate``: answer, or score, every line of a data file; called again, it continues."""
    usage = Usage()
    with open_sampling(GenerateConfig, path, overrides) as run:
        resolved = resolve_sampling(run.config, run.tasks)
        config, directory = resolved.config, run.directory.path
        scoring = config.output.kind == "score"
        out = directory / ("scores.jsonl" if scoring else "completions.jsonl")
        claim(out, identity(config, run.train.fingerprint, run.tokenizer))
        announce(resolved, run.directory, run.train)
        file, done = directory / "report.json", None
        usage.add_earlier({_PART: read_json(file)["usage"]} if file.exists() else {})
        try:
            with usage.phase("scoring" if scoring else "sampling", _PART):
                _write(config, run, out, usage)
            with usage.phase("selection", _PART):
                done = _outcome(config, directory, out)
        finally:
            found = total_of(usage.parts().values())
            counted = {"output": done.output.name, "lines": done.lines, "counts": done.counts} if done else {}
            write_json(file, {**counted, "usage": found})
        assert done is not None
        return replace(done, usage=found, earlier=usage.earlier)


def _write(config: GenerateConfig, run: SamplingRun[GenerateConfig], out: Path, usage: Usage) -> None:
    if config.output.kind == "score":
        _score(config, run, out)
        return
    decode: Callable[[Sequence[int]], str] = partial(run.tokenizer.decode, skip_special_tokens=True)
    flat, made = config.sampling.n == 1, MADE.get(config.output.kind, ())
    writer = LineWriter(decode, flat, run.rewards is not None, config.output.logprobs, made)
    answer_tasks(config, run, run.tasks, writer, out, usage)


def _score(config: GenerateConfig, run: SamplingRun[GenerateConfig], out: Path) -> None:
    """Every completion of the data as a rollout that ends as the model would have ended it."""
    column, tasks, tokenizer = config.data.completion, run.tasks, run.tokenizer
    assert run.rewards is not None and config.reward is not None
    for task in tasks:
        given_records(task, column)
    chat = choose_template(config.data, tokenizer, [Example(t.id, t.id, prompt=t.prompt) for t in tasks]) is not None
    end = end_of_turn_id(tokenizer) if chat else tokenizer.eos_token_id

    def ids(text: str, ended: bool) -> list[int]:
        return [*encode(tokenizer, [text])[0], *([end] if ended and end is not None else [])]

    if repair(out) < len(tasks):
        add_rewards(run.rewards, config, tokenizer, partial(print, flush=True))
        produce, line = score_given(run.rewards, column, ids), partial(scored_line, column=column)
        share, live = config.reward.max_failed_share, config.monitor.progress
        run_async(answer(out, tasks, produce, line, window=window_of(BLOCK, 1), max_failed_share=share, live=live))


def _outcome(config: GenerateConfig, run_dir: Path, out: Path) -> Generated:
    """Write what is made of the completions, and count."""
    output, choice = config.output, Choice()
    kept = out
    if output.kind in ("best", "pairs", "conditional"):
        kept = run_dir / f"{output.kind}.jsonl"
        lines = read_lines(out)
        match output.kind:
            case "best":
                made = choice.best(lines, output.min_reward)
            case "pairs":
                made = choice.pairs(lines, output.min_margin or 0.0, output.min_reward)
            case _:
                rewards = [record["reward"] for line in read_lines(out) for record in usable(line)]
                if not rewards:
                    raise ConfigError(f"no completion in {out} has a reward, so that none can be written into a prompt")
                borders = level_borders(rewards, output.reward_levels) if output.reward_levels else None
                made = choice.conditional(lines, output.reward_template or "", borders)
        count = write_whole(kept, made)
    else:
        count = sum(1 for _ in read_lines(out))
    return Generated(run_dir, kept, count, _counts(out) | {k: v for k, v in choice.skipped.items() if v})


def _counts(out: Path) -> dict[str, float]:
    found, rewards = Counter[str](), 0.0
    for line in read_lines(out):
        records = records_of(line)
        found["completions"] += len(records)
        found["failed"] += sum("error" in record for record in records)
        found["cut off"] += sum(record.get("finish_reason") == "length" for record in records)
        scored = usable(line)
        found["scored"] += len(scored)
        rewards += sum(record["reward"] for record in scored)
    counts: dict[str, float] = {name: float(n) for name, n in found.items() if n}
    return counts | ({"mean reward": rewards / found["scored"]} if found["scored"] else {})
