"""Tunesmith's own engine."""

from tunesmith.config.engines import Adapters, EngineKind

KIND = EngineKind(
    "local",
    "Tunesmith's engine",
    "tunesmith.run.specs.engines:local_spec",
    adapters=Adapters(),
    records_experts=True,
)
