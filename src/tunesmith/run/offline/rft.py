"""``tunesmith rft``: sample answers, keep the correct ones, train on them, evaluate."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tunesmith.config.commands import RFTConfig
from tunesmith.config.doors import Door
from tunesmith.config.objects import located
from tunesmith.config.reading.files import ADAPTER_CONFIG
from tunesmith.config.reading.overriding import Override
from tunesmith.config.resolved import config_text
from tunesmith.config.schema import DataSection
from tunesmith.errors import ConfigError
from tunesmith.learn.data.prepare import load_samples
from tunesmith.learn.data.prompts import PromptEncoder
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.plan.derive.generation import profile_values, rft_warmup
from tunesmith.plan.plan import Plan
from tunesmith.plan.resolve import resolve
from tunesmith.plan.rules.engines import OF_SAMPLERS
from tunesmith.records.metrics import MetricsLog, newest_objects, read_metrics
from tunesmith.records.run_dir import point
from tunesmith.records.standing import recorded
from tunesmith.records.storage import write_json, write_output
from tunesmith.records.text import EvalExample
from tunesmith.run.assembly.checking import facts_of_run
from tunesmith.run.assembly.opening import FROM_A_COMMAND, Caller, OpenRun
from tunesmith.run.assembly.session import SHOWN, load_trained
from tunesmith.run.assembly.sinks import ADAPTERS
from tunesmith.run.assembly.train import run_sft
from tunesmith.run.loop.checkpoint import Checkpoints, read_state
from tunesmith.run.offline.lines import Json, LineWriter, claim, count_answered, read_lines
from tunesmith.run.offline.questions import (
    Questions,
    first_questions,
    held_out_questions,
    planned_from,
    sampling_from,
)
from tunesmith.run.offline.rounds import (
    RftRound,
    adopt_answers,
    check_prompts,
    describe,
    describe_yield,
    evaluation_metrics,
    examples,
    fallen,
    select_answers,
    yield_metrics,
)
from tunesmith.run.offline.sampling import answer_tasks, identity, longest_prompt, open_sampling
from tunesmith.run.offline.selection import accuracy, correct_answers, right_answers, select
from tunesmith.run.offline.usage import Usage, read_report, total_of
from tunesmith.run.offline.watch import JobWatch, Judged
from tunesmith.types import Task

YIELDS = Door[Callable[[Mapping[str, Any], int, int, str], list[str]]](
    "yields", "tunesmith.records.doctor.answers:yield_warnings"
)
"""What judges a round by its counts, completions per question, batch size and name."""

Step = Literal["generate", "train", "evaluate", "run"]
_TOTAL = "total"
_TRAINING = ("model.", "lora.", "train.", "system.", "monitor.", "checkpoint.")


@dataclass(frozen=True, slots=True)
class RFTOutcome:
    """The result of a step of rejection-sampling fine-tuning."""

    run_dir: Path
    model: Path | None
    """The last trained model; None before the first."""
    evaluations: dict[str, Json]
    """By ``base``, ``round-1``, ...: shares as ``[share, low, high]``."""
    yields: dict[str, Json]
    examples: list[EvalExample] = field(repr=False)
    """Held-out questions, answered by the base model and by the last one."""
    usage: dict[str, float] = field(default_factory=dict[str, float], compare=False, repr=False)
    """Seconds by phase and peak memory of all calls and rounds, by the names of metrics; see
    ``Usage``."""
    earlier: float = field(default=0.0, compare=False, repr=False)
    """Seconds that calls before this one took."""

    def load(self, **options: Any) -> tuple[Any, Any]:
        """The last trained model and its tokenizer, loaded by transformers."""
        if self.model is None:
            raise ConfigError(f"no round in {self.run_dir} is trained yet")
        return load_trained(self.model, **options)


def run_rft(
    step: Step,
    path: Path | None,
    overrides: Sequence[Override] = (),
    caller: Caller = FROM_A_COMMAND,
) -> RFTOutcome:
    """One step, or with ``run`` all of them; completed work is not repeated."""
    usage = Usage()
    with open_sampling(RFTConfig, path, overrides, caller) as (run, rewards):
        if step == "evaluate" and run.config.data.eval is None:
            why = "data.eval is missing: name the questions to evaluate on"
            raise ConfigError(why, keys=("data.eval",))
        assert rewards is not None, "a run needs a reward"
        steps = _begin(run, rewards, usage)
        with recorded(run.directory.path, "rft", steps.count):
            steps.do(step)
        return steps.outcome()


def _begin(run: OpenRun[RFTConfig, Task], rewards: RewardSet, usage: Usage) -> _Run:
    """Resolve and announce the settings; read the run's existing results."""
    said = run.config
    run_dir = run.directory.path
    first = first_questions(run)
    held_out = held_out_questions(run, trained=False).tasks if run.held_out else []
    # The number of questions is not the amount of training, so it is not given as the size of the
    # data.
    run.resolve(longest=longest_prompt([*first.tasks, *held_out]))
    run.announce()
    threshold = run.config.rft.threshold
    if threshold is None:
        threshold = sum(w for w in rewards.weights.values() if w > 0)
    numbers = range(1, run.config.rft.rounds + 1)
    rounds = [RftRound(run_dir / f"round-{number}") for number in numbers]
    report = run_dir / "report.json"
    earlier: Json = read_report(report).get("usage", {}) if report.exists() else {}
    usage.add_earlier({part: metrics for part, metrics in earlier.items() if part != _TOTAL})
    return _Run(run, said, rewards, threshold, first, RftRound(run_dir / "base"), rounds, usage)


@dataclass(slots=True)
class _Run:
    """The parts of a run, and its steps."""

    run: OpenRun[RFTConfig, Task]
    said: RFTConfig
    """The settings before they were resolved."""
    rewards: RewardSet
    threshold: float
    """The lowest reward of a correct answer."""
    first: Questions
    base: RftRound
    rounds: list[RftRound]
    usage: Usage

    @property
    def plan(self) -> Plan[RFTConfig]:
        return self.run.plan

    @property
    def config(self) -> RFTConfig:
        return self.plan.said

    def do(self, step: Step) -> None:
        if step == "run":
            held_out = self.run.held_out
            if held_out and self.config.eval.at_start:
                self.evaluate(self.base)
            for number, this in enumerate(self.rounds):
                self.generate(number)
                self.train(number)
                if held_out:
                    self.evaluate(this)
            return
        if step == "evaluate":
            self.evaluate(next((r for r in reversed(self.rounds) if r.model), self.base))
            return
        number = next((i for i, r in enumerate(self.rounds) if r.model is None), None)
        if number is None:
            raise ConfigError(
                f"all {len(self.rounds)} rounds in {self.run.directory.path} are trained; raise "
                "rft.rounds. To train on the same answers with other settings, give another "
                f"run_dir and rft.answers={self.rounds[-1].samples}",
                keys=("rft.rounds",),
            )
        if step == "generate" or self.config.rft.answers is not None:
            self.generate(number)
        if step == "train":
            self.train(number)

    @property
    def _outputs(self) -> list[Path]:
        """The files of answers, in the order in which they are made."""
        made = [path for this in self.rounds for path in (this.samples, this.evaluation)]
        return [self.base.evaluation, *made]

    def count(self) -> tuple[int, int]:
        """Answered prompts, and all prompts of the run."""
        questions = len(self.run.train.items)
        rounds = len(self.rounds)
        held_out = len(self.run.eval_items or ()) * (rounds + self.config.eval.at_start)
        return sum(map(count_answered, self._outputs)), questions * rounds + held_out

    def outcome(self) -> RFTOutcome:
        model = next((r.model for r in reversed(self.rounds) if r.model), None)
        newest = next((r for r in reversed(self.rounds) if r.evaluation.exists()), None)
        shown: list[EvalExample] = []
        if newest and self.base.evaluation.exists():
            shown = examples(self.base, newest, SHOWN)
        report = self._report()
        run_dir = self.run.directory.path
        usage = report["usage"][_TOTAL]
        earlier = self.usage.earlier
        return RFTOutcome(
            run_dir, model, report["evaluations"], report["yields"], shown, usage, earlier
        )

    def _report(self) -> dict[str, dict[str, Json]]:
        """Write ``report.json``: results and usage so far."""
        parts = self.usage.parts()
        places = [self.base, *self.rounds]
        report = {
            "evaluations": {
                r.name: read_report(r.evaluation_report)
                for r in places
                if r.evaluation_report.exists()
            },
            "yields": {
                r.name: read_report(r.yield_report) for r in places if r.yield_report.exists()
            },
            "usage": {_TOTAL: total_of(parts.values()), **parts},
        }
        write_json(self.run.directory.path / "report.json", report)
        return report

    @contextmanager
    def _phase(self, name: str, this: RftRound) -> Generator[None]:
        try:
            with self.usage.phase(name, this.name):
                yield
        finally:
            self._report()

    def generate(self, number: int) -> None:
        """Sample answers with the last model, and keep correct ones. Only the first round has
        worked examples."""
        this = self.rounds[number]
        config = self.config
        train = self.run.train
        if this.model is not None:
            return
        with self._phase("sampling", this):
            if config.rft.answers is not None:
                adopt_answers(config.rft.answers, this, train.items)
            elif number:
                questions = Questions(self.run.tokenizer, train.items, train.fingerprint)
                self._sample(
                    this, planned_from(self.plan, self.rounds[number - 1].model), questions
                )
            elif config.rft.sampler is None:
                self._sample(this, planned_from(self.plan, None), self.first)
            else:
                other = sampling_from(self.said, config.rft.sampler)
                facts = replace(facts_of_run(other), longest=longest_prompt(self.first.tasks))
                self._sample(this, resolve(other, facts), self.first)
            n = self.plan.sampling.n
            counts = select_answers(this, config.rft.select, self.threshold, n)
        print(describe_yield(this.name, counts), flush=True)
        self._record(this, yield_metrics(counts))
        for judge in YIELDS.rooms:
            for text in judge(counts, n, self.plan.training.batch or n, this.name):
                print(f"warning: {text}", flush=True)

    def train(self, number: int) -> None:
        """Run ``tunesmith sft`` on the answers that a round kept."""
        this = self.rounds[number]
        if this.model is not None:
            return
        if not this.train.exists():
            raise ConfigError(f"there is no {this.train}; make it with: tunesmith rft generate")
        with self._phase("training", this):
            model = self._trained(number)
        point(self.run.directory.path / "model", model)
        write_json(this.trained, {"model": os.path.relpath(model, this.directory)})

    def _trained(self, number: int) -> Path:
        this = self.rounds[number]
        data = self._training_data(this)
        samples = load_samples(data, data.train, self.run.tokenizer)
        check_prompts(this.train, samples.items, self.run.train.items)
        run_file = this.directory / "sft.toml"
        values, reasons = self._training_settings(number, data, len(samples))
        write_output(run_file, config_text(values).encode(), private=True)
        newest = Checkpoints(this.sft / "checkpoints", 1).newest()
        state = read_state(newest) if newest else {}
        if newest and state.get("finished"):  # an earlier call ended before it recorded the model
            return newest / "model"
        if state.get("model_only"):  # nothing can resume from this checkpoint
            shutil.rmtree(this.sft)
        _release_memory()
        caller = Caller(reasons, self.run.caller.callbacks, brief=number > 0)
        done = run_sft(run_file, ['checkpoint.resume="auto"'], caller)
        setup = done.seconds.get("setup", 0.0)
        metrics = {"seconds/setup": setup, "seconds/training": -setup}
        # Each training step resets the peak of device memory, so the highest of them counts.
        lines = read_metrics(this.sft / "metrics.jsonl")
        peaks = [line.get("memory/device_peak") for line in lines]
        known = [peak for peak in peaks if peak is not None]
        if known:
            metrics["memory/device_peak"] = max(known)
        self.usage.add(this.name, metrics)
        return done.checkpoint

    def evaluate(self, this: RftRound) -> None:
        """Greedy answers of a round's model, or of the base model, to the held-out questions."""
        model = this.model
        questions = held_out_questions(self.run, trained=model is not None)
        with self._phase("evaluation", this):
            self._sample(this, planned_from(self.plan, model), questions, greedy=True)
            lines = islice(read_lines(this.evaluation), len(questions.tasks))
            shares = accuracy(lines, self.threshold)
            shares["few_shot"] = questions.shots is not None
            write_json(this.evaluation_report, shares)
        print(describe(this.name, shares), flush=True)
        self._record(this, evaluation_metrics(shares))
        before = self.base.evaluation_report
        if model is not None and before.exists() and fallen(read_report(before), shares):
            print(
                "warning: the trained model is worse than the model before training, by more than "
                "chance explains. Try a lower train.lr, fewer train.epochs, or more answers "
                "(sampling.n)",
                flush=True,
            )

    def _record(self, this: RftRound, metrics: dict[str, float]) -> None:
        """Write the result of a round's samples or evaluation into ``metrics.jsonl``, once."""
        file = self.run.directory.path / "metrics.jsonl"
        step = self.count()[0]
        metrics["round"] = float(this.number)
        if not any(metrics.items() <= line.items() for line in newest_objects(file, 1 << 16)):
            with MetricsLog(file).begin(step) as log:
                log.write(step, metrics)

    def _sample(
        self, this: RftRound, plan: Plan[RFTConfig], questions: Questions, *, greedy: bool = False
    ) -> None:
        """Answer questions into the round's file of samples or, if ``greedy``, of its
        evaluation."""
        out = this.evaluation if greedy else this.samples
        out.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = questions.tokenizer
        tasks = questions.tasks
        separator = questions.separator
        source = identity(plan, questions.fingerprint, tokenizer, greedy=greedy)
        if questions.shots is not None:
            source["rft.few_shot"] = [questions.shots, separator]
        claim(out, source, self.run.directory.path)

        def decode(token_ids: Sequence[int]) -> str:
            """The text of an answer, without the separator that ended it."""
            text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
            return text.split(separator, 1)[0] if separator else text

        def judge(line: Json) -> Judged:
            if greedy:
                return Judged(len(right_answers(line, self.threshold)), 0)
            correct = correct_answers(line, self.threshold)
            return Judged(len(correct), len(select(correct, self.config.rft.select)))

        writer = LineWriter(decode, flat=False, scored=True)
        stop = (separator,) if separator else ()
        watch = JobWatch(
            self.run.directory.path,
            f"{this.name} {'evaluation' if greedy else 'sampling'}: completions",
            len(tasks),
            before=sum(count_answered(file) for file in self._outputs if file != out),
            evaluates=greedy,
            common={"round": float(this.number)},
            judge=judge,
        )
        if greedy:
            plan = replace(plan, sampling=replace(plan.sampling, n=1, temperature=0.0))
        answer_tasks(
            plan, tokenizer, self.rewards, tasks, writer, out, self.usage, watch, stop=stop
        )

    def _training_data(self, this: RftRound) -> DataSection:
        """The kept answers; their prompts are those of the data, before the chat template."""
        data = self.config.data
        run = self.run
        encoder = PromptEncoder.of(data, run.tokenizer, [task.prompt for task in run.train.items])
        return DataSection(
            train=str(this.train),
            prompt="prompt",
            completion="completion",
            system_prompt=data.system_prompt,
            chat=encoder.template is not None,
            chat_template_kwargs=data.chat_template_kwargs,
            shuffle=data.shuffle,
            seed=self.plan.training.data_seed,
        )

    def _training_settings(
        self, number: int, data: DataSection, samples: int
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The settings of a round's training by dotted key, and the reasons for those that the user
        did not set."""
        config = self.config
        given = self.plan.given
        name = self.run.directory.path.name
        values = self.plan.settings
        reasons = {d.key: d.reason for d in self.plan.reasons}
        # Settings that depend on the machine are derived again: no sampler runs next to the
        # training.
        chosen = {*given, *profile_values(config.rft.profile)}
        chosen |= {key for key in reasons if not key.startswith("system.")}
        of_training = [k for k in values if k.startswith(_TRAINING) and not OF_SAMPLERS.covers(k)]
        kept = {key: values[key] for key in of_training if key in chosen}
        if (
            kept.get("system.compile") is True
        ):  # on by default, but refused if training has nothing to compile
            del kept["system.compile"]
        start = self.rounds[number - 1].model if number and config.rft.start == "last" else None
        if start is not None and (start / ADAPTER_CONFIG).is_file():
            for key in ("lora.rank", "lora.alpha", "lora.targets"):
                kept.pop(key, None)
            kept["lora.path"] = str(start)
        elif start is not None:
            kept["model.path"] = str(start)
        warmup = rft_warmup(self.plan, samples)
        if warmup:
            kept["train.warmup_steps"], reasons["train.warmup_steps"] = warmup
        written = data.model_dump(mode="json", exclude_unset=True)
        kept |= {f"data.{key}": value for key, value in written.items()}
        sinks = config.monitor.sinks
        if sinks:
            base_dir = self.run.base_dir
            sinks = [sink if sink in ADAPTERS else located(sink, base_dir) for sink in sinks]
            kept["monitor.sinks"] = sinks
        kept["run_dir"] = str(self.rounds[number].sft)
        kept["monitor.run_name"] = f"{config.monitor.run_name or name}-round-{number + 1}"
        said = given.keys() - reasons.keys()
        by_user = {key for key in said if key in kept and kept[key] == values[key]}
        of_round = f"round {number + 1} of tunesmith rft"
        others = [key for key in (*kept, "checkpoint.resume") if key not in by_user]
        return kept, {key: reasons.get(key, of_round) for key in others}


def _release_memory() -> None:
    """Free the GPU memory of a closed sampler."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
