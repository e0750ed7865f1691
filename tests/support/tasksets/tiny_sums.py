"""A taskset of ``verifiers``: sums, asked once or with one question after the answer."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["SumsEnv", "SumsTaskset"]


class SumsConfig(vf.TasksetConfig):
    count: int = 3
    split: str = "train"
    turns: int = 1
    breaks: bool = False


class SumsData(vf.TaskData):
    answer: str
    turns: int = 1
    breaks: bool = False


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task: SumsData, trace: vf.Trace) -> float:
        return float(task.answer in trace.last_reply)

    @vf.metric
    async def size(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        start = 100 if self.config.split == "test" else 0
        for n in range(start, start + self.config.count):
            data = SumsData(
                prompt=f"{n}+{n}?",
                answer=str(2 * n),
                turns=self.config.turns,
                breaks=self.config.breaks,
            )
            yield SumsTask(data, self.config.task)


class SumsEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class SumsEnv(vf.Env[SumsEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            for _ in range(task.data.turns - 1):
                await interaction.turn("Are you sure?")
        if task.data.breaks:
            raise RuntimeError("the environment broke")
