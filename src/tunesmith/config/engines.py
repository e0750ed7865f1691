"""What each value of ``system.engine`` is: the properties that planning, refusing and deriving
settings depend on, and what builds it.

Code and rules ask for these properties and not for an engine's name, apart from what is about one
engine only. An engine's ``KIND`` stands with its adapter and is found by a door, also in other
packages::

    # my_package/engine.py
    KIND = EngineKind("mine", "My engine", "my_package.engine:make_spec", third_party=True)

    # pyproject.toml
    [project.entry-points."tunesmith.engines"]
    mine = "my_package.engine:KIND"

It is loaded whenever settings are read, so that its module imports what is slow in functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Literal

from tunesmith.config.doors import Door
from tunesmith.config.section import OneOf
from tunesmith.errors import ConfigError

RoundedWeights = Literal["float16", "int8"]
EngineWeights = Literal["model", "float16", "int8"]
"""Values of ``system.engine_weights``."""
ROUNDED_BYTES: Mapping[RoundedWeights, int] = {"float16": 2, "int8": 1}
"""Bytes of a weight; the scales of int8 come on top."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Which adapters an engine takes alone."""

    ranks: tuple[int, ...] = ()
    """The ranks for which it reserves memory, in rising order; empty: the adapter's own."""
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The linear modules of each family (``model_type``) whose adapters it takes; empty: of
    all."""
    slow_on_cpu: bool = False
    """On a CPU it samples much slower with an adapter beside the base."""

    def reserved(self, rank: int) -> int | None:
        """The rank for which it reserves memory; None: it takes no adapter of this rank."""
        return next((size for size in self.ranks if size >= rank), None) if self.ranks else rank

    def problem(self, family: str | None, rank: int | None) -> str | None:
        """Why it does not take an adapter."""
        if self.modules and family not in self.modules:
            return f"no adapter of a model of type {family or 'unknown'} has been tried alone"
        if not self.ranks:
            return None
        if rank is None:
            return "nothing is known of the adapter's rank"
        if self.reserved(rank) is None:
            return f"it takes adapters of at most rank {self.ranks[-1]}, and this one has {rank}"
        return None


@dataclass(frozen=True, slots=True)
class EngineKind:
    name: str
    """The value of ``system.engine``."""
    title: str
    """Its name in messages."""
    spec: str
    """``module:function`` that makes its ``EngineSpec`` from a plan."""
    served: bool = False
    """Servers that were started separately: the run allocates no memory for them, and sends them
    files of weights."""
    third_party: bool = False
    """It does not compute with the trainer's model: it always has its own copy of the weights,
    takes them under the names of the model's files (never quantised), and uses the same rotary
    frequencies for all lengths. It also has its own formats of weights and of keys and values."""
    rounds_base: bool = False
    """It rounds the base that it loads as ``model.quantize`` says, so that an adapter alone goes
    with it."""
    adapters: Adapters | None = None
    """The adapters that it takes alone, onto the same base; None: it takes whole weights."""
    spans_devices: bool = False
    """One engine may be several ranks, each with a device of its own (``system.vllm`` has their
    numbers)."""
    speculates_elsewhere: bool = False
    """It also decodes speculatively outside the trainer's process."""
    fastest_on_gpus: bool = False
    """It samples fastest on GPUs, and is derived there where it can be used."""
    seeing: tuple[str, ...] = ()
    """Families to which it shows the images of prompts, as the trainer does."""
    records_experts: bool = False
    """Its completions may have the experts that routers chose for their tokens."""
    install: str = ""
    """The command that installs it."""
    constrains: bool = False
    """Whether it keeps to a JSON schema while it writes."""
    least_temperature: float = 0.0
    """It raises lower positive temperatures to this, and the log-probabilities would then not
    match."""
    most_temperature: float = inf
    """It refuses higher ones."""
    fixed_families: Mapping[str, str] = field(default_factory=dict[str, str])
    """Families whose new weights it does not take, each with the reason; it samples them as they
    are published."""
    lacks: tuple[str, ...] = ()
    """Families that it cannot read as they are saved here."""
    unaltered_only: str = ""
    """Why sampling must not be altered (``top_p``, ``min_new_tokens``, ...); empty if it may be."""
    launch: str = ""
    """The command that starts a server of ``{path}`` on ``{port}``."""

    def sees(self, family: str | None) -> bool:
        """Whether such an engine takes images of a family.

        Args:
            family: of a model or of its text decoder.
        """
        return not self.third_party or str(family).removesuffix("_text") in self.seeing


OWN_ENGINE = "local"
"""Tunesmith's own engine, which needs no other package."""
BLOCK_TOKENS = 32
"""Tokens per block of keys and values: of the local engine, and of vLLM on a CPU. Those of other
engines are smaller."""
ENGINES = Door[EngineKind](
    "engines",
    "tunesmith.run.engines.local:KIND",
    "tunesmith.run.engines.vllm:KIND",
    "tunesmith.run.engines.http:KIND",
)


def engine_kinds() -> Mapping[str, EngineKind]:
    """All engines by name.

    Raises:
        ConfigError: two have the same name.
    """
    kinds: dict[str, EngineKind] = {}
    for kind in ENGINES.rooms:
        other = kinds.setdefault(kind.name, kind)
        if other is not kind:
            raise ConfigError(
                f"two engines are called '{kind.name}': {other.spec} and {kind.spec}. Uninstall "
                "the package of one of them, or rename its engine",
                keys=("system.engine",),
            )
    return kinds


EngineName = Annotated[str, OneOf(engine_kinds)]
