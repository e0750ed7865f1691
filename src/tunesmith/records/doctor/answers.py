"""Batch inference and RFT: how a run stands, and whether a round's samples are enough to learn
from."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tunesmith.records.doctor.columns import UNKNOWN, span
from tunesmith.records.doctor.record import RunRecord
from tunesmith.records.doctor.rules import (
    Change,
    Evidence,
    Finding,
    Rules,
    applied,
    explains,
    worst_first,
)
from tunesmith.records.doctor.signs import Signs, times
from tunesmith.records.plain import Row
from tunesmith.records.wilson import wilson

MOST_SAMPLES = 32
"""Samples per question up to which more of them are advised."""
Share = tuple[float, float, float]
"""A share, and the limits of its 95% interval."""
UNKNOWN_SHARE: Share = (UNKNOWN, UNKNOWN, UNKNOWN)


def _shown(share: Share) -> str:
    return "{:.1%} (95%: {:.1%} to {:.1%})".format(*share)


class Answers(Signs):
    """A run of batch inference or RFT, with its evaluations ``before`` and ``after`` training."""

    def __init__(self, record: RunRecord) -> None:
        super().__init__(record)
        assert record.standing is not None
        self.standing = record.standing
        self.done = f"{self.standing.answered} of {self.standing.total} prompts are answered"
        evaluated = {name: r for name, r in record.rounds.items() if "evaluation" in r}
        shares = {name: tuple(r["evaluation"]["accuracy"]) for name, r in evaluated.items()}
        self.before: Share = shares.get("base", UNKNOWN_SHARE)
        self.after: Share = list(shares.values())[-1] if len(shares) > 1 else UNKNOWN_SHARE
        first = record.rounds.get("round-1", {}).get("yield")
        self.sampled: float = first["correct_share"][0] if first else UNKNOWN


@dataclass(frozen=True, slots=True)
class SampledRound:
    """The counts of a round's ``yield.json``.

    Args:
        per_question: samples.
        batch: samples of a training batch. An epoch over fewer answers is one step, so they are
            only repeated.
    """

    name: str
    counts: Row
    per_question: int
    batch: int

    @property
    def right(self) -> Share:
        share = self.counts["correct"] / self.counts["samples"]
        return share, *wilson(share, self.counts["samples"])

    @property
    def counted(self) -> str:
        right = f"{self.counts['correct']} of {self.counts['samples']}"
        return f"{self.name}: {right} samples are right, "

    def samples_for(self, answers: int) -> str | None:
        """Samples per question that give this many right answers; None if that is out of reach, or
        reached already."""
        if not self.counts["correct"]:
            return None
        needed = ceil(answers / self.right[0] / self.counts["questions"])
        return str(needed) if self.per_question < needed <= MOST_SAMPLES else None


RUN = Rules[Answers]()
ROUND = Rules[SampledRound]()


@RUN.add("problem")
def run_failed(run: Answers) -> Evidence:
    """An error ended the run.

    Mend that and give the same command again: it goes on from there.
    """
    if run.standing.state == "failed":
        yield f"{run.done}: {run.standing.error}"


@RUN.add("note")
def run_stopped(run: Answers) -> Evidence:
    """It was interrupted.

    The same command goes on from there.
    """
    if run.standing.state == "stopped":
        yield run.done


@ROUND.add("problem", Change[SampledRound]("sampling.n", lambda this: this.samples_for(this.batch)))
@explains("low_yield")
def few_kept(this: SampledRound) -> Evidence:
    """This is less than one batch to learn from: training only repeats it.

    More questions or more samples of each give more answers. Where few samples are right, give
    worked examples (rft.few_shot), let a larger model answer (rft.sampler), ask easier questions,
    or train by example first (tunesmith sft).
    """
    kept, solved, questions = (this.counts[name] for name in ("kept", "solved", "questions"))
    if kept < this.batch:  # an epoch over it is one optimizer step
        counted = f"{this.counted}{_shown(this.right)}; {kept} answers to {solved} of {questions}"
        yield f"{counted} questions are kept, and train.batch_size is {this.batch}"


@ROUND.add(
    "warning",
    Change[SampledRound]("sampling.n", lambda this: this.samples_for(this.counts["questions"])),
)
def low_yield(this: SampledRound) -> Evidence:
    """Only the easiest questions are learned from.

    Sample more of each question, give worked examples (rft.few_shot), or let a larger model answer
    (rft.sampler).
    """
    if this.right[2] * this.per_question < 1:
        solved = f"{this.counts['solved']} of {this.counts['questions']} questions are solved"
        yield f"{this.counted}{_shown(this.right)}, less than one per question; {solved}"


@ROUND.add("note")
def nearly_all_right(this: SampledRound) -> Evidence:
    """There is little left to learn from these questions.

    Give harder ones.
    """
    if this.right[1] > 0.95:
        yield f"{this.name}: {_shown(this.right)} of the samples are right"


@ROUND.add("warning")
def answers_not_found(this: SampledRound) -> Evidence:
    """Most samples have no answer in the form that the reward looks for, or are cut off before it.

    Read some, and see reward.pattern; show the form with rft.few_shot, or raise
    sampling.max_new_tokens.
    """
    share, _, high = this.counts.get("answered_share") or UNKNOWN_SHARE
    if high < 0.5:
        yield f"{this.name}: an answer was found in {share:.1%} of the samples"


@RUN.add("problem", times("train.lr", 0.3))
def accuracy_fell(run: Answers) -> Evidence:
    """Training made the model worse, by more than chance explains.

    Lower train.lr, train for fewer epochs, or learn from more answers (sampling.n).
    """
    if run.after[2] < run.before[1]:
        yield f"accuracy fell from {_shown(run.before)} to {_shown(run.after)}"


@RUN.add("note")
def greedy_answers_differ(run: Answers) -> Evidence:
    """Samples at sampling.temperature are more varied than the greedy answers of an evaluation.

    A lower sampling.temperature gives more right samples; the greedy accuracy shows little of what
    is learned.
    """
    if run.before[0] - run.sampled >= 0.25:
        shares = f"{run.before[0]:.1%} of greedy answers and {run.sampled:.1%} of samples"
        yield f"before training {shares} were right"


@RUN.add("warning")
def answers_fail(run: Answers) -> Evidence:
    """The engine or a reward raised or ran out of time.

    The field error in rollouts.jsonl has the reason for each.
    """
    failed = run["rollouts/failed"].mean
    if failed >= 0.02:
        yield f"{failed:.1%} of the completions failed"


@RUN.add("warning", times("sampling.max_new_tokens", 2))
def answers_cut_off(run: Answers) -> Evidence:
    """What is cut off is judged as it is, and RFT does not learn from it.

    More completions end.
    """
    cut = run["truncated"].mean
    limit = run.shown("sampling.max_new_tokens")
    if cut >= 0.2:
        yield f"{cut:.0%} of the completions reach the limit of {limit} tokens before they end"


def answer_findings(record: RunRecord) -> list[Finding]:
    """What is wrong with a run and with its last round."""
    run = Answers(record)
    settings = record.settings
    steps = span(record.steps)
    found = list(applied(RUN, run, steps))
    yields = [(name, parts["yield"]) for name, parts in record.rounds.items() if "yield" in parts]
    per_question = settings.get("sampling.n")
    batch = settings.get("train.batch_size")
    if yields and isinstance(per_question, int) and isinstance(batch, int):
        name, counts = yields[-1]
        found += applied(ROUND, SampledRound(name, counts, per_question, batch), steps)
    return worst_first(found, [*RUN, *ROUND])


def yield_findings(
    counts: Row, samples_per_question: int, batch_size: int, name: str
) -> list[Finding]:
    """What is wrong with a round's yield, while the run goes on."""
    this = SampledRound(name, counts, samples_per_question, batch_size)
    found = worst_first(applied(ROUND, this, f"1-{counts['questions']}"), ROUND)
    return [finding for finding in found if finding.severity != "note"]


def yield_warnings(counts: Row, samples_per_question: int, batch_size: int, name: str) -> list[str]:
    """The findings of ``yield_findings``, several lines each."""
    findings = yield_findings(counts, samples_per_question, batch_size, name)
    return ["\n  ".join([f.numbers, *f.change, f.effect]) for f in findings]
