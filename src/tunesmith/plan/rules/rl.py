"""Rules about reinforcement learning and distillation: environments, rollouts, the algorithm and
the critic."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.commands import DistillConfig, OfflineDistillConfig
from tunesmith.config.judges import POLICY
from tunesmith.config.reading.packages import PACKAGES, package_name
from tunesmith.config.sandboxes import LocalSandbox
from tunesmith.config.schema import EnvironmentSection, RLConfig, RunConfig
from tunesmith.errors import Problem
from tunesmith.plan.rules.rule import rule, unread
from tunesmith.plan.rules.situation import Situation, at_least, more

# A rule is a condition and a sentence: with an argument on each line there would be twice as many.
# fmt: off


@rule(RunConfig)
def teacher(s: Situation[RunConfig]) -> Iterator[Problem]:
    config = s.config
    if not isinstance(config, DistillConfig | OfflineDistillConfig):
        return
    if config.distill.alpha == 0:
        yield s.clash("distill.alpha", "ignores the teacher; use tunesmith sft, or a value above 0")
    section = config.teacher
    here = section.url is None
    several = set(section.by_name())
    models = set(section.model) if isinstance(section.model, dict) else several
    if not here and models != several:
        yield s.clash("teacher.model",
            "names other teachers than teacher.url; have both the same names", "teacher.url")
    if several and config.distill.mode == "offline":
        yield s.clash("teacher.url",
            "names several teachers, which tasks choose by a column, and here answers are given; "
            "name one", "distill.mode")
    if here and config.distill.mode == "sampled" and section.prompt:
        yield s.clash("distill.mode",
            "compares whole distributions in one pass, and with teacher.prompt the teacher's is "
            "another; use 'on_policy', or a teacher.url", "teacher.prompt")
    if section.path != POLICY:
        return
    if not here:
        yield s.clash("teacher.path",
            "is the policy, and teacher.url a server's; leave url out, or name the tokenizer of "
            "the server's model", "teacher.url")
    elif config.distill.mode != "on_policy":
        yield s.clash("distill.mode",
            "needs a frozen teacher, and teacher.path = 'policy' changes; use 'on_policy', or the "
            "path of a model", "teacher.path")
    elif section.prompt is None:
        yield s.clash("teacher.path",
            "is the policy, which agrees with itself: name a data column with another prompt in "
            "teacher.prompt")


@rule(DistillConfig)
def served_teacher(s: Situation[DistillConfig]) -> Iterator[Problem]:
    config = s.config
    if config.teacher.url is None:
        return
    if config.rollout.temperature != 1:
        yield s.clash("rollout.temperature",
            "changes the student's probabilities, and a server's are those at 1.0; leave it or "
            "teacher.url out", "teacher.url")


@rule(DistillConfig)
def distillation(s: Situation[DistillConfig]) -> Iterator[Problem]:
    config = s.config
    if config.data.eval is not None and not s.rewarded and not config.environment.pays:
        yield Problem(("data.eval",),
            "data.eval without [reward]: answers would be sampled and nothing measured; add a "
            "reward or leave data.eval out")
    if config.distill.mode == "on_policy" and s.needs("teacher") is False:
        why = "does not use the teacher; leave [algorithm] out"
        yield s.clash("algorithm.advantage", why, "algorithm.name")
    if config.distill.mode == "on_policy" and s.needs("teacher") and s.kl_in_reward != "k1":
        yield Problem(("algorithm.kl",),
            "distillation learns from the KL to the teacher in the reward, estimated by k1; leave "
            "algorithm.kl out")


@rule(RLConfig)
def kl(s: Situation[RLConfig]) -> Iterator[Problem]:
    kl = s.algorithm and s.algorithm.reference
    key = "algorithm.kl.reference_every"
    if kl is None:
        return
    if more(kl.reference_every, s.steps):
        yield s.clash(key,
            f"is longer than the run of {s.steps} steps, so the reference would never be replaced; "
            "leave it out",
            "train.steps")
    if kl.reference_every is not None and s.needs("teacher"):
        yield s.clash(key, "would copy the policy over its teacher; leave it out")
    if kl.reference_every is not None and s.config.lora.on:
        yield s.clash(key,
            "copies the policy into a second model, and with [lora] the reference is the policy "
            "without its adapter; leave it out", "lora.rank", "lora.path")
    if kl.target is not None and s.needs("teacher"):
        yield s.clash("algorithm.kl.target",
            "would adapt the weight of the teacher's KL, which is all that distillation learns "
            "from; leave it out")


@rule(RLConfig)
def what_the_advantage_needs(s: Situation[RLConfig]) -> Iterator[Problem]:
    key = "algorithm.advantage"
    name = "algorithm.name"
    if s.needs("teacher") and not isinstance(s.config, DistillConfig):
        why = "learns from a teacher: train with tunesmith distill, and set teacher.path"
        yield s.clash(key, why, name)
    if s.needs("reward_weights") and not s.rewarded:
        yield s.clash(key,
            "standardises each reward separately, and the environment's is the only one; add "
            "[reward] functions, or use algorithm.name = 'grpo'", name)
    if s.needs("group") and s.config.rollout.group_size == 1:
        yield s.clash(key,
            "compares the rollouts of a prompt with each other, and rollout.group_size = 1 leaves "
            "nothing to compare; use 4 or more, or algorithm.name = 'reinforce'",
            "rollout.group_size", name)


@rule(RLConfig)
def steps_of_the_critic(s: Situation[RLConfig]) -> Iterator[Problem]:
    critic = s.config.critic
    if at_least(critic.freeze_actor_steps, s.steps):
        yield s.clash("critic.freeze_actor_steps",
            f"freezes the policy for all {s.steps} steps of the run; lower it", "train.steps")
    if more(critic.warmup_steps, s.critic_steps):
        yield s.clash("critic.warmup_steps",
            f"is longer than the critic's {s.critic_steps} optimizer steps; lower it",
            "train.steps")


@rule(RLConfig)
def environment(s: Situation[RLConfig]) -> Iterator[Problem]:
    section = s.config.environment
    key = "environment.max_tokens"
    if section.path == {}:
        why = "is empty: set path = 'env.py:Game', or a table of name = 'file.py:name'"
        yield Problem(("environment.path",), f"environment.path {why}")
    if more(s.lengths.episode, s.context):
        yield s.clash(key, f"is longer than the model's context of {s.context}; lower it")
    if at_least(s.longest, s.lengths.episode):
        yield s.clash(key, f"leaves no room after the longest prompt of {s.longest} tokens")


@rule(RunConfig)
def isolation(s: Situation[RunConfig]) -> Iterator[Problem]:
    reference = s.facts and s.facts.instances_for
    for name in ("reward", "environment"):
        section = getattr(s.config, name, None)
        if reference and getattr(section, "isolation", None) == "process":
            yield s.clash(f"{name}.isolation",
                f"does not go with {reference}, which takes `environments`: those instances cannot "
                f"leave the process of the run; leave {name}.isolation out", "reward.functions")


@rule(RLConfig)
def rollouts(s: Situation[RLConfig]) -> Iterator[Problem]:
    rollout = s.config.rollout
    key = "rollout.max_staleness"
    if rollout.temperature == 0:
        yield s.clash("rollout.temperature",
            "is greedy: all rollouts of a prompt would be equal, and nothing could be learned from "
            "them; use 1.0 or a little less")
    if rollout.max_staleness and rollout.oversample > 1:
        yield Problem(("rollout.oversample", key),
            "rollout.oversample is for steps that play their own rollouts; with "
            "rollout.max_staleness prompts are played ahead of time anyway. Leave it out, or set "
            "rollout.over_generation")
    if not rollout.max_staleness or s.weights_apart is not False:
        return
    if not rollout.partial:
        yield s.clash(key,
            "with an engine that uses the trainer's own weights interrupts completions while the "
            "policy trains, and they go on with the new policy: set rollout.partial = true and "
            "rollout.over_generation above 1 for that, or system.engine_process = true for an "
            "engine with its own weights", "rollout.partial", "system.engine_process")
    elif rollout.over_generation == 1:
        yield s.clash(key,
            "with an engine that uses the trainer's own weights gains nothing with "
            "rollout.over_generation = 1: use more, such as 1.5, or system.engine_process = true",
            "rollout.over_generation", "system.engine_process")


@rule(RLConfig)
def overlong(s: Situation[RLConfig]) -> Iterator[Problem]:
    ramp = (s.algorithm or s.config.algorithm).overlong
    if ramp and more(ramp.buffer, s.config.rollout.max_new_tokens):
        key = "rollout.max_new_tokens"
        yield s.clash("algorithm.overlong.buffer",
            f"is longer than {s.said(key)}, so every answer would be penalised; lower it", key)


@rule(RLConfig)
def dynamic_filter(s: Situation[RLConfig]) -> Iterator[Problem]:
    algorithm = s.algorithm
    config = s.config
    key = "algorithm.dynamic_filter"
    bounds = (algorithm or config.algorithm).dynamic_filter
    if not bounds:
        if config.rollout.oversample > 1:
            yield s.clash("rollout.oversample",
                f"tries more prompts than are wanted because some are filtered out, and {key} is "
                "off; leave it out",
                key)
        return
    if not config.environment.pays and not _tells_solved(config):
        yield Problem((key, "reward.weights"),
            f"{key} keeps prompts that are solved sometimes, and no reward with a weight above 0 "
            f"tells when one is solved: no prompt would be kept. Add such a reward, or set {key} = "
            "false")
    if s.scored_by_model and bounds.low is None and bounds.high is None:
        yield Problem((key, "reward.models"),
            f"{key} replaces groups of equal scores, and a reward model never gives two answers "
            f"the same score: every group would be kept. Set {key}.low and high, or {key} = false")
    if config.rollout.group_size == 1:
        yield Problem((key, "rollout.group_size"),
            f"{key} keeps groups whose rollouts differ, and with rollout.group_size = 1 none can: "
            f"no prompt would be kept. Use 4 or more, or set {key} = false")


def _tells_solved(config: RLConfig) -> bool:
    """Whether any reward has a weight above 0."""
    reward = config.reward
    weights = reward.weights or (1.0,) * len(reward.functions)
    apart = [entry.weight for entry in reward.named]
    return any(weight > 0 for weight in (*weights, *apart))


@rule(RunConfig)
def sandbox(s: Situation[RunConfig]) -> Iterator[Problem]:
    environment = getattr(s.config, "environment", None)
    chosen = environment and environment.sandbox
    key = "environment.sandbox"
    if environment is None or chosen is None:
        return
    functions = s.reward.functions if s.reward else ()
    own = chosen.for_python and any(":" in reference for reference in functions)
    used = isinstance(environment, EnvironmentSection) and environment.used
    if not used and not own and "code_tests" not in functions:
        yield s.clash(key,
            "is for tools, environments, your own reward functions (with 'process') and "
            "code_tests, and there are none; leave it out")
    for name, section in (("environment", environment), ("reward", s.reward)):
        if getattr(section, "isolation", None) == "thread" and chosen.for_python:
            yield Problem((key, f"{name}.isolation"),
                f"{key} confines processes, and {name}.isolation = 'thread' runs your code in "
                "the run's own; leave one of them out")


@rule(RLConfig)
def sandbox_of_episodes(s: Situation[RLConfig]) -> Iterator[Problem]:
    environment = s.config.environment
    chosen = environment.sandbox
    key = "environment.sandbox"
    if chosen is None:
        return
    if environment.command is not None:
        if not isinstance(chosen, LocalSandbox):
            yield s.clash(key,
                "keeps nothing from one program to the next, and environment.command is followed "
                "by environment.verify; use 'process', 'bubblewrap' or 'docker'",
                "environment.command")
    elif environment.used and not chosen.for_python:
        yield Problem((key,),
            f"{key} = '{chosen.name}' runs programs, and tools and environments are Python objects "
            "of this machine; use 'process'")


@rule(RLConfig)
def command(s: Situation[RLConfig]) -> Iterator[Problem]:
    config = s.config
    environment = config.environment
    key = "environment.command"
    if environment.command is None:
        return
    path = environment.path
    references = path.values() if isinstance(path, dict) else [path] if path else []
    named = list(map(package_name, references))
    brings_tasks = all(each and PACKAGES[each.package].names_directories for each in named)
    for other, there in (("path", not brings_tasks), ("tools", environment.tools)):
        if there:
            yield s.clash(key,
                f"plays every task by itself; leave it out, or environment.{other}",
                f"environment.{other}")
    for other in ("folder", "verify"):
        if named and brings_tasks and getattr(environment, other):
            yield s.clash(f"environment.{other}",
                "is for tasks of your own, and those of a directory bring theirs; leave it out",
                "environment.path")
    if not environment.pays and not s.rewarded and config.command != "distill":
        yield Problem((key, "environment.verify"),
            f"{key} plays, and nothing gives a reward: set environment.verify, or [reward]")


@rule(RLConfig)
def judges_of_a_run(s: Situation[RLConfig]) -> Iterator[Problem]:
    loaded = [entry for entry in s.config.reward.judge if entry.path is not None]
    if loaded and s.config.system.cluster == "ray":
        yield Problem(("reward.judge", "system.cluster"),
            f"reward.judge '{loaded[0].name}' has a path, and the process that would load it has "
            "no GPU on Ray. Start `tunesmith serve` with it and give its url")


@rule(RLConfig)
def compared_in_pairs(s: Situation[RLConfig]) -> Iterator[Problem]:
    config = s.config
    reward = config.reward
    pairs = [entry for entry in reward.judge if entry.compare == "pairs"]
    if not pairs:
        return
    if config.rollout.group_size == 1:
        yield Problem(("reward.judge", "rollout.group_size"),
            "reward.judge compares the answers of a group, and with rollout.group_size = 1 there "
            "is nothing to compare; use 4 or more, or compare = 'scale'")
    if s.needs("greedy_rollout"):
        yield Problem(("reward.judge", "algorithm.advantage"),
            "reward.judge compares the answers of a group, and the greedy answer that remax "
            "compares a group with is alone: its reward would lack the judge's. Use compare = "
            "'scale', or an algorithm.advantage that compares the group, such as rloo")
    alone = len(pairs) == len(reward.functions) + len(reward.named)
    if alone and config.data.eval is not None and not config.environment.used:
        yield Problem(("reward.judge", "data.eval"),
            "reward.judge compares the answers of a group, and an evaluation has one greedy answer "
            "to each prompt, which would have no reward. Add another reward (weight 0 will do), or "
            "leave data.eval out")


unread(RLConfig, "critic.", lambda s: s.needs("critic") is False,
       "without a critic: set algorithm.name = 'ppo' or 'vapo', or an algorithm.advantage that "
       "needs one ('gae', 'vapo'), or leave [critic] out")
unread(RLConfig, "critic.", lambda s: s.needs("critic") and s.config.critic.shared_trunk,
       "with critic.shared_trunk: the critic is a head on the policy and is trained in the "
       "policy's own optimizer steps; leave one of the two out",
       but="critic.shared_trunk critic.value_coef critic.lr")
unread(RLConfig, "critic.value_coef",
       lambda s: s.needs("critic") and not s.config.critic.shared_trunk,
       "on a critic with its own model: it weighs the value loss on a shared trunk; leave it out, "
       "or set critic.shared_trunk = true")
unread(RLConfig, "critic.min_lr_ratio",
       lambda s: s.needs("critic") and s.config.critic.schedule == "constant",
       "on the constant schedule; leave it out, or change critic.schedule", harmless=(0.0,))
for kind in (DistillConfig, OfflineDistillConfig):
    unread(kind, "teacher.model teacher.token_env teacher.concurrency teacher.deadline",
           lambda s: s.config.teacher.url is None,
           "without teacher.url, where the trainer has the teacher; leave it out")
    unread(kind, "teacher.column", lambda s: not s.config.teacher.by_name(),
           "with one teacher, which scores every sample; leave it out")
unread(OfflineDistillConfig, "teacher.prompt", lambda _: True,
       "on given answers, which follow their own prompts; leave it out")
unread(DistillConfig, "distill.alpha", lambda s: s.config.distill.mode != "offline",
       "with mode = {distill.mode}, where no answers are given; leave it out")
unread(DistillConfig, "distill.top_k", lambda s: s.config.distill.mode == "on_policy",
       "with mode = 'on_policy', which compares the sampled tokens; leave it out")
unread(DistillConfig, "algorithm.", lambda s: s.config.distill.mode == "sampled",
       "with mode = 'sampled', which has its own objective; leave it out",
       but="algorithm.aggregation")
unread(RLConfig, "environment.", lambda s: not s.config.environment.used,
       "without an environment: set environment.path, environment.command or environment.tools",
       but="environment.sandbox environment.sandbox.")
unread(RLConfig, "environment.folder environment.setup environment.verify",
       lambda s: s.config.environment.command is None,
       "without environment.command, a program whose directory these prepare and judge; leave it "
       "out")
unread(RLConfig, "environment.host environment.isolation environment.memory environment.bad_call",
       lambda s: s.config.environment.command is not None,
       "with environment.command, which runs in environment.sandbox; leave it out")
unread(RLConfig, "environment.column", lambda s: not isinstance(s.config.environment.path, dict),
       "with one environment, which plays every task; leave it out")
unread(RLConfig, "rollout.partial rollout.over_generation rollout.queue_size",
       lambda s: s.config.rollout.max_staleness == 0,
       "with rollout.max_staleness = 0, where every step plays its own rollouts to the end; set "
       "rollout.max_staleness = 1, or leave it out", harmless=(False, 1.0))
unread(RunConfig, "system.critic_max_tokens", lambda s: s.kind and not s.kind.critic,
       "without a critic that has its own model; leave it out")
unread(RunConfig, "system.reward_max_tokens", lambda s: not (s.reward and s.reward.models),
       "without reward.models; leave it out")
