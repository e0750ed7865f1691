"""Conversions of values that cannot be copied, by their names under ``convert`` in
``config/names/keys.toml``.

Each takes a setting and its whole launch, and returns our settings or the reason why the run file
has no line for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from tunesmith.guide.migrate.batches import BATCHES
from tunesmith.guide.migrate.given import Given
from tunesmith.guide.migrate.learned import LEARNED
from tunesmith.guide.migrate.sources import SOURCES
from tunesmith.guide.migrate.there import OFF, Dropped, Result, There, Value, is_off


def last_rate(given: Given, there: There) -> Result:
    """The schedule's final rate as a share of the peak."""
    value: Any = given.value
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).get(
            "min_lr_rate", cast("dict[str, Any]", value).get("min_lr_ratio")
        )
    elif given.name.endswith((".min_lr", ".lr_min")):
        rate = there.get("optim.lr", default=0)
        value = (
            value / rate
            if isinstance(value, int | float) and isinstance(rate, float) and rate
            else None
        )
    key = "critic.min_lr_ratio" if "critic" in given.name else "train.min_lr_ratio"
    return [Value(key, value)] if isinstance(value, int | float) and value > 0 else OFF


def warmup(given: Given, there: There) -> Result:
    value: Any = given.value
    critic = "critic" in given.name
    if is_off(value) or not isinstance(value, int | float):
        return OFF
    if "ratio" in given.name or value < 1:
        if critic:
            return Dropped("the critic's warm-up is a number of steps here: critic.warmup_steps")
        if there.number("lr_warmup_steps", "warmup_steps", default=0) > 0:
            return Dropped("the number of warm-up steps is given as well, and wins", off=True)
        return [Value("train.warmup_ratio", value)]
    return [Value("critic.warmup_steps" if critic else "train.warmup_steps", int(value))]


def betas(given: Given, there: There) -> Result:
    value: Any = given.value
    if isinstance(value, str):
        value = [float(part) for part in re.findall(r"[\d.]+", value)]
    if isinstance(value, int | float):
        value = [
            there.get("adam_beta1", "beta1", default=0.9),
            there.get("adam_beta2", "beta2", default=0.999),
        ]
    return (
        [Value("train.betas", list(value))]
        if isinstance(value, list | tuple) and len(value) == 2
        else OFF
    )


def every(given: Given, there: There) -> Result:
    """Steps between evaluations or checkpoints; other frameworks' -1 means "not during
    training"."""
    key = "eval.every" if re.search(r"eval|test_freq", given.name) else "checkpoint.every"
    value = given.value
    if value == "epoch":
        return [Value(key, "epoch")]
    if value in ("steps", "no") or is_off(value):
        return Dropped(
            "nothing is done during training there"
            if value != "steps"
            else "the steps are given as well",
            off=True,
        )
    strategy = there.get(
        *(("eval_strategy", "evaluation_strategy") if key == "eval.every" else ("save_strategy",)),
        default="steps",
    )
    if there.framework in ("trl", "transformers") and strategy not in ("steps", None):
        return Dropped(f"without effect there, because the strategy is {strategy}", off=True)
    if isinstance(value, float) and (value < 1 or value == float("inf")):
        return Dropped("a share of the run there; a number of steps here") if value < 1 else OFF
    return (
        [Value(key, int(value))]
        if isinstance(value, int | float)
        else Dropped(f"{value} is not a number of steps")
    )


def adapter(given: Given, there: There) -> Result:
    """A flag; here an adapter is trained whenever its rank is given."""
    return (
        [Value("lora.rank", there.get("lora_r", "lora.rank", default=16))] if given.value else OFF
    )


def half(given: Given, there: There) -> Result:
    """A switch for float16, beside one for bfloat16."""
    if given.value not in (True, "true", "True", 1):
        return Dropped("it is off there", off=True)
    if there.get("bf16", "bf16.enabled") is True:
        return Dropped("bfloat16 is on as well: set model.dtype to one of them")
    return [Value("model.dtype", "float16")]


def offloaded(given: Given, there: There) -> Result:
    """A switch, or the device that weights or activations are kept on."""
    if is_off(given.value) or given.value == "false":
        return OFF
    if given.value == "nvme":
        return Dropped("they are kept in host memory here, not on a drive: true or false")
    key = there.meanings(given)[0].keys[0]
    if (
        key != "system.offload_activations"
        and "muon" in str(there.get("actor.optim", "optim", "optimizer.type")).lower()
    ):
        return Dropped(
            "Muon's products of matrices would run on the CPU: leave it out, or use AdamW"
        )
    return [Value(key, True)]


def ema(_given: Given, there: There) -> Result:
    on = there.get("enable_ema", "train.enable_ema")
    return (
        [Value("train.ema_decay", there.get("ema_beta", "train.ema_beta", default=0.992))]
        if on
        else OFF
    )


def too_long(given: Given, there: There) -> Result:
    if given.value == "error" and there.get("filter_overlong_prompts"):
        return Dropped("prompts that are too long are skipped before", off=True)
    return OFF if given.value is None else [Value("data.too_long", given.value)]


def muon_rate(given: Given, there: There) -> Result:
    """Muon's learning rate as a multiple of AdamW's."""
    rate = there.get("actor.adam.lr", "adam.lr", "actor_learning_rate", "learning_rate")
    if (
        "critic" in given.name
        or not isinstance(given.value, int | float)
        or not isinstance(rate, float)
    ):
        return Dropped("a separate critic has the policy's optimizer", off=True)
    return [Value("train.optimizer.lr_ratio", given.value / rate, f"{given.value} / {rate}")]


def compiled(given: Given, there: There) -> Result:
    """A switch, a mode, or the compiler; if several are given, the mode decides."""
    mode = ("torch_compile_mode", "dynamo_mode")
    switch = ("torch_compile", "torch_compile_backend", "dynamo_backend")
    if not given.value or given.value in ("no", False):
        return OFF
    if there.framework == "accelerate" and is_off(there.get("dynamo_backend")):
        return Dropped("without effect there, because dynamo_backend is not given", off=True)
    if given.name.rpartition(".")[2] in switch and there.get(*mode):
        return Dropped("the mode is given as well", off=True)
    return [Value("system.compile", "default" if given.value is True else given.value)]


CONVERSIONS: Mapping[str, Callable[[Given, There], Result]] = {
    conversion.__name__: conversion
    for conversion in (
        *(*BATCHES, *SOURCES, *LEARNED),
        *(
            last_rate,
            warmup,
            betas,
            every,
            adapter,
            half,
            offloaded,
            ema,
            too_long,
            muon_rate,
            compiled,
        ),
    )
}
