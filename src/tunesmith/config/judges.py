"""``[[reward.judge]]``: a language model that judges completions."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from tunesmith.config.section import Section
from tunesmith.config.values import Count, Memory, PositiveInt, Text, Url

POLICY = "policy"
"""The name of the policy as a judge."""
TEXT_FILES = (".txt", ".md", ".jinja", ".j2")
"""A rubric or template of one line that ends so is a file."""


def names_text_file(said: str) -> bool:
    """Whether a rubric or template is in a file that it names."""
    return "\n" not in said and said.endswith(TEXT_FILES)


_OF_SERVERS = (
    "token_env", "timeout", "retries", "requests_per_minute", "extra",
)  # fmt: skip
_OF_SCALES = ("scale", "votes", "criteria")


class Criterion(Section):
    """One of the things that a judge looks at."""

    name: Annotated[str, Field(pattern=r"^\w[\w-]*$")]
    """Its name in the metrics, and in the judge's answer."""
    text: Text
    """What the judge is asked; a Jinja template, like the rubric."""
    weight: float = 1.0
    """Its part of the sum; below 0 for what an answer should not have."""


class JudgeReward(Section):
    """A language model that judges completions: ``[[reward.judge]]``."""

    model: Text | None = None
    """The model's name at ``url``; without ``url`` and ``path``, "policy": the policy judges
    itself."""
    path: Text | None = None
    """A directory or a hub name: the run loads this model itself, frozen, and asks it."""
    kv_memory: Memory = "1GB"
    """Memory for the keys and values of a model at ``path``."""
    url: Url | None = None
    """The address of an OpenAI-compatible server, up to ``/v1``."""
    name: Text = "judge"
    weight: float = 1.0
    compare: Literal["scale", "pairs"] = "scale"
    """Each completion on a scale, or the completions of a group with each other."""
    rubric: Text | None = None
    """What makes a completion good: text or a file (.txt, .md, .jinja); data columns by name, as in
    ``{{ answer }}``."""
    criteria: tuple[Criterion, ...] | Text = ()
    """Several things that are judged apart, or the data column that lists them."""
    template: Text | None = None
    """The whole question, instead of the built-in one: text or a file, in Jinja."""
    scale: tuple[float, float] = (0.0, 10.0)
    """The judge's worst and best number; the reward is from 0 to 1."""
    pattern: Text | None = None
    """Regular expression whose group is the verdict in the judge's answer; None: ``Score: N`` or
    ``Better: N``."""
    votes: PositiveInt = 1
    """Answers of the judge per completion, of which the mean counts."""
    rounds: PositiveInt | None = None
    """Pairs: comparisons of each completion with the one so many places on in a random circle;
    None: every pair."""
    seed: Count = 0
    """Seed of the circles, and of the judge's sampling."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_new_tokens: PositiveInt = 512
    extra: Annotated[dict[str, JsonValue] | None, Field(description="a table")] = None
    """Further fields of each request, such as ``{ reasoning_effort = "low" }``; with
    ``max_completion_tokens``, ``max_tokens`` is not sent."""
    token_env: Text | None = None
    """The environment variable with the key that is sent as ``Authorization: Bearer``."""
    concurrency: PositiveInt = 32
    """Requests at once."""
    requests_per_minute: PositiveInt | None = None
    timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that one attempt may take."""
    retries: Count = 5
    """Retries after a failed connection, a timeout, 429 or 5xx, with growing pauses or the server's
    ``Retry-After``."""
    deadline: Annotated[float, Field(gt=0)] = 300.0
    """Seconds after which a question has no answer, retries included."""

    @property
    def by_policy(self) -> bool:
        return self.url is None and self.path is None

    @property
    def named_criteria(self) -> tuple[Criterion, ...]:
        """The criteria that are the same for every completion."""
        return () if isinstance(self.criteria, str) else self.criteria

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        said = self.model_fields_set
        self._check_model(said)
        unread = next((key for key in _OF_SCALES if self.compare == "pairs" and key in said), None)
        if unread:
            raise ValueError(f"{unread} has no effect with compare = 'pairs'; leave it out")
        if self.compare == "scale" and "rounds" in said:
            raise ValueError("rounds are of compare = 'pairs'; leave it out")
        if not self.scale[0] < self.scale[1]:
            raise ValueError("scale is the worst number and the best, the lower one first")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError("votes that are greedy are all the same; set temperature above 0")
        template = self.template or "rubric"
        if self.rubric and "rubric" not in template and not names_text_file(template):
            raise ValueError("template has no {{ rubric }}; write it there, or leave one out")
        self._check_criteria()
        return self

    def _check_model(self, said: set[str]) -> None:
        if self.path is not None and (self.url or self.model):
            other = "url" if self.url else "model"
            raise ValueError(f"path and {other} name two judges; leave one out")
        if self.by_policy and self.model != POLICY:
            raise ValueError(
                f"model = '{self.model}' has no url; give the address that serves it, such as "
                "'http://127.0.0.1:8000/v1', or the path of a model that the run loads, or set "
                "model = 'policy'"
            )
        if self.url and self.model is None:
            raise ValueError("url needs model, the model's name there")
        unread = next((key for key in _OF_SERVERS if not self.url and key in said), None)
        if unread:
            who = "the policy judges" if self.by_policy else "the run loads the judge itself"
            raise ValueError(f"{unread} is of a server, and {who}; leave it out")
        if self.path is None and "kv_memory" in said:
            raise ValueError("kv_memory is of a model at path; leave it out")

    def _check_criteria(self) -> None:
        if not self.criteria:
            return
        if self.pattern:
            raise ValueError("pattern finds one number, and criteria have one each; leave one out")
        names = [criterion.name for criterion in self.named_criteria]
        if len(set(names)) < len(names):
            raise ValueError("two criteria have the same name")
        if names and not any(criterion.weight > 0 for criterion in self.named_criteria):
            raise ValueError("criteria need at least one weight above 0")
