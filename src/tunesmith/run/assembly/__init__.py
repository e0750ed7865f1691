"""The composition root: the only package that names adapters and assembles runs.

Order matters: before a model is loaded, everything that can be refused is refused, and the resolved
configuration is printed and saved.
"""

from tunesmith.run.assembly.session import RunResult
from tunesmith.run.assembly.train import (
    run_distill,
    run_dpo,
    run_kto,
    run_prm,
    run_rl,
    run_rm,
    run_sft,
)
from tunesmith.run.specs.models import run_merge

__all__ = [
    "RunResult",
    "run_distill",
    "run_dpo",
    "run_kto",
    "run_merge",
    "run_prm",
    "run_rl",
    "run_rm",
    "run_sft",
]
