"""The planner tells published runs that worked from those that needed more memory than there
was."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import SUPPORT
from tests.support.hub_of_sizes import serve
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig, SFTConfig
from tunesmith.errors import CapacityError
from tunesmith.run.assembly.planning import plan_run

PUBLISHED = tomllib.loads((SUPPORT / "published.toml").read_text())
RL = [
    *(
        "reward.functions=['math']",
        "algorithm.kl=loss",
        "rollout.group_size=5",
        "rollout.prompts_per_step=8",
    ),
    *("system.engine=vllm", "system.engine_process=true"),
]


def named(run: dict[str, Any]) -> str:
    return f"{run['model']} on {run['machine']}"


@pytest.mark.parametrize("run", PUBLISHED["run"], ids=named)
def test_what_is_published_is_told(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(
        {f"some/{name}": sizes for name, sizes in PUBLISHED["models"].items()},
        tmp_path,
        monkeypatch,
    )
    kind, said = (RLConfig, [*RL, *run["rl"]]) if "rl" in run else (SFTConfig, run["sft"])
    config = load_config(
        kind,
        None,
        [f"model.path=some/{run['model']}", "model.dtype=bfloat16", "data.train=some/data", *said],
    )
    if run["fits"]:
        plan_run(config, run["machine"])
    else:
        with pytest.raises(CapacityError):
            plan_run(config, run["machine"])
