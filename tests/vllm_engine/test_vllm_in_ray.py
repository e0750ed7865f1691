"""vLLM in a Ray actor against the engine contract. Runs where both are installed: ``make
test-vllm``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.support.engine_contract import Subject
from tests.support.pool_bench import LAST, PoolBench, each_check
from tunesmith.config.system import SystemSection
from tunesmith.errors import EngineLostError
from tunesmith.plan.cluster import Bundle

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
pytest.importorskip("ray", reason="Ray is an extra: pip install 'tunesmith[ray]'")

from tunesmith.run.engines.far import FarEngine
from tunesmith.run.processes.ray_cluster import RayCluster

pytestmark = pytest.mark.xdist_group("ray")


class Bench(PoolBench):
    cluster: RayCluster

    async def start(self) -> FarEngine:
        far = self.cluster.spawn("rollout", EngineLostError)
        return await FarEngine.start(far, self.spec.build)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("ray"), head_dim=32)
    made.use_vllm(tensor_parallel_size=request.param)
    with (
        RayCluster.open(SystemSection(), [Bundle(("rollout",), 1.0, 0.0)]) as made.cluster,
        made.opened(),
    ):
        yield made


@each_check
def test_contract(check: Callable[[Subject], Awaitable[None]], bench: Bench) -> None:
    bench.check(check)


def test_closing_fails_what_is_in_flight(bench: Bench) -> None:
    bench.check(LAST)
