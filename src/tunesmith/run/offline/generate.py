"""``tunesmith generate``: answer, or score, every line of a data file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path

from tunesmith.config.commands import GenerateConfig
from tunesmith.errors import ConfigError
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.plan.derive.generation import TEMPLATE
from tunesmith.records.standing import recorded
from tunesmith.records.storage import write_json
from tunesmith.run.assembly.opening import OpenRun
from tunesmith.run.offline.lines import (
    Json,
    LineWriter,
    claim,
    count_answered,
    read_lines,
    records_of,
    write_whole,
)
from tunesmith.run.offline.sampling import answer_tasks, identity, longest_prompt, open_sampling
from tunesmith.run.offline.scoring import score
from tunesmith.run.offline.selection import (
    OVERWRITTEN,
    Selected,
    best,
    conditional,
    level_borders,
    pair,
    usable,
)
from tunesmith.run.offline.usage import Usage, read_report, total_of
from tunesmith.run.offline.watch import JobWatch
from tunesmith.types import Task

_PART = "run"


@dataclass(frozen=True, slots=True)
class Generated:
    """The result of ``tunesmith generate``."""

    run_dir: Path
    output: Path
    lines: int
    counts: dict[str, float]
    """Numbers of completions and of lines, by result."""
    usage: dict[str, float] = field(default_factory=dict[str, float], compare=False)
    """Seconds by phase and peak memory of all calls, by the names of metrics; see ``Usage``."""
    earlier: float = field(default=0.0, compare=False)
    """Seconds that calls before this one took."""


def run_generate(path: Path | None, overrides: Sequence[str] = ()) -> Generated:
    """``tunesmith generate``; a repeated call continues."""
    usage = Usage()
    with open_sampling(GenerateConfig, path, overrides) as (run, rewards):
        tasks = run.train.items
        tokenizer = run.tokenizer
        run.resolve(train_size=len(tasks), longest=longest_prompt(tasks))
        config = run.config
        directory = run.directory.path
        output = run.config.output
        scoring = output.kind == "score"
        outs = [directory / "completions.jsonl", directory / "scores.jsonl"]
        out = outs[scoring]
        before = count_answered(outs[not scoring])
        claim(out, identity(run.plan, run.train.fingerprint, tokenizer), directory)
        run.announce()
        file = directory / "report.json"
        kept = Json()
        usage.add_earlier({_PART: read_report(file)["usage"]} if file.exists() else {})
        count = len(tasks)
        watch = JobWatch(directory, "lines" if scoring else "completions", count, before=before)
        with recorded(directory, "generate", lambda: (min(count_answered(out), count), count)):
            try:
                with usage.phase("scoring" if scoring else "sampling", _PART):
                    if scoring:
                        assert rewards is not None, "they are all there is to do"
                        score(run.plan, tokenizer, rewards, tasks, out, watch)
                    else:
                        _answer(run, rewards, out, usage, watch)
                with usage.phase("selection", _PART):
                    done = _selected(config, directory, out)
                kept = {"output": done.output.name, "lines": done.lines, "counts": done.counts}
            finally:
                total = total_of(usage.parts().values())
                write_json(file, {**kept, "usage": total})
        return replace(done, usage=total, earlier=usage.earlier)


def _answer(
    run: OpenRun[GenerateConfig, Task],
    rewards: RewardSet | None,
    out: Path,
    usage: Usage,
    watch: JobWatch,
) -> None:
    tokenizer = run.tokenizer
    output = run.config.output
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    flat = run.plan.sampling.n == 1
    overwritten = OVERWRITTEN.get(output.kind, ())
    writer = LineWriter(decode, flat, rewards is not None, output.logprobs, overwritten)
    answer_tasks(run.plan, tokenizer, rewards, run.train.items, writer, out, usage, watch)


def _selected(config: GenerateConfig, run_dir: Path, out: Path) -> Generated:
    """Write the file that ``output.kind`` selects from the completions in ``out``, and count."""
    kind = config.output.kind
    skipped = Counter[str]()
    if kind in ("completions", "score"):
        return Generated(run_dir, out, sum(1 for _ in read_lines(out)), _counts(out))
    select = _selection(config, out)

    def lines() -> Iterator[Json]:
        for line in read_lines(out):
            selected = select(line)
            if isinstance(selected, str):
                skipped[selected] += 1
            else:
                yield from selected

    kept = run_dir / f"{kind}.jsonl"
    count = write_whole(kept, lines())  # which also counts what is skipped
    return Generated(run_dir, kept, count, {**_counts(out), **skipped})


def _selection(config: GenerateConfig, out: Path) -> Callable[[Json], Selected]:
    output = config.output
    min_reward = -inf if output.min_reward is None else output.min_reward
    if output.kind == "best":
        return partial(best, min_reward=min_reward)
    if output.kind == "pairs":
        return partial(pair, min_margin=output.min_margin or 0.0, min_reward=min_reward)
    rewards = [record["reward"] for line in read_lines(out) for record in usable(line)]
    if not rewards:
        raise ConfigError(f"no completion in {out} has a reward to write into its prompt")
    borders = level_borders(rewards, output.reward_levels) if output.reward_levels else None
    return partial(conditional, template=output.reward_template or TEMPLATE, borders=borders)


def _counts(out: Path) -> dict[str, float]:
    counts = Counter[str]()
    rewards = 0.0
    for line in read_lines(out):
        records = records_of(line)
        scored = usable(line)
        counts["completions"] += len(records)
        counts["failed"] += sum("error" in record for record in records)
        counts["cut off"] += sum(record.get("finish_reason") == "length" for record in records)
        counts["scored"] += len(scored)
        rewards += sum(record["reward"] for record in scored)
    mean = {"mean reward": rewards / counts["scored"]} if counts["scored"] else {}
    return {name: float(n) for name, n in counts.items() if n} | mean
