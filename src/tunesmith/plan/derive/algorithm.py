"""Resolves a run file's ``[algorithm]``. No torch.

A preset fills in the keys that are left out. A run file that changes the loss or the estimator of a
preset gets the defaults of the new one, not the preset's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

from tunesmith.config.algorithm import Algorithm, AlgorithmSection
from tunesmith.config.choice import Choice
from tunesmith.config.families import CorrectionChoice, KLInReward, NoKL, OverlongRamp
from tunesmith.config.presets import Preset, find_preset
from tunesmith.config.section import Section, is_open
from tunesmith.errors import ConfigError, Problem

Reasons = list[tuple[str, object, str]]


def resolve_algorithm(
    section: AlgorithmSection,
    *,
    max_new_tokens: int,
    max_staleness: int = 0,
    altered_by: Collection[str] = (),
    rounded: bool = False,
) -> tuple[Algorithm, Reasons]:
    """The algorithm, and ``(key, value, reason)`` for each key that was left out.

    Args:
        max_staleness: above 0, truncated importance sampling is the default correction.
        altered_by: settings that alter the sampled distribution: the sampler's log-probabilities
            are then not the old log-probabilities of the distribution that is trained.
        rounded: whether the sampler rounds the weights; truncated importance sampling is then the
            default correction, too.

    Raises:
        ConfigError: a preset is incomplete, or settings contradict each other.
    """
    preset = find_preset(section.name)
    usual = _settings_of(preset)
    correction, why = _usual_correction(max_staleness, rounded=rounded)
    defaults: dict[str, tuple[Any, str]] = {
        "kl": (NoKL(), "no KL to a reference"),
        "correction": (CorrectionChoice.typed(correction)(), why),
    }
    values: dict[str, Any] = {}
    reasons: Reasons = []
    for key, field in AlgorithmSection.model_fields.items():
        if key == "decoupled":  # its default depends on the correction
            defaults[key] = _decoupled(values["correction"], altered_by)
        default, reason = defaults.get(key, (field.default, ""))
        if key in usual.model_fields_set:
            default = getattr(usual, key)
            reason = preset.origin
        written = getattr(section, key) if key in section.model_fields_set else None
        value = default if written is None else written
        if value is None and is_open(field):
            raise ConfigError(
                f"algorithm.name: preset '{preset.name}' has no {key}; set algorithm.{key}",
                keys=("algorithm.name",),
            )
        if isinstance(value, Section):
            value, more = _merged(f"algorithm.{key}", written, default, reason)
            reasons += more
        elif written is None and reason:
            reasons.append((f"algorithm.{key}", value, reason))
        values[key] = value
    ramp = values["overlong"]
    if isinstance(ramp, OverlongRamp) and ramp.buffer is None:
        buffer = ramp.length(max_new_tokens)
        values["overlong"] = ramp.model_copy(update={"buffer": buffer})
        reasons.append(
            ("algorithm.overlong.buffer", buffer, "a fifth of rollout.max_new_tokens, as in DAPO")
        )
    algorithm = Algorithm.model_construct(section.model_fields_set, **values)
    _refuse_contradictions(algorithm, altered_by)
    return algorithm, reasons


def _usual_correction(max_staleness: int, *, rounded: bool) -> tuple[str, str]:
    """The default of ``algorithm.correction``, and the reason."""
    if max_staleness:
        return "token_truncate", "with rollout.max_staleness an older policy may have sampled"
    if rounded:
        return "token_truncate", "with system.engine_weights the sampler rounds the weights"
    return "none", "sampler and trainer agree"


def _settings_of(preset: Preset) -> AlgorithmSection:
    try:
        return AlgorithmSection.model_validate(dict(preset.settings))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"algorithm.name: preset '{preset.name}', {place}: {first['msg']}",
            keys=("algorithm.name",),
        ) from None


def _merged(key: str, written: Section | None, usual: Any, reason: str) -> tuple[Section, Reasons]:
    """The keys of ``written`` over those of ``usual`` if both have the same type, and a reason for
    each other value.

    Args:
        reason: the reason for the values of ``usual``.
    """
    kind = type(usual if written is None else written)

    def given(table: Any) -> dict[str, Any]:
        return {name: getattr(table, name) for name in table.model_fields_set - {"type"}}

    own = {} if written is None else given(written)
    known = given(usual) if isinstance(usual, kind) else {}
    merged = kind(**{**known, **own})
    reasons: Reasons = []
    value = True
    why = reason
    default = ""
    if isinstance(merged, Choice):
        value = merged.name
        default = f"default of the {merged.what} {merged.name}"
        why = reason if isinstance(usual, kind) else f"the usual {merged.what}"
    if written is None or (isinstance(written, Choice) and "type" not in written.model_fields_set):
        reasons.append((key, value, why))
    for name in kind.model_fields:
        field = getattr(merged, name)
        why = reason if name in known else default
        if name not in own and field is not None and why:
            reasons.append((f"{key}.{name}", field, why))
    return merged, reasons


def _decoupled(correction: CorrectionChoice, altered_by: Collection[str]) -> tuple[bool, str]:
    if altered_by:
        why = "the sampled distribution, and the loss compares unaltered ones"
        return True, f"{_cause(altered_by)} {why}"
    if correction.name == "none":
        return False, "the sampler's log-probabilities are the old ones"
    return True, f"the correction {correction.name} compares them with the sampler's"


def _cause(altered_by: Collection[str]) -> str:
    return " and ".join(altered_by) + (" alters" if len(altered_by) == 1 else " alter")


def _refuse_contradictions(algorithm: Algorithm, altered_by: Collection[str]) -> None:
    correction = algorithm.correction
    decoupled = "algorithm.decoupled"
    altering = tuple(name for name in altered_by if name.startswith("rollout."))
    if altered_by and not algorithm.decoupled:
        text = (
            "algorithm.decoupled = false takes the sampler's log-probabilities as the old ones, "
            f"but {_cause(altered_by)} them: the ratio of the loss would not start at 1. Leave one "
            "of them out."
        )
        raise ConfigError(Problem((decoupled, *altering), text))
    if altered_by and correction.unaltered_only:
        text = (
            f'algorithm.correction = "{correction.name}" {correction.unaltered_only}, but '
            f"{_cause(altered_by)} the sampler's probabilities: it would keep hardly any. "
            "Leave one of them out."
        )
        raise ConfigError(Problem(("algorithm.correction", *altering), text))
    if not algorithm.decoupled and correction.name != "none":
        text = (
            f"algorithm.correction: '{correction.name}' compares the trainer's log-probabilities "
            "with the sampler's, which are the same with decoupled=false. Leave decoupled out, or "
            'set correction="none".'
        )
        raise ConfigError(Problem(("algorithm.correction", decoupled), text))
    why = algorithm.advantage.shaping
    if why:
        shaping = {
            "overlong": algorithm.overlong,
            "stop_properly": algorithm.stop_properly is not None,
            "reward_clip": algorithm.reward_clip,
        }
        if "reward_weights" in algorithm.needs:
            shaping["kl"] = isinstance(algorithm.kl, KLInReward)
        for key in (f"algorithm.{key}" for key, on in shaping.items() if on):
            text = f"{key} would have no effect: the advantage '{algorithm.advantage.name}' {why}."
            raise ConfigError(Problem((key, "algorithm.advantage"), text, "unread"))
