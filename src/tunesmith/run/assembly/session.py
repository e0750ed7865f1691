"""The session of a training run: its log, progress, timeline, checkpoints and sinks; and the run's
result."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from tunesmith.config.doors import Door
from tunesmith.config.reading.files import ADAPTER_CONFIG
from tunesmith.config.schema import RunConfig
from tunesmith.errors import ConfigError, NoEngineError, StorageError, TrainerLostError
from tunesmith.records.facts import write_facts
from tunesmith.records.interrupts import handled, held, keeping
from tunesmith.records.metrics import MetricsLog, is_evaluation, read_metrics
from tunesmith.records.progress import open_progress
from tunesmith.records.run_dir import RunDir, how_to_continue
from tunesmith.records.text import EvalExample, shown_path
from tunesmith.records.timeline import Timeline
from tunesmith.records.watchdog import Watchdog
from tunesmith.run.assembly.learning import learning_facts
from tunesmith.run.assembly.opening import OpenRun
from tunesmith.run.assembly.sinks import open_sinks
from tunesmith.run.loop.checkpoint import Checkpoints, read_state
from tunesmith.run.loop.profiling import StepProfiler
from tunesmith.run.loop.recorder import JUDGES, Recorder
from tunesmith.run.loop.rollout_log import RolloutLog, examples, read_evaluated
from tunesmith.run.loop.session import Best, Publisher, Session

PUBLISHERS = Door[Callable[[RunConfig, RunDir, Callable[[str], None]], Publisher]](
    "publishers", "tunesmith.guide.hub:open_hub"
)
SHOWN = 6
"""Held-out prompts whose answers are shown at the end of a run."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run: its directory, model and numbers."""

    run_dir: Path
    checkpoint: Path
    """The last checkpoint's model, in Hugging Face format."""
    evaluations: list[dict[str, Any]] = field(repr=False)
    """One entry per evaluation, first to last."""
    seconds: dict[str, float] = field(repr=False)
    """Seconds by phase."""
    best: str | None = None
    """The best evaluation and its checkpoint, if not the last one."""
    warning: str | None = None
    """Why the run learned nothing, if so."""
    examples: Sequence[EvalExample] = field(default=(), repr=False)
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

    def load(self, **options: object) -> tuple[Any, Any]:
        """The trained model and its tokenizer, loaded by transformers; ``options`` go to
        ``from_pretrained``."""
        return load_trained(self.checkpoint, scores=self.scores, **options)


def load_trained(path: Path, *, scores: bool = False, **options: object) -> tuple[Any, Any]:
    """A model (or an adapter on its base) and its tokenizer.

    transformers gives an adapter its base's generation configuration; here it gets its own.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from tunesmith.models.export import read_generation
    from tunesmith.models.score_heads import add_score_head
    from tunesmith.models.source import load_config

    kind: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    if scores:
        trusted = bool(options.get("trust_remote_code"))
        add_score_head(load_config(_base_of(path), trust_remote_code=trusted))
        options = {"num_labels": 1, **options}
    model = kind.from_pretrained(path, **options)
    tokenizer = cast(Any, AutoTokenizer).from_pretrained(path)
    if model.can_generate() and (saved := read_generation(path)):
        model.generation_config = saved
    return model, tokenizer


def _base_of(path: Path) -> str:
    """The model at ``path``, or the one that the adapter there was made for."""
    adapter = path / ADAPTER_CONFIG
    written: Mapping[str, object] = json.loads(adapter.read_bytes()) if adapter.is_file() else {}
    return str(written.get("base_model_name_or_path") or path)


def open_publisher(
    config: RunConfig, run_dir: RunDir, report: Callable[[str], None]
) -> Publisher | None:
    """What uploads the models of a run with ``checkpoint.push_to_hub``."""
    if config.checkpoint.push_to_hub is None:
        return None
    if not PUBLISHERS.rooms:
        key = "checkpoint.push_to_hub"
        raise ConfigError(f"{key}: nothing that uploads models is installed", keys=(key,))
    return PUBLISHERS.rooms[0](config, run_dir, report)


@contextmanager
def open_session(
    run: OpenRun[Any, Any], checkpoint: Path | None, metric: str
) -> Generator[Session]:
    """The session of a run.

    Args:
        checkpoint: the one to resume from; after a restart, not the one with which the run was
            opened.
        metric: the metric that selects the best checkpoint, unless ``eval.metric`` names another.
    """
    plan = run.plan
    config: RunConfig = plan.said
    run_dir = run.directory
    metric = config.eval.metric or metric
    with ExitStack() as stack:
        stack.enter_context(handled())
        facts = learning_facts(plan, run.tokenizer, run.train, run.eval_items or ())
        write_facts(facts, run_dir.path)
        step = read_state(checkpoint)["step"] if checkpoint else None
        every = plan.intervals.progress
        progress = open_progress(
            plan.steps, start=step or 0, live=config.monitor.progress, every=every
        )
        sinks = open_sinks(
            config.monitor, plan.settings, run_dir, run.base_dir, step, progress.note
        )
        metrics = MetricsLog(run_dir.metrics, sinks, every)
        monitor = config.monitor
        make_log = partial(RolloutLog.of, run_dir.rollouts, monitor, run.tokenizer)
        rollouts = make_log(monitor.samples) if plan.kind.rl else None
        if rollouts:
            stack.callback(rollouts.close)
        profiler = StepProfiler(run_dir.path / "profile", config.monitor.profile_steps)
        stack.callback(profiler.close)
        timeline = Timeline(run_dir.traces, config.monitor.trace_steps)
        stack.enter_context(progress)
        if config.monitor.stall_after:
            stack.enter_context(Watchdog(timeline, config.monitor.stall_after, progress.note))
        yield Session(
            total_steps=plan.steps,
            intervals=plan.intervals,
            eval=config.eval,
            checkpoint=config.checkpoint,
            publisher=open_publisher(config, run_dir, progress.note),
            recorder=Recorder(
                stack.enter_context(metrics),
                progress,
                rollouts,
                judges=[judge(facts) for judge in JUDGES.rooms],
                timeline=timeline,
                profiler=profiler,
            ),
            checkpoints=Checkpoints(run_dir.checkpoints, config.checkpoint.keep),
            best=Best(metric, config.eval.target),
            callbacks=run.caller.callbacks,
            resume_from=checkpoint,
        )


@contextmanager
def kept_on_interrupt(run: OpenRun[Any, Any], session: Session) -> Generator[None]:
    """If a signal or an error ends the code inside, save the progress; say what was kept and how to
    continue."""
    with keeping(lambda: f"{session.keep()}\n{how_to_continue(run.directory.path)}"):
        try:
            yield
        except (TrainerLostError, NoEngineError):
            raise  # nothing can be saved; ``keeping`` saves
        except Exception as error:
            tried = isinstance(error, StorageError) and error.names_checkpoint
            if session.unsaved and not tried:
                with held():
                    session.keep()
            raise


def run_result(run: OpenRun[Any, Any], session: Session) -> RunResult:
    run_dir = run.directory
    newest = session.checkpoints.newest()
    assert newest is not None, "a run ends with a checkpoint"
    evaluations = [line for line in read_metrics(run_dir.metrics) if is_evaluation(line)]
    session.recorder.clock.lap()
    found = session.best
    kept = session.checkpoints.path(found.step) if found.step else None
    best = None
    if kept and kept != newest and kept.exists():
        model = f"{shown_path(kept)}/{'ema' if run.config.eval.use_ema else 'model'}"
        best = f"{found.metric} {found.value:.3g} at step {found.step}: {model}"
    log = session.recorder.rollout_log
    shown = examples(read_evaluated(run_dir.rollouts), SHOWN) if log else []
    return RunResult(
        run_dir.path,
        newest / "model",
        evaluations,
        session.recorder.clock.totals,
        best,
        next(filter(None, (judge.end() for judge in session.recorder.judges)), None),
        shown,
        run.plan.said.command == "rm",
    )
