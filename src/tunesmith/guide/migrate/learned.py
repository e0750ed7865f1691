"""Conversions of the algorithm's settings: estimator, loss, clip, KL, correction and shaping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunesmith.config.presets import PRESETS
from tunesmith.guide.migrate.given import Given
from tunesmith.guide.migrate.programs import MARKS
from tunesmith.guide.migrate.there import OFF, Result, There, Value, by_hand, is_off, without
from tunesmith.guide.names.foreign import value_of


def estimator(given: Given, _there: There) -> Result:
    name = MARKS["estimators"].get(str(given.value), str(given.value))
    if name not in PRESETS:
        lists = "tunesmith presets lists those that there are"
        return by_hand(f"there is no estimator {given.value} here: {lists}")
    how = "the preset with this estimator; the settings below win over it"
    return Value("algorithm.name", name, how)


def deviation(given: Given, there: There) -> Result:
    """Whether advantages are divided by the group's standard deviation; OpenRLHF's flag disables
    it."""
    if there.framework == "trl" and "rloo" in there.launch.name.lower():
        return OFF if not given.value else by_hand("RLOO's advantages are not standardised here")
    names = ("adv_estimator", "advantage.estimator", "advantage_estimator")
    if there.get(*names, default="grpo") not in ("grpo", "group_norm"):
        return without("this estimator does not divide by a deviation")
    if given.value == "batch":
        return by_hand("the deviation is the group's here, not the batch's")
    if (given.value in (True, "group")) != ("no_" in given.name):
        return without("advantages are divided by the group's deviation here too")
    return Value("algorithm.advantage", "dr_grpo", "without the deviation")


def loss_type(given: Given, there: There) -> Result:
    """``loss_type`` of TRL's trainers and of OpenRLHF's reward model."""
    names = [str(v) for v in given.value] if isinstance(given.value, list) else [str(given.value)]
    name = names[0]
    if there.command == "rl":  # TRL's values are losses, or ways to average one
        average = value_of("algorithm.aggregation", name)
        return Value("algorithm.aggregation" if average else "algorithm.loss", name)
    if there.command == "rm":
        return Value("rm.loss", "logexp" if name == "logexp" else "sigmoid")
    if len(names) > 1:
        return by_hand(f"one loss is learned here, not {' and '.join(names)}")
    if there.command == "dpo" and name in ("sigmoid", "dpo", "ipo", "hinge"):
        return Value("dpo.loss", "sigmoid" if name == "dpo" else name)
    if name in ("kto", "nll", "None", "sft"):
        return without("it is the loss here too")
    return by_hand(f"there is no loss {name} here")


def kl_coef(given: Given, there: There) -> Result:
    """A coefficient counts only if its KL is switched on."""
    if _is_off_in_verl(given, there):
        place = "term of the loss" if "loss" in given.name else "in the reward"
        return without(f"the KL {place} is off there")
    if not isinstance(given.value, int | float) or given.value <= 0:
        none = Value("algorithm.kl", "none", "a coefficient of 0")
        return OFF if there.framework == "verl" else none
    coefficient = Value("algorithm.kl.coef", given.value)
    if there.framework == "trl" and "beta" in given.name:
        in_loss = "rloo" not in there.launch.name.lower()
    elif there.framework == "openrlhf":
        in_loss = there.get("kl.use_loss", "use_kl_loss")
    else:
        return coefficient
    return [Value("algorithm.kl", "loss" if in_loss else "reward"), coefficient]


def _is_off_in_verl(given: Given, there: There) -> bool:
    switch = "use_kl_loss" if "loss" in given.name else "use_kl_in_reward"
    return there.framework == "verl" and not there.get(switch)


def kl_estimator(given: Given, there: There) -> Result:
    without_kl = there.framework == "openrlhf" and not there.get("kl.init_coef", "init_kl_coef")
    if without_kl or _is_off_in_verl(given, there):
        return without("the KL that it belongs to is off there")
    if given.value in ("k1", "kl") and there.get("use_kl_loss", "kl.use_loss"):
        return by_hand("as a term of the loss k1 has no gradient; the default estimator stays")
    return Value("algorithm.kl.estimator", given.value)


def kl_in(given: Given, there: There) -> Result:
    place = "reward" if "reward" in given.name else "loss"
    if given.value:
        return Value("algorithm.kl", place)
    other = there.get("use_kl_in_reward" if place == "loss" else "use_kl_loss")
    none = Value("algorithm.kl", "none", "no KL in loss or reward")
    return OFF if other or there.framework != "verl" else none


def bounds(given: Given, _there: There) -> Result:
    """Two numbers for ``clip_low`` and ``clip_high``, or for the bounds of the filter."""
    numbers = _pair(given.value)
    if numbers is None:
        return by_hand(f"{given.value} is not two numbers")
    return _bounds("dynamic_filter." if "filter" in given.name else "loss.clip_", numbers)


def pair(given: Given, _there: There) -> Result:
    """Bounds of the reward."""
    numbers = _pair(given.value)
    return Value("algorithm.reward_clip", [*map(float, numbers)]) if numbers else OFF


def _pair(value: object) -> Sequence[Any] | None:
    return value if isinstance(value, list | tuple) and len(value) == 2 else None


def _bounds(table: str, numbers: Sequence[object]) -> list[Value]:
    """Two numbers are ``low`` and ``high``; one is ``high``."""
    ends = ("low", "high") if len(numbers) == 2 else ("high",)
    bounds = zip(ends, numbers, strict=False)
    return [Value(f"algorithm.{table}{end}", number) for end, number in bounds]


def clip_ratio(given: Given, there: There) -> Result:
    """One number for both sides, except a side with its own number."""
    if not isinstance(given.value, int | float) or there.given("eps_clip_low_high"):
        return without("the bounds of each side are given as well")
    loss = str(there.get("policy_loss.loss_mode", "loss_mode", default="ppo"))
    if not given.line and loss not in ("ppo", "vanilla"):
        return without("this loss has its own bounds")
    own = {"low": ("clip_ratio_low", "epsilon"), "high": ("clip_ratio_high", "epsilon_high")}
    ends = [end for end, names in own.items() if not there.given(*names)]
    values = [Value(f"algorithm.loss.clip_{end}", given.value) for end in ends]
    return values or without("each side has its own")


def epsilon(given: Given, there: There) -> Result:
    """TRL's lower bound, which is also the upper one if that is not given."""
    alone = there.given("epsilon_high") or "epsilon" not in given.name
    ends = ["clip_low"] if alone else ["clip_low", "clip_high"]
    return [Value(f"algorithm.loss.{end}", given.value) for end in ends]


def correction(given: Given, there: There) -> Result:
    """The importance weight that corrects for the difference between sampler and trainer."""
    if is_off(given.value) or given.value == "off":
        return OFF
    if there.framework == "trl":
        return _correction_of_trl(there)
    if there.get("is_correction_level", default="off") != "off":
        return _correction_by_level(there)
    if given.name.endswith(("is_correction_gating", "is_correction_mode")):
        return OFF
    name = there.get("is_correction_type", "vllm_is_correction_type", default=given.value)
    bounds = there.get("vllm_is_truncated_threshold", "is_correction_threshold")
    both = name in ("tis", True) and isinstance(bounds, list)
    return Value("algorithm.correction", "token_clamp" if both else name)


def _correction_of_trl(there: There) -> Result:
    mode = there.get("vllm_importance_sampling_mode", default="sequence_mask")
    if not there.get("use_vllm") or there.get("vllm_importance_sampling_correction") is False:
        return without("it is only for rollouts of vLLM, where the correction is on")
    if mode == "sequence_mask":
        return by_hand(
            "it bounds the product of an answer's ratios there, and sequence_mask their geometric "
            'mean here; "sequence_truncate" and "icepop" are the nearest'
        )
    low = there.get("vllm_importance_sampling_clip_min")
    name = "token_clamp" if mode == "token_truncate" and low is not None else mode
    names = ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
    bounds = [Value("algorithm.correction.high", there.get(*names, default=3.0))]
    if mode == "token_mask":
        bounds.append(Value("algorithm.correction.low", low or 0.0))
    return [Value("algorithm.correction", name), *bounds]


_LEVELS = {
    ("token", "mask"): "icepop",
    ("token", "clip"): "token_clamp",
    ("seq", "mask"): "sequence_mask",
}
"""Our names for OpenRLHF's level and mode."""


def _correction_by_level(there: There) -> Result:
    gating = there.get("is_correction_gating", default="ratio")
    if gating != "ratio":
        return by_hand(f"the bounds are those of the ratio here, not of {gating}")
    kind = (there.get("is_correction_level"), there.get("is_correction_mode", default="mask"))
    name = _LEVELS.get(kind)
    return Value("algorithm.correction", name) if name else by_hand(f"there is no {kind} here")


def threshold(given: Given, there: There) -> Result:
    on = there.get("is_correction_enable", "enable_vllm_is_correction")
    on = on or there.get("is_correction_level", default="off") != "off"
    numbers = given.value if isinstance(given.value, list) else [given.value]
    if not on or not isinstance(given.value, list | int | float):
        return without("the correction is off there")
    if there.get("is_correction_gating", default="ratio") != "ratio":
        return without("it bounds what is_correction_gating names")
    return _bounds("correction.", numbers)


def rejection(given: Given, there: There) -> Result:
    """verl's ``rollout_rs``, which keeps or rejects and has no weight."""
    if is_off(given.value):
        return OFF
    if not is_off(there.get("rollout_is")):
        return by_hand("rollout_is gives a weight already, and there is one correction here")
    if given.value in ("geometric", "seq_mean_k1"):
        return Value("algorithm.correction", "geometric")
    near = '"icepop" rejects tokens and weights the others, "geometric" rejects answers'
    return by_hand(f"nothing rejects by {given.value} here: {near}")


def rejected_outside(given: Given, there: There) -> Result:
    """Bounds of ``rollout_rs``: a number, or ``low_high``; low is the reciprocal if it is left
    out."""
    if is_off(given.value):
        return OFF
    only = there.get("rollout_rs") in ("geometric", "seq_mean_k1")
    if not only or not is_off(there.get("rollout_is")):
        return without("it bounds what rollout_rs rejects")
    if given.name.endswith("lower"):
        return Value("algorithm.correction.low", given.value)
    low, _, high = str(given.value).rpartition("_")
    lower = float(low) if low else there.get("rollout_rs_threshold_lower")
    return _bounds("correction.", [1 / float(high) if lower is None else lower, float(high)])


def overlong(given: Given, there: There) -> Result:
    on = there.get("overlong_buffer.enable", "overlong_buffer_cfg.enable", default=True)
    if on in (False, None) or is_off(given.value):
        return OFF
    if given.name.endswith(".enable"):
        return without("it is on where algorithm.overlong.buffer is given")
    return Value("algorithm.overlong.buffer", given.value)


def overlong_factor(given: Given, there: There) -> Result:
    names = ("overlong_buffer.enable", "overlong_buffer_cfg.enable", "overlong_buffer_len")
    on = there.get(*names, default=False) and not is_off(given.value)
    return Value("algorithm.overlong.factor", float(given.value)) if on else OFF


def adaptive(given: Given, there: There) -> Result:
    if given.value in ("fixed", False, None):
        return OFF
    return Value("algorithm.kl.target", there.get("kl_ctrl.target_kl", "target_kl", default=0.1))
