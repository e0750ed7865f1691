"""What tests of training share: small batches, learners, and the gradient of one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tunesmith.learn.algorithms.aggregation import weigh
from tunesmith.learn.algorithms.objective import Objective
from tunesmith.learn.data.batch import Batch
from tunesmith.learn.data.micro_batches import Packing, build_forest
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.forest import Forest
from tunesmith.run.loop.learner import Learner
from tunesmith.run.trainers.optimizer import AdamWSettings
from tunesmith.run.trainers.torch import TorchBackend
from tunesmith.types import Sample

Grads = dict[str, Tensor]


def backend_of(
    path: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> TorchBackend[CausalLM]:
    settings = AdamWSettings(max_grad_norm=0.0)
    return TorchBackend(
        CausalLM.load(path, dtype=dtype), settings, **{"predict": CausalLM.predict, **options}
    )


def learner_of(backend: Any, max_tokens: int = 4096, **options: Any) -> Learner:
    settings: dict[str, Any] = {
        "aggregation": "seq_mean_token_mean",
        "max_new_tokens": 16,
        "learning_rate": lambda step: 1e-2,  # noqa: ARG005
        "report": lambda text: None,  # noqa: ARG005
    }
    return Learner(backend=backend, max_tokens=max_tokens, **{**settings, **options})


def samples_of(seed: int = 0, groups: int = 4, size: int = 3) -> list[Sample]:
    """Groups of completions (1 to 12 tokens) after prompts (2 to 9 tokens)."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for group in range(groups):
        prompt = rng.integers(5, 260, rng.integers(2, 10)).tolist()
        for _ in range(size):
            answer = rng.integers(5, 260, rng.integers(1, 13)).tolist()
            samples.append(
                Sample(prompt + answer, [False] * len(prompt) + [True] * len(answer), group)
            )
    return samples


def gradient(
    learner: Learner, batch: Batch, objective: Objective
) -> tuple[Grads, dict[str, float]]:
    """Of one optimizer step that moves nothing; and its metrics."""
    backend: Any = learner.backend
    taken: Grads = {}

    def keep(lr: float) -> dict[str, float]:  # noqa: ARG001
        masters = backend.optimizer.masters
        taken.update({name: m.grad.clone() for name, m in masters.items() if m.grad is not None})
        backend.optimizer.zero_grad()
        return {"grad_norm": 1.0}

    backend.step = keep
    try:
        return taken, learner.update(batch, objective)
    finally:
        del backend.step


def difference(a: Grads, b: Grads) -> float:
    """The norm of the difference over the norm of ``b``."""
    assert a.keys() == b.keys() and a
    delta = sum(float((a[n] - b[n]).double().square().sum()) for n in a) ** 0.5
    return delta / sum(float(b[n].double().square().sum()) for n in b) ** 0.5


def forest_of(
    samples: Sequence[Sample], indices: Sequence[int] | None = None, *, share: bool = True
) -> Forest:
    """The samples' forest, without columns."""
    return build_forest(Batch.of(samples), indices, share=share)


def whole(samples: Sequence[Sample], indices: Sequence[int] | None = None) -> Packing:
    """One micro-batch of an optimizer batch weighed by tokens: of all its samples, or of those at
    ``indices``."""
    batch = Batch.of(samples)
    weigh(batch, "token_mean")
    return Packing((build_forest(batch, indices),), batch.num_predictions, batch)


def weighed(samples: Sequence[Sample]) -> Batch:
    """A batch with the weights that an objective reads."""
    batch = Batch.of(samples)
    weigh(batch, "token_mean")
    return batch
