"""What a run file's ``[algorithm]`` resolves to. No torch.

A preset fills in the keys that were left out. Whoever changes the loss or the estimator of a preset gets
the defaults of the new one, not the preset's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

from tunesmith.algorithms.corrections import Correction, Geometric, NoCorrection, TokenTruncate
from tunesmith.algorithms.kl import KLInReward, NoKL
from tunesmith.algorithms.presets import Preset, find_preset
from tunesmith.algorithms.shaping import OverlongRamp
from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.choice import Choice
from tunesmith.config.section import Section
from tunesmith.errors import ConfigError

Reasons = list[tuple[str, object, str]]


def resolve_algorithm(
    section: AlgorithmSection, *, max_new_tokens: int, max_staleness: int = 0, altered_by: Collection[str] = ()
) -> tuple[AlgorithmSection, Reasons]:
    """Fill in every key that was left out; return the section and ``(key, value, reason)`` for each.

    With ``max_staleness`` what an older policy sampled is corrected for (truncated importance sampling) unless the
    section chooses another correction. ``altered_by`` names what alters the distribution that is sampled: what the
    sampler reports is then no old log-probability of the distribution that is trained.

    Raises:
        ConfigError: a preset that is incomplete, or settings that contradict each other.
    """
    preset = find_preset(section.name)
    merging = _Merging(section, preset)
    for key in ("advantage", "loss", "aggregation"):
        merging.choose(key)
    merging.choose("kl", NoKL(), "no KL to a reference")
    if max_staleness:
        merging.choose("correction", TokenTruncate(), "with rollout.max_staleness an older policy may have sampled")
    else:
        merging.choose("correction", NoCorrection(), "sampler and trainer agree")
    for key, field in AlgorithmSection.model_fields.items():
        if key not in merging.values and key != "decoupled":
            merging.choose(key, field.default)
    if isinstance(ramp := merging.values["overlong"], OverlongRamp) and ramp.buffer is None:
        buffer = ramp.length(max_new_tokens)
        merging.values["overlong"] = ramp.model_copy(update={"buffer": buffer})
        merging.reasons.append(("algorithm.overlong.buffer", buffer, "a fifth of rollout.max_new_tokens, as in DAPO"))
    merging.choose("decoupled", *_decoupled(merging.values["correction"], altered_by))
    algorithm = section.model_copy(update=merging.values)
    _refuse_contradictions(algorithm, altered_by)
    return algorithm, merging.reasons


class _Merging:
    """The section as it fills up."""

    def __init__(self, section: AlgorithmSection, preset: Preset) -> None:
        self.section, self.preset = section, preset
        try:
            self.usual = AlgorithmSection.model_validate(dict(preset.settings))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigError(f"algorithm.name: preset '{preset.name}', {place}: {first['msg']}") from None
        self.values: dict[str, Any] = {"name": section.name}
        self.reasons: Reasons = []

    def choose(self, key: str, default: Any = ..., why: str = "") -> None:
        """The key's value: as written, else the preset's, else ``default`` because ``why``."""
        written, usual = (getattr(s, key) if key in s.model_fields_set else None for s in (self.section, self.usual))
        value, reason = (default, why) if usual is None else (usual, self.preset.origin)
        if isinstance(written, Section):
            self.values[key] = self._joined(key, written, value, reason)
        elif written is not None:
            self.values[key] = written
        elif isinstance(value, Section):
            self.values[key] = self._joined(key, None, value, reason)
        elif value is ...:
            raise ConfigError(f"algorithm.name: preset '{self.preset.name}' has no {key}; say algorithm.{key}")
        else:
            self.values[key] = value
            if reason:
                self.reasons.append((f"algorithm.{key}", value, reason))

    def _joined(self, key: str, written: Section | None, usual: Any, reason: str) -> Section:
        """What was written above what is usual, where both are of one type, with a reason for each value."""
        base = written or usual
        below = usual if isinstance(usual, type(base)) else None
        known = {} if below is None else {k: getattr(below, k) for k in below.model_fields_set - {"type"}}
        given = {} if written is None else {k: getattr(written, k) for k in written.model_fields_set - {"type"}}
        joined = type(base)(**{**known, **given})
        named = written is not None and (not isinstance(written, Choice) or "type" in written.model_fields_set)
        if isinstance(joined, Choice):
            default = f"default of the {joined.what} {joined.name}"
            if not named:
                self.reasons.append((f"algorithm.{key}", joined.name, reason if below else f"the usual {joined.what}"))
        else:
            default = ""
            if not named:
                self.reasons.append((f"algorithm.{key}", True, reason))
        for name in type(joined).model_fields:
            value = getattr(joined, name)
            why = reason if name in known else default
            if name not in given and value is not None and why:
                self.reasons.append((f"algorithm.{key}.{name}", value, why))
        joined.model_fields_set.update(type(joined).model_fields, {"type"})
        return joined


def _decoupled(correction: Correction, altered_by: Collection[str]) -> tuple[bool, str]:
    if altered_by:
        return True, (
            f"{_cause(altered_by)} the distribution that is sampled, and the old log-probabilities are those of the "
            "whole one"
        )
    if isinstance(correction, NoCorrection):
        return False, "the sampler's log-probabilities are the old ones"
    return True, f"the correction {correction.name} compares them with the sampler's"


def _cause(altered_by: Collection[str]) -> str:
    return " and ".join(altered_by) + (" alters" if len(altered_by) == 1 else " alter")


def _refuse_contradictions(algorithm: AlgorithmSection, altered_by: Collection[str]) -> None:
    correction = algorithm.correction
    if altered_by and not algorithm.decoupled:
        # The loss's ratio has to start at 1, and the sampler's log-probabilities are those of another distribution.
        raise ConfigError(
            "algorithm.decoupled = false takes the sampler's log-probabilities for the old ones, and "
            f"{_cause(altered_by)} the distribution that they belong to: the ratio of the loss would not start at 1. "
            "Leave one of them out."
        )
    if altered_by and isinstance(correction, Geometric):
        raise ConfigError(
            'algorithm.correction = "geometric" keeps the answers that trainer and sampler find nearly equally likely, '
            f"and {_cause(altered_by)} the sampler's probabilities: hardly any answer would be kept. Leave one of them "
            "out."
        )
    if not algorithm.decoupled and not isinstance(correction, NoCorrection):
        raise ConfigError(
            f"algorithm.correction: '{correction.name}' weighs the trainer's log-probabilities against the sampler's, "
            'which are the same with decoupled=false. Leave decoupled out, or set correction="none".'
        )
    if why := algorithm.advantage.shaping:
        shaping = {"overlong": algorithm.overlong, "stop_properly": algorithm.stop_properly is not None}
        shaping |= {"reward_clip": algorithm.reward_clip}
        if "reward_weights" in algorithm.needs:
            shaping["kl"] = isinstance(algorithm.kl, KLInReward)
        for key in (key for key, on in shaping.items() if on):
            raise ConfigError(
                f"algorithm.{key} would have no effect: the advantage '{algorithm.advantage.name}' {why}."
            )
