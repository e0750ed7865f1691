"""Conversions of values that cannot be copied, by their names under ``convert`` in
``guide/names/keys.toml``.

Each takes a setting and its whole launch, and returns our settings or the reason why the run file
has no line for it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tunesmith.guide.migrate import batches, learned, sources
from tunesmith.guide.migrate.given import Given
from tunesmith.guide.migrate.there import OFF, Result, There, Value, by_hand, is_off, without


def last_rate(given: Given, there: There) -> Result:
    """The schedule's final rate as a share of the peak."""
    value: Any = given.value
    if isinstance(value, dict):
        return _last_rate_of(value, there)
    critic = "critic" in given.name
    if given.name.endswith((".min_lr", ".lr_min")):
        names = ("critic.optim.lr",) if critic else ("optim.lr", "learning_rate", "lr")
        value = _share_of(value, there.get(*names))
    key = "critic.min_lr_ratio" if critic else "train.min_lr_ratio"
    return Value(key, value) if isinstance(value, int | float) and value > 0 else OFF


def _last_rate_of(table: Mapping[str, object], there: There) -> Result:
    """``lr_scheduler_kwargs``, whose keys depend on the schedule."""
    shares = [table.get("min_lr_rate", table.get("min_lr_ratio"))]
    shares.append(_share_of(table.get("min_lr"), there.get("learning_rate", "lr")))
    known = {"min_lr_rate", "min_lr_ratio", "min_lr"}
    share = next((each for each in shares if isinstance(each, int | float)), None)
    if not known.issuperset(table) or (share is None and not is_off(table)):
        return by_hand("a schedule has train.min_lr_ratio here, and no other constants")
    return Value("train.min_lr_ratio", share) if share else OFF


def _share_of(rate: object, peak: object) -> float | None:
    known = isinstance(rate, int | float) and isinstance(peak, float) and peak
    return rate / peak if known else None  # pyright: ignore


def warmup(given: Given, there: There) -> Result:
    value: Any = given.value
    critic = "critic" in given.name
    if is_off(value) or not isinstance(value, int | float):
        return OFF
    if "ratio" not in given.name and value >= 1:
        return Value("critic.warmup_steps" if critic else "train.warmup_steps", int(value))
    if critic:
        return by_hand("the critic's warm-up is a number of steps here: critic.warmup_steps")
    if there.number("lr_warmup_steps", "warmup_steps", default=0) > 0:
        return without("the number of warm-up steps is given as well, and wins")
    return Value("train.warmup_ratio", value)


def betas(given: Given, there: There) -> Result:
    match given.value:
        case str() as text:
            both = [float(part) for part in re.findall(r"[\d.]+", text)]
        case int() | float():
            first = there.get("adam_beta1", "beta1", default=0.9)
            both = [first, there.get("adam_beta2", "beta2", default=0.999)]
        case [first, second]:
            both = [first, second]
        case _:
            return OFF
    return Value("train.betas", both) if len(both) == 2 else OFF


def every(given: Given, there: There) -> Result:
    """Steps between evaluations or checkpoints; other frameworks' -1 means "not during
    training"."""
    evaluates = re.search(r"eval|test_freq", given.name)
    key = "eval.every" if evaluates else "checkpoint.every"
    value = given.value
    if value == "epoch":
        return Value(key, "epoch")
    if value == "steps":
        return without("the steps are given as well")
    if value == "no" or is_off(value):
        return without("nothing is done during training there")
    names = ("eval_strategy", "evaluation_strategy") if evaluates else ("save_strategy",)
    strategy = there.get(*names, default="steps")
    if there.framework in ("trl", "transformers") and strategy not in ("steps", None):
        return without(f"without effect there, because the strategy is {strategy}")
    if not isinstance(value, int | float):
        return by_hand(f"{value} is not a number of steps")
    if value < 1 and isinstance(value, float):
        return by_hand("a share of the run there; a number of steps here")
    return OFF if value == float("inf") else Value(key, int(value))


def adapter(given: Given, there: There) -> Result:
    """A flag; here an adapter is trained whenever its rank is given."""
    return Value("lora.rank", _rank(there) or 16, _layers(there)) if given.value else OFF


def rank(given: Given, there: There) -> Result:
    return OFF if is_off(given.value) else Value("lora.rank", given.value, _layers(there))


def _rank(there: There) -> object:
    return there.get("lora_r", "lora_rank", "lora.rank")


def _layers(there: There) -> str:
    """peft's own choice of layers, where a script makes none."""
    named = there.given("lora_target_modules") or there.framework not in ("trl", "transformers")
    return "" if named else "all linear layers; peft's own choice there is mostly q_proj, v_proj"


def alpha(given: Given, there: There) -> Result:
    off = is_off(_rank(there)) and not there.get("use_peft")
    return without("no adapter is trained there") if off else Value("lora.alpha", given.value)


def turns(given: Given, _there: There) -> Result:
    """Turns of the policy, from the number of its calls."""
    how = f"{given.count} calls, and the last answer"
    return Value("environment.max_turns", given.count + 1, how) if given.count else OFF


def half(given: Given, there: There) -> Result:
    """A switch for float16, beside one for bfloat16."""
    if given.value not in (True, "true", "True", 1):
        return OFF
    if there.get("bf16", "bf16.enabled") is True:
        return by_hand("bfloat16 is on as well: set model.dtype to one of them")
    return Value("model.dtype", "float16")


def offloaded(given: Given, there: There) -> Result:
    """A switch, or the device that weights or activations are kept on."""
    if is_off(given.value) or given.value == "false":
        return OFF
    if given.value == "nvme":
        return by_hand("they are kept in host memory here, not on a drive: true or false")
    key = there.meanings(given)[0].keys[0]
    optimizer = str(there.get("actor.optim", "optim", "optimizer.type")).lower()
    if key != "system.offload_activations" and "muon" in optimizer:
        return by_hand("Muon's matrix products would run on the CPU: leave it out, or use AdamW")
    return Value(key, True)


def ema(_given: Given, there: There) -> Result:
    decay = there.get("ema_beta", "train.ema_beta", default=0.992)
    on = there.get("enable_ema", "train.enable_ema")
    return Value("train.ema_decay", decay) if on else OFF


def too_long(given: Given, there: There) -> Result:
    if given.value == "error" and there.get("filter_overlong_prompts"):
        return without("prompts that are too long are skipped before")
    return OFF if given.value is None else Value("data.too_long", given.value)


def muon_rate(given: Given, there: There) -> Result:
    """Muon's learning rate as a multiple of AdamW's."""
    rate = there.get("actor.adam.lr", "adam.lr", "actor_learning_rate", "learning_rate")
    known = isinstance(given.value, int | float) and isinstance(rate, float)
    if "critic" in given.name or not known:
        return without("a separate critic has the policy's optimizer")
    return Value("train.optimizer.lr_ratio", given.value / rate, f"{given.value} / {rate}")


def compiled(given: Given, there: There) -> Result:
    """A switch, a mode, or the compiler; if several are given, the mode decides."""
    switch = ("torch_compile", "torch_compile_backend", "dynamo_backend")
    if not given.value or given.value == "no":
        return OFF
    if there.framework == "accelerate" and is_off(there.get("dynamo_backend")):
        return without("without effect there, because dynamo_backend is not given")
    mode = there.get("torch_compile_mode", "dynamo_mode")
    if given.name.rpartition(".")[2] in switch and mode:
        return without("the mode is given as well")
    return Value("system.compile", "default" if given.value is True else given.value)


CONVERSIONS: Mapping[str, Callable[[Given, There], Result]] = {
    name: function
    for module in (batches, learned, sources, sys.modules[__name__])
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_")
}
