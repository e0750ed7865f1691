"""A trained reward model as a reward: exact tokens, any batching, normalisation, mixing, and runs
with it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support import tiny
from tests.support.tiny_rewards import direct_scores, save_reward_model
from tests.support.tiny_runs import rl_settings, tensors, untimed
from tunesmith.config.load import load_config
from tunesmith.config.schema import ModelReward, RewardSection, RLConfig
from tunesmith.errors import ConfigError
from tunesmith.learn.data.chat import HERMES
from tunesmith.learn.rewards.batching import Batcher
from tunesmith.learn.rewards.function import ItemFailure, RewardFunction, required_columns
from tunesmith.learn.rewards.loading import check_rewards, load_rewards
from tunesmith.learn.rewards.model import RewardModel, model_reward, same_tokens
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.models.score_model import ScoreModel
from tunesmith.plan.facts.hardware import Gpu, Hardware
from tunesmith.plan.facts.model import count_parameters, read_model_facts
from tunesmith.plan.facts.run import Facts
from tunesmith.plan.resolve import resolve
from tunesmith.records.metrics import read_metrics
from tunesmith.run import assembly
from tunesmith.run.specs.scorers import ScorerSpec
from tunesmith.types import Completion, FinishReason, Rollout, Status, Task

SEQUENCES = [[5, 6, 7, 8, 9], [5, 6, 7, 11], [12, 13], [5, 6, 7, 8, 9], [40], list(range(20, 60))]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("policy"))


def load(
    path: Path,
    *,
    max_tokens: int = 64,
    chat: bool | None = None,
    offload: bool = False,
    **keys: Any,
) -> RewardModel:
    entry = ModelReward(path=str(path), **keys)
    return ScorerSpec(entry, "float32", "cpu", max_tokens, chat, offload=offload).build()


def rollout(
    prompt: Any, answer: str, ids: Sequence[int], *, finish: FinishReason = "stop", turns: int = 1
) -> Rollout:
    """The prompt's ids come first; the last of ``ids`` are what was sampled."""
    made = Rollout(Task("t", prompt, tuple(ids[:2])))
    made.observe(ids[:2])
    made.act(Completion(list(ids[2:]), [0.0] * len(ids[2:]), [0] * len(ids[2:]), finish))
    made.turns.extend(made.turns * (turns - 1))
    made.notes["text"] = answer
    return made


def scored(function: RewardFunction, *rollouts: Rollout) -> Sequence[Rollout]:
    rewards = RewardSet({function.name: 1.0}, 1.0)
    rewards.add(function)
    asyncio.run(rewards.score(rollouts, [r.notes["text"] for r in rollouts]))
    return rollouts


@pytest.mark.parametrize("max_tokens", [1, 7, 20, 1000])
def test_scores_are_those_of_transformers_one_at_a_time(path: Path, max_tokens: int) -> None:
    expected = direct_scores(path, SEQUENCES)
    assert load(path, max_tokens=max_tokens).score(SEQUENCES) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1 and expected[0] == expected[3]
    assert load(path).score([]) == []


def test_a_model_in_host_memory_scores_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ScoreModel] = []

    def load_into_memory(*args: Any, **options: Any) -> ScoreModel:
        made.append(read(*args, **options))
        for parameter in made[0].module.parameters():  # memory of a file cannot be given back
            parameter.data = parameter.data.clone()
        made[0].runner.bind()
        return made[0]

    expected = load(path).score(SEQUENCES)
    read = ScoreModel.load
    monkeypatch.setattr(ScoreModel, "load", load_into_memory)
    away = load(path, offload=True)
    for _ in range(2):
        assert sum(p.untyped_storage().nbytes() for p in made[0].module.parameters()) == 0
        assert away.score(SEQUENCES) == expected


def test_normalised_by_the_models_own_statistics(path: Path) -> None:
    raw = load(path).score(SEQUENCES)
    found = load(path, normalize=True).score(SEQUENCES)
    assert found == pytest.approx([(s - 0.25) / 2.0 for s in raw if isinstance(s, float)], abs=1e-6)


def test_what_does_not_fit_the_context_fails_alone(path: Path) -> None:
    long, none, fits = load(path).score([[7] * 513, [], [7] * 512])
    assert isinstance(fits, float)
    assert isinstance(long, ItemFailure) and "513 tokens; the model's context is 512" in long.reason
    assert isinstance(none, ItemFailure)


def test_a_whole_context_fits_a_model_with_learned_positions(tmp_path: Path) -> None:
    tiny.save_model(tmp_path / "base", "gpt2", max_position_embeddings=16)
    model = ScoreModel.load(tmp_path / "base")
    torch.nn.init.normal_(model.head.weight)
    model.save(tmp_path / "rm")
    sequences = [list(range(5, 21)), list(range(5, 20)), [7]]
    assert load(tmp_path / "rm").context == 16
    assert load(tmp_path / "rm").score(sequences) == pytest.approx(
        direct_scores(tmp_path / "rm", sequences), abs=1e-5
    )


def test_rollouts_are_scored_by_their_own_tokens(path: Path) -> None:
    """Whatever their text would be encoded to."""
    model = load(path)
    played = scored(
        model_reward("rm", model, exact=True),
        *(rollout("p", "unlike", ids) for ids in SEQUENCES[:2]),
    )
    assert [r.reward for r in played] == pytest.approx(direct_scores(path, SEQUENCES[:2]), abs=1e-5)


def test_text_is_encoded_as_the_policy_would_have_written_it(path: Path) -> None:
    tokenizer = tiny.tokenizer()
    chat = load(path)
    plain = load(path, chat=False)
    user = [{"role": "user", "content": "2+2?"}]
    text = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4"
    for prompt in (user, "2+2?"):
        assert tokenizer.decode(chat.encode(prompt, "4")) == text + "<|im_end|>"
        assert tokenizer.decode(chat.encode(prompt, "4", finished=False)) == text
    assert tokenizer.decode(plain.encode("2+2=", "4")) == "2+2=4<eos>"
    assert tokenizer.decode(plain.encode("2+2=", "4", finished=False)) == "2+2=4"
    truncated = rollout("2+2?", "4", [9, 9, 9], finish="length")
    finished = rollout("2+2?", "4", [9, 9, 9])
    scored(model_reward("rm", chat, exact=False), truncated, finished)
    expected = direct_scores(
        path, [chat.encode("2+2?", "4", finished=False), chat.encode("2+2?", "4")]
    )
    assert [truncated.reward, finished.reward] == pytest.approx(expected, abs=1e-5)


def test_a_tasks_tools_are_in_a_text_that_is_encoded_anew(path: Path, tmp_path: Path) -> None:
    """Where the model's template has a place for them."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    shutil.copytree(path, tmp_path / "hermes")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = HERMES.read_text(encoding="utf-8")
    tokenizer.save_pretrained(tmp_path / "hermes")
    for place, read in ((tmp_path / "hermes", True), (path, False)):
        model = load(place)
        seen = model.encode("2+2?", "4", tools=tools)
        assert (seen != model.encode("2+2?", "4")) == read
        asked = [rollout("2+2?", "4", [9, 9, 9]) for _ in range(2)]
        asked[1].task = replace(asked[1].task, tools=tools)
        scored(model_reward("rm", model, exact=False), *asked)
        expected = direct_scores(place, [model.encode("2+2?", "4"), seen])
        assert [one.reward for one in asked] == pytest.approx(expected, abs=1e-5)


def test_what_cannot_be_encoded_anew_is_a_failure(path: Path) -> None:
    several = rollout("p", "a", [1, 2, 3], turns=2)
    kept = rollout("p", "a", [1, 2, 3], turns=2)
    answer = {"role": "assistant", "content": "use the tool"}
    kept.messages = [
        answer,
        {"role": "user", "content": "it says 4"},
        {"role": "assistant", "content": "a"},
    ]
    chat = load(path)
    scored(model_reward("rm", chat, exact=False), kept)
    whole = chat.encode([{"role": "user", "content": "p"}, *kept.messages[:2]], "a")
    assert kept.reward == pytest.approx(direct_scores(path, [whole])[0], abs=1e-5)
    talk = rollout([{"role": "user", "content": "hi"}], "a", [1, 2, 3])
    fine = rollout("p", "a", [1, 2, 3])
    scored(model_reward("rm", load(path, chat=False), exact=False), several, talk, fine)
    assert fine.status is Status.OK
    assert several.status is talk.status is Status.REWARD_FAILED
    assert "several turns" in (several.error or "") and "no chat template" in (talk.error or "")


def test_a_score_that_is_not_finite_is_a_failure(path: Path) -> None:
    model = replace(load(path), score_ids=lambda sequences: [float("nan")] * len(sequences))
    (one,) = scored(model_reward("rm", model, exact=True), rollout("p", "a", [1, 2, 3]))
    assert one.status is Status.REWARD_FAILED and "nan" in (one.error or "")


def test_tokenizers_are_the_same_by_vocabulary_and_template() -> None:
    assert same_tokens(tiny.tokenizer(), tiny.tokenizer())
    assert not same_tokens(tiny.tokenizer(), tiny.tokenizer(chat_template=None))
    more = tiny.tokenizer()
    more.add_tokens(["<more>"])
    assert not same_tokens(tiny.tokenizer(), more)


def test_a_model_and_a_function_are_mixed_by_weight(path: Path) -> None:
    def brief(completions: list[str]) -> list[float]:
        return [1.0 / len(c) for c in completions]

    function = RewardFunction("brief", "rewards.py:brief", brief, required_columns(brief, "brief"))
    rewards = RewardSet({"brief": 2.0, "rm": -0.5}, 5.0)
    rewards.add(function)
    rewards.add(model_reward("rm", load(path), exact=True))
    one = rollout("p", "abcd", SEQUENCES[0])
    asyncio.run(rewards.score([one], ["abcd"]))
    rewards.close()
    (score,) = direct_scores(path, SEQUENCES[:1])
    assert one.reward == pytest.approx(2.0 * 0.25 - 0.5 * score, abs=1e-5)


@pytest.mark.parametrize(("in_thread", "batches"), [(False, [2, 2, 2]), (True, [6])])
def test_a_model_of_this_process_scores_each_group_by_itself(
    in_thread: bool, batches: list[int]
) -> None:
    """Which groups finish at the same time depends on timing, which must not reach a run that can
    be repeated."""
    seen: list[int] = []

    def ones(sequences: list[list[int]]) -> list[float]:
        seen.append(len(sequences))
        return [1.0] * len(sequences)

    rewards = RewardSet({"rm": 1.0}, 5.0)
    rewards.add(
        model_reward(
            "rm", RewardModel(ones, tiny.tokenizer(), None, None), exact=True, in_thread=in_thread
        )
    )

    async def together() -> None:
        groups = [[rollout("p", "a", ids) for ids in SEQUENCES[:2]] for _ in range(3)]
        await asyncio.gather(*(rewards.score(group, ["a", "a"]) for group in groups))

    asyncio.run(together())
    assert seen == batches


def test_the_batcher_joins_what_is_asked_for_together() -> None:
    seen: list[list[int]] = []

    async def run(items: list[int]) -> list[int]:
        seen.append(items)
        await asyncio.sleep(0)
        if 13 in items:
            raise ValueError("13")
        return [2 * i for i in items]

    async def ask() -> None:
        batcher: Batcher[int, int] = Batcher(run)
        assert await asyncio.gather(*(batcher.submit([i, i + 1]) for i in range(3))) == [
            [0, 2],
            [2, 4],
            [4, 6],
        ]
        assert await batcher.submit([]) == []
        gone = asyncio.create_task(batcher.submit([99]))
        stays = asyncio.create_task(batcher.submit([5]))
        await asyncio.sleep(0)
        gone.cancel()
        assert await stays == [10]
        both = await asyncio.gather(
            batcher.submit([13]), batcher.submit([1]), return_exceptions=True
        )
        assert [str(error) for error in both] == ["13", "13"]
        assert await batcher.submit([4]) == [8]

    asyncio.run(ask())
    assert seen == [[0, 1, 1, 2, 2, 3], [], [5], [13, 1], [4]]


def refused(path: Path, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_rewards(RewardSection(models=(ModelReward(path=str(path), **keys),)), Path.cwd())
    assert caught.value.keys == ("reward.models",)
    return str(caught.value)


def test_directories_that_hold_no_usable_reward_model_are_refused(
    tmp_path: Path, policy: Path
) -> None:
    assert "LlamaForCausalLM" in refused(policy)
    assert "3 labels" in refused(save_reward_model(tmp_path / "three", num_labels=3))
    assert "2 labels" in refused(save_reward_model(tmp_path / "two", num_labels=2))
    rm = save_reward_model(tmp_path / "rm")
    assert "reward_stats.json, which does not exist" in refused(rm, normalize=True)
    for text in ("{", "{}", '{"mean": 0, "std": 0}', '{"mean": NaN, "std": 1}'):
        (rm / "reward_stats.json").write_text(text)
        assert "reward_stats.json must hold" in refused(rm, normalize=True)
    ScoreModel.load(policy).save(tmp_path / "new")  # as training a reward model begins and saves
    check_rewards(RewardSection(models=(ModelReward(path=str(tmp_path / "new")),)), tmp_path)
    section = RewardSection(models=(ModelReward(path=str(rm), weight=0.5),))
    check_rewards(section, tmp_path)
    assert load_rewards(section, tmp_path).weights == {"reward_model": 0.5}


def model_settings(folder: Path, policy: Path, models: str, **changed: Any) -> list[str]:
    keys = {"train__steps": 2, "monitor__samples": 16, **changed}
    return [*rl_settings(folder, policy, **keys), f"reward.models={models}"]


@pytest.mark.more
def test_a_run_with_a_reward_model_and_a_function(
    tmp_path: Path,
    path: Path,
    policy: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model sees prompts and what was sampled, token by token; the same run twice is bitwise
    the same."""
    seen: dict[str, tuple[list[int], float]] = {}
    score = RewardModel.score

    def watched(self: RewardModel, sequences: list[list[int]]) -> list[Any]:
        scores = score(self, sequences)
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in sequences]
        seen.update(
            {
                t: (ids, s)
                for t, ids, s in zip(texts, sequences, scores, strict=True)
                if isinstance(s, float)
            }
        )
        return scores

    monkeypatch.setattr(RewardModel, "score", watched)
    models = f'[{{path = "{path}", weight = 0.5, normalize = true}}]'
    runs = [
        assembly.run_rl(None, model_settings(tmp_path, policy, models, run=name))
        for name in ("a", "b")
    ]
    told = capsys.readouterr().out
    assert "'reward_model' sees the rollouts' own tokens" in told and "mean 0.25 and std 2" in told
    lines = [read_metrics(run.run_dir / "metrics.jsonl") for run in runs]
    for line in lines[0]:
        parts = line["reward/share/mean"] + 0.5 * line["reward/reward_model/mean"]
        assert line["reward"] == pytest.approx(parts)
    assert untimed(runs[0].run_dir / "metrics.jsonl") == untimed(runs[1].run_dir / "metrics.jsonl")
    a, b = (tensors(run.checkpoint) for run in runs)
    assert a.keys() == b.keys() and all(t.equal(b[name]) for name, t in a.items())
    samples = [
        json.loads(line) for line in (runs[0].run_dir / "rollouts.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 2 * 8 * len(lines[0]), "two groups of eight in each step"
    for sample in samples:
        ids, normalised = seen[sample["prompt"] + sample["completion"]]
        assert ids[: len(sample["prompt"])] == tiny.tokenizer()(sample["prompt"])["input_ids"]
        assert len(ids) == len(sample["prompt"]) + sample["tokens"]
        assert sample["rewards"]["reward_model"] == normalised
        assert normalised == pytest.approx((direct_scores(path, [ids])[0] - 0.25) / 2, abs=1e-5)
        assert sample["reward"] == pytest.approx(sample["rewards"]["share"] + 0.5 * normalised)


def test_a_run_with_another_tokenizer_encodes_anew(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny.tokenizer(chat_template=None)
    other.add_tokens(["<more>"])
    rm = save_reward_model(tmp_path / "other", tokens=other)
    models = f'[{{path = "{rm}", name = "judge"}}]'
    outcome = assembly.run_rl(
        None, model_settings(tmp_path, policy, models, reward__functions=None)
    )
    assert "'judge' sees prompt and answer tokenized again" in capsys.readouterr().out
    for line in read_metrics(outcome.run_dir / "metrics.jsonl"):
        assert (
            line["rollouts/failed"] == 0
            and line["reward/judge/applied"] == 1
            and line["reward/judge/std"] > 0
        )


def test_a_reward_models_weights_leave_less_for_the_sampler(
    tmp_path: Path, path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As much as this small GPU has.
    monkeypatch.setattr("tunesmith.plan.cost.memory.LIBRARIES", 0)
    gpu = Gpu("a GPU", 10**9, 10**9, (9, 0))
    machine = Hardware(
        "a CPU", cores=4, memory_total=10**10, memory_available=10**10, bf16=True, gpus=(gpu,)
    )
    settings = model_settings(
        tmp_path, policy, f'[{{path = "{path}"}}]', rollout__max_new_tokens=400
    )
    config = load_config(RLConfig, None, settings)
    room: list[int] = []
    for parameters in (0, 200_000_000):
        facts = Facts(
            machine,
            read_model_facts(policy),
            train_size=12,
            longest=8,
            frozen_parameters=parameters,
        )
        room.append(resolve(config, facts).settings["system.max_tokens_per_microbatch"] or 0)
    assert room[0] > room[1] > 0
    assert count_parameters(path) == sum(
        p.numel() for p in AutoModelForSequenceClassification.from_pretrained(path).parameters()
    )


def test_dynamic_filtering_by_an_unbounded_score_is_refused(
    tmp_path: Path, path: Path, policy: Path
) -> None:
    settings = model_settings(
        tmp_path, policy, f'[{{path = "{path}"}}]', algorithm__dynamic_filter=True
    )
    with pytest.raises(ConfigError, match="every group would be kept"):
        assembly.run_rl(None, settings)
