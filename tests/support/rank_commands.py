"""Every command that trains, with settings of a small run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.rank_runs import sft_settings
from tests.support.tiny_preferences import preference_settings
from tests.support.tiny_runs import rl_settings
from tunesmith.run import assembly

Run = Callable[[Path | None, Sequence[str]], assembly.RunResult]


def distill_settings(folder: Path, model: Path, run: str, **changed: Any) -> list[str]:
    return sft_settings(
        folder, model, run, **{"teacher.path": model, "distill.mode": "offline", **changed}
    )


COMMANDS: dict[str, tuple[Run, Callable[..., list[str]]]] = {
    "sft": (assembly.run_sft, sft_settings),
    "distill": (assembly.run_distill, distill_settings),
    "dpo": (assembly.run_dpo, lambda *args, **kw: preference_settings("dpo", *args, **kw)),
    "kto": (assembly.run_kto, lambda *args, **kw: preference_settings("kto", *args, **kw)),
    "rm": (assembly.run_rm, lambda *args, **kw: preference_settings("rm", *args, **kw)),
    "prm": (assembly.run_prm, lambda *args, **kw: preference_settings("prm", *args, **kw)),
    "rl": (
        assembly.run_rl,
        lambda *args, **kw: rl_settings(
            *args,
            algorithm__name="ppo",
            train__steps=3,
            train__lr=1e-3,
            system__engine_process=True,
            **kw,
        ),
    ),
}
