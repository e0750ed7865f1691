"""``tunesmith generate``, put together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.build.common import load_tokenizer
from tunesmith.build.sampler import Sampler, identity, make_ready, resolve_sampling, task_data
from tunesmith.config.generation import GenerateConfig
from tunesmith.config.load import load_config
from tunesmith.data.chat import end_of_turn_id
from tunesmith.data.formats import Example
from tunesmith.data.learned import choose_template
from tunesmith.data.prepare import load_tasks
from tunesmith.data.tokens import encode
from tunesmith.environments.rewards import RewardSet, check_rewards, load_rewards
from tunesmith.errors import ConfigError
from tunesmith.loop.generation import (
    BLOCK,
    Json,
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
from tunesmith.loop.opening import announce, check_inputs
from tunesmith.loop.selection import Choice, level_borders, usable
from tunesmith.monitor.progress import open_progress
from tunesmith.monitor.run_dir import RunDir, open_run_dir
from tunesmith.plan.checks import check
from tunesmith.types import RolloutGroup, Task


@dataclass(frozen=True, slots=True)
class Generated:
    """What ``tunesmith generate`` leaves. ``counts`` says what became of the lines."""

    run_dir: Path
    output: Path
    lines: int
    counts: dict[str, float]


def run_generate(path: Path | None, overrides: Sequence[str] = ()) -> Generated:
    """``tunesmith generate``: answer, or score, every line of a data file; called again, it continues."""
    config = load_config(GenerateConfig, path, overrides)
    check(config)
    base_dir, name = (path.parent, path.stem) if path else (Path.cwd(), "generate")
    if config.reward is not None:
        check_rewards(config.reward, base_dir)
    data = task_data(config)
    check_inputs(config.model_copy(update={"data": data}), "rl")
    with ExitStack() as stack:
        run_dir = stack.enter_context(open_run_dir(config.run_dir or Path("runs").absolute() / name, name, False))
        rewards = load_rewards(config.reward, base_dir) if config.reward else None
        if rewards is not None:
            stack.callback(rewards.close)
        tokenizer = load_tokenizer(config)
        loaded = load_tasks(data, data.train, tokenizer)
        if rewards is not None:
            rewards.check_tasks(loaded.items)
        resolved = resolve_sampling(config, loaded.items)
        scoring = config.output.kind == "score"
        out = run_dir.path / ("scores.jsonl" if scoring else "completions.jsonl")
        claim(out, identity(resolved.config, loaded.fingerprint))
        config = announce(resolved, run_dir, loaded)
        work = _score if scoring else _complete
        work(config, tokenizer, loaded.items, rewards, out)
        return _outcome(config, run_dir, out)


def _complete(
    config: GenerateConfig, tokenizer: Any, tasks: Sequence[Task], rewards: RewardSet | None, out: Path
) -> None:
    decode: Callable[[Sequence[int]], str] = partial(tokenizer.decode, skip_special_tokens=True)
    assert config.sampling.n is not None, "not resolved"
    writer = LineWriter(decode, config.sampling.n == 1, rewards is not None, config.output.logprobs)
    writer.check_columns(tasks)
    if (done := repair(out)) < len(tasks):
        with Sampler.open(config, tokenizer, rewards, decode) as sampler:
            sampler.answer(out, tasks, writer.line, done)


def _score(config: GenerateConfig, tokenizer: Any, tasks: Sequence[Task], rewards: RewardSet | None, out: Path) -> None:
    """Every completion of the data as a rollout that ends as the model would have ended it."""
    column = config.data.completion
    assert rewards is not None and config.reward is not None
    for task in tasks:
        given_records(task, column)
    chat = choose_template(config.data, tokenizer, [Example(t.id, t.id, prompt=t.prompt) for t in tasks]) is not None
    end = end_of_turn_id(tokenizer) if chat else tokenizer.eos_token_id

    def ids(text: str, ended: bool) -> list[int]:
        return [*encode(tokenizer, [text])[0], *([end] if ended and end is not None else [])]

    def line(group: RolloutGroup) -> Json:
        return scored_line(group, column)

    if (done := repair(out)) < len(tasks):
        make_ready(rewards, config, tokenizer)
        with open_progress(len(tasks), start=done, live=config.monitor.progress) as progress:
            produce, share = score_given(rewards, column, ids), config.reward.max_failed_share
            work = answer(
                out, tasks, produce, line, window=window_of(BLOCK, 1), max_failed_share=share, progress=progress
            )
            asyncio.run(work)


def _outcome(config: GenerateConfig, run_dir: RunDir, out: Path) -> Generated:
    """Write what is made of the completions, and count."""
    output, choice = config.output, Choice()
    kept = out
    if output.kind in ("best", "pairs", "conditional"):
        kept = run_dir.path / f"{output.kind}.jsonl"
        lines = read_lines(out)
        match output.kind:
            case "best":
                made = choice.best(lines)
            case "pairs":
                made = choice.pairs(lines, output.min_margin or 0.0)
            case _:
                rewards = [record["reward"] for line in read_lines(out) for record in usable(line)]
                if not rewards:
                    raise ConfigError(f"no completion in {out} has a reward, so that none can be written into a prompt")
                borders = level_borders(rewards, output.reward_levels) if output.reward_levels else None
                made = choice.conditional(lines, output.reward_template or "", borders)
        count = write_whole(kept, made)
    else:
        count = sum(1 for _ in read_lines(out))
    return Generated(run_dir.path, kept, count, _counts(out) | {k: v for k, v in choice.skipped.items() if v})


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
