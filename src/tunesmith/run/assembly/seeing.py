"""Whether the models of a run see images that come while it runs, and where these are kept."""

from __future__ import annotations

import atexit
from pathlib import Path
from tempfile import TemporaryDirectory

from tunesmith.models.vision.kept import KeptImages
from tunesmith.models.vision.processing import vocabulary_of
from tunesmith.plan.plan import AnyPlan

FOLDER = "images"
"""The folder of a run directory with the images that clients sent, named by a digest of their
bytes."""
SERVED_BYTES = 1 << 30
"""Bytes of images that a model's server keeps at most."""


def see_requests(plan: AnyPlan, tokenizer: object, run_dir: Path | None = None) -> None:
    """Let a model with a tower see the images of requests, or say why it does not.

    Args:
        run_dir: keeps them; None: the latest are kept while the process runs.
    """
    vocabulary = vocabulary_of(tokenizer)
    if vocabulary is None:
        return
    vocabulary.closed = _reason(plan)
    if run_dir is not None:
        vocabulary.kept = KeptImages(run_dir / FOLDER)
        return
    directory = TemporaryDirectory(prefix="tunesmith-images-")
    atexit.register(directory.cleanup)
    vocabulary.kept = KeptImages(Path(directory.name), SERVED_BYTES)


def _reason(plan: AnyPlan) -> str:
    devices = plan.devices
    model = plan.facts.model
    sees = devices.engine.sees(model and model.family)
    if devices.engine.third_party and not (sees and plan.kind.trains):
        return f"system.engine = '{devices.engine.name}' is not shown images"
    if plan.said.system.draft_model is not None:
        return "the draft model (system.draft_model) does not see it"
    if devices.sequence > 1:
        return "ranks that share a sequence (system.sequence_parallel.size) do not see it"
    if plan.kind.teacher or plan.kind.served_teacher:
        return "the teacher does not see it"
    if plan.kind.critic:
        return "the critic does not see it; set critic.shared_trunk"
    return ""
