"""Rewards that need the run's tokenizer, its directory or a model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tunesmith.config.commands import SamplingConfig
from tunesmith.config.judges import JudgeReward
from tunesmith.config.schema import DataSection, ModelSection, RLConfig
from tunesmith.errors import ConfigError, about
from tunesmith.learn.data.chat import end_of_turn_id
from tunesmith.learn.data.chat_defaults import without_system_prompt
from tunesmith.learn.data.prompts import PromptEncoder, with_system
from tunesmith.learn.rewards.reward_set import RewardSet
from tunesmith.plan.plan import AnyPlan
from tunesmith.run.assembly.event_loop import run_async
from tunesmith.run.placement.port import Placement
from tunesmith.run.specs.base import Report
from tunesmith.run.specs.from_plan import scorer_spec
from tunesmith.types import Completion, Sampling, Tokenizer

if TYPE_CHECKING:
    from tunesmith.learn.rewards.judge_answers import AnswerFile, PolicyJudge, Written
    from tunesmith.learn.rewards.model import RewardModel

Generate = Callable[[Sequence[int], Sampling], Awaitable[Completion]]
"""An engine's ``generate``."""
QUESTION = 2048
"""Tokens of a question for which a judge that the run loads has room at least."""


def add_rewards(
    rewards: RewardSet,
    plan: AnyPlan,
    tokenizer: Tokenizer,
    report: Report,
    placement: Placement,
    folder: Path | None,
    engine: Generate | None,
) -> None:
    """Add the remote rewards, judges and reward models, unless they have already been added; let
    judges that are the policy ask ``engine`` from now on.

    Args:
        report: receives a sentence about the tokens that each model sees.
        placement: where the reward models score.
        folder: where the answers of judges are kept; None: only in memory.
        engine: generates with the policy, which may be a judge; None: there is no engine.

    Raises:
        ConfigError, ModelError: a reward model cannot be loaded.
    """
    config: RLConfig | SamplingConfig = plan.said
    rewards.policy = engine
    if config.reward is None or len(rewards.functions) == len(rewards.weights):
        return
    if config.reward.remote:
        from tunesmith.learn.rewards.remote import remote_reward

        decode = partial(tokenizer.decode, skip_special_tokens=False)
        for entry in config.reward.remote:
            rewards.add(remote_reward(entry, config.reward.answer, decode))
    if config.reward.judge:
        _add_judges(rewards, config, tokenizer, folder)
    if not config.reward.models:
        return
    from tunesmith.learn.rewards.model import model_reward, same_tokens

    for entry in config.reward.models:
        with about("reward.models"):
            model = placement.scorer(scorer_spec(plan, entry), report)
        exact = same_tokens(model.tokenizer, tokenizer)
        rewards.add(
            model_reward(
                entry.name,
                model,
                exact=exact,
                conversation=partial(with_system, config.data) if model.template else None,
                in_thread=placement.scores_elsewhere,
            )
        )
        report(f"reward model '{entry.name}' sees {_seen_by(model, exact)}")


@about("reward.judge")
def _add_judges(
    rewards: RewardSet, config: RLConfig | SamplingConfig, tokenizer: Tokenizer, folder: Path | None
) -> None:
    from tunesmith.learn.rewards.judge import judge_reward
    from tunesmith.learn.rewards.judge_answers import AnswerFile, PolicyJudge, ServedJudge

    assert config.reward is not None, "there are judges"
    kept = AnswerFile(folder)
    for entry in config.reward.judge:
        if entry.url is not None:
            rewards.add(judge_reward(entry, ServedJudge(entry, kept)))
        elif entry.path is not None:
            rewards.add(judge_reward(entry, _local_judge(entry, config.model, kept)))
        elif rewards.policy is None:
            raise ConfigError(
                f"reward.judge '{entry.name}': the policy cannot judge where nothing is sampled; "
                "give the url of a server or the path of a model",
                keys=("reward.judge",),
            )
        else:
            asked = without_system_prompt(tokenizer, config.data.chat_template_kwargs)
            write = partial(_written, asked, partial(_as_policy, rewards), entry)
            rewards.add(judge_reward(entry, PolicyJudge(entry, write)))


def _local_judge(entry: JudgeReward, model: ModelSection, kept: AnswerFile) -> PolicyJudge:
    """A model that this process loads, in the policy's type of numbers."""
    from tunesmith.learn.rewards.judge_answers import PolicyJudge
    from tunesmith.run.assembly.serve import open_model

    said = [f"sampling.max_new_tokens={entry.max_new_tokens}", "system.engine=local"]
    said += [f"system.kv_memory={entry.kv_memory}", f"system.max_running={entry.concurrency}"]
    said += [f"model.dtype={model.dtype}"] if model.dtype else []
    served = open_model(str(entry.path), said, QUESTION)
    engine = served.engine
    write = partial(_written, served.setting.renderer.tokenizer, engine.generate, entry)
    return PolicyJudge(entry, write, kept, lambda: run_async(engine.close()))


async def _as_policy(
    rewards: RewardSet, prompt_ids: Sequence[int], sampling: Sampling
) -> Completion:
    assert rewards.policy is not None, "the run samples"
    return await rewards.policy(prompt_ids, sampling)


async def _written(
    tokenizer: Tokenizer, generate: Generate, entry: JudgeReward, question: str, seed: int
) -> Written:
    """A model's answer to a judge's question."""
    from tunesmith.learn.rewards.judge_answers import Written

    prompt = PromptEncoder.of(DataSection(train="questions"), tokenizer, [question]).ids(question)
    end = end_of_turn_id(tokenizer)
    sampling = Sampling(
        entry.max_new_tokens,
        entry.temperature,
        stop_token_ids=() if end is None else (end,),
        seed=seed,
    )
    done = await generate(prompt, sampling)
    text = tokenizer.decode(done.token_ids, skip_special_tokens=True)
    cut_off = done.finish_reason == "length"
    return Written(text, len(prompt), len(done.token_ids), cut_off)


def _seen_by(model: RewardModel, exact: bool) -> str:
    sees = (
        "the rollouts' own tokens, since its tokenizer is the policy's"
        if exact
        else "prompt and answer tokenized again, since its tokenizer or chat template is not the "
        "policy's"
    )
    if model.stats is None:
        return sees
    return f"{sees}; normalised by mean {model.stats.mean:.4g} and std {model.stats.std:.4g}"
