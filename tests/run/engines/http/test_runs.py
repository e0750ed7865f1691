"""Commands that sample with servers behind HTTP, and what is refused before they are asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support.http_engine_servers import Sglang, serving
from tests.support.http_servers import unused_url
from tests.support.tiny_runs import rl_settings, sums, write_lines
from tunesmith.config.load import load_config
from tunesmith.config.schema import RLConfig
from tunesmith.errors import ConfigError, UserError
from tunesmith.models.causal_lm import CausalLM
from tunesmith.plan.facts.hardware import read_hardware
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.rules.checks import check
from tunesmith.plan.said import open_plan
from tunesmith.run.assembly import run_rl
from tunesmith.run.offline.generate import run_generate
from tunesmith.run.specs.base import WeightSource
from tunesmith.run.specs.from_plan import engine_spec
from tunesmith.run.specs.http_engines import ServedSpec
from tunesmith.types import Sampling


@pytest.fixture
def servers(model: Path) -> Iterator[list[Sglang]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(Sglang(model, context=256))) for _ in range(2)]


def urls(servers: list[Sglang]) -> str:
    return json.dumps([server.url for server in servers])


@pytest.mark.slow
def test_rl_trains_with_servers(tmp_path: Path, model: Path, servers: list[Sglang]) -> None:
    for run, number, more in (("one", 1, {}), ("two", 2, {}), ("adapter", 1, {"lora__rank": 4})):
        settings = rl_settings(tmp_path, model, run, train__steps=2, **more)
        run_rl(
            None,
            [*settings, "system.engine=sglang", f"system.engine_urls={urls(servers[:number])}"],
        )
        lines = [
            json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        ]
        assert [line["step"] for line in lines if "reward" in line] == [1, 2]
        assert not any("limit_share" in line or "attainable_seconds" in line for line in lines)
        # Sampler and trainer agree on how likely each token was: the weights arrived before each
        # step.
        assert all(abs(line["policy_kl"]) < 1e-6 for line in lines if "reward" in line)
    for server in servers:
        assert server.weight_version.endswith("-version-1")
        assert server.asked_for("generate")


def generate_settings(folder: Path, model: Path) -> list[str]:
    write_lines(folder / "asked.jsonl", sums(3))
    return [
        f"run_dir={folder / 'out'}",
        f"model.path={model}",
        "model.dtype=float32",
        "system.threads=1",
        f"data.train={folder / 'asked.jsonl'}",
        "data.chat=false",
        "sampling.max_new_tokens=6",
        "sampling.n=2",
    ]


def test_generate_gives_sglang_the_weights_first(
    tmp_path: Path, model: Path, servers: list[Sglang]
) -> None:
    said = [
        *generate_settings(tmp_path, model),
        "system.engine=sglang",
        f"system.engine_urls={urls(servers)}",
    ]
    assert len(run_generate(None, said).output.read_text().splitlines()) == 3
    assert all(server.weight_version.endswith("-version-0") for server in servers)


def test_a_server_that_is_not_there_ends_the_command_at_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.run.engines.http.engine.START_PATIENCE", 0.1)
    url = unused_url().removesuffix("/reward")
    said = ["system.engine=sglang", f"system.engine_urls=['{url}']"]
    with pytest.raises(
        UserError, match=f"{url} cannot be used.* Start SGLang there with: python -m sglang"
    ):
        run_rl(None, [*rl_settings(tmp_path, model), *said])
    with pytest.raises(
        UserError, match=f"{url} cannot be used.* Start SGLang there with: python -m sglang"
    ):
        run_generate(None, [*generate_settings(tmp_path, model), *said])


def test_one_of_several_servers_that_is_not_there_ends_the_command_at_once(
    tmp_path: Path, model: Path, servers: list[Sglang], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunesmith.run.engines.http.engine.START_PATIENCE", 0.1)
    missing = unused_url().removesuffix("/reward")
    said = f"system.engine_urls=['{servers[0].url}', '{missing}']"
    with pytest.raises(UserError, match=f"{missing} cannot be used"):
        run_rl(None, [*rl_settings(tmp_path, model), "system.engine=sglang", said])


async def test_a_server_that_is_lost_joins_again_when_it_is_back(
    model: Path, servers: list[Sglang], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests go to the other one; back under its address, it gets the newest weights."""
    monkeypatch.setattr("tunesmith.run.engines.http.engine.START_PATIENCE", 0.05)
    monkeypatch.setattr("tunesmith.run.specs.http_engines.LET_GO", 0.1)
    monkeypatch.setattr("tunesmith.run.engines.roster.RETRY", 0.05)
    lost, other = servers
    spec = ServedSpec([lost.url, other.url], str(model), 8)
    reports: list[str] = []
    pool = spec.around(WeightSource(CausalLM.load(model)), reports.append, None)
    await pool.load_weights(1)

    async def refuse(*_: Any) -> web.StreamResponse | None:
        return web.Response(status=503)

    lost.trouble = refuse
    prompts = [[11 + i] * 20 for i in range(6)]
    sampling = Sampling(max_new_tokens=4)
    done = await asyncio.gather(*(pool.generate(prompt, sampling) for prompt in prompts))
    assert all(set(completion.versions) == {1} for completion in done)
    await pool.load_weights(2)
    assert lost.weight_version.endswith("-version-1")
    assert other.weight_version.endswith("-version-2")
    lost.trouble = None
    lost.restart()
    async with asyncio.timeout(60):
        while not any("2 of 2 engines" in text for text in reports):
            await asyncio.sleep(0.01)
    assert lost.weight_version.endswith("-version-2")
    await pool.close()


HERE = 'system.engine_urls=["http://127.0.0.1:30000"]'
FAR = 'system.engine_urls=["http://node7:30000"]'


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (
            ["system.engine=sglang"],
            "Start a server with: python -m sglang.launch_server --model-path org/m --port 30000",
        ),
        ([HERE], 'system.engine_urls has no effect with system.engine = "local"'),
        (["system.engine=sglang", "system.engine_urls=['127.0.0.1:30000']"], "is not a URL"),
        (
            ["system.engine=sglang", 'system.engine_urls=["http://a:1", "http://a:1"]'],
            "names a server twice",
        ),
        (["system.engine=sglang", HERE, "system.kv_memory=1GB"], "system.kv_memory has no effect"),
        (
            ["system.engine=sglang", HERE, "system.engine_process=true"],
            "system.engine_process has no effect",
        ),
        (["system.engine=sglang", HERE, "system.draft_model=org/m"], "leave it out"),
        (
            ["system.engine=sglang", HERE, "lora.rank=4", "model.quantize=int8"],
            "does not round activations to 8 bits",
        ),
        (
            ["system.engine=sglang", HERE, "rollout.top_p=0.9"],
            "rollout.top_p = 0.9 does not go with",
        ),
        (["system.engine=sglang", FAR], "weights reach http://node7:30000 through files"),
        (
            ["system.engine=sglang", FAR, "system.engine_directory=nowhere"],
            "system.engine_directory",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_a_server_is_asked(
    said: list[str], problem: str, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "t.jsonl", sums(1))
    usual = ["model.path=org/m", f"data.train={data}", "reward.functions=['math']"]
    with pytest.raises(ConfigError) as raised:
        check(load_config(RLConfig, None, [*usual, *said]))
    assert problem in str(raised.value)


def test_how_often_servers_may_be_lost_can_be_said(tmp_path: Path, model: Path) -> None:
    said = [*rl_settings(tmp_path, model), "system.engine=sglang", HERE, "system.engine_restarts=2"]
    config = load_config(RLConfig, None, said)
    check(config)
    plan = open_plan(config, Facts(read_hardware()))
    pool: Any = engine_spec(plan).around(WeightSource(CausalLM.load(model)), print, None)
    assert pool.roster.restarts_left == 2
