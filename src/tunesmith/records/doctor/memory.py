"""Memory that runs out, grows, or is never used."""

from __future__ import annotations

from tunesmith.records.doctor.rules import Evidence, Rules
from tunesmith.records.doctor.signs import Signs

RULES = Rules[Signs]()


@RULES.add("note", "system.gradient_checkpointing = true")
def memory_retries(run: Signs) -> Evidence:
    """system.max_tokens_per_microbatch is more than the device holds.

    Larger micro-batches fit; or set the limit that the run printed, so nothing is repeated.
    docs/troubleshooting.md lists what else takes less memory, in the order in which to try it.
    """
    retries = run["memory_retries"]
    if retries.sum > 0:
        last = max(step for count, step in retries.pairs if count)
        yield (
            f"memory ran out {retries.sum:.0f} times, the last time in step {last:.0f}; "
            "the work was repeated with smaller micro-batches"
        )


@RULES.add("warning")
def host_memory_grows(run: Signs) -> Evidence:
    """Something is kept from step to step: a reward, an environment or a callback.

    Look at what your functions keep; reward.isolation = "process" tells whether it is the reward.
    """
    peak = run["memory/host_peak"]
    if run.steps >= 10 and peak.times > 1.5 and peak.rise > 1e9:
        grown = f"from {peak.first / 1e9:.1f} to {peak.last / 1e9:.1f} GB"
        yield f"the trainer's process grew {grown}"


@RULES.add("note")
def kv_unused(run: Signs) -> Evidence:
    """More memory is kept for keys and values than requests need.

    A smaller system.kv_memory leaves room for larger micro-batches.
    """
    used = run["kv_used"].max
    if run.on_gpu and used < 0.1 and run.steps >= 3:
        yield f"at most {used:.0%} of system.kv_memory = {run.shown('system.kv_memory')} was used"
