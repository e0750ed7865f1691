"""Conversions of the algorithm's settings: estimator, loss, clip, KL, correction and shaping."""

from __future__ import annotations

from typing import Any, cast

from tunesmith.config.presets import PRESETS
from tunesmith.guide.migrate.given import Given
from tunesmith.guide.migrate.there import OFF, Dropped, Result, There, Value, is_off
from tunesmith.guide.names.foreign import value_of

_ESTIMATORS = {
    "gae": "ppo", "group_norm": "grpo", "group_mean": "grpo", "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline", "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline", "grpo_passk": "grpo", "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}  # fmt: skip
"""Estimators of OpenRLHF and verl, and the preset that corresponds to each."""


def estimator(given: Given, _there: There) -> Result:
    name = _ESTIMATORS.get(str(given.value), str(given.value))
    if name not in PRESETS:
        return Dropped(
            f"there is no estimator {given.value} here: tunesmith presets lists those that there are"
        )
    return [
        Value(
            "algorithm.name", name, "the preset with this estimator; the settings below win over it"
        )
    ]


def deviation(given: Given, there: There) -> Result:
    """Whether advantages are divided by the group's standard deviation; OpenRLHF's flag disables
    it."""
    if there.framework == "trl" and "rloo" in there.launch.name.lower():
        return OFF if not given.value else Dropped("RLOO's advantages are not standardised here")
    divides = (given.value in (True, "group", "batch")) != ("no_" in given.name)
    if there.get(
        "adv_estimator", "advantage.estimator", "advantage_estimator", default="grpo"
    ) not in (
        "grpo",
        "group_norm",
    ):
        return Dropped("this estimator does not divide by a deviation", off=True)
    if given.value == "batch":
        return Dropped("the deviation is the group's here, not the batch's")
    if divides:
        return Dropped("advantages are divided by the group's deviation here too", off=True)
    return [Value("algorithm.advantage", "dr_grpo", "without the deviation")]


def loss_type(given: Given, there: There) -> Result:
    """``loss_type`` of TRL's trainers and of OpenRLHF's reward model."""
    names = [str(v) for v in given.value] if isinstance(given.value, list) else [str(given.value)]
    name = names[0]
    if there.command == "rl":  # TRL's values are losses, or ways to average one
        average = value_of("algorithm.aggregation", name)
        return [Value("algorithm.aggregation" if average else "algorithm.loss", name)]
    if there.command == "rm":
        return [Value("rm.loss", "logexp" if name == "logexp" else "sigmoid")]
    if len(names) > 1:
        return Dropped(f"one loss is learned here, not {' and '.join(names)}")
    if there.command == "dpo" and name in ("sigmoid", "dpo", "ipo", "hinge"):
        return [Value("dpo.loss", "sigmoid" if name == "dpo" else name)]
    if name in ("kto", "nll", "None", "sft"):
        return Dropped("it is the loss here too", off=True)
    return Dropped(f"there is no loss {name} here")


def kl_coef(given: Given, there: There) -> Result:
    """A coefficient counts only if its KL is switched on."""
    if _is_off_in_verl(given, there):
        return Dropped(
            f"the KL {'term of the loss' if 'loss' in given.name else 'in the reward'} is off there",
            off=True,
        )
    if not isinstance(given.value, int | float) or given.value <= 0:
        kl = [Value("algorithm.kl", "none", "a coefficient of 0")]
        return kl if there.framework != "verl" else OFF
    if there.framework == "trl" and "beta" in given.name:
        is_rloo = "RLOO" in there.launch.name or "rloo" in there.launch.name
        return [
            Value("algorithm.kl", "reward" if is_rloo else "loss"),
            Value("algorithm.kl.coef", given.value),
        ]
    if there.framework == "openrlhf":
        in_loss = there.get("kl.use_loss", "use_kl_loss")
        return [
            Value("algorithm.kl", "loss" if in_loss else "reward"),
            Value("algorithm.kl.coef", given.value),
        ]
    return [Value("algorithm.kl.coef", given.value)]


def _is_off_in_verl(given: Given, there: There) -> bool:
    switch = "use_kl_loss" if "loss" in given.name else "use_kl_in_reward"
    return there.framework == "verl" and not there.get(switch)


def kl_estimator(given: Given, there: There) -> Result:
    without_kl = there.framework == "openrlhf" and not there.get("kl.init_coef", "init_kl_coef")
    if without_kl or _is_off_in_verl(given, there):
        return Dropped("the KL that it belongs to is off there", off=True)
    if given.value in ("k1", "kl") and there.get("use_kl_loss", "kl.use_loss"):
        return Dropped("as a term of the loss k1 has no gradient; the default estimator stays")
    return [Value("algorithm.kl.estimator", given.value)]


def kl_in(given: Given, there: There) -> Result:
    place = "reward" if "reward" in given.name else "loss"
    other = there.get("use_kl_in_reward") if place == "loss" else there.get("use_kl_loss")
    if not given.value:
        return (
            OFF
            if other or there.framework != "verl"
            else [Value("algorithm.kl", "none", "no KL in loss or reward")]
        )
    return [Value("algorithm.kl", place)]


def bounds(given: Given, _there: There) -> Result:
    """Two numbers for ``clip_low`` and ``clip_high``, or for the bounds of the filter."""
    numbers: Any = given.value
    if not isinstance(numbers, list) or len(cast("list[Any]", numbers)) != 2:
        return Dropped(f"{given.value} is not two numbers")
    table = "algorithm.dynamic_filter" if "filter" in given.name else "algorithm.loss"
    ends = ("low", "high") if "filter" in given.name else ("clip_low", "clip_high")
    return [
        Value(f"{table}.{end}", number)
        for end, number in zip(ends, cast("list[Any]", numbers), strict=True)
    ]


def clip_ratio(given: Given, there: There) -> Result:
    """One number for both sides, except a side with its own number."""
    sides = {
        "clip_low": ("clip_ratio_low", "epsilon"),
        "clip_high": ("clip_ratio_high", "epsilon_high"),
    }
    if not isinstance(given.value, int | float) or there.given("eps_clip_low_high"):
        return Dropped("the bounds of each side are given as well", off=True)
    mine = [end for end, names in sides.items() if not there.given(*names)]
    loss = str(there.get("policy_loss.loss_mode", "loss_mode", default="ppo"))
    if not given.line and loss not in ("ppo", "vanilla"):
        return Dropped("this loss has its own bounds", off=True)
    return [Value(f"algorithm.loss.{end}", given.value) for end in mine] or Dropped(
        "each side has its own", off=True
    )


def epsilon(given: Given, there: There) -> Result:
    """TRL's lower bound, which is also the upper one if that is not given."""
    ends = (
        ["clip_low"]
        if there.given("epsilon_high") or "epsilon" not in given.name
        else ["clip_low", "clip_high"]
    )
    return [Value(f"algorithm.loss.{end}", given.value) for end in ends]


def correction(given: Given, there: There) -> Result:
    """The importance weight that corrects for the difference between sampler and trainer."""
    if is_off(given.value):
        return OFF
    names = ("is_correction_type", "vllm_is_correction_type", "vllm_importance_sampling_mode")
    return [Value("algorithm.correction", there.get(*names, default=given.value))]


def threshold(given: Given, there: There) -> Result:
    on = there.get("is_correction_enable", "enable_vllm_is_correction")
    if not on or not isinstance(given.value, list | int | float):
        return Dropped("the correction is off there", off=True)
    numbers = cast("list[Any]", given.value) if isinstance(given.value, list) else [given.value]
    ends = ("low", "high") if len(numbers) == 2 else ("high",)
    return [
        Value(f"algorithm.correction.{end}", number)
        for end, number in zip(ends, numbers, strict=False)
    ]


def overlong(given: Given, there: There) -> Result:
    if there.get("overlong_buffer.enable", "overlong_buffer_cfg.enable", default=True) in (
        False,
        None,
    ) or is_off(given.value):
        return OFF
    if given.name.endswith(".enable"):
        return Dropped("it is on where algorithm.overlong.buffer is given", off=True)
    return [Value("algorithm.overlong.buffer", given.value)]


def overlong_factor(given: Given, there: There) -> Result:
    on = there.get(
        "overlong_buffer.enable", "overlong_buffer_cfg.enable", "overlong_buffer_len", default=False
    )
    return (
        [Value("algorithm.overlong.factor", float(given.value))]
        if on and not is_off(given.value)
        else OFF
    )


def adaptive(given: Given, there: There) -> Result:
    if given.value in ("fixed", False, None):
        return OFF
    target = there.get("kl_ctrl.target_kl", "target_kl", default=0.1)
    return [Value("algorithm.kl.target", target)]


def pair(given: Given, _there: There) -> Result:
    """Bounds of the reward."""
    numbers = given.value
    if not isinstance(numbers, list | tuple) or len(cast("list[Any]", numbers)) != 2:
        return OFF
    return [
        Value("algorithm.reward_clip", [float(number) for number in cast("list[Any]", numbers)])
    ]


LEARNED = (
    estimator, deviation, loss_type, kl_coef, kl_estimator, kl_in, bounds, clip_ratio, epsilon, correction, threshold,
    adaptive, pair, overlong, overlong_factor,
)  # fmt: skip
