"""The research script of examples/: its reward rises, and its loss is the library's."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path

import torch

import tunesmith
from tiny import save_model
from tunesmith.algorithms.losses import PPO, PolicyBatch
from tunesmith.models.causal_lm import CausalLM

SCRIPT = Path(__file__).parent.parent / "examples/rl_loop.py"


def test_the_reward_rises(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("rl_loop", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["rl_loop"] = script
    spec.loader.exec_module(script)
    loop = asyncio.run(script.train(CausalLM.load(save_model(tmp_path / "model")), 15))
    assert sum(loop.rewards[-3:]) / 3 > 10 * (loop.rewards[0] + 0.01), loop.rewards
    drawn = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    sample = torch.zeros(50, dtype=torch.int64)
    batch = PolicyBatch(drawn[0], drawn[1], drawn[2], torch.ones(50, dtype=torch.bool), sample, 1)
    torch.testing.assert_close(script.ClippedSurrogate()(batch).loss, PPO()(batch).loss)


def test_it_fits_on_a_page() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 120


def test_public_names_exist_and_importing_the_package_loads_no_torch() -> None:
    assert all(getattr(tunesmith, name) is not None for name in tunesmith.__all__)
    code = "import sys, tunesmith; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
