"""Rules about ``system.compile``, ``system.kernels`` and what only lean layers do."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.schema import RunConfig
from tunesmith.errors import Problem
from tunesmith.plan.facts.experts import implementation
from tunesmith.plan.facts.model import ModelFacts
from tunesmith.plan.rules.rule import rule, unread
from tunesmith.plan.rules.situation import Situation

# A rule is a condition and a sentence: with an argument on each line there would be twice as many.
# fmt: off

COMPILE = "system.compile"
KERNELS = "system.kernels"
EXPERTS = "system.experts_implementation"
CHECKPOINTING = "system.gradient_checkpointing"
WIDEST = 65536
"""Elements of the longest row that Liger's kernels hold."""
_NO_COMPILER = "install g++, name one with CXX, or leave it out"
_ONE = "leave out one of the two"


def _lean_layers(model: ModelFacts) -> str:
    """What acts on lean layers alone, of a model that has none."""
    family = model.family or "this model"
    if model.own_code:
        return "decoder layers with a lean form, and the model's own code has none; leave it out"
    return f'decoder layers with a lean form, and those of "{family}" have none; leave it out'


@rule(RunConfig)
def compiler(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.config.system.cluster != "none" or s.compiles is not False:
        return
    if s.system.compile is True and s.compilable:
        yield s.clash(COMPILE, f": no C++ compiler was found; {_NO_COMPILER}", kind="machine")
    if isinstance(s.system.compile, str) and s.device_kind == "cpu":
        why = f": torch.compile needs a C++ compiler, and none was found; {_NO_COMPILER}"
        yield s.clash(COMPILE, why, kind="machine")


@rule(RunConfig)
def compiled_layers(s: Situation[RunConfig]) -> Iterator[Problem]:
    if not isinstance(s.system.compile, str):
        return
    if not s.config.trains:
        yield s.clash(COMPILE, "is for training, and nothing is trained; leave it out")
    if s.model and not s.model.lean:
        yield s.clash(COMPILE, f"compiles only {_lean_layers(s.model)}")
    if s.config.model.quantize:
        why = f"products of quantised weights are not compiled; {_ONE}"
        yield s.clash(COMPILE, f"with {s.said('model.quantize')}: {why}", "model.quantize")
    if s.config.lora.dropout:
        why = ("compiled layers would draw other random numbers, and the run would learn something "
               "else")
        yield s.clash(COMPILE, f"with {s.said('lora.dropout')}: {why}; {_ONE}", "lora.dropout")


@rule(RunConfig)
def kept_products(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.config.system.gradient_checkpointing == "selective" and s.model and not s.model.lean:
        yield s.clash(CHECKPOINTING, f"is only for {_lean_layers(s.model)}")


@rule(RunConfig)
def liger(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.config.system.kernels != "liger":
        return
    if not s.config.trains:
        yield s.clash(KERNELS, "is for training, and nothing is trained; leave it out")
    if s.device_kind == "cpu":
        why = f": Triton compiles its kernels for GPUs, and {s.said('system.device')}; leave it out"
        yield s.clash(KERNELS, why, "system.device")
    if isinstance(s.system.compile, str):
        why = "torch.compile makes kernels of the same operations itself"
        yield s.clash(KERNELS, f"with {s.said(COMPILE)}: {why}; {_ONE}", COMPILE)
    if s.model and not s.model.lean:
        yield s.clash(KERNELS, f"is only for {_lean_layers(s.model)}")
    widest = max(s.model.hidden_size, s.model.intermediate_size) if s.model else 0
    if widest > WIDEST:
        yield s.clash(KERNELS,
            f": its kernels hold rows of at most {WIDEST} elements, and the model has rows of "
            f"{widest}; leave it out")


@rule(RunConfig)
def grouped_products(s: Situation[RunConfig]) -> Iterator[Problem]:
    said = s.config.system.experts_implementation
    if said != "grouped_mm" or not s.model or s.device_kind != "cuda":
        return
    best, why = implementation(s.model.expert_widths, 4 if s.dtype == "float32" else 2, on_gpu=True)
    if best == "eager":
        yield s.clash(EXPERTS, f": {why}; leave it out")


unread(RunConfig, EXPERTS, lambda s: s.model and not s.model.expert_widths,
       "on a model without experts; leave it out")
unread(RunConfig, "system.compile", lambda s: s.compilable is False,
       "here: on a CPU it compiles decoding in the local engine for models of Llama's shape, and "
       "training of these in float32 or bfloat16, or of others in bfloat16 with AMX or AVX-512 "
       "BF16; leave it out, or name a torch.compile mode for training",
       harmless=(False, "default", "max-autotune"))
