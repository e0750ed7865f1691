"""Settings of runs of each command, and models of known and unknown size, to be planned."""

from __future__ import annotations

SIZED = "meta-llama/Llama-3.1-8B-Instruct"
UNKNOWN = "org/gated"
JUDGE = "Skywork/Skywork-Reward-Llama-3.1-8B"
RL = ['reward.functions=["math"]', "algorithm.name=grpo"]
PPO = [*RL, "algorithm.name=ppo", "algorithm.kl.coef=0.01", f'reward.models=[{{path="{JUDGE}"}}]']
TEACHER = f"teacher.path={SIZED}"
RUNS: dict[str, list[list[str]]] = {
    "sft": [[], ["lora.rank=16"]],
    "rm": [["rm.loss=sigmoid"]],
    "prm": [["prm.good=+"]],
    "dpo": [["dpo.beta=0.1"], ["dpo.beta=0.1", "lora.rank=16"]],
    "kto": [["kto.beta=0.1"]],
    "generate": [["output.kind=completions"]],
    "rft": [["rft.threshold=1", RL[0]]],
    "rl": [RL, PPO, [*RL, "lora.rank=16"], [*RL, "rollout.max_staleness=1"]],
    "distill": [[TEACHER], [TEACHER, "distill.mode=sampled"], [TEACHER, "distill.mode=offline"]],
}
