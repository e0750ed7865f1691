"""Several trainer ranks learn what one learns: gradients are summed, replicas stay equal, a lost
rank is noticed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support import training
from tunesmith.config.schema import LoraSection
from tunesmith.costs import CostModel
from tunesmith.errors import DeviceMemoryError, ModelError, TrainerLostError
from tunesmith.learn.algorithms.objective import Objective, SFTObjective
from tunesmith.learn.data.batch import Batch, Floats
from tunesmith.learn.data.micro_batches import Packing
from tunesmith.learn.data.packing import pack
from tunesmith.learn.data.trie import num_forest_tokens
from tunesmith.models import adapters
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.forest import Forest, Predictions
from tunesmith.run.loop.learner import Learner
from tunesmith.run.processes import rank_group
from tunesmith.run.processes.process_group import open_store
from tunesmith.run.processes.rank_group import RankGroup, reach_store
from tunesmith.run.trainers.backward_sums import BackwardSums
from tunesmith.run.trainers.base import Quantity
from tunesmith.run.trainers.memory import memory_boundary
from tunesmith.run.trainers.optimizer import AdamWSettings, MasterOptimizer
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample

HERE = "127.0.0.1"
PATIENCE = 300.0


class Threads:
    """Ranks in threads of this process, as the loop sees them: a real group, and each has its share
    of a packing."""

    cost = CostModel(1.0, 0.01, 0.1)

    def __init__(self, replicas: Sequence[TorchBackend[CausalLM]]) -> None:
        self.replicas = replicas
        self.ranks = len(replicas)
        self.pools = [ThreadPoolExecutor(1) for _ in replicas]
        self.counts = [0] * self.ranks
        self.lock = Lock()  # how torch multiplies is a setting of the whole process
        self.each(TorchBackend[CausalLM].join, groups(self.ranks))

    @property
    def optimizer_steps(self) -> int:
        return self.replicas[0].optimizer_steps

    @property
    def optimizer(self) -> MasterOptimizer:
        return self.replicas[0].optimizer

    def score(
        self, packing: Packing, of: Quantity = "logprobs", *, reference: bool = False
    ) -> Floats:
        shares = [packing.for_rank(rank, self.ranks, columns=False) for rank in range(self.ranks)]
        return np.sum(
            self.each(lambda replica, share: replica.score(share, of, reference=reference), shares),
            axis=0,
        )

    def forward_backward(self, packing: Packing, objective: Objective) -> dict[str, float]:
        """Each rank's micro-batches arrive as they would from another process."""
        shares = [
            pickle.loads(pickle.dumps(packing.for_rank(rank, self.ranks)))
            for rank in range(self.ranks)
        ]
        self.counts = [len(share) for share in shares]

        def alone(replica: TorchBackend[CausalLM], share: Packing) -> dict[str, float]:
            with self.lock:
                return replica.forward_backward(share, objective)

        parts = self.each(alone, shares)
        return {name: sum(part.get(name, 0.0) for part in parts) for name in parts[0]}

    def step(self, lr: float) -> dict[str, float]:
        found = self.each(lambda replica, _: replica.step(lr), [None] * self.ranks)
        assert all(metrics == found[0] for metrics in found)
        return found[0]

    def each(
        self, do: Callable[[TorchBackend[CausalLM], Any], Any], given: Sequence[Any]
    ) -> list[Any]:
        answers = [
            p.submit(do, *both) for p, *both in zip(self.pools, self.replicas, given, strict=True)
        ]
        for answer in answers:
            answer.exception()
        return [answer.result() for answer in answers]


def groups(world: int) -> list[RankGroup]:
    store = open_store(HERE, PATIENCE)
    with ThreadPoolExecutor(world) as pool:
        made = [
            pool.submit(
                RankGroup,
                store if rank == 0 else reach_store(HERE, store.port),
                rank,
                world,
                HERE,
                patience=PATIENCE,
            )
            for rank in range(world)
        ]
    return [one.result() for one in made]


def together(world: int, do: Callable[[RankGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(world) as pool:
        return [answer.result() for answer in [pool.submit(do, group) for group in groups(world)]]


def backend_of(
    path: Path, dtype: torch.dtype = torch.float32, lora: LoraSection | None = None
) -> TorchBackend[CausalLM]:
    settings = AdamWSettings(0.1, max_grad_norm=0.5)
    loaded = CausalLM.load(path, dtype=dtype)
    if lora:
        torch.manual_seed(5)
        adapters.attach(loaded, lora)
    return TorchBackend(loaded, settings, CausalLM.predict, ema_decay=0.5)


def embedding_of(backend: TorchBackend[CausalLM]) -> nn.Parameter:
    """Its gradient comes last."""
    embedding: Any = backend.model.module.get_input_embeddings()
    return embedding.weight


def learner_of(backend: Any, max_tokens: int = 60) -> Learner:
    return training.learner_of(backend, max_tokens, aggregation="token_mean")


def learn(learner: Learner, samples: Sequence[Sample]) -> dict[str, float]:
    return learner.update(Batch.of(samples), SFTObjective())


def samples_of(seed: int, groups: int, size: int = 3) -> list[Sample]:
    draw = random.Random(seed)
    found: list[Sample] = []
    for group in range(groups):
        prompt = [draw.randrange(5, 260) for _ in range(draw.randrange(2, 10))]
        for _ in range(size):
            answer = [draw.randrange(5, 260) for _ in range(draw.randrange(1, 13))]
            found.append(
                Sample(prompt + answer, [False] * len(prompt) + [True] * len(answer), group)
            )
    return found


def state_of(backend: TorchBackend[CausalLM]) -> dict[str, Tensor]:
    averages = {f"average:{name}": tensor for name, tensor in backend.optimizer.average.items()}
    return {**backend.model.module.state_dict(), **backend.optimizer.state(), **averages}


STEPS = [samples_of(0, 5), samples_of(1, 1, 1), samples_of(2, 4)]
"""The second has one sample: with more ranks than one, some have no micro-batch."""


@pytest.mark.parametrize(
    ("dtype", "bound", "weights"),
    # AdamW divides by the gradient's own size: where that is near 0, rounding may move one weight
    # by up to lr = 0.01.
    [(torch.float64, 1e-10, 1e-9), (torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2e-2, 5e-3)],
)
@pytest.mark.more
def test_any_number_of_ranks_takes_the_steps_of_one(
    model: Path, dtype: torch.dtype, bound: float, weights: float
) -> None:
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    try:
        alone = backend_of(model, dtype)
        expected = [learn(learner_of(alone, 1000), samples) for samples in STEPS]
        scored = learner_of(alone).score(Batch.of(STEPS[0]))
        for world in (2, 3):
            ranks = Threads([backend_of(model, dtype) for _ in range(world)])
            learner = learner_of(ranks, 1000)
            found = []
            counts = list[list[int]]()
            for samples in STEPS:
                found.append(learn(learner, samples))
                counts.append(ranks.counts)
            for ours, theirs in zip(found, expected, strict=True):
                for name in ("loss", "grad_norm"):
                    assert ours[name] == pytest.approx(theirs[name], rel=bound)
            assert [metrics["microbatches"] for metrics in found] == [world, 1, world]
            assert counts == [[1] * world] * 3, (
                "where there is one micro-batch the others have padding"
            )
            first, *others = (state_of(replica) for replica in ranks.replicas)
            assert all(first[name].equal(other[name]) for other in others for name in first), (
                "bit by bit"
            )
            for name, tensor in state_of(alone).items():
                assert float((first[name] - tensor).abs().mean()) < weights, name
            assert learner.score(Batch.of(STEPS[0])) == pytest.approx(scored, abs=50 * weights)
    finally:
        torch.set_default_dtype(torch.float32)


def test_ranks_with_adapters_take_the_steps_of_one(model: Path) -> None:
    """A step has several micro-batches on each rank."""
    lora = LoraSection(rank=2, targets=("q_proj", "v_proj"))
    alone = backend_of(model, lora=lora)
    ranks = Threads([backend_of(model, lora=lora) for _ in range(2)])
    expected = [learn(learner_of(alone), samples) for samples in STEPS]
    found = [learn(learner_of(ranks), samples) for samples in STEPS]
    assert found[0]["microbatches"] > 2
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


@pytest.mark.parametrize("place", ["loss", "backward"])
def test_memory_that_runs_out_on_one_rank_begins_the_step_again(model: Path, place: str) -> None:
    """In a backward pass some sums have begun, with gradients that nobody needs."""
    alone = learner_of(backend_of(model))
    ranks = learner_of(Threads([backend_of(model) for _ in range(2)]))
    tight: TorchBackend[CausalLM] = ranks.backend.replicas[1]  # type: ignore[attr-defined]
    usual = tight.forward_backward
    calls = list[int]()

    def narrow(packing: Packing, objective: Objective) -> dict[str, float]:
        def exhausted(*_: Any) -> Any:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

        calls.append(packing.num_tokens)
        if len(calls) > 1:
            return usual(packing, objective)
        if place == "loss":
            return usual(packing, exhausted)
        hook = embedding_of(tight).register_hook(exhausted)
        try:
            return usual(packing, objective)
        finally:
            hook.remove()

    tight.forward_backward = narrow  # type: ignore[method-assign]
    ours = learn(ranks, STEPS[0])
    theirs = learn(alone, STEPS[0])
    assert ranks.caps["max_tokens"] == 30 and len(calls) > 1
    assert [ours[n] for n in ("loss", "grad_norm")] == pytest.approx(
        [theirs[n] for n in ("loss", "grad_norm")]
    )


class Parts(nn.Module):
    """Parameters of two types; ``unused`` never has a gradient, ``first`` has one on rank 0
    alone."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.ones(3, 2))
        self.first = nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("bucket", [1, 40, 1 << 20])
def test_sums_by_hand(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of bfloat16 weights are summed in float32; where there is none, none comes to
    be."""
    monkeypatch.setattr(rank_group, "BUCKET", bucket)

    def step(group: RankGroup) -> tuple[dict[str, Any], dict[str, Any], float]:
        module = Parts()
        rank = group.rank
        optimizer = MasterOptimizer(module, AdamWSettings(0.5, max_grad_norm=0.0))
        loss = (rank + 1) * module.all.sum() + 10**-9 * (rank + 1) * module.wide.sum()
        loss = loss + (256.0 if rank == 0 else 0.5) * module.narrow.sum()
        (loss + 7 * module.first.sum() if rank == 0 else loss).backward()
        group.sum_gradients(optimizer.masters.values())
        grads = {
            name: m.grad if m.grad is None else m.grad.tolist()
            for name, m in optimizer.masters.items()
        }
        metrics = optimizer.step(0.1)
        return (
            grads,
            {name: p.tolist() for name, p in module.named_parameters()},
            metrics["grad_norm"],
        )

    found = together(3, step)
    assert found[0] == found[1] == found[2]
    grads, weights, _ = found[0]
    assert grads["all"] == [[6.0, 6.0]] * 3 and grads["first"] == [7.0] * 4
    assert grads["wide"] == pytest.approx([6e-9] * 5, rel=1e-12)
    assert grads["narrow"] == [257.0] * 3  # in bfloat16 256 + 0.5 + 0.5 stays at 256
    assert grads["unused"] is None and weights["unused"] == [[1.0, 1.0]] * 2, (
        "what is not trained does not decay"
    )


@pytest.mark.parametrize("bucket", [1, 40, 1 << 20])
def test_sums_during_the_backward_pass_by_hand(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches, of which rank 2 has none; then a batch in which rank 1 fails."""
    monkeypatch.setattr(rank_group, "BUCKET", bucket)

    def sums_of(group: RankGroup) -> list[Any]:
        module = Parts()
        rank = group.rank
        optimizer = MasterOptimizer(module, AdamWSettings(0.5, max_grad_norm=0.0))
        sums = BackwardSums(optimizer.all_masters, group)
        for scale in (10.0, 1.0):
            optimizer.zero_grad()
            sums.begin_batch()
            for number in range(2 if rank < 2 else 0):
                if number:
                    sums.expect_last()
                if rank == 1 and scale == 10.0 and number:
                    optimizer.zero_grad()
                    break
                loss = scale * (rank + 1) * (module.narrow.sum() + module.wide.sum())
                if rank == 0:
                    loss = loss + 7 * scale * module.first.sum()
                (loss + scale * module.all.sum()).backward()
            sums.begin_rest()
        sums.finish()
        grads = [master.grad for master in optimizer.masters.values()]
        return [grad if grad is None else grad.tolist() for grad in grads]

    first, *others = together(3, sums_of)
    assert first == [[[4.0, 4.0]] * 3, [14.0] * 4, None, [6.0] * 5, [6.0] * 3]
    assert others == [first, first]


def test_gradients_are_summed_while_others_are_computed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "BUCKET", 1)
    ranks = Threads([backend_of(model) for _ in range(2)])
    group: Any = ranks.replicas[0].group
    begin = group.begin_sum
    begun: list[int] = []

    def begin_sum(flat: Tensor) -> Any:
        begun.append(flat.numel())
        return begin(flat)

    embedding = embedding_of(ranks.replicas[0])
    seen: list[int] = []
    monkeypatch.setattr(group, "begin_sum", begin_sum)

    def note(_: Tensor) -> None:
        seen.append(len(begun))

    embedding.register_hook(note)
    ranks.forward_backward(Packing.of(Batch.of(STEPS[0]), 60, multiple_of=2), with_weight_one)
    weights = len(ranks.optimizer.masters)
    assert len(seen) > 1 and len(begun) == weights
    assert seen[:-1] == [0] * len(seen[:-1]), "sums wait for the last micro-batch"
    assert seen[-1] == weights - 1, "only that of the embedding, whose gradient comes last, is left"


def test_a_gradient_that_is_not_finite_on_one_rank_is_dropped_by_all(model: Path) -> None:
    ranks = Threads([backend_of(model) for _ in range(2)])
    before = {name: tensor.clone() for name, tensor in state_of(ranks.replicas[0]).items()}
    broken = embedding_of(ranks.replicas[1])

    def infinite(grad: Tensor) -> Tensor:
        return grad + float("inf")

    broken.register_hook(infinite)
    ranks.forward_backward(
        Packing.of(Batch.of([STEPS[0][0], STEPS[0][4]]), 22, multiple_of=2), with_weight_one
    )
    assert ranks.step(0.1)["skipped_steps"] == 1.0
    for replica in ranks.replicas:
        assert all(tensor.equal(before[name]) for name, tensor in state_of(replica).items())


def with_weight_one(_: Forest, predictions: Predictions) -> tuple[Tensor, dict[str, Tensor]]:
    assert predictions.logprobs is not None
    return -predictions.logprobs.sum(), {}


def test_other_weights_on_another_machine_are_refused() -> None:
    same = [torch.arange(6.0), torch.ones(2, dtype=torch.bfloat16)]
    assert together(3, lambda group: group.check_equal(same)) == [None] * 3

    def check(group: RankGroup) -> str:
        try:
            group.check_equal([torch.arange(6.0), torch.full((2,), 1.0 + (group.rank == 1))])
        except ModelError as error:
            return str(error)
        return ""

    assert any("have different weights" in said for said in together(3, check))


def test_another_base_beneath_an_adapter_is_refused(model: Path) -> None:
    backends = [backend_of(model, lora=LoraSection(rank=2)) for _ in range(2)]
    with torch.no_grad():
        embedding_of(backends[1])[7] += 0.5  # frozen

    def join(group: RankGroup) -> str:
        try:
            backends[group.rank].join(group)
        except ModelError as error:
            return str(error)
        return ""

    assert any("have different weights" in said for said in together(2, join))


def test_a_rank_that_does_not_come_to_the_sum_is_lost_after_the_stated_time() -> None:
    given_up = Event()

    def lonely(group: RankGroup) -> str:
        if group.rank:
            assert given_up.wait(PATIENCE)
            return ""
        group.patience = 0.5
        group._group._set_default_timeout(timedelta(seconds=0.5))
        parameter = nn.Parameter(torch.ones(3))
        with pytest.raises(
            TrainerLostError, match=r"rank 0 of the trainer's 2 waited for .* for 0\.5 s"
        ) as error:
            group.sum_gradients([parameter])
        given_up.set()
        return str(error.value)

    assert together(2, lonely)[0]


# Processes

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["tunesmith.run.trainers.torch", "tunesmith.models.adapters", "tunesmith.models.causal_lm"]
)


class Processes:
    """Each runs ``do(group, pipe, *args)``."""

    def __init__(self, world: int, do: Callable[..., None], *args: Any) -> None:
        self.store = open_store(HERE, PATIENCE)
        self.pipes, ends = zip(*(CONTEXT.Pipe() for _ in range(world)), strict=True)
        everything = (
            (do, rank, world, self.store.port, end, args) for rank, end in enumerate(ends)
        )
        self.running = [CONTEXT.Process(target=_run, args=values) for values in everything]
        for process in self.running:
            process.start()

    def said(self, rank: int, within: float) -> Any:
        assert self.pipes[rank].poll(within), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.join()


@pytest.fixture
def processes() -> Iterator[Callable[..., Processes]]:
    made: list[Processes] = []

    def start(*args: Any) -> Processes:
        made.append(Processes(*args))
        return made[-1]

    yield start
    for one in made:
        one.close()


def _run(
    do: Callable[..., None], rank: int, world: int, port: int, pipe: Any, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    do(RankGroup(reach_store(HERE, port), rank, world, HERE, patience=PATIENCE), pipe, *args)
    pipe.recv()  # nobody leaves before all have finished


def _sum_twice(group: RankGroup, pipe: Any) -> None:
    parameter = nn.Parameter(torch.ones(1 << 16))
    group.sum_gradients([parameter])
    pipe.send(os.getpid())
    if group.rank == 2:
        time.sleep(600)  # the others wait in the sum
    try:
        group.sum_gradients([parameter])
        pipe.send("summed")
    except TrainerLostError as error:
        pipe.send(str(error))


@pytest.mark.slow
def test_a_rank_that_is_killed_while_the_others_sum_is_lost_at_once(
    processes: Callable[..., Processes],
) -> None:
    three = processes(3, _sum_twice)
    pids = [three.said(rank, within=PATIENCE) for rank in range(3)]
    os.kill(pids[2], signal.SIGKILL)
    first = next(rank for rank in (0, 1) for _ in range(2000) if three.pipes[rank].poll(0.05))
    assert "waited for another one, which is gone" in three.said(first, within=60)
    three.running[first].kill()  # as the run does with all of them
    assert "waited for another one, which is gone" in three.said(1 - first, within=PATIENCE / 2)


def _train_with_dropout(group: RankGroup, pipe: Any, model: str, folder: str) -> None:
    def made() -> TorchBackend[CausalLM]:
        loaded = CausalLM.load(model)
        torch.manual_seed(5)
        adapters.attach(loaded, LoraSection(rank=4, dropout=0.5))
        return TorchBackend(loaded, AdamWSettings(), CausalLM.predict, seed=5)

    def step(backend: TorchBackend[CausalLM]) -> None:
        backend.forward_backward(training.whole(STEPS[0][:3]), with_weight_one)
        backend.step(1e-2)

    straight = made()
    resumed = made()
    straight.join(group)
    step(straight)
    straight.save(Path(folder))
    step(straight)
    group.check_equal([])  # all have saved
    resumed.join(group)
    resumed.load(Path(folder))
    drawn = torch.rand(3).tolist()
    resumed.load(Path(folder))
    step(resumed)
    ours, theirs = (dict(b.model.module.named_parameters()) for b in (straight, resumed))
    pipe.send(
        (drawn, all(ours[name].equal(theirs[name]) for name in ours), sorted(os.listdir(folder)))
    )


@pytest.mark.slow
def test_each_ranks_random_state_is_kept_and_another_number_of_ranks_goes_on(
    model: Path, tmp_path: Path, processes: Callable[..., Processes]
) -> None:
    saved = tmp_path / "saved"
    two = processes(2, _train_with_dropout, str(model), str(saved))
    (ours, same, files), (theirs, also_same, _) = (
        two.said(rank, within=PATIENCE) for rank in range(2)
    )
    assert same and also_same, "resumed, it goes on as it would have"
    assert ours != theirs, "each rank drops out other numbers"
    assert files == ["model", "optimizer.safetensors", "random-00001.safetensors"]
    loaded = CausalLM.load(model)
    adapters.attach(loaded, LoraSection(rank=4, dropout=0.5))
    alone = TorchBackend(loaded, AdamWSettings(), CausalLM.predict)
    alone.load(saved)
    assert alone.optimizer_steps == 1 and torch.rand(3).tolist() == ours
    three = Threads(
        [alone, *(TorchBackend(loaded, AdamWSettings(), CausalLM.predict) for _ in range(2))]
    )
    for replica in three.replicas:
        replica.load(saved)
    assert [replica.optimizer_steps for replica in three.replicas] == [1] * 3


def test_memory_that_is_short_is_not_a_rank_that_is_gone() -> None:
    class Failing:
        error = RuntimeError()

        def allreduce(self, _: Any) -> Any:
            raise self.error

    [group] = groups(1)
    group._group = failing = Failing()  # pyright: ignore[reportPrivateUsage]
    parameter = nn.Parameter(torch.zeros(2))
    failing.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(DeviceMemoryError), memory_boundary("the optimizer step"):
        group.sum_gradients([parameter])
    failing.error = RuntimeError("Connection closed by peer")
    with pytest.raises(
        TrainerLostError, match="gone or did not answer for 300 s: Connection closed"
    ):
        group.sum_gradients([parameter])


# Sharing out


def tokens(samples: Sequence[Sample], bins: Sequence[Sequence[int]]) -> list[int]:
    return [num_forest_tokens(Batch.of(samples), b) for b in bins]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(22, 200),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_sample_once_and_never_over_the_cap(
    seed: int, number: int, size: int, cap: int, ranks: int, keep: bool
) -> None:
    samples = samples_of(seed, number, size)
    cap = max(cap, 9 + 12 * size) if keep else cap
    bins = pack(Batch.of(samples), cap, keep_groups=keep, multiple_of=ranks)
    assert sorted(i for b in bins for i in b) == list(range(len(samples)))
    assert all(bins) and max(tokens(samples, bins)) <= cap
    whole = [{samples[i].group for i in b} for b in bins]
    if keep:
        assert sum(map(len, whole)) == number
    assert bins == pack(Batch.of(samples), cap, keep_groups=keep, multiple_of=ranks)


@pytest.mark.parametrize("cap", [4000, 900, 350])
def test_ranks_have_equally_much_to_do(cap: int) -> None:
    samples = samples_of(3, 40, 4)
    for ranks in (2, 4, 7):
        bins = pack(Batch.of(samples), cap, multiple_of=ranks)
        assert len(bins) % ranks == 0
        work = [sum(tokens(samples, bins[rank::ranks])) for rank in range(ranks)]
        assert max(work) < 1.05 * min(work)
    assert len(pack(Batch.of(samples), 4000)) == 1
    assert [len(b) for b in pack(Batch.of(samples[:3]), 4000, multiple_of=7)] == [1, 1, 1]
