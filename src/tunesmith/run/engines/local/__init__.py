"""Tunesmith's own engine."""

from tunesmith.config.engines import EngineKind

KIND = EngineKind("local", "Tunesmith's engine", "tunesmith.run.placement.engines:local_spec")
