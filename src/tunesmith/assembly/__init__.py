"""The composition root: the one room that names adapters and puts runs together.

Order matters: everything that can be refused is refused before a model is loaded, and the resolved
configuration is printed and saved before that too.
"""

from tunesmith.assembly.merge import run_merge
from tunesmith.assembly.opening import RunResult
from tunesmith.assembly.train import run_distill, run_dpo, run_kto, run_prm, run_rl, run_rm, run_sft

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
