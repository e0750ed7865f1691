"""The backend that trains the policy, with a reference and a value head if the algorithm needs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tunesmith.assembly.common import load_model, make_backend
from tunesmith.assembly.critic import make_value_head
from tunesmith.assembly.teacher import compare_with, load_teacher
from tunesmith.config.commands import DistillConfig, SampledDistillConfig
from tunesmith.config.schema import RLConfig

if TYPE_CHECKING:
    from torch import nn

    from tunesmith.backends.torch import TorchBackend
    from tunesmith.data.forest import Forest, Predictions
    from tunesmith.models.causal_lm import CausalLM


def policy_backend(
    config: RLConfig, tokenizer: Any, model: CausalLM, *, reference: bool = True
) -> TorchBackend[CausalLM]:
    """Args: reference: keep a frozen reference in addition to the model if the algorithm needs one."""
    from tunesmith.models.causal_lm import CausalLM

    # With an adapter, the reference is the same model without it.
    frozen = reference and config.algorithm.reference is not None and not config.lora.on
    teacher = load_teacher(config, tokenizer) if isinstance(config, DistillConfig) else None
    # Distilling on the student's samples is a KL penalty in the reward: the teacher takes the reference's place.
    reference_model = teacher or (load_model(CausalLM, config, tokenizer, frozen=True) if frozen else None)
    head = make_value_head(config, model)
    predict = policy_predict(config, head)
    if teacher and isinstance(config, SampledDistillConfig):
        predict, reference_model = compare_with(teacher, config), None
    return make_backend(config, model, predict, reference_model, head)


def policy_predict(config: RLConfig, value_head: nn.Linear | None = None) -> Callable[[CausalLM, Forest], Predictions]:
    """The function that runs the policy on a forest."""
    from tunesmith.models.causal_lm import CausalLM

    return partial(
        CausalLM.predict,
        temperature=config.rollout.temperature,
        entropy=bool(config.algorithm.entropy_coef),
        chunk=config.system.logprob_chunk,
        value_head=value_head,
    )
