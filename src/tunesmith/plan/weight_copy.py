"""Where the trainer keeps the copy of its weights that NCCL sends."""

from __future__ import annotations

from tunesmith.config.sizes import format_size
from tunesmith.plan.facts import Facts
from tunesmith.plan.filling import Filling, with_values
from tunesmith.plan.memory import planned_devices


def derive_weight_copy(filling: Filling, facts: Facts) -> None:
    """Keep the copy on the trainer's GPU if it has room besides everything derived so far; else in host memory."""
    config, key = filling.config, "system.weight_copy"
    if config.system.weight_plane != "nccl":
        return
    devices = planned_devices(with_values(config, {key: "gpu"}), facts)
    if not devices:
        filling.fill(key, "host", "the model's size is not known")
        return
    _, needed, free = devices[0]
    copy = format_size(needed.published)
    if needed.peak <= free:
        filling.fill(key, "gpu", f"the trainer's GPU has room for {copy} more, which then never pass through the host")
    filling.fill(key, "host", f"the trainer's GPU has no room for {copy} more")
