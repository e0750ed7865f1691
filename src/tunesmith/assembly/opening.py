"""Opening a run: check it, lock its directory, read its data, resolve and announce it. No model is loaded here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from tunesmith.assembly.checking import checked, checkpoint_to_continue, facts_of_run, task_data
from tunesmith.assembly.common import load_tokenizer
from tunesmith.assembly.hub import open_hub
from tunesmith.assembly.learning import learning_facts, unknown_share
from tunesmith.assembly.sinks import open_sinks
from tunesmith.config.commands import RMConfig, SamplingConfig, ScoreConfig
from tunesmith.config.resolved import Resolved, changes, print_resolved, save_resolved
from tunesmith.config.schema import DataSection, RLConfig, RunConfig
from tunesmith.config.section import known
from tunesmith.config.values import parse_size
from tunesmith.data.prepare import Prepared, Sources
from tunesmith.doctor.learning import LearningWatch
from tunesmith.doctor.record import write_facts
from tunesmith.errors import CheckpointError
from tunesmith.loop.callbacks import Callbacks
from tunesmith.loop.checkpoint import Checkpoints, check_same_model, read_state
from tunesmith.loop.manifest import check_whole, has_manifest
from tunesmith.loop.profiling import StepProfiler
from tunesmith.loop.rollout_log import RolloutLog, examples, read_evaluated
from tunesmith.loop.session import Best, Session
from tunesmith.monitor.interrupts import handled, keeping
from tunesmith.monitor.metrics import MetricsLog, is_evaluation, read_metrics
from tunesmith.monitor.progress import open_progress
from tunesmith.monitor.run_dir import PLAN_FILE, RunDir, how_to_continue, open_run_dir
from tunesmith.monitor.text import EvalExample, shown_path
from tunesmith.monitor.timeline import Timeline
from tunesmith.monitor.waits import long_wait
from tunesmith.monitor.watchdog import Watchdog
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.plan.report import memory_of
from tunesmith.plan.resolve import resolve
from tunesmith.storage import write_json

SHOWN = 6
"""Held-out prompts whose answers are shown at the end of a run."""

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run: its directory, model and numbers."""

    run_dir: Path
    checkpoint: Path
    """The last checkpoint's model, in Hugging Face format."""
    evaluations: list[dict[str, Any]]
    """One entry per evaluation, first to last."""
    seconds: dict[str, float]
    """Seconds by phase."""
    best: str | None = None
    """The best evaluation and its checkpoint, if not the last one."""
    warning: str | None = None
    """Why the run learned nothing, if so."""
    examples: Sequence[EvalExample] = ()
    """Held-out prompts, with answers from before and after training."""
    scores: bool = False
    """Whether the model is a reward model."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``: one per step, and one per evaluation."""
        return read_metrics(self.run_dir / "metrics.jsonl")

    def to_pandas(self) -> Any:
        """The metrics as a ``pandas.DataFrame``."""
        from pandas import DataFrame

        return DataFrame(self.metrics)

    def load(self, **options: Any) -> tuple[Any, Any]:
        """The trained model and its tokenizer, loaded by transformers; ``options`` go to ``from_pretrained``."""
        return load_trained(self.checkpoint, scores=self.scores, **options)


def load_trained(path: Path, *, scores: bool = False, **options: Any) -> tuple[Any, Any]:
    """A model (or an adapter on its base) and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    kind: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    if scores:
        options = {"num_labels": 1, **options}
    tokenizer: Any = AutoTokenizer
    return kind.from_pretrained(path, **options), tokenizer.from_pretrained(path)


@dataclass(frozen=True, slots=True)
class Caller:
    """Additions by a Python program to the settings of a run that it starts."""

    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """By dotted key, why a setting that the user did not write has its value; see ``Resolved.reasons``."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    config: Any = None
    """Settings that replace the run file's."""
    rollouts: Callable[[Any], Any] | None = None
    """Returns a rollout source that replaces the run's own, which it is given."""


FROM_A_COMMAND = Caller()


@dataclass(frozen=True, slots=True)
class OpenRun(Generic[C]):
    """A run whose settings are checked and whose directory is locked; its data is not read yet."""

    config: C
    """The configuration, not yet resolved."""
    base_dir: Path
    """The run file's directory, where references to the user's code are looked up first."""
    directory: RunDir
    checkpoint: Path | None
    """The checkpoint to resume from, if any."""
    tokenizer: Any
    caller: Caller

    @property
    def data(self) -> DataSection:
        return limited_data(self.config)

    def read(self, load: Callable[[DataSection, Sources], Prepared[T]]) -> tuple[Prepared[T], Prepared[T] | None]:
        """The training data and the held-out data, if any; ``load`` reads one source."""
        data = self.data
        with long_wait("reading data.train"):
            train = load(data, data.train)
        with long_wait("reading data.eval"):
            return train, load(data, data.eval) if data.eval else None


@contextmanager
def open_run(
    kind: type[C], path: Path | None, overrides: Sequence[str], caller: Caller = FROM_A_COMMAND
) -> Generator[OpenRun[C]]:
    """Check the settings, lock the run's directory and load the tokenizer; every command begins with this.

    Args:
        path: the run file, whose name is also the run's; None for settings from overrides only.

    Raises:
        UserError: settings, files or the machine do not allow the run, or its directory holds another run.
    """
    base_dir, name = (path.parent, path.stem) if path else (Path.cwd(), kind.command)
    with checked(kind, path, overrides, caller.config) as config:
        directory, resume = config.run_dir, config.checkpoint.resume
        if isinstance(config, SamplingConfig):  # if called again, these commands find the remaining work
            directory, resume = directory or Path("runs").absolute() / name, False
        with open_run_dir(directory, config.monitor.run_name or name, resume) as run_dir:
            checkpoint = checkpoint_to_resume(config, run_dir)
            yield OpenRun(config, base_dir, run_dir, checkpoint, load_tokenizer(config), caller)


def checkpoint_to_resume(config: RunConfig, run_dir: RunDir) -> Path | None:
    checkpoint = checkpoint_to_continue(config, run_dir)
    if checkpoint is None:
        return None
    check_whole(checkpoint, Checkpoints(run_dir.checkpoints, config.checkpoint.keep).newest_first())
    if not has_manifest(checkpoint):
        print(f"{checkpoint} is of an earlier version and has no checksums: damage in it would not be noticed")
    if read_state(checkpoint).get("model_only"):
        raise CheckpointError(
            f"{checkpoint} holds the model alone (checkpoint.model_only), and cannot be resumed. Start another "
            f"run from it: model.path={checkpoint}/model"
        )
    check_same_model(checkpoint, config.model.path)
    return checkpoint


def limited_data(config: RunConfig) -> DataSection:
    """The data section with the token limits of model and micro-batch, so that errors name lines that are too long."""
    facts = known_model_facts(config.model.path)
    context = facts and facts.context
    if isinstance(config, SamplingConfig):
        data, key, rooms, reserved = task_data(config), "max_prompt_tokens", [context], config.new_tokens
    else:
        data, rooms = config.data, [context, known(config.system, "max_tokens_per_microbatch")]
        key, reserved = "max_tokens", int(isinstance(config, ScoreConfig))
        if isinstance(config, RLConfig):
            key, reserved = "max_prompt_tokens", config.rollout.max_new_tokens
    limit = min((room for room in rooms if room is not None), default=0) - reserved
    # If no room is left for a prompt, the settings conflict; resolving the run refuses that.
    return data.model_copy(update={key: limit}) if getattr(data, key) is None and limit > 0 else data


@dataclass(frozen=True, slots=True)
class ReadyRun(OpenRun[C], Generic[C, T]):
    """A run whose data is read and whose ``config`` is resolved, printed and saved; no model is loaded yet."""

    train: Prepared[T]
    held_out: Prepared[T] | None

    @property
    def eval_items(self) -> list[T] | None:
        """The held-out items to evaluate."""
        return self.held_out.items[: self.config.eval.max_prompts] if self.held_out else None


def make_ready(
    run: OpenRun[C],
    load: Callable[[DataSection, Sources], Prepared[T]],
    sizes: Callable[[T], tuple[int, int]],
    check_data: Callable[[list[T], str], None] = lambda _, __: None,
    instances_for: str | None = None,
) -> ReadyRun[C, T]:
    """Read the data, resolve the settings and announce them.

    Args:
        load: reads one source of data.
        sizes: returns an item's longest sequence, and the tokens that have to share a micro-batch.
        check_data: refuses bad items of a ``[data]`` key.
        instances_for: as in ``Facts``.
    """
    config = run.config
    train, held_out = run.read(load)
    check_data(train.items, "data.train")
    if held_out:
        check_data(held_out.items, "data.eval")
    items = [*train.items, *(held_out.items if held_out else [])]
    longest, together = (max(size) for size in zip(*map(sizes, items), strict=True))
    if (unknown := unknown_share(run.tokenizer, train.items)) >= 0.5:
        print(f"warning: {unknown:.0%} of the data's tokens are unknown to the tokenizer of {config.model.path}")
    facts = replace(
        facts_of_run(config),
        train_size=len(train),
        eval_size=len(held_out) if held_out else None,
        longest=longest,
        together=together,
        instances_for=instances_for,
    )
    resolved = replace(resolve(config, facts), reasons=run.caller.reasons)
    announce(resolved, run.directory, train, held_out)
    planned = {"memory": memory_of(resolved.config, facts), "seconds": step_seconds(resolved.config, facts)}
    write_json(run.directory.path / PLAN_FILE, planned)
    return ReadyRun(
        resolved.config, run.base_dir, run.directory, run.checkpoint, run.tokenizer, run.caller, train, held_out
    )


def announce(resolved: Resolved[Any], run_dir: RunDir, *loaded: Prepared[Any] | None) -> None:
    """Print and save the settings and the data reports, before anything heavy loads."""
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


@contextmanager
def open_session(run: ReadyRun[Any, Any], checkpoint: Path | None, metric: str) -> Generator[Session]:
    """The session of a run.

    Args:
        checkpoint: the one to resume from; after a restart, not the one with which the run was opened.
        metric: the metric that selects the best checkpoint.
    """
    config: RunConfig = run.config
    run_dir = run.directory
    with ExitStack() as stack:
        stack.enter_context(handled())
        facts = learning_facts(config, run.tokenizer, run.train, run.eval_items or ())
        write_facts(facts, run_dir.path)
        step, every = read_state(checkpoint)["step"] if checkpoint else None, config.monitor.every
        progress = open_progress(config.train.steps, start=step or 0, live=config.monitor.progress, every=every)
        sinks = open_sinks(config, run_dir, run.base_dir, step, progress.note)
        metrics = MetricsLog(run_dir.metrics, sinks, every, step)
        rollouts = open_rollout_log(run, step)
        if rollouts:
            stack.callback(rollouts.close)
        profiler = StepProfiler(run_dir.path / "profile", config.monitor.profile_steps)
        stack.callback(profiler.close)
        timeline = Timeline(run_dir.traces, config.monitor.trace_steps)
        stack.enter_context(progress)
        if config.monitor.stall_after:
            stack.enter_context(Watchdog(timeline, config.monitor.stall_after, progress.note))
        yield Session(
            total_steps=config.train.steps,
            eval=config.eval,
            checkpoint=config.checkpoint,
            publisher=open_hub(config, run_dir, progress.note),
            metrics=stack.enter_context(metrics),
            progress=progress,
            checkpoints=Checkpoints(run_dir.checkpoints, config.checkpoint.keep),
            best=Best(metric, higher_is_better="loss" not in metric, target=config.eval.target),
            rollout_log=rollouts,
            learning=LearningWatch(facts),
            timeline=timeline,
            profiler=profiler,
            callbacks=run.caller.callbacks,
            resume_from=checkpoint,
        )


def open_rollout_log(run: ReadyRun[Any, Any], step: int | None) -> RolloutLog | None:
    """The rollout log; None in supervised training."""
    monitor, tokenizer = run.config.monitor, run.tokenizer
    if not isinstance(run.config, RLConfig):
        return None
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    size = parse_size(monitor.rollouts_size)
    return RolloutLog(
        run.directory.rollouts,
        monitor.samples,
        size,
        decode,
        tokenizer.decode,
        tokens=monitor.tokens,
        resume_step=step,
    )


def kept_on_interrupt(run: OpenRun[Any], keep: Callable[[], str]) -> AbstractContextManager[None]:
    """If a signal ends the code inside, ``keep`` saves the progress; its report and how to continue are shown."""
    return keeping(lambda: f"{keep()}\n{how_to_continue(run.directory.path)}")


def run_result(run: OpenRun[Any], session: Session) -> RunResult:
    run_dir = run.directory
    newest = session.checkpoints.newest()
    assert newest is not None, "a run ends with a checkpoint"
    evaluations = [line for line in read_metrics(run_dir.metrics) if is_evaluation(line)]
    session.clock.lap()
    kept = session.checkpoints.path(session.best.step) if session.best.step else None
    better = kept is not None and kept != newest and kept.exists()
    best = (
        f"{session.best.metric} {session.best.value:.3g} at step {session.best.step}: {shown_path(kept)}/model"
        if kept and better
        else None
    )
    shown = examples(read_evaluated(run_dir.rollouts), SHOWN) if session.rollout_log else []
    return RunResult(
        run_dir.path,
        newest / "model",
        evaluations,
        session.clock.totals,
        best,
        session.learning.end(),
        shown,
        isinstance(run.config, RMConfig),
    )
