"""Rules about runs whose data has images."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.errors import Problem
from tunesmith.plan.rules.rule import rule
from tunesmith.plan.rules.situation import ENGINE, Situation

COMMANDS = ("sft", "dpo", "kto", "rl")
"""Those whose models see images."""


@rule(RunConfig)
def images(s: Situation[RunConfig]) -> Iterator[Problem]:
    if not s.facts or not s.facts.images:
        return
    config = s.config
    if config.command not in COMMANDS:
        yield Problem(
            ("data.train",),
            f"the data has images, which tunesmith {config.command} does not show to its model; "
            f"these do: {', '.join(COMMANDS)}. Leave the images out",
        )
        return
    if s.devices.sequence > 1:
        yield s.clash(
            "system.sequence_parallel.size",
            _alone("ranks that do not share a sequence: leave it out"),
        )


@rule(RLConfig)
def images_of_rollouts(s: Situation[RLConfig]) -> Iterator[Problem]:
    if not s.facts or not s.facts.images or s.config.command not in COMMANDS:
        return
    config = s.config
    devices = s.devices
    if devices.engine.third_party:
        yield s.clash(ENGINE, _alone("the embedded engine: set system.engine = 'local'"))
    if config.system.draft_model is not None:
        yield s.clash("system.draft_model", ": the data has images, which a draft does not see")
    if config.environment.used:
        yield Problem(
            ("environment.path", "data.train"),
            "the data has images, and an environment's conversations are of text; leave one out",
        )
    if s.kind and s.kind.critic:
        yield s.clash(
            "algorithm.advantage",
            ": a critic of its own does not see images; set critic.shared_trunk, or take an "
            "advantage without a critic",
            "critic.shared_trunk",
        )


def _alone(what: str) -> str:
    return f": with images in the data a run needs {what}"
