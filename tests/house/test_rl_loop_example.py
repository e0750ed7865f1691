"""The research script of examples/: its reward rises, and its loss is the library's."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

import tunesmith
from tests.support.documents import ROOT
from tests.support.tiny import save_model
from tunesmith.learn.algorithms.losses import PPO, PolicyBatch
from tunesmith.learn.data.batch import Batch
from tunesmith.models.causal_lm import CausalLM
from tunesmith.types import Completion, Record, Rollout, Task

SCRIPT = ROOT / "examples/rl_loop.py"


def script_of() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_loop", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["rl_loop"] = script
    spec.loader.exec_module(script)
    return script


def test_its_advantages_are_the_packages_where_rollouts_fork_and_where_one_is_empty() -> None:
    def rollout(reward: float, *records: int) -> Rollout:
        made = Rollout(Task("0", "", (1,)), records=[Record() for _ in records], reward=reward)
        for record, count in zip(made.records, records, strict=True):
            record.observe([1, 2])
            if count:
                record.act(Completion([3] * count, [-1.0] * count, [0] * count, "stop"))
        return made

    groups = [[rollout(1.0, 2, 1), rollout(0.0, 3), rollout(9.0, 0)], [rollout(0.1, 1)] * 3]
    numbers = list[int]()
    learned = list[Batch]()

    async def play(task: Task, number: int) -> list[Rollout]:  # noqa: ARG001
        numbers.append(number)
        return groups[number - 6]

    async def load(number: int) -> None:
        pass

    learner = SimpleNamespace(update=lambda batch, *_, **__: learned.append(batch))
    loop = SimpleNamespace(
        engine=SimpleNamespace(load_weights=load), play=play, learner=learner, rewards=[]
    )
    script = script_of()
    asyncio.run(script.Loop.step(loop, 3, [groups[0][0].task] * 2))
    high = 0.5 / (0.5**0.5 + 1e-6)  # the unbiased deviation of 1 and 0 is √½
    np.testing.assert_allclose(
        learned[0].columns["advantages"], [high] * 3 + [-high] * 3 + [0.0] * 3
    )
    assert numbers == [6, 7], "two prompts of step 3"


def test_the_reward_rises(tmp_path: Path) -> None:
    script = script_of()
    loop = asyncio.run(script.train(CausalLM.load(save_model(tmp_path / "model")), 15))
    assert sum(loop.rewards[-3:]) / 3 > 10 * (loop.rewards[0] + 0.01), loop.rewards
    drawn = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    sample = torch.zeros(50, dtype=torch.int64)
    batch = PolicyBatch(drawn[0], drawn[1], drawn[2], torch.ones(50, dtype=torch.bool), sample, 1)
    torch.testing.assert_close(script.ClippedSurrogate()(batch).loss, PPO()(batch).loss)


def test_it_fits_on_a_page() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 150


def test_public_names_exist_and_importing_the_package_loads_no_torch() -> None:
    assert all(getattr(tunesmith, name) is not None for name in tunesmith.__all__)
    code = "import sys, tunesmith; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
