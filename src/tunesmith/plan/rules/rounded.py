"""Rules about ``system.engine_weights``: copies of the weights, in fewer bits, with which the
embedded engine samples on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.schema import RunConfig
from tunesmith.errors import Problem
from tunesmith.plan.rules.rule import rule
from tunesmith.plan.rules.situation import ENGINE, Situation

# A rule is a condition and a sentence: with an argument on each line there would be twice as many.
# fmt: off

WEIGHTS = "system.engine_weights"


@rule(RunConfig)
def rounded_weights(s: Situation[RunConfig]) -> Iterator[Problem]:
    said = s.config.system.engine_weights
    if said in (None, "model") or s.config.supervised:
        return
    if s.engine.third_party and not s.engine_open:
        yield s.clash(WEIGHTS,
            f"is for Tunesmith's own engine; leave it out, or set {ENGINE} = \"local\"", ENGINE)
        return
    yield from _machine(s)
    yield from _model(s)
    if said == "int8" and s.algorithm and s.algorithm.correction.name == "none":
        yield s.clash(WEIGHTS,
            "samples from rounded weights, which differ from the trained ones; correct for it with "
            'algorithm.correction = "token_truncate"', "algorithm.correction")


def _machine(s: Situation[RunConfig]) -> Iterator[Problem]:
    if s.device_kind not in (None, "cpu"):
        yield s.clash(WEIGHTS,
            "is for CPUs, where memory limits decoding; leave it out", "system.device")
    elif s.system.compile is False:
        yield s.clash(WEIGHTS,
            "is read by compiled functions; leave system.compile out, or this", "system.compile")
    elif s.compiles is False and s.config.system.cluster == "none":
        yield s.clash(WEIGHTS,
            "is read by compiled functions, and no C++ compiler was found; install g++, name one "
            "with CXX, or leave it out", kind="machine")


def _model(s: Situation[RunConfig]) -> Iterator[Problem]:
    said = s.config.system.engine_weights
    if s.config.model.quantize:
        yield s.clash(WEIGHTS,
            f"with {s.said('model.quantize')}, which sets the format of the weights; leave one of "
            "the two out", "model.quantize")
    if s.model and not s.model.lean:
        whose = "the model's own code" if s.model.own_code else f"'{s.model.family}'"
        yield s.clash(WEIGHTS,
            f"is for models of Llama's shape, and {whose} is none; leave it out", "model.path")
    if s.dtype == "float16":
        yield s.clash(WEIGHTS,
            "is for models in float32 or bfloat16; leave it out", "model.dtype")
    elif said == "float16" and s.dtype == "bfloat16":
        yield s.clash(WEIGHTS,
            'would save nothing: bfloat16 has 16 bits, too. Leave it out, or set "int8"',
            "model.dtype")
