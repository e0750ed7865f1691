"""Conversions of values that cannot be copied, by the name that ``config/names/keys.toml`` has under ``convert``.

Each takes a setting and all of its launch, and gives our settings, or the reason why it has no line in the run file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from tunesmith.config.names.foreign import meanings_of, value_of
from tunesmith.migrate.batches import BATCHES
from tunesmith.migrate.given import Given
from tunesmith.migrate.learned import LEARNED
from tunesmith.migrate.sources import SOURCES
from tunesmith.migrate.there import OFF, Dropped, There, Value, family, is_off

Result = Sequence[Value] | Dropped


def schedule(given: Given, _there: There) -> Result:
    name = str(given.value)
    if is_off(given.value):
        return OFF
    ours = (value_of("train.schedule", name) or f'"{name}"').strip('"').lower()
    key = "critic.schedule" if "critic" in given.name else "train.schedule"
    if ours not in ("constant", "linear", "cosine"):
        return Dropped(f"there is no schedule {name} here; constant, linear and cosine there are")
    return [Value(key, ours)]


def last_rate(given: Given, there: There) -> Result:
    """Where the schedule ends, as a share."""
    value: Any = given.value
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).get("min_lr_rate", cast("dict[str, Any]", value).get("min_lr_ratio"))
    elif given.name.endswith((".min_lr", ".lr_min")):
        rate = there.get("optim.lr", default=0)
        value = value / rate if isinstance(value, int | float) and isinstance(rate, float) and rate else None
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
        value = [there.get("adam_beta1", "beta1", default=0.9), there.get("adam_beta2", "beta2", default=0.999)]
    return [Value("train.betas", list(value))] if isinstance(value, list | tuple) and len(value) == 2 else OFF


def every(given: Given, there: There) -> Result:
    """Steps between evaluations or checkpoints; other frameworks' -1 is "not during training"."""
    key = "eval.every" if re.search(r"eval|test_freq", given.name) else "checkpoint.every"
    value = given.value
    if value == "epoch":
        if key == "checkpoint.every":
            return [Value(key, "epoch")]
        return Dropped("evaluations go by steps here: set eval.every to the steps of an epoch")
    if value in ("steps", "no") or is_off(value):
        return Dropped(
            "nothing is done during training there" if value != "steps" else "the steps are given as well", off=True
        )
    strategy = there.get(
        *(("eval_strategy", "evaluation_strategy") if key == "eval.every" else ("save_strategy",)), default="steps"
    )
    if there.framework in ("trl", "transformers") and strategy not in ("steps", None):
        return Dropped(f"without effect there, because the strategy is {strategy}", off=True)
    if isinstance(value, float) and (value < 1 or value == float("inf")):
        return Dropped("a share of the run there; a number of steps here") if value < 1 else OFF
    return [Value(key, int(value))] if isinstance(value, int | float) else Dropped(f"{value} is not a number of steps")


def flag_with(key: str, number: str, default: Any) -> Callable[[Given, There], Result]:
    """A flag that switches on what is on here wherever a number is given: the number of another setting."""

    def convert(given: Given, there: There) -> Result:
        return [Value(key, there.get(*number.split(), default=default))] if given.value else OFF

    return convert


def ema(_given: Given, there: There) -> Result:
    on = there.get("enable_ema", "train.enable_ema")
    return [Value("train.ema_decay", there.get("ema_beta", "train.ema_beta", default=0.992))] if on else OFF


def greedy(given: Given, there: There) -> Result:
    draws = bool(given.value) != ("greedy" in given.name)
    key = "rollout.temperature" if there.rl else "sampling.temperature"
    return Dropped("completions are drawn here too", off=True) if draws else [Value(key, 0.0)]


def drawn(given: Given, there: There) -> Result:
    """``top_k``: -1 is off in vLLM, 0 here."""
    key = f"{'rollout' if there.rl else 'sampling'}.top_k"
    return OFF if is_off(given.value) else [Value(key, given.value)]


def too_long(given: Given, there: There) -> Result:
    name = str(given.value)
    if name == "middle":
        return Dropped("a prompt is cut at one end: data.too_long = 'truncate_left' or 'truncate_right'")
    if name == "error" and there.get("filter_overlong_prompts"):
        return Dropped("prompts that are too long are skipped before", off=True)
    ours = {"error": "error", **dict.fromkeys(("left", "keep_end"), "truncate_left")}.get(name, "truncate_right")
    return [Value("data.too_long", ours)]


def device(given: Given, _there: There) -> Result:
    if given.value in ("cpu", True) and ("cpu" in given.name or given.value == "cpu"):
        return [Value("system.device", "cpu")]
    return Dropped("the device is found on the machine", derived=True)


def token_cap(given: Given, _there: There) -> Result:
    """Of the passes that the name is about."""
    if not isinstance(given.value, int) or isinstance(given.value, bool):
        return OFF
    [meaning] = meanings_of(given.name, family(given.framework))[1] or meanings_of(given.name)[1]
    return [Value(key, given.value) for key in meaning.keys]


def checkpointing(given: Given, _there: There) -> Result:
    """A switch, or Megatron's granularity, which is on."""
    if isinstance(given.value, bool):
        return [Value("system.gradient_checkpointing", given.value)]
    if given.value in ("full", "selective"):
        return [Value("system.gradient_checkpointing", True)]
    return Dropped("each layer is one checkpoint", derived=True)


def optimizer(given: Given, _there: There) -> Result:
    name = (value_of("train.optimizer", given.value) or f'"{given.value}"').strip('"').lower()
    if "critic" in given.name:
        return Dropped("a separate critic has the policy's optimizer", off=True)
    if name not in ("adamw", "muon"):
        return Dropped(f"there is no optimizer {given.value} here; adamw, the default, and muon there are")
    return [Value("train.optimizer", name)]


def muon_rate(given: Given, there: There) -> Result:
    """Muon's learning rate as a multiple of AdamW's."""
    rate = there.get("actor.adam.lr", "adam.lr", "actor_learning_rate", "learning_rate")
    if "critic" in given.name or not isinstance(given.value, int | float) or not isinstance(rate, float):
        return Dropped("a separate critic has the policy's optimizer", off=True)
    return [Value("train.optimizer.lr_ratio", given.value / rate, f"{given.value} / {rate}")]


def nesterov(given: Given, _there: There) -> Result:
    return [Value("train.optimizer.nesterov", bool(given.value) != ("no_" in given.name))]


def compiled(given: Given, there: There) -> Result:
    """A switch, a mode, or the compiler; of several settings the mode decides."""
    mode, switch = ("torch_compile_mode", "dynamo_mode"), ("torch_compile", "torch_compile_backend", "dynamo_backend")
    if not given.value or given.value in ("no", False):
        return OFF
    if there.framework == "accelerate" and is_off(there.get("dynamo_backend")):
        return Dropped("without effect there, because dynamo_backend is not given", off=True)
    if given.name.rpartition(".")[2] in switch and there.get(*mode):
        return Dropped("the mode is given as well", off=True)
    name = "default" if given.value is True else str(given.value).lower()
    ours = (value_of("system.compile", name) or f'"{name}"').strip('"')
    if ours not in ("default", "max-autotune"):
        return Dropped(f"{given.value} is not offered here: layers are compiled by Inductor")
    return [Value("system.compile", ours)]


def positive(given: Given, _there: There) -> Result:
    return [Value("checkpoint.keep", given.value)] if isinstance(given.value, int) and given.value > 0 else OFF


CONVERSIONS: Mapping[str, Callable[[Given, There], Result]] = {
    **BATCHES,
    **SOURCES,
    **LEARNED,
    "schedule": schedule,
    "last_rate": last_rate,
    "warmup": warmup,
    "betas": betas,
    "every": every,
    "ema": ema,
    "greedy": greedy,
    "drawn": drawn,
    "too_long": too_long,
    "device": device,
    "token_cap": token_cap,
    "optimizer": optimizer,
    "muon_rate": muon_rate,
    "nesterov": nesterov,
    "positive": positive,
    "compiled": compiled,
    "checkpointing": checkpointing,
    "normalized": lambda _given, _there: Dropped("normalize = true of the reward's model", off=True),
    "eval_draws": lambda _given, _there: Dropped(
        "one sample is greedy here, several are drawn: eval.samples", off=True
    ),
    "hybrid": lambda _given, _there: Dropped("engine and trainer take turns where they share a GPU", derived=True),
    "teacher": lambda given, _there: [Value("teacher.path", given.value)] if isinstance(given.value, str) else OFF,
    "adapter": flag_with("lora.rank", "lora_r lora.rank", 16),
}
