"""Opening a run: check it, lock its directory, read its data, resolve and announce it. No model is
loaded here.

Every command that writes a run directory does this, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from tunesmith.config.commands import SamplingConfig
from tunesmith.config.continuing import REMEDY, Content, changes
from tunesmith.config.load import load_config, read_tree
from tunesmith.config.reading.overriding import Override
from tunesmith.config.reading.places import placed
from tunesmith.config.resolved import print_resolved, save_resolved
from tunesmith.config.schema import DataSection, RunConfig
from tunesmith.errors import CheckpointError, about
from tunesmith.learn.data.prepare import Prepared, Sources
from tunesmith.models.vision.processing import vocabulary_of
from tunesmith.plan.cost.seconds import step_seconds
from tunesmith.plan.facts.hub import known_model_facts
from tunesmith.plan.facts.run import Done
from tunesmith.plan.plan import Plan
from tunesmith.plan.report import memory_of
from tunesmith.plan.resolve import resolve
from tunesmith.records.run_dir import PLAN_FILE, RunDir, open_run_dir
from tunesmith.records.storage import write_json
from tunesmith.records.text import shown_path
from tunesmith.records.waits import long_wait
from tunesmith.run.assembly.checking import (
    check_run,
    checkpoint_to_continue,
    facts_of_run,
    resumes,
    with_launched_ranks,
)
from tunesmith.run.assembly.contents import contents_of
from tunesmith.run.assembly.examining import task_data
from tunesmith.run.assembly.learning import image_facts, unknown_share
from tunesmith.run.loop.callbacks import Callbacks
from tunesmith.run.loop.checkpoint import Checkpoints, check_same_model, read_state
from tunesmith.run.loop.manifest import check_whole
from tunesmith.run.specs.from_plan import load_tokenizer
from tunesmith.types import Tokenizer

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    """Additions by a Python program to the settings of a run that it starts."""

    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """By dotted key, why a setting that the user did not write has its value; see
    ``Plan.origins``."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    config: Any = None
    """Settings that replace the run file's."""
    brief: bool = False
    """Whether the settings are not printed, because those of a run like it were."""
    rollouts: Callable[[Any], Any] | None = None
    """Returns a rollout source that replaces the run's own, which it is given."""


FROM_A_COMMAND = Caller()


@dataclass(slots=True)
class OpenRun(Generic[C, T]):
    """A run whose settings are checked and whose directory is locked; ``read`` and ``resolve``
    complete it."""

    config: C
    """What was said; once ``resolve`` has been called, with the values of a profile."""
    base_dir: Path
    """The run file's directory, where references to the user's code are looked up first."""
    directory: RunDir
    checkpoint: Path | None
    """The checkpoint to resume from, if any."""
    tokenizer: Tokenizer
    caller: Caller
    train: Prepared[T] = field(init=False, repr=False)
    held_out: Prepared[T] | None = field(init=False, repr=False)
    plan: Plan[C] = field(init=False, repr=False)

    def read(
        self,
        load: Callable[[DataSection, Sources], Prepared[T]],
        check: Callable[[list[T], str], None] | None = None,
    ) -> None:
        """Read the training data and the held-out data, if any.

        Args:
            load: reads one source.
            check: refuses bad items of a ``[data]`` key.
        """
        data = limited_data(self.config)
        with long_wait("reading data.train"), about("data.train"):
            self.train = load(data, data.train)
        with long_wait("reading data.eval"), about("data.eval"):
            self.held_out = load(data, data.eval) if data.eval else None
        if check:
            check(self.train.items, "data.train")
        if check and self.held_out:
            check(self.held_out.items, "data.eval")

    def resolve(self, **known: object) -> None:
        """Make the plan; ``known`` are facts about the data."""
        vocabulary = vocabulary_of(self.tokenizer)
        images = len(vocabulary.rows) if vocabulary else 0
        facts = replace(facts_of_run(self.config, self.base_dir), images=images, **known)
        self.plan = replace(resolve(self.config, facts), origins=self.caller.reasons)
        self.config = self.plan.said

    def announce(self) -> None:
        """Print and save the settings and the data reports, before anything heavy loads."""
        folder = self.directory.path
        reports = [data.report for data in (self.train, self.held_out) if data]
        for report in reports:
            print(report.summary())
        if not self.caller.brief:
            print_resolved(self.plan.listing, all_of_it=self.config.monitor.verbose)
        contents = contents_of(self.plan, self.tokenizer, self.train, self.held_out)
        self._tell_changes(contents)
        save_resolved(
            self.plan.listing, folder, {name: content.digest for name, content in contents.items()}
        )
        for report in reports:
            report.write_skipped(folder / "skipped.jsonl")
        print(f"run directory: {shown_path(folder)}", flush=True)

    def _tell_changes(self, contents: Mapping[str, Content]) -> None:
        """Say what differs from the run that is continued.

        Raises:
            CheckpointError: its checkpoint does not go with the new settings or files.
        """
        checkpoint = self.checkpoint
        # Commands that sample have no checkpoint, and files that say what made them.
        if checkpoint is None and not isinstance(self.config, SamplingConfig):
            return
        before = checkpoint.parents[1] if checkpoint else self.directory.path
        found = changes(self.plan.listing, contents, before)
        if checkpoint and found.refused:
            first = f"{checkpoint} does not go with changes made since:"
            raise CheckpointError("\n  ".join([first, *found.refused, f"{REMEDY}."]))
        told = [*found.refused, *found.told]
        if told:
            start = f"step {read_state(checkpoint)['step']}" if checkpoint else "now"
            first = f"the run that is continued was begun with other settings; from {start} on:"
            print("\n  ".join([first, *told]))

    @property
    def eval_items(self) -> list[T] | None:
        """The held-out items to evaluate."""
        return self.held_out.items[: self.config.eval.max_prompts] if self.held_out else None


@contextmanager
def open_run(
    kind: type[C], path: Path | None, overrides: Sequence[Override], caller: Caller = FROM_A_COMMAND
) -> Generator[OpenRun[C, Any]]:
    """Check the settings, lock the run's directory and load the tokenizer.

    Errors about settings, from here and from inside the context, say where the settings are
    written.

    Args:
        path: the run file, whose name is also the run's; None for settings from overrides only.

    Raises:
        UserError: settings, files or the machine do not allow the run, or its directory holds
            another run.
    """
    base_dir, name = (path.parent, path.stem) if path else (Path.cwd(), kind.command)
    with placed(path, overrides):
        config: C = with_launched_ranks(caller.config or load_config(kind, path, overrides))
        check_run(config, base_dir)
        caller = replace(
            caller, reasons={**read_tree(path, overrides)[1].reasons, **caller.reasons}
        )
        directory = config.run_dir
        if isinstance(config, SamplingConfig):  # called again, it finds the remaining work
            directory = directory or Path("runs").absolute() / name
        resume = config.checkpoint.resume
        if directory is not None:
            resume = resumes(config.command, resume, directory)
        with open_run_dir(directory, config.monitor.run_name or name, resume) as run_dir:
            checkpoint = checkpoint_to_resume(config, run_dir)
            yield OpenRun(config, base_dir, run_dir, checkpoint, load_tokenizer(config), caller)


def prepare_training(
    run: OpenRun[C, T],
    load: Callable[[DataSection, Sources], Prepared[T]],
    sizes: Callable[[T], tuple[int, int]],
    check: Callable[[list[T], str], None] | None = None,
) -> None:
    """Read the data, resolve the settings, announce them, and save what is planned.

    Args:
        load, check: as in ``OpenRun.read``.
        sizes: returns an item's longest sequence, and the tokens that have to share a micro-batch.
    """
    run.read(load, check)
    unknown = unknown_share(run.tokenizer, run.train.items)
    if unknown >= 0.5:
        path = run.config.model.path
        print(f"warning: {unknown:.0%} of the data's tokens are unknown to the tokenizer of {path}")
    items = [*run.train.items, *(run.held_out.items if run.held_out else [])]
    longest, together = (max(size) for size in zip(*map(sizes, items), strict=True))
    run.resolve(
        **image_facts(run.tokenizer, run.train.items),
        train_size=len(run.train),
        eval_size=len(run.held_out) if run.held_out else None,
        done=_done_before(run.checkpoint),
        longest=longest,
        together=together,
    )
    run.announce()
    planned = {"memory": memory_of(run.plan), "seconds": step_seconds(run.plan)}
    write_json(run.directory.path / PLAN_FILE, planned)


def _done_before(checkpoint: Path | None) -> Done:
    """What a run had done at a checkpoint; nothing: there is none, or it does not say."""
    state = read_state(checkpoint) if checkpoint else {}
    taken = state.get("samples", {}).get("taken")
    return Done(state["step"], sum(taken)) if taken else Done(**state.get("done", {}))


def checkpoint_to_resume(config: RunConfig, run_dir: RunDir) -> Path | None:
    checkpoint = checkpoint_to_continue(config, run_dir)
    if checkpoint is None:
        return None
    check_whole(checkpoint, Checkpoints(run_dir.checkpoints, config.checkpoint.keep).newest_first())
    if read_state(checkpoint).get("model_only"):
        raise CheckpointError(
            f"{checkpoint} holds the model alone (checkpoint.model_only), and cannot be resumed. "
            f"Start another run from it: model.path={checkpoint}/model",
            keys=("checkpoint.resume",),
        )
    check_same_model(checkpoint, config.model.path)
    return checkpoint


def limited_data(config: RunConfig) -> DataSection:
    """The data section with the token limits of model and micro-batch, so that errors name lines
    that are too long."""
    facts = known_model_facts(config.model.path)
    context = facts and facts.context
    key = "max_prompt_tokens" if config.samples else "max_tokens"
    if isinstance(config, SamplingConfig):
        data = task_data(config)
        rooms = [context]
        key = "max_prompt_tokens"
    else:
        data = config.data
        rooms = [context, config.system.max_tokens_per_microbatch]
    reserved = config.new_tokens + config.score_model
    limit = min((room for room in rooms if room is not None), default=0) - reserved
    # If no room is left for a prompt, the settings conflict; resolving the run refuses that.
    open_yet = getattr(data, key) is None and limit > 0
    return data.model_copy(update={key: limit}) if open_yet else data
