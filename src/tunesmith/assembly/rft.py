"""``tunesmith rft``, put together: sample, keep what is right, train on it, evaluate."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tunesmith.assembly.common import load_tokenizer
from tunesmith.assembly.opening import FROM_A_COMMAND, SHOWN, Caller, announce, load_trained
from tunesmith.assembly.sampler import (
    SamplingRun,
    answer_tasks,
    identity,
    open_sampling,
    release_memory,
    resolve_sampling,
)
from tunesmith.assembly.sinks import ADAPTERS
from tunesmith.assembly.train import run_sft
from tunesmith.config.files import ADAPTER_CONFIG
from tunesmith.config.generation import RFTConfig
from tunesmith.config.resolved import Resolved, config_text, settings
from tunesmith.config.schema import DataSection, LoraSection
from tunesmith.data.prepare import load_samples, load_tasks
from tunesmith.data.prompts import PromptEncoder, Shots, read_shots
from tunesmith.environments.multi_turn import tools_in_data
from tunesmith.errors import ConfigError, DataError, StorageError, boundary
from tunesmith.loop.checkpoint import Checkpoints, read_state
from tunesmith.loop.usage import Usage, total_of
from tunesmith.monitor.metrics import read_metrics
from tunesmith.monitor.text import Example
from tunesmith.offline.generation import Json, LineWriter, claim
from tunesmith.offline.rft import (
    Round,
    adopt_answers,
    check_prompts,
    describe,
    describe_yield,
    evaluate_file,
    examples,
    fallen,
    report_of,
    select_answers,
)
from tunesmith.plan.engine import SAMPLER_KEYS
from tunesmith.plan.generation import SEPARATOR, derive_rft_warmup
from tunesmith.storage import read_json, write_json
from tunesmith.types import Task
from tunesmith.usercode.loading import located

Step = Literal["generate", "train", "evaluate", "run"]
_TOTAL = "total"
_TRAINING = ("model.", "lora.", "train.", "system.", "monitor.", "checkpoint.")


@dataclass(frozen=True, slots=True)
class RFTOutcome:
    """What a step of rejection-sampling fine-tuning leaves."""

    run_dir: Path
    model: Path | None
    """The last trained model; None while there is none."""
    evaluations: dict[str, Json]
    """By ``base``, ``round-1``, ...: shares as ``[share, low, high]``."""
    yields: dict[str, Json]
    examples: list[Example]
    """Held-out questions, answered by the base model and by the last one."""
    usage: dict[str, float] = field(default_factory=dict[str, float], compare=False)
    """Seconds by phase and peak memory of all calls and rounds, by the names of metrics; see ``Usage``."""
    earlier: float = field(default=0.0, compare=False)
    """Seconds that calls before this one took."""

    def load(self, **options: Any) -> tuple[Any, Any]:
        """The last trained model and its tokenizer, loaded by transformers."""
        if self.model is None:
            raise ConfigError(f"no round in {self.run_dir} is trained yet")
        return load_trained(self.model, **options)


def run_rft(
    step: Step, path: Path | None, overrides: Sequence[str] = (), caller: Caller = FROM_A_COMMAND
) -> RFTOutcome:
    """One step, or with ``run`` all of them; what is done already is not done again."""
    usage = Usage()
    with open_sampling(RFTConfig, path, overrides, caller) as run:
        if step == "evaluate" and run.config.data.eval is None:
            raise ConfigError("data.eval is missing: name the questions to evaluate on")
        return _opened_run(run, usage).do(step)


def _opened_run(run: SamplingRun[RFTConfig], usage: Usage) -> _Run:
    config = run.config
    shots = read_shots(config.rft.few_shot) if config.rft.few_shot else ()
    first = _first_sampler(config, run, shots)
    resolved = resolve_sampling(config, [*first.tasks, *(run.held_out.items if run.held_out else [])], count=False)
    announce(resolved, run.directory, run.train, run.held_out)
    rounds = [Round(run.directory.path / f"round-{number}") for number in range(1, config.rft.rounds + 1)]
    report = run.directory.path / "report.json"
    earlier: Json = read_json(report).get("usage", {}) if report.exists() else {}
    usage.add_earlier({part: found for part, found in earlier.items() if part != _TOTAL})
    return _Run(run, resolved, first, rounds, usage)


@dataclass(frozen=True, slots=True)
class Sampler:
    """Who answers the questions of the first round, and how they are asked."""

    config: RFTConfig
    """Of ``rft.sampler``, not resolved; else of the run."""
    opened: SamplingRun[RFTConfig]
    """With the sampler's tokenizer."""
    encoder: PromptEncoder
    tasks: list[Task]
    """The questions with worked examples before them."""


def _first_sampler(config: RFTConfig, run: SamplingRun[RFTConfig], shots: Shots) -> Sampler:
    """The model to train, or ``rft.sampler`` with the same questions in its own tokens and chat template."""
    if config.rft.sampler is not None:
        config = with_model(config, config.rft.sampler)
        tokenizer = load_tokenizer(config)
        run = replace(run, tokenizer=tokenizer, train=load_tasks(run.data, run.data.train, tokenizer))
    separator = config.rft.few_shot_separator
    prompts = [task.prompt for task in run.train.items]
    encoder = PromptEncoder.of(run.data, run.tokenizer, prompts, separator or SEPARATOR)
    if encoder.template is not None and separator is not None:
        raise ConfigError("rft.few_shot_separator has no effect on a chat template, which has turns; leave it out")
    tasks = [with_shots(task, encoder, shots, run.data.max_prompt_tokens) for task in run.train.items]
    return Sampler(config, run, encoder, tasks)


def with_shots(task: Task, encoder: PromptEncoder, shots: Shots, limit: int | None) -> Task:
    """The task as it is sampled. What is learned and evaluated is the task as it is."""
    if not shots:
        return task
    ids = encoder.ids(task.prompt, tools_in_data(task), shots)
    if limit is not None and len(ids) > limit:
        raise DataError(
            f"task {task.id}: with the worked examples of rft.few_shot the prompt has {len(ids)} tokens, the limit is "
            f"{limit}: the model's context less sampling.max_new_tokens, or data.max_prompt_tokens"
        )
    return replace(task, prompt_ids=tuple(ids))


@dataclass(slots=True)
class _Run:
    """The parts of a run, and its steps."""

    opened: SamplingRun[RFTConfig]
    resolved: Resolved[RFTConfig]
    first: Sampler
    rounds: list[Round]
    usage: Usage

    @property
    def config(self) -> RFTConfig:
        return self.resolved.config

    @property
    def threshold(self) -> float:
        said = self.config.rft.threshold
        assert self.opened.rewards is not None, "a run needs a reward"
        return sum(w for w in self.opened.rewards.weights.values() if w > 0) if said is None else said

    def do(self, step: Step) -> RFTOutcome:
        run_dir, held_out = self.opened.directory.path, self.opened.held_out
        base = Round(run_dir / "base")
        if step == "run":
            if held_out and self.config.eval.at_start:
                self.evaluate(base, None)
            for number in range(len(self.rounds)):
                self.generate(number)
                model = self.train(number)
                if held_out:
                    self.evaluate(self.rounds[number], model)
        elif step == "evaluate":
            last = next((r for r in reversed(self.rounds) if r.model), base)
            self.evaluate(last, last.model)
        else:
            number = next((i for i, r in enumerate(self.rounds) if r.model is None), None)
            if number is None:
                raise ConfigError(
                    f"all {len(self.rounds)} rounds in {run_dir} are trained; raise rft.rounds. To train on the same "
                    f"answers with other settings, give another run_dir and rft.answers={self.rounds[-1].samples}"
                )
            if step == "generate" or self.config.rft.answers is not None:
                self.generate(number)
            if step == "train":
                self.train(number)
        last = next((r.model for r in reversed(self.rounds) if r.model), None)
        report = self._report()
        newest = next((r for r in reversed(self.rounds) if r.evaluation.exists()), None)
        shown = examples(base, newest, SHOWN) if newest and base.evaluation.exists() else []
        return RFTOutcome(
            run_dir, last, report["evaluations"], report["yields"], shown, report["usage"][_TOTAL], self.usage.earlier
        )

    def _report(self) -> dict[str, dict[str, Json]]:
        """What the run has and took so far, which is written to ``report.json``."""
        run_dir, parts = self.opened.directory.path, self.usage.parts()
        report = report_of(run_dir, self.rounds)
        report["usage"] = {_TOTAL: total_of(parts.values()), **parts}
        write_json(run_dir / "report.json", report)
        return report

    @contextmanager
    def _phase(self, name: str, this: Round) -> Generator[None]:
        try:
            with self.usage.phase(name, this.directory.name):
                yield
        finally:
            self._report()

    def generate(self, number: int) -> None:
        """Sample answers with the last model, and keep right ones. Worked examples are for the first round."""
        this, config = self.rounds[number], self.config
        if this.model is not None:
            return
        with self._phase("sampling", this):
            if config.rft.answers is not None:
                adopt_answers(config.rft.answers, this, self.opened.train.items)
            elif number:
                model, train = self.rounds[number - 1].model, self.opened.train
                self._sample(this.samples, _with_model(config, model), self.opened, train.items, train.fingerprint)
            else:
                self._sample_first(this)
            found = select_answers(this, config.rft.select, self.threshold, config.sampling.n)
        print("\n".join(describe_yield(this.directory.name, found)), flush=True)

    def _sample_first(self, this: Round) -> None:
        """The answers of the first round: of the model to train or of ``rft.sampler``, after worked examples."""
        config, first = self.config, self.first
        own = config.rft.sampler is None
        model = _with_model(config, None) if own else resolve_sampling(first.config, first.tasks, count=False).config
        shots, separator = config.rft.few_shot, "" if first.encoder.template else first.encoder.separator
        worked = (shots.read_text(encoding="utf-8"), separator) if shots else None
        self._sample(this.samples, model, first.opened, first.tasks, first.opened.train.fingerprint, worked=worked)

    def train(self, number: int) -> Path:
        """``tunesmith sft`` on what a round kept."""
        this = self.rounds[number]
        if this.model is not None:
            return this.model
        if not this.train.exists():
            raise ConfigError(f"there is no {this.train} to train on; make it with: tunesmith rft generate")
        with self._phase("training", this):
            model = self._trained(number)
        this.finish(model)
        return model

    def _trained(self, number: int) -> Path:
        this = self.rounds[number]
        data = self._training_data(this)
        samples = load_samples(data, data.train, self.opened.tokenizer)
        check_prompts(this.train, samples.items, self.opened.train.items)
        run_file = this.directory / "sft.toml"
        said, reasons = self._training_settings(number, data, len(samples))
        with boundary(StorageError, f"cannot write {run_file}", OSError):
            run_file.write_text(config_text(Resolved(self.config, said, ())), encoding="utf-8")
        model = self._begun(this)
        if model is None:
            release_memory()
            done = run_sft(run_file, ['checkpoint.resume="auto"'], Caller(reasons, self.opened.caller.callbacks))
            model, setup = done.checkpoint, done.seconds.get("setup", 0.0)
            found = {"seconds/setup": setup, "seconds/training": -setup}
            # Every step of the training begins a new peak, so that what is left at its end is that of its last one.
            peaks = [line.get("memory/device_peak") for line in read_metrics(this.sft / "metrics.jsonl")]
            if known := [peak for peak in peaks if peak is not None]:
                found["memory/device_peak"] = max(known)
            self.usage.add(this.directory.name, found)
        return model

    def _begun(self, this: Round) -> Path | None:
        """The model of a training that was ended before that was written down; one that cannot go on is begun anew."""
        newest = Checkpoints(this.sft / "checkpoints", 1).newest()
        state = read_state(newest) if newest else {}
        if newest and state.get("finished"):
            return newest / "model"
        if state.get("model_only"):
            shutil.rmtree(this.sft)
        return None

    def evaluate(self, this: Round, model: Path | None) -> None:
        """Greedy answers to the held-out questions, asked as in training."""
        held_out = self.opened.held_out
        assert held_out is not None
        tasks = held_out.items[: self.config.eval.max_prompts]
        config = _with_model(self.config, model)
        with self._phase("evaluation", this):
            self._sample(this.evaluation, config, self.opened, tasks, held_out.fingerprint, greedy=True)
            found = evaluate_file(this, self.threshold, len(tasks))
        print(describe(this.directory.name, found), flush=True)
        before = self.opened.directory.path / "base" / "evaluation.json"
        if model is not None and before.exists() and fallen(read_json(before), found):
            print(
                "warning: the trained model is worse than the model before training, by more than chance explains. "
                "Try a lower train.lr, fewer train.epochs, or more answers (sampling.n)",
                flush=True,
            )

    def _sample(
        self,
        out: Path,
        config: RFTConfig,
        opened: SamplingRun[RFTConfig],
        tasks: Sequence[Task],
        fingerprint: str,
        *,
        greedy: bool = False,
        worked: tuple[str, str] | None = None,
    ) -> None:
        """Answer tasks into ``out``. Args: worked: the text of worked examples and what separates them."""
        out.parent.mkdir(parents=True, exist_ok=True)
        separator = worked[1] if worked else ""
        source = identity(config, fingerprint, opened.tokenizer, greedy=greedy)
        if worked:
            source["rft.few_shot"] = list(worked)
        claim(out, source)
        writer = LineWriter(_decoder(opened.tokenizer, separator), flat=False, scored=True)
        stop = (separator,) if separator else ()
        answer_tasks(config, opened, tasks, writer, out, self.usage, greedy=greedy, stop=stop)

    def _training_data(self, this: Round) -> DataSection:
        """The questions as they were sampled: in ``train.jsonl`` they stand as in the data, not templated."""
        data, opened = self.config.data, self.opened
        asked = PromptEncoder.of(opened.data, opened.tokenizer, [task.prompt for task in opened.train.items])
        return DataSection(
            train=str(this.train),
            prompt="prompt",
            completion="completion",
            system_prompt=data.system_prompt,
            chat=asked.template is not None,
            chat_template_kwargs=data.chat_template_kwargs,
            shuffle=data.shuffle,
            seed=data.seed,
        )

    def _training_settings(self, number: int, data: DataSection, samples: int) -> tuple[dict[str, Any], dict[str, str]]:
        """What the run file of a round's training says, by dotted key; and why, where nobody set it."""
        config, said = self.config, dict(self.resolved.given)
        values, derived = settings(config), {d.key: d.reason for d in self.resolved.derived}
        known = {*said, *derived}
        kept = {k: values[k] for k in values if k in known and k.startswith(_TRAINING) and k not in SAMPLER_KEYS}
        start = self.rounds[number - 1].model if number and config.rft.start == "last" else None
        if start is not None and (start / ADAPTER_CONFIG).is_file():
            kept = {k: v for k, v in kept.items() if k not in ("lora.rank", "lora.alpha", "lora.targets")}
            kept["lora.path"] = str(start)
        elif start is not None:
            kept["model.path"] = str(start)
        if warmup := derive_rft_warmup(config, said, samples):
            kept["train.warmup_steps"], derived["train.warmup_steps"] = warmup
        kept |= {f"data.{k}": v for k, v in data.model_dump(mode="json", exclude_unset=True).items()}
        if config.monitor.sinks:
            names = config.monitor.sinks
            kept["monitor.sinks"] = [
                name if name in ADAPTERS else located(name, self.opened.base_dir) for name in names
            ]
        kept["run_dir"] = str(self.rounds[number].sft)
        kept["monitor.run_name"] = f"{config.monitor.run_name or self.opened.directory.path.name}-round-{number + 1}"
        of_round = dict.fromkeys([*kept, "checkpoint.resume"], f"round {number + 1} of tunesmith rft")
        as_said = {key for key in said if key in kept and kept[key] == values[key]}
        return kept, {key: derived.get(key, why) for key, why in of_round.items() if key not in as_said - {*derived}}


def _with_model(config: RFTConfig, model: Path | None) -> RFTConfig:
    """The configuration of sampling from the base (None), from an adapter, or from a whole model."""
    if model is None:
        return config.model_copy(update={"lora": LoraSection(path=config.lora.path)})
    if (model / ADAPTER_CONFIG).is_file():
        return config.model_copy(update={"lora": LoraSection(path=model)})
    return with_model(config, str(model))


def with_model(config: RFTConfig, model: str) -> RFTConfig:
    """The configuration of sampling from another whole model."""
    changed = config.model.model_copy(update={"path": model})
    return config.model_copy(update={"model": changed, "lora": LoraSection()})


def _decoder(tokenizer: Any, separator: str) -> Callable[[Sequence[int]], str]:
    """Text of an answer, without the separator at which it was stopped."""

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
        return text.split(separator, 1)[0] if separator else text

    return decode
