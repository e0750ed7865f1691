"""Before a run: what is refused, derived, said and opened, in that order. No model is loaded here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from tunesmith.assembly.checking import checkpoint_to_continue, frozen_parameters
from tunesmith.assembly.hub import open_hub
from tunesmith.assembly.learning import learning_facts, unknown_share
from tunesmith.assembly.sinks import open_sinks
from tunesmith.config.preference import ScoreConfig
from tunesmith.config.resolved import Resolved, changes, print_resolved, save_resolved
from tunesmith.config.schema import DataSection, RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.sizes import parse_size
from tunesmith.data.prepare import Prepared, Sources
from tunesmith.errors import CheckpointError
from tunesmith.loop.checkpoint import Checkpoints, check_same_model, read_state
from tunesmith.loop.manifest import check_whole, has_manifest
from tunesmith.loop.profiling import StepProfiler
from tunesmith.loop.rollout_log import RolloutLog, examples, read_rollouts
from tunesmith.loop.session import BESIDE_STEPS, Best, Session
from tunesmith.monitor.clock import Clock
from tunesmith.monitor.interrupts import handled
from tunesmith.monitor.learning import LearningWatch
from tunesmith.monitor.metrics import MetricsLog, read_metrics
from tunesmith.monitor.progress import open_progress
from tunesmith.monitor.run_dir import RunDir, how_to_continue
from tunesmith.monitor.text import Example, shown_path
from tunesmith.monitor.timeline import Timeline
from tunesmith.monitor.waits import long_wait
from tunesmith.monitor.watchdog import Watchdog
from tunesmith.plan.facts import Facts
from tunesmith.plan.hardware import read_hardware
from tunesmith.plan.hub import known_model_facts
from tunesmith.plan.resolve import resolve

SHOWN = 6
"""Held-out prompts whose answers are shown at the end of a run."""

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run leaves: where, and its last numbers."""

    run_dir: Path
    checkpoint: Path
    """The last checkpoint's model, in Hugging Face format."""
    evaluations: list[dict[str, Any]]
    """One entry per evaluation, first to last."""
    seconds: dict[str, float]
    """By phase."""
    best: str | None = None
    """The best evaluation and its checkpoint, where that is not the last one."""
    warning: str | None = None
    """Where the run ended without learning, why."""
    examples: Sequence[Example] = ()
    """Held-out prompts, answered before training and after it."""


def checkpoint_to_resume(config: RunConfig, run_dir: RunDir) -> Path | None:
    checkpoint = checkpoint_to_continue(config, run_dir)
    if checkpoint is None:
        return None
    check_whole(checkpoint, Checkpoints(run_dir.checkpoints, config.checkpoint.keep).newest_first())
    if not has_manifest(checkpoint):
        print(f"{checkpoint} is of an earlier version and has no checksums: damage in it would not be noticed")
    if read_state(checkpoint).get("model_only"):
        raise CheckpointError(
            f"{checkpoint} holds the model alone (checkpoint.model_only), and nothing can go on from it. Start another "
            f"run from it: model.path={checkpoint}/model"
        )
    check_same_model(checkpoint, config.model.path)
    return checkpoint


def limited_data(config: RunConfig) -> DataSection:
    """The data section with the limit that model and micro-batch set, so that a line over it is told by its place."""
    is_rl = isinstance(config, RLConfig)
    key = "max_prompt_tokens" if is_rl else "max_tokens"
    facts = known_model_facts(config.model.path)
    room = [n for n in (facts and facts.context, known(config.system, "max_tokens_per_microbatch")) if n is not None]
    if getattr(config.data, key) is not None or not room:
        return config.data
    limit = min(room) - (config.rollout.max_new_tokens if is_rl else int(isinstance(config, ScoreConfig)))
    # Where nothing is left for a prompt, it is other settings that are at odds, and they are refused later.
    return config.data.model_copy(update={key: limit}) if limit > 0 else config.data


@dataclass(frozen=True, slots=True)
class Ready(Generic[C, T]):
    """A run before its model is loaded: resolved, with its data read."""

    config: C
    tokenizer: Any
    train: Prepared[T]
    held_out: Prepared[T] | None

    @property
    def eval_items(self) -> list[T] | None:
        """The held-out items that are evaluated."""
        return self.held_out.items[: self.config.eval.max_prompts] if self.held_out else None


def make_ready(
    config: C,
    run_dir: RunDir,
    tokenizer: Any,
    load: Callable[[DataSection, Sources], Prepared[T]],
    sizes: Callable[[T], tuple[int, int]],
    check_data: Callable[[list[T], str], None] = lambda _, __: None,
    reasons: Mapping[str, str] | None = None,
    instances_for: str | None = None,
) -> Ready[C, T]:
    """Read the data, derive what was left open, and say it.

    Args:
        load: reads one source of data.
        sizes: of an item: tokens of its longest sequence, and tokens that have to share a micro-batch.
        check_data: refuses the items of a key of ``[data]``.
        reasons: see ``Resolved``.
        instances_for: as in ``Facts``.
    """
    data = limited_data(config)
    with long_wait("reading data.train"):
        train = load(data, data.train)
    with long_wait("reading data.eval"):
        held_out = load(data, data.eval) if data.eval else None
    check_data(train.items, "data.train")
    if held_out:
        check_data(held_out.items, "data.eval")
    items = [*train.items, *(held_out.items if held_out else [])]
    longest, together = (max(size) for size in zip(*map(sizes, items), strict=True))
    if (unknown := unknown_share(tokenizer, train.items)) >= 0.5:
        print(f"warning: {unknown:.0%} of the data's tokens are unknown to the tokenizer of {config.model.path}")
    facts = Facts(
        hardware=read_hardware(),
        model=known_model_facts(config.model.path),
        train_size=len(train),
        eval_size=len(held_out) if held_out else None,
        longest=longest,
        together=together,
        frozen_parameters=frozen_parameters(config),
        instances_for=instances_for,
    )
    resolved = replace(resolve(config, facts), reasons=reasons or {})
    return Ready(announce(resolved, run_dir, train, held_out), tokenizer, train, held_out)


def announce(resolved: Resolved[C], run_dir: RunDir, *loaded: Prepared[Any] | None) -> C:
    """Print and save what the run will do and what became of the data, before anything heavy loads."""
    reports = [data.report for data in loaded if data]
    for report in reports:
        print(report.summary())
    print_resolved(resolved)
    if changed := changes(resolved, run_dir.path):
        print("\n  ".join(["the run that is continued was begun with other settings:", *changed]))
    save_resolved(resolved, run_dir.path)
    for report in reports:
        report.write_skipped(run_dir.path / "skipped.jsonl")
    print(f"run directory: {shown_path(run_dir.path)}", flush=True)
    return resolved.config


def open_session(
    stack: ExitStack, run: Ready[Any, Any], run_dir: RunDir, base_dir: Path, checkpoint: Path | None, metric: str
) -> Session:
    """
    Args:
        base_dir: of the run file, where a sink of the user's own may lie.
        metric: what the best checkpoint is judged by.
    """
    config: RunConfig = run.config
    stack.enter_context(handled())
    step, every = read_state(checkpoint)["step"] if checkpoint else None, config.monitor.every
    progress = open_progress(config.train.steps, start=step or 0, live=config.monitor.progress, every=every)
    sinks = open_sinks(config, run_dir, base_dir, step, progress.note)
    metrics = MetricsLog(run_dir.metrics, sinks, every, step)
    rollouts = None
    if isinstance(config, RLConfig):
        decode = partial(run.tokenizer.decode, skip_special_tokens=True)
        most = parse_size(config.monitor.rollouts_size)
        rollouts = RolloutLog(run_dir.rollouts, config.monitor.samples, most, decode, run.tokenizer.decode, step)
        stack.callback(rollouts.close)
    profiler = StepProfiler(run_dir.path / "profile", config.monitor.profile_steps)
    stack.callback(profiler.close)
    timeline = Timeline(run_dir.traces, config.monitor.trace_steps, beside=BESIDE_STEPS)
    stack.enter_context(progress)
    if config.monitor.stall_after:
        stack.enter_context(Watchdog(timeline, config.monitor.stall_after, progress.note))
    return Session(
        total_steps=config.train.steps,
        evaluate_every=config.eval.every,
        checkpoint_every=config.checkpoint.every,
        model_only=config.checkpoint.model_only,
        publisher=open_hub(config, run_dir, progress.note),
        checkpoint_seconds=config.checkpoint.minutes and 60 * config.checkpoint.minutes,
        metrics=stack.enter_context(metrics),
        progress=progress,
        checkpoints=Checkpoints(run_dir.checkpoints, config.checkpoint.keep),
        best=Best(metric, higher_is_better="loss" not in metric, target=config.eval.target),
        rollout_log=rollouts,
        clock=Clock(),
        learning=LearningWatch(learning_facts(config, run.tokenizer, run.train.items)),
        timeline=timeline,
        profiler=profiler,
        resume_from=checkpoint,
    )


def keep_and_tell(kept: str, run_dir: RunDir) -> str:
    """What a signal left, and how to go on."""
    return f"{kept}\n{how_to_continue(run_dir.path)}"


def run_result(session: Session, run_dir: RunDir) -> RunResult:
    newest = session.checkpoints.newest()
    assert newest is not None, "a run ends with a checkpoint"
    evaluations = [line for line in read_metrics(run_dir.metrics) if any(k.startswith("eval/") for k in line)]
    session.clock.lap()
    kept = session.checkpoints.path(session.best.step) if session.best.step else None
    better = kept is not None and kept != newest and kept.exists()
    best = (
        f"{session.best.metric} {session.best.value:.3g} at step {session.best.step}: {shown_path(kept)}/model"
        if kept and better
        else None
    )
    shown = examples(read_rollouts(run_dir.rollouts), SHOWN) if session.rollout_log else []
    return RunResult(
        run_dir.path, newest / "model", evaluations, session.clock.totals(), best, session.learning.end(), shown
    )
