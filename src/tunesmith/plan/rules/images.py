"""Rules about runs whose data has images."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.schema import RLConfig, RunConfig
from tunesmith.errors import Problem
from tunesmith.plan.facts.families import family_around, seeing
from tunesmith.plan.rules.rule import rule
from tunesmith.plan.rules.situation import ENGINE, C, Situation

TOWER = "model.vision_tower"
COMMANDS = ("sft", "dpo", "kto", "rl")
"""The commands whose models see images."""


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


@rule(RunConfig)
def trained_tower(s: Situation[RunConfig]) -> Iterator[Problem]:
    config = s.config
    if config.model.vision_tower == "frozen":
        return
    if config.command not in COMMANDS:
        yield s.clash(
            TOWER, f": tunesmith {config.command} shows its model no images; leave it out"
        )
        return
    sees = s.model and family_around(s.model.family).images and s.model.tower_parameters
    if s.model and not sees:
        yield s.clash(
            TOWER, f": only {', '.join(seeing())} have one that sees images; leave it out"
        )
    elif not config.rl:
        yield from _without_images(s)
    if s.devices.sequence > 1:
        why = ": ranks that share a sequence see no images; leave it out"
        yield s.clash("system.sequence_parallel.size", why, TOWER)


@rule(RLConfig)
def trained_tower_of_rollouts(s: Situation[RLConfig]) -> Iterator[Problem]:
    if s.config.model.vision_tower == "frozen" or s.config.command not in COMMANDS:
        return
    if not s.config.environment.used:  # its agents may send some
        yield from _without_images(s)
    if _unseen(s):
        why = f": {s.devices.engine.title} is not shown images; set system.engine = 'local'"
        yield s.clash(TOWER, why, ENGINE)
    if s.kind and s.kind.critic:
        why = ": a critic of its own does not see images; set critic.shared_trunk"
        yield s.clash(TOWER, why, "algorithm.advantage", "critic.shared_trunk")


def _unseen(s: Situation[C]) -> bool:
    """Whether the engine is not shown images of this model, or of any."""
    engine = s.devices.engine
    if s.model is None:
        return engine.third_party and not engine.seeing
    return not engine.sees(s.model.family)


def _without_images(s: Situation[C]) -> Iterator[Problem]:
    if s.facts and s.facts.images == 0:
        yield s.clash(TOWER, ": the data has no images; leave it out", "data.train")


@rule(RLConfig)
def images_of_rollouts(s: Situation[RLConfig]) -> Iterator[Problem]:
    if not s.facts or not s.facts.images or s.config.command not in COMMANDS:
        return
    config = s.config
    engine = s.devices.engine
    if _unseen(s):
        whose = f", and {engine.title} is shown those of {', '.join(engine.seeing)}"
        whose = whose if engine.seeing else ""
        yield s.clash(ENGINE, _alone(f"the embedded engine{whose}: set system.engine = 'local'"))
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
