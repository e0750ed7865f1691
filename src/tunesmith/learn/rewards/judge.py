"""Rewards from a judge: a score on a scale, scores for several criteria, or wins against the other
completions of a group.

Where the judge fails, the rollout fails: its total would lack a part.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from statistics import fmean

from tunesmith.config.judges import JudgeReward
from tunesmith.errors import DeadlineExceeded, RewardError
from tunesmith.learn.rewards.function import ItemFailure, Notes, RewardFunction, Score
from tunesmith.learn.rewards.judge_answers import Answer, Judge, JudgeQuestion, Tally, Unanswered
from tunesmith.learn.rewards.judge_questions import (
    Asked,
    JudgeQuestions,
    first_wins,
    score_in,
    scores_in,
    share_of,
    transcript,
    winner_in,
)
from tunesmith.learn.usercode.killable import Pool, UserProgram, WorkerError
from tunesmith.types import Rollout, Status, as_messages

PATTERN_SECONDS = 5.0
SHOWN_CHARACTERS = 2000
"""How many characters of a judge's answer, from its end, are written to rollouts.jsonl."""


def judge_reward(entry: JudgeReward, judge: Judge) -> RewardFunction:
    """The reward function that asks ``judge``."""
    reward = JudgeRewards(entry, judge)
    score = reward.by_pairs if entry.compare == "pairs" else reward.by_scale
    return RewardFunction(
        entry.name, entry.name, score, builtin=True, close=reward.close, costs=reward.metrics
    )


@dataclass(frozen=True, slots=True)
class Judgement:
    """A judgement of one completion: its reward, and the scores of its criteria."""

    reward: float
    scores: tuple[float, ...] = ()


@dataclass(slots=True)
class _Outcomes:
    """Judgements since the metrics were read last."""

    wanted: int = 0
    failed: int = 0
    agreement: list[float] = field(default_factory=list[float])


class JudgeRewards:
    """One judge's questions, its verdicts, and what is counted of them."""

    def __init__(self, entry: JudgeReward, judge: Judge) -> None:
        self._entry = entry
        self._judge = judge
        self._questions = JudgeQuestions(entry)
        program = UserProgram(Path(__file__).with_name("pattern_program.py"), "extract")
        self._pool = Pool(program, PATTERN_SECONDS) if entry.pattern else None
        self._outcomes = _Outcomes()

    def close(self) -> None:
        self._judge.close()
        if self._pool:
            self._pool.close()

    def metrics(self) -> dict[str, float]:
        """Costs and quality since the last call, evaluations included."""
        tally = self._judge.tally
        outcomes = self._outcomes
        self._judge.tally = Tally()
        self._outcomes = _Outcomes()
        if not tally.questions and not outcomes.wanted:
            return {}
        values: dict[str, float] = {
            "requests": tally.requests,
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.completion_tokens,
        }
        if tally.questions:
            values["cached"] = tally.cached / tally.questions
        if outcomes.wanted:
            values["failed"] = outcomes.failed / outcomes.wanted
        if outcomes.agreement:
            values["agreement"] = fmean(outcomes.agreement)
        return {f"judge/{self._entry.name}/{key}": float(v) for key, v in values.items()}

    async def by_scale(
        self, rollouts: Sequence[Rollout], texts: Sequence[str], notes: Notes
    ) -> list[Score]:
        """The mean of the votes on each completion, from 0 to 1."""
        votes = range(self._entry.votes)
        asked = [self._asked(*each) for each in zip(rollouts, texts, strict=True)]
        shown = [one[0] for one in asked if not isinstance(one, Unanswered)]
        questions = [JudgeQuestion(text, vote) for text in shown for vote in votes]
        answers = iter(await self._judge.answers(questions))
        scores: list[Score] = []
        said: list[str | None] = []
        reasons: list[str | None] = []
        named = self._entry.named_criteria
        columns: dict[str, list[float | None]] = {criterion.name: [] for criterion in named}
        for one in asked:
            if isinstance(one, Unanswered):
                own: list[Answer] = [one]
                verdicts = list[Judgement]()
                reason = one.reason
            else:
                own = [next(answers) for _ in votes]
                verdicts, reason = await self._verdicts(own, one[1])
            scores.append(fmean(v.reward for v in verdicts) if verdicts else _failed(reason))
            reasons.append(None if verdicts else reason)
            written = (a if isinstance(a, str) else a.text for a in own)
            said.append(next((text[-SHOWN_CHARACTERS:] for text in written if text), None))
            gaps = [abs(a.reward - b.reward) for a, b in combinations(verdicts, 2)]
            if gaps:
                self._outcomes.agreement.append(1.0 - fmean(gaps))
            for place, column in enumerate(columns.values()):
                column.append(fmean(v.scores[place] for v in verdicts) if verdicts else None)
        self._note(notes, {**columns, "said": said, "error": reasons})
        self._count(reasons)
        return scores

    async def by_pairs(
        self, rollouts: Sequence[Rollout], texts: Sequence[str], notes: Notes
    ) -> list[Score]:
        """The share of its comparisons that each completion of a group wins; a tie is half a win.
        None for one that is compared with no other.

        Every pair is asked in both orders and counts only if both have a verdict.
        """
        shown = [_texts(*each)[1] for each in zip(rollouts, texts, strict=True)]
        pairs = [pair for group in groups_of(rollouts) for pair in self._pairs(rollouts, group)]
        asked: list[JudgeQuestion | Unanswered] = []
        for one, other in pairs:
            asked.append(self._between(rollouts[one], shown[one], shown[other]))
            asked.append(self._between(rollouts[other], shown[other], shown[one]))
        known = [question for question in asked if isinstance(question, JudgeQuestion)]
        answers = iter(await self._judge.answers(known))
        wins: list[list[float]] = [[] for _ in rollouts]
        reasons: list[str | None] = [None] * len(rollouts)
        for place, (one, other) in enumerate(pairs):
            both = [
                next(answers) if isinstance(question, JudgeQuestion) else question
                for question in asked[2 * place : 2 * place + 2]
            ]
            try:
                forward, backward = [await self._winner(answer) for answer in both]
            except RewardError as error:
                reasons[one] = reasons[other] = str(error)
                continue
            self._outcomes.agreement.append(float(forward == 1.0 - backward))
            won = (forward + 1.0 - backward) / 2
            wins[one].append(won)
            wins[other].append(1.0 - won)
        compared = {place for pair in pairs for place in pair}
        failed = [reasons[n] if not wins[n] else None for n in range(len(rollouts))]
        self._note(notes, {"comparisons": [float(len(won)) for won in wins], "error": failed})
        self._count([failed[n] for n in sorted(compared)])
        scores: list[Score] = [_failed(reason) if reason else None for reason in failed]
        return [fmean(won) if won else score for won, score in zip(wins, scores, strict=True)]

    def _asked(self, rollout: Rollout, text: str) -> tuple[str, list[Asked]] | Unanswered:
        try:
            return self._questions.about(*_texts(rollout, text), rollout.task.columns)
        except RewardError as error:
            return Unanswered(str(error))

    def _between(self, rollout: Rollout, first: str, second: str) -> JudgeQuestion | Unanswered:
        prompt = transcript(as_messages(rollout.task.prompt))
        try:
            columns = rollout.task.columns
            return JudgeQuestion(self._questions.between(prompt, first, second, columns))
        except RewardError as error:
            return Unanswered(str(error))

    def _pairs(self, rollouts: Sequence[Rollout], group: Sequence[int]) -> list[tuple[int, int]]:
        seed = f"{self._entry.seed}:{rollouts[group[0]].task.id}"
        pairs = pairs_of(len(group), self._entry.rounds, seed)
        return [(group[one], group[other]) for one, other in pairs]

    async def _verdicts(
        self, answers: Sequence[Answer], criteria: Sequence[Asked]
    ) -> tuple[list[Judgement], str]:
        """The verdicts in the answers, and why one is missing."""
        verdicts: list[Judgement] = []
        reason = ""
        for answer in answers:
            try:
                verdicts.append(await self._verdict(answer, criteria))
            except RewardError as error:
                reason = str(error)
        return verdicts, reason

    async def _verdict(self, answer: Answer, criteria: Sequence[Asked]) -> Judgement:
        if isinstance(answer, Unanswered):
            raise RewardError(answer.reason)
        scale = self._entry.scale
        if not criteria:
            found = await self._extracted(answer) if self._pool else None
            own = share_of(found, answer, scale) if self._pool else score_in(answer, scale)
            return Judgement(own)
        scores = scores_in(answer, [criterion.name for criterion in criteria], scale)
        weights = [criterion.weight for criterion in criteria]
        full = sum(weight for weight in weights if weight > 0)
        total = sum(w * score for w, score in zip(weights, scores, strict=True))
        return Judgement(total / full, tuple(scores))

    async def _winner(self, answer: Answer) -> float:
        if isinstance(answer, Unanswered):
            raise RewardError(answer.reason)
        if self._pool:
            return first_wins(await self._extracted(answer), answer)
        return winner_in(answer)

    async def _extracted(self, answer: str) -> str | None:
        assert self._pool is not None
        try:
            return await self._pool.run(self._entry.pattern, answer)
        except (DeadlineExceeded, WorkerError) as error:
            raise RewardError(f"reward.judge.pattern: {error}") from None

    def _count(self, reasons: Sequence[str | None]) -> None:
        self._outcomes.wanted += len(reasons)
        self._outcomes.failed += sum(reason is not None for reason in reasons)

    def _note(self, notes: Notes, columns: Mapping[str, Sequence[object]]) -> None:
        for name, values in columns.items():
            if any(value is not None for value in values):
                notes.log_extra(f"{self._entry.name}/{name}", values)


def _failed(reason: str) -> ItemFailure:
    return ItemFailure(Status.REWARD_FAILED, f"has no verdict: {reason}")


def groups_of(rollouts: Sequence[Rollout]) -> Iterator[list[int]]:
    """The places of the rollouts of each task."""
    places: dict[str, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        places.setdefault(rollout.task.id, []).append(place)
    yield from places.values()


def pairs_of(size: int, rounds: int | None, seed: str) -> list[tuple[int, int]]:
    """The pairs of a group that are compared.

    The completions stand in a circle in random order, and each is compared with the one ``r``
    places on, for ``r`` from 1 to ``rounds``: each is in ``2 * rounds`` pairs. That is every pair
    if ``2 * rounds`` is at least ``size - 1``, and without ``rounds``.

    Example:
        >>> len(pairs_of(8, 1, "seed")), len(pairs_of(8, None, "seed"))
        (8, 28)
    """
    if rounds is None or 2 * rounds >= size - 1:
        return list(combinations(range(size), 2))
    circle = list(range(size))
    random.Random(seed).shuffle(circle)
    steps = product(range(1, rounds + 1), range(size))
    return [(circle[place], circle[(place + distance) % size]) for distance, place in steps]


def _texts(rollout: Rollout, text: str) -> tuple[str, str]:
    """Prompt and completion as text; of several turns, all messages after the prompt."""
    completion = transcript(rollout.messages) if rollout.messages else text
    return transcript(as_messages(rollout.task.prompt)), completion
