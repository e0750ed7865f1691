"""A whole reinforcement-learning loop from Tunesmith's public parts, to start research from.

    python examples/rl_loop.py MODEL [STEPS]

MODEL is a directory or a hub name. The task is a toy: the reward is the share of a completion's
tokens that are one chosen token, which every model can learn. Change the reward, the loss or the
advantages here; ``tunesmith rl`` runs the same parts with evaluation, checkpoints, environments and
several devices.

Shape legend: ``G`` rollouts of a group, ``N`` tokens that the policy wrote, over the whole batch.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tunesmith import (
    GRPO,
    AdamWSettings,
    CausalLM,
    Learner,
    LocalEngine,
    Loss,
    Outcome,
    PolicyBatch,
    PolicyObjective,
    Rollout,
    Sampling,
    Task,
    TokenLoss,
    TorchBackend,
    compute_advantages,
    rollout_batch,
)

PROMPTS_PER_STEP = 4
GROUP_SIZE = 8
NEW_TOKENS = 8
LEARNING_RATE = 1e-2


class ClippedSurrogate(Loss):
    """PPO's loss, ``max(−ρA, −clip(ρ, 1 − ε, 1 + ε)A)`` (arXiv:1707.06347), written out to be
    changed."""

    name = "clipped_surrogate"
    epsilon: float = 0.2

    def __call__(self, batch: PolicyBatch) -> TokenLoss:
        """The loss of every token ``[N]`` of a micro-batch."""
        ratio = batch.log_ratio.exp()
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon)
        return TokenLoss((-ratio * batch.advantages).maximum(-clipped * batch.advantages))


@dataclass
class Loop:
    """A policy, the engine that samples from it, and the learner that improves it."""

    model: CausalLM
    target: int
    """The token that earns a reward."""
    rewards: list[float] = field(default_factory=list[float])
    """The mean reward of each step."""

    def __post_init__(self) -> None:
        backend = TorchBackend(self.model, AdamWSettings(), CausalLM.predict)
        self.engine = LocalEngine(
            self.model, kv_bytes=1 << 26, max_running=64, max_prefill_tokens=1024
        )
        self.learner = Learner(
            backend,
            aggregation="token_mean",
            max_new_tokens=NEW_TOKENS,
            learning_rate=lambda step: LEARNING_RATE,  # noqa: ARG005
            max_tokens=2048,
        )

    async def step(self, number: int, tasks: Sequence[Task]) -> dict[str, float]:
        """Sample with the newest weights, reward, compare with the group, learn."""
        await self.engine.load_weights(number)
        groups = await asyncio.gather(
            *(self.play(t, number * len(tasks) + i) for i, t in enumerate(tasks))
        )
        played = [
            (r, g)
            for g, rollouts in enumerate(groups)
            for r in rollouts
            if r.num_sampled and r.reward is not None
        ]
        batch = rollout_batch(played)
        rewards = np.array([r.reward for r, _ in played], np.float64)
        outcomes = [
            Outcome(g, float(x), r.num_sampled) for (r, g), x in zip(played, rewards, strict=True)
        ]
        batch.add(
            "advantages", np.concatenate(compute_advantages(GRPO(), outcomes).advantages)
        )  # [N]
        self.rewards.append(float(rewards.mean()))
        return self.learner.update(
            batch, PolicyObjective(ClippedSurrogate()), passes=2, seed=number
        )

    async def play(self, task: Task, number: int) -> list[Rollout]:
        """``[G]`` rewarded rollouts of a task; no group of another ``number`` has its seeds."""
        samplings = [
            Sampling(NEW_TOKENS, ignore_eos=True, seed=GROUP_SIZE * number + i)
            for i in range(GROUP_SIZE)
        ]
        completions = await asyncio.gather(
            *(self.engine.generate(task.prompt_ids, s) for s in samplings)
        )
        rollouts: list[Rollout] = []
        for completion in completions:
            rollout = Rollout(task, reward=completion.token_ids.count(self.target) / NEW_TOKENS)
            rollout.observe(task.prompt_ids)
            rollout.act(completion)
            rollouts.append(rollout)
        return rollouts


async def train(model: CausalLM, steps: int, target: int = 7) -> Loop:
    """Take ``steps`` steps on a few fixed prompts."""
    prompts = [
        tuple(model.tokenizer(text)["input_ids"]) for text in ("1+1=", "2+3=", "4+4=", "5+2=")
    ]
    tasks = [Task(str(i), "", prompt) for i, prompt in enumerate(prompts[:PROMPTS_PER_STEP])]
    loop = Loop(model, target)
    for number in range(steps):
        metrics = await loop.step(number, tasks)
        print(
            f"step {number + 1}  reward {loop.rewards[-1]:.3f}  loss {metrics['loss']:.4f}",
            flush=True,
        )
    await loop.engine.close()
    return loop


if __name__ == "__main__":
    asyncio.run(train(CausalLM.load(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20))
