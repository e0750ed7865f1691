"""``tunesmith serve-training``: the real ``tinker`` package trains and samples as our own parts do."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.tinker_clients import (
    KEY,
    PROMPT,
    SETTINGS,
    command,
    logprobs,
    sample,
    serving,
    supervised,
    tinker,
    trainer,
    weights,
)
from tunesmith.run.assembly.serve_training import open_base
from tunesmith.run.placement.adapters_on_base import FrozenBase


@pytest.fixture(scope="module")
def base(adaptable: Path) -> Iterator[FrozenBase]:
    with open_base(str(adaptable), SETTINGS) as base:
        yield base


@pytest.fixture(scope="module")
def address(base: FrozenBase, saved: Path) -> Iterator[str]:
    with serving(base, saved) as address:
        yield address


@pytest.fixture(scope="module")
def service(address: str) -> Any:
    return tinker.ServiceClient(base_url=address, api_key=KEY)


def own_logprobs(adaptable: Path, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(adaptable)(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens)[1:, None]).flatten()


def test_supervised_training_lowers_the_loss(service: Any, adaptable: Path) -> None:
    client = trainer(service)
    assert client.get_info().lora_rank == 4
    rows = [[5, 6, 7, 8, 9], [5, 6, 20, 21, 22, 23]]
    data = [supervised(row) for row in rows]
    losses: list[float] = []
    for number in range(30):
        output = client.forward_backward(data, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
        result = output.result()
        losses.append(result.metrics["loss:sum"])
        if not number:  # the new adapter changes nothing
            for own, row in zip(logprobs(result), rows, strict=True):
                assert own == pytest.approx(own_logprobs(adaptable, row).numpy(), abs=1e-4)
            assert losses[0] == pytest.approx(-sum(own.sum() for own in logprobs(result)), rel=1e-5)
    assert losses[-1] < losses[0] / 2, losses
    forwarded = client.forward(data, "cross_entropy").result()
    assert forwarded.metrics["loss:sum"] < losses[-1]


def test_what_was_trained_and_saved_is_listed(base: FrozenBase, tmp_path: Path) -> None:
    with serving(base, tmp_path) as address:
        service = tinker.ServiceClient(base_url=address, api_key=KEY)
        clients = [trainer(service, rank) for rank in (2, 4)]
        state, kept = (clients[0].save_state(name).result().path for name in ("one", "two"))
        sampler = clients[0].save_weights_for_sampler("three").result().path
        rest = tinker.RestClient(base_url=address, api_key=KEY)
        listed = rest.list_training_runs().result()
        assert {run.training_run_id: run.lora_rank for run in listed.training_runs} == {
            client.model_id: rank for client, rank in zip(clients, (2, 4), strict=True)
        }
        assert listed.cursor.total_count == 2
        assert len(rest.list_training_runs(limit=1, offset=1).result().training_runs) == 1
        run = rest.get_training_run_by_tinker_path(state).result()
        assert run.base_model == "model"
        assert run.last_checkpoint.tinker_path == kept
        assert run.last_sampler_checkpoint.tinker_path == sampler
        rest.delete_checkpoint_from_tinker_path(state).result()
        rest.set_checkpoint_ttl_from_tinker_path(sampler, 3600).result()
        found = rest.list_user_checkpoints().result().checkpoints
        assert {each.tinker_path: each.expires_at is None for each in found} == {
            kept: True,
            sampler: False,
        }
        (session,) = rest.list_sessions().result().sessions
        runs = rest.get_session(session).result().training_run_ids
        assert runs == sorted(client.model_id for client in clients)
        with pytest.raises(tinker.NotFoundError):
            rest.get_training_run("another").result()


def test_a_step_is_that_of_plain_pytorch(service: Any, adaptable: Path, saved: Path) -> None:
    """Two requests' gradients add up; the settings are the step's."""
    rows = [[5, 6, 7, 8, 9], [5, 6, 20, 21, 22, 23], [30, 31]]
    client = trainer(service)
    before = saved / client.save_weights_for_sampler("a").result().path.removeprefix("tinker://")
    peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(adaptable), before, is_trainable=True
    )
    trained = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    how = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    adamw = torch.optim.AdamW(trained.values(), lr=0.01, **how)
    for step in range(2):
        for part in (rows[:2], rows[2:]):
            client.forward_backward([supervised(row) for row in part], "cross_entropy")
        adam = tinker.AdamParams(
            learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1,
            grad_clip_norm=1.0 if step else 0.0,
        )  # fmt: skip
        norm = client.optim_step(adam).result().metrics["grad_norm"]
        for row in rows:
            logits = peft(torch.tensor([row])).logits[0, :-1]
            torch.nn.functional.cross_entropy(
                logits, torch.tensor(row)[1:], reduction="sum"
            ).backward()
        most = 1.0 if step else float("inf")
        own = torch.nn.utils.clip_grad_norm_(trained.values(), most)
        assert norm == pytest.approx(float(own), rel=1e-4) and norm > 1
        adamw.step()
        adamw.zero_grad()
    after = weights(client, saved, "b")
    for name, weight in trained.items():
        key = name.replace(".default.", ".")
        assert torch.allclose(after[key], weight, atol=2e-5), name


def test_two_clients_train_as_each_alone(service: Any, saved: Path) -> None:
    ours = [supervised([5, 6, 7, 8, 9])]
    theirs = [supervised([40, 41, 42])]
    adam = tinker.AdamParams(learning_rate=0.01)

    def train(*parts: tuple[Any, list[Any]]) -> None:
        for _ in range(2):
            for client, data in parts:
                client.forward_backward(data, "cross_entropy")
            for client, _ in parts:
                client.optim_step(adam).result()

    alone = trainer(service)
    train((alone, ours))
    one = trainer(service)
    two = trainer(service, rank=2, seed=5)
    train((one, ours), (two, theirs))
    expected = weights(alone, saved, "end")
    assert all(expected[name].equal(w) for name, w in weights(one, saved, "end").items())
    assert {w.shape[0] for n, w in weights(two, saved, "end").items() if "lora_A" in n} == {2}


def test_a_custom_loss_is_computed_by_the_client(service: Any, saved: Path) -> None:
    data = [supervised([5, 6, 7, 8, 9])]
    plain = trainer(service)
    plain.forward_backward(data, "cross_entropy")
    custom = trainer(service)

    def loss(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum(each.sum() for each in logprobs), {"seen": 1.0}

    assert custom.forward_backward_custom(data, loss).result().metrics["seen"] == 1.0
    for client in (plain, custom):
        client.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
    expected = weights(plain, saved, "end")
    assert all(torch.allclose(expected[n], w) for n, w in weights(custom, saved, "end").items())


def test_several_targets_at_a_token(service: Any) -> None:
    client = trainer(service)
    tokens = [5, 6, 7]
    targets = np.array([[6, 30], [7, 31], [8, 32]])
    shares = np.array([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]], np.float32)
    several = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": targets, "weights": shares},
    )
    result = client.forward([several, supervised([5, 6, 30])], "cross_entropy").result()
    found = logprobs(result)
    assert found[0].shape == (3, 2) and found[1].shape == (2,)
    assert found[0][0, 0] == pytest.approx(found[1][0], abs=1e-5)
    assert found[0][1, 1] != found[0][1, 0]
    loss = -(found[0] * shares).sum() - found[1].sum()
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)


def test_samples_are_of_the_weights_that_were_saved(service: Any, adaptable: Path) -> None:
    client = trainer(service)
    before = client.save_weights_and_get_sampling_client().result()
    drawn = sample(before, num_samples=2, how={"seed": 7})
    again = sample(before, num_samples=2, how={"seed": 7})
    sequences = [each.tokens for each in drawn.sequences]
    assert sequences == [each.tokens for each in again.sequences] and sequences[0] != sequences[1]
    row = [*PROMPT, 50, 51, 52]
    for _ in range(40):
        client.forward_backward([supervised(row)] * 4, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
    after = client.save_weights_and_get_sampling_client().result()
    greedy = sample(after, how={"temperature": 0.0, "max_tokens": 3}).sequences[0]
    assert (greedy.tokens, greedy.stop_reason) == ([50, 51, 52], "length")
    scored = logprobs(client.forward([supervised(row)], "cross_entropy").result())[0]
    assert greedy.logprobs == pytest.approx(scored[-3:].tolist(), abs=1e-4)
    stopped = sample(after, how={"temperature": 0.0, "stop": [51]}).sequences[0]
    assert (stopped.tokens, stopped.stop_reason) == ([50, 51], "stop")
    assert [each.tokens for each in sample(before, num_samples=2, how={"seed": 7}).sequences] == (
        sequences
    )
    base = service.create_sampling_client(base_model="model")
    scores = base.compute_logprobs(tinker.ModelInput.from_ints(row)).result()
    assert scores[0] is None
    assert scores[1:] == pytest.approx(own_logprobs(adaptable, row).tolist(), abs=1e-4)
    likeliest = sample(base, include_prompt_logprobs=True, topk_prompt_logprobs=2)
    assert len(likeliest.topk_prompt_logprobs[1]) == 2


@pytest.mark.parametrize("alone", [False, True], ids=["side by side", "in turn"])
def test_more_samplers_than_engines(
    base: FrozenBase, tmp_path: Path, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that were closed are made again, and those that sleep, as on a GPU, wake up."""
    monkeypatch.setattr(base, "alone", alone)
    with serving(base, tmp_path) as address:
        client = trainer(tinker.ServiceClient(base_url=address, api_key=KEY))
        samplers = [client.save_weights_and_get_sampling_client().result() for _ in range(4)]
        drawn = [sample(each, how={"seed": 7}).sequences[0].tokens for each in samplers * 2]
        assert drawn == [drawn[0]] * 8


def test_a_state_outlives_the_server(base: FrozenBase, tmp_path: Path) -> None:
    """A client that was killed, and one of a server that was: both go on from what was saved."""
    data = [supervised([5, 6, 7, 8, 9])]
    adam = tinker.AdamParams(learning_rate=0.01)

    def train(client: Any, steps: int) -> None:
        for _ in range(steps):
            client.forward_backward(data, "cross_entropy")
            client.optim_step(adam).result()

    with serving(base, tmp_path) as address:
        service = tinker.ServiceClient(base_url=address, api_key=KEY)
        client = trainer(service)
        train(client, 2)
        path = client.save_state("two").result().path
        with pytest.raises(tinker.RequestFailedError, match="two"):
            client.save_state("two").result()
        train(client, 2)
        expected = weights(client, tmp_path, "four")
        client.load_state_with_optimizer(path).result()
        train(client, 2)
        assert all(expected[n].equal(w) for n, w in weights(client, tmp_path, "again").items())
    with serving(base, tmp_path) as address:
        service = tinker.ServiceClient(base_url=address, api_key=KEY)
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        train(resumed, 2)
        assert all(expected[n].equal(w) for n, w in weights(resumed, tmp_path, "four").items())
        fresh = service.create_training_client_from_state(path).result()
        train(fresh, 2)
        assert not all(expected[n].equal(w) for n, w in weights(fresh, tmp_path, "four").items())


def test_a_server_is_killed_and_back(adaptable: Path, tmp_path: Path) -> None:
    with command(adaptable, tmp_path) as (address, process):
        service = tinker.ServiceClient(base_url=address, api_key=KEY)
        client = service.create_lora_training_client(base_model="org/tiny", rank=4).result()
        path = client.save_state("one").result().path
        process.kill()
    with command(adaptable, tmp_path) as (address, process):
        service = tinker.ServiceClient(base_url=address, api_key=KEY)
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.forward([supervised([5, 6, 7])], "cross_entropy").result().metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


KILLED = """
import sys
import numpy as np
import tinker

service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
client = service.create_lora_training_client(base_model="model", rank=4, seed=3).result()
inputs = {"target_tokens": np.array([6, 7, 8]), "weights": np.ones(3, np.float32)}
tokens = tinker.ModelInput.from_ints([5, 6, 7])
data = [tinker.Datum(model_input=tokens, loss_fn_inputs=inputs)]

def step():
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()

step()
print(client.save_state("kept").result().path, flush=True)
while True:
    step()
"""


def test_a_client_is_killed_and_back(service: Any, address: str) -> None:
    """What it saved goes on as in a client that lives; what it trained after that is gone."""
    command = [sys.executable, "-c", KILLED, address, KEY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        time.sleep(0.5)
    finally:
        process.kill()
        process.wait()
    back = service.create_training_client_from_state_with_optimizer(path).result()
    lives = trainer(service)
    data = [supervised([5, 6, 7, 8])]
    adam = tinker.AdamParams(learning_rate=1e-2)
    for client, steps in ((lives, 2), (back, 1)):
        for _ in range(steps):
            client.forward_backward(data, "cross_entropy").result()
            client.optim_step(adam).result()
    (one,), (other,) = (logprobs(x.forward(data, "cross_entropy").result()) for x in (lives, back))
    assert one == pytest.approx(other, abs=1e-6)


def test_a_repeated_request_is_the_same_future(service: Any, address: str) -> None:
    """A client whose answer was lost sends again: nothing is trained twice."""
    client = trainer(service)
    model_id = client.model_id
    step = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.01}}

    def post(path: str, body: dict[str, Any], key: str = KEY) -> httpx.Response:
        headers = {"X-API-Key": key}
        return httpx.post(f"{address}/api/v1/{path}", json=body, headers=headers, timeout=60)

    other = post("optim_step", step, key="tml-other")
    assert (other.status_code, other.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert httpx.get(f"{address}/api/v1/healthz", headers={"Host": "x.org"}).status_code == 401
    named = {"Host": "x.org", "X-API-Key": KEY}  # a page whose name was rebound
    assert httpx.get(f"{address}/api/v1/healthz", headers=named).status_code == 421
    later = post("optim_step", {**step, "seq_id": 2}).json()["request_id"]  # before its turn
    first, again = (post("optim_step", step).json()["request_id"] for _ in range(2))
    assert first == again != later
    for name in (first, later, first):
        assert "metrics" in post("retrieve_future", {"request_id": name}).json()
    wrong = post("optim_step", {**step, "seq_id": 3, "adam_params": {"beta1": 2}})
    problem = post("retrieve_future", wrong.json()).json()
    assert problem["category"] == "user" and "adam_params.beta1" in problem["error"]
    after = post("optim_step", {**step, "seq_id": 4}).json()  # the wrong one took its turn
    assert "metrics" in post("retrieve_future", after).json()
    assert post("retrieve_future", {"request_id": "other"}).status_code == 410
    assert post("optim_step", {**step, "model_id": "other"}).status_code == 404


def test_what_is_not_served_is_said(service: Any) -> None:
    client = trainer(service)
    data = [supervised([5, 6, 7])]
    for wrong, match in (
        (lambda: client.forward_backward(data, "stable_reinforce"), "stable_reinforce"),
        (lambda: client.forward_backward(data, "ppo"), "advantages"),
        (lambda: client.forward_backward(data, "cross_entropy", {"beta": 1.0}), "beta"),
        (lambda: client.forward_backward([supervised([5, 6, 999])], "cross_entropy"), "target"),
        (lambda: client.load_state("tinker://no/weights/x"), "tinker://no"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=match):
            wrong().result()
    assert client.forward(data, "cross_entropy").result().metrics["loss:sum"] > 0
    for ask, match in (({"rank": 4000}, "wide"), ({"train_mlp": False, "train_attn": False}, "no")):
        with pytest.raises(tinker.RequestFailedError, match=match):
            service.create_lora_training_client(base_model="model", **ask).result()
    with pytest.raises(tinker.UnprocessableEntityError, match="another"):
        service.create_lora_training_client(base_model="another", rank=4).result()
