"""Every command that trains, with settings of a small run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.rank_runs import sft_settings
from tests.support.tiny_preferences import preference_settings
from tests.support.tiny_runs import rl_settings
from tunesmith.run import placement

Run = Callable[[Path | None, Sequence[str]], placement.RunResult]


def distill_settings(folder: Path, model: Path, run: str, **changed: Any) -> list[str]:
    return sft_settings(
        folder, model, run, **{"teacher.path": model, "distill.mode": "offline", **changed}
    )


COMMANDS: dict[str, tuple[Run, Callable[..., list[str]]]] = {
    "sft": (placement.run_sft, sft_settings),
    "distill": (placement.run_distill, distill_settings),
    "dpo": (placement.run_dpo, lambda *args, **kw: preference_settings("dpo", *args, **kw)),
    "kto": (placement.run_kto, lambda *args, **kw: preference_settings("kto", *args, **kw)),
    "rm": (placement.run_rm, lambda *args, **kw: preference_settings("rm", *args, **kw)),
    "prm": (placement.run_prm, lambda *args, **kw: preference_settings("prm", *args, **kw)),
    "rl": (
        placement.run_rl,
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
