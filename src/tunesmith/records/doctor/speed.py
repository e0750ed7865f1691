"""Where the time goes. Only what costs a minute in all counts: of a shorter run nobody gets
anything back."""

from __future__ import annotations

from collections.abc import Set
from statistics import median

from tunesmith.records.doctor.columns import Figure, ratio
from tunesmith.records.doctor.rules import Change, Evidence, Rules, explains
from tunesmith.records.doctor.signs import Signs, ahead, at_least, times

RULES = Rules[Signs]()
LEAST_SECONDS = 60
BUSY = 0.25
"""The share of the cores that other programs take, and of the run's time in which they do, from
which it is reported."""
LEAST_COMPARED = 3
"""Steps with other programs, and without, before their times are compared."""


def _share(run: Signs, phase: str) -> Figure:
    """A phase's share of the time; 0 if the run is too short for it to matter."""
    seconds = run[f"seconds/{phase}"].sum
    counts = run.steps >= 3 and seconds > LEAST_SECONDS
    return ratio(seconds, run["seconds"].sum) if counts else Figure(0)


@RULES.add("note")
def far_from_limit(run: Signs) -> Evidence:
    """The GPU waits: for rewards, environments or engines, for few or short samples in each step,
    or for kernel launches of a small model.

    More prompts or a larger batch in each step use the GPU better; seconds/<phase> says which phase
    takes the time, and tunesmith tune measures faster settings.
    """
    share = run["limit_share"].mean
    if run.steps >= 3 and share < 0.1 and run["seconds"].sum > LEAST_SECONDS and run.on_gpu:
        yield f"the steps attain {share:.0%} of what the hardware can do with the same work"


@RULES.add(
    "note", "rollout.max_staleness = 1", "rollout.partial = true", "rollout.over_generation = 1.25"
)
def stragglers(run: Signs) -> Evidence:
    """A few long completions hold up the step.

    The next step's rollouts fill the gap, or the slowest groups are left out.
    """
    share = _share(run, "rollout")
    longest = ratio(run["completion_tokens_max"].mean, run["completion_tokens"].mean)
    if share > 0.5 and longest > 4 and run.number("rollout.max_staleness") <= 0:
        length = f"the longest completion is {longest:.1f} times the mean"
        yield f"{share:.0%} of the time is rollouts, and {length}"


def _waits(run: Signs, name: str, things: str) -> Evidence:
    share = run[f"waiting/{name}"].mean
    seconds = run.waited(name)
    if run.steps >= 3 and share > 0.2 and seconds > LEAST_SECONDS:
        yield f"in {share:.0%} of the time, {seconds:.0f} s, engines and trainer wait for {things}"


@RULES.add("warning", ahead, 'reward.isolation = "process"')
@explains("stragglers trainer_waits")
def slow_reward(run: Signs) -> Evidence:
    """The reward is on the critical path.

    Rewards are computed while the next step samples, or on several cores; or make it async.
    """
    yield from _waits(run, "reward", "rewards")


@RULES.add("warning", ahead)
@explains("stragglers trainer_waits")
def slow_environment(run: Signs) -> Evidence:
    """They are on the critical path.

    The next step's episodes are played meanwhile; make the environment's methods async.
    """
    yield from _waits(run, "environment", "tools and environments")


@RULES.add("note", ahead, "system.hybrid = true")
def engines_idle(run: Signs) -> Evidence:
    """The trainer is the bottleneck, and engines have their own devices.

    Sampling overlaps with training; or both share the devices in turn.
    """
    share = _share(run, "train")
    idle = run["idle/engine"].mean
    if share > 0.6 and idle > 0.6 and run.settings.get("system.engine_process") is True:
        yield f"{share:.0%} of the time is training, and engines are idle {idle:.0%} of all time"


@RULES.add("note", 'system.engine = "vllm"')
def trainer_waits(run: Signs) -> Evidence:
    """Sampling is the bottleneck.

    An engine made for GPUs; more engines on other GPUs, or rollout.max_staleness = 1, help further.
    """
    share = _share(run, "rollout")
    engine = run.settings.get("system.engine")
    if share > 0.7 and run["idle/engine"].mean < 0.3 and run.on_gpu and engine == "local":
        yield f"{share:.0%} of the time is rollouts, with engines at work"


def _half_running(run: Signs) -> str | None:
    running = run.number("system.max_running")
    return f"{running // 2:.0f}" if running > 1 else None


@RULES.add("warning", Change("system.max_running", _half_running))
def preempted(run: Signs) -> Evidence:
    """More requests run at once than system.kv_memory holds.

    Fewer requests at once, none recomputed; a larger system.kv_memory is better where there is
    room.
    """
    requests = run["preemptions"]
    memory = run.shown("system.kv_memory")
    if requests.mean > 0.5:
        limit = f"memory for keys and values ran out (system.kv_memory = {memory})"
        yield f"{requests.sum:.0f} requests were interrupted: {limit}"


@RULES.add("note", "system.vllm.prefix_caching = true")
def prompts_not_shared(run: Signs) -> Evidence:
    """Every rollout of a group recomputes its prompt.

    A prompt is computed once per group; for a server that you start yourself, set the server's
    option.
    """
    share = run["prefix_hit_share"].mean
    size = run.number("rollout.group_size")
    if run.steps >= 3 and size >= 4 and share < 0.1:
        yield f"{share:.0%} of the prompt tokens come from the cache, with groups of {size}"


@RULES.add("warning", ahead)
def slow_sync(run: Signs) -> Evidence:
    """Weights travel through files or over a slow link.

    Sync overlaps with sampling; see docs/weights.md for faster ways.
    """
    share = _share(run, "sync")
    if share > 0.2:
        yield f"{share:.0%} of the time is sending weights to engines"


@RULES.add("warning", at_least("checkpoint.minutes = 30"))
def slow_checkpoints(run: Signs) -> Evidence:
    """Checkpoints are frequent, or the disk is slow.

    Fewer checkpoints; at most that much work is lost.
    """
    share = _share(run, "checkpoint")
    if share > 0.15:
        seconds = run["seconds/checkpoint"].sum
        yield f"{share:.0%} of the time is writing checkpoints ({seconds:.0f} s)"


@RULES.add("note", times("eval.every", 4))
def slow_evaluation(run: Signs) -> Evidence:
    """It runs often, or has many prompts.

    Fewer evaluations.
    """
    share = _share(run, "eval")
    if share > 0.4:
        yield f"{share:.0%} of the time is evaluation ({run['seconds/eval'].sum:.0f} s)"


def _fitting_threads(run: Signs) -> str:
    return f"{max(1, run.number('system.threads') // run.facts.threads_per_core):.0f}"


@RULES.add("warning", Change("system.threads", _fitting_threads))
def too_many_threads(run: Signs) -> Evidence:
    """Threads take the processors from each other.

    Each thread has a processor; left out, the number is derived.
    """
    threads = run.number("system.threads")
    per_core = run.facts.threads_per_core
    if per_core > 1.5 and threads > 1:
        yield f"{per_core:.1f} threads compute per usable processor (system.threads = {threads})"


@RULES.add("note")
def busy_machine(run: Signs) -> Evidence:
    """Other programs compute on the cores of this run, and its threads wait for them.

    End them, or start the run when they have ended: the seconds of its steps say little beside
    them.
    """
    others = run["machine/others"]
    busy = {step for share, step in others.pairs if share > BUSY}
    if len(busy) > BUSY * others.count and run["seconds"].sum > LEAST_SECONDS:
        shares = f"{others.mean:.0%} of the cores busy, {others.max:.0%} at most"
        yield f"other programs kept {shares}{_slower_in(busy, run)}"


def _slower_in(busy: Set[float], run: Signs) -> str:
    """How much longer the steps took in which other programs computed; nothing if there were hardly
    any without."""
    measured = {step for _, step in run["machine/others"].pairs}
    seconds = run["seconds"].pairs
    beside = [each for each, step in seconds if step in busy]
    alone = [each for each, step in seconds if step in measured - busy]
    if min(len(beside), len(alone)) < LEAST_COMPARED:
        return ""
    return f"; steps beside them took {median(beside) / median(alone):.1f} times as long"


@RULES.add("warning", "system.draft_model = none")
def drafts_rejected(run: Signs) -> Evidence:
    """Guesses cost more than they save.

    The same output, faster.
    """
    kept = run["draft_acceptance"].mean
    if kept < 0.3:
        yield f"{kept:.0%} of the guessed tokens are kept"
