"""TRL's losses stand inside its trainers: each trainer here has what its ``_compute_loss`` reads,
and no model."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from torch import Tensor
from trl import DPOTrainer, GRPOConfig, GRPOTrainer, KTOTrainer, RewardTrainer

from tests.peers.cases import MAX_NEW_TOKENS, Case, Graded, grade


class _Given(GRPOTrainer):
    """A GRPO trainer whose model predicts the log-probabilities it is given."""

    def __init__(self, config: GRPOConfig, logprobs: Tensor, entropies: Tensor) -> None:
        self.args = config
        self.predicted = logprobs, entropies
        self.accelerator = Accelerator(cpu=True)
        self.model = torch.nn.Linear(1, 1)
        self.loss_type = config.loss_type
        self.beta = config.beta
        self.epsilon_low = config.epsilon
        self.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        self.importance_sampling_level = config.importance_sampling_level
        self.max_completion_length = MAX_NEW_TOKENS
        self.top_entropy_quantile = 1.0
        self.off_policy_mask_threshold = None
        self.use_vllm = self.aux_loss_enabled = self.use_adaptive_entropy = False
        self.entropy_coef = config.entropy_coef
        self._entropy_bonus_enabled = bool(config.entropy_coef)
        self.current_gradient_accumulation_steps = 1
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

    def _get_per_token_logps_and_entropies(
        self, *_: object, **__: object
    ) -> tuple[Tensor, Tensor, None]:
        return *self.predicted, None


def grpo_loss(case: Case, *, entropies: Tensor | None = None, **settings: object) -> Graded:
    """``GRPOTrainer._compute_loss`` of the whole batch. ``settings`` are those of
    ``GRPOConfig``."""
    leaf = case.logprobs.clone().requires_grad_()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            report_to="none",
            use_cpu=True,
            bf16=False,
            steps_per_generation=1,
            **settings,
        )
    trainer = _Given(config, leaf, torch.zeros_like(leaf) if entropies is None else entropies)
    inputs = {
        "prompt_ids": torch.ones(len(leaf), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(leaf), 1, dtype=torch.int64),
        "completion_ids": torch.ones(leaf.shape, dtype=torch.int64),
        "completion_mask": case.mask,
        "advantages": case["advantages"],
        "old_per_token_logps": case["old_logprobs"],
        "ref_per_token_logps": case["ref_logprobs"],
        "num_items_in_batch": case.mask.sum(),
    }
    return grade(trainer._compute_loss(trainer.model, inputs), leaf)


class _Ready:
    """What every trainer's loss reads beside its own settings; ``outputs`` is what its model
    answers with."""

    accelerator: Accelerator
    aux_loss_enabled = use_weighting = False
    ld_alpha = None
    f_divergence_type = "reverse_kl"
    precompute_ref_logps = calculate_KL = True
    _total_train_tokens = 0
    _tp_size = 1

    def __init__(self, **settings: object) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.model = torch.nn.Linear(1, 1)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        for name, value in settings.items():
            setattr(self, name, value)


class _GivenDPO(_Ready, DPOTrainer):
    pass


class _GivenKTO(_Ready, KTOTrainer):
    pass


class _GivenReward(_Ready, RewardTrainer):
    pass


def _predicted(logprobs: Tensor) -> SimpleNamespace:
    """A causal model's answer: its log-probabilities, and what goes into metrics only."""
    zeros = torch.zeros_like(logprobs)
    return SimpleNamespace(
        log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )


def _tokens(mask: Tensor, token: int = 1) -> dict[str, Tensor]:
    """``[B, 1 + T]``: a prompt of one token, and the completion."""
    ids = torch.full((mask.shape[0], 1 + mask.shape[1]), token)
    completion = torch.cat([torch.zeros(len(mask), 1), mask], 1).long()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completion}


def dpo_loss(case: Case, beta: float, losses: dict[str, float]) -> Graded:
    """``DPOTrainer._compute_loss``; rows of the case are chosen, rejected, chosen, …; ``reference``
    is by row."""
    leaf = case.logprobs.clone().requires_grad_()
    order = [*range(0, len(leaf), 2), *range(1, len(leaf), 2)]
    trainer = _GivenDPO(
        beta=beta, loss_types=list(losses), loss_weights=list(losses.values()), label_smoothing=0.0
    )
    reference = case["reference"]
    inputs = _tokens(case.mask[order]) | {
        "ref_chosen_logps": reference[0::2],
        "ref_rejected_logps": reference[1::2],
    }
    outputs = _predicted((leaf * case.mask)[order])
    return grade(trainer._compute_loss(lambda **_: outputs, inputs, return_outputs=False), leaf)


def kto_loss(case: Case, kl: Tensor, **settings: float) -> Graded:
    """``KTOTrainer._compute_loss``; ``kl [B]`` is ``logπ − logπ_ref`` of the mismatched pairs."""
    leaf = case.logprobs.clone().requires_grad_()
    mismatched = {f"KL_{name}": value for name, value in _tokens(case.mask, token=2).items()}
    batch = (
        _tokens(case.mask)
        | mismatched
        | {
            "label": case["side"] > 0,
            "ref_logps": case["reference"],
            "ref_KL_logps": torch.zeros_like(kl),
        }
    )
    kl_logprobs = torch.zeros_like(leaf)
    kl_logprobs[:, 0] = kl.detach()

    def model(input_ids: Tensor, **_: object) -> SimpleNamespace:
        return _predicted(leaf * case.mask if input_ids[0, 0] == 1 else kl_logprobs)

    trainer = _GivenKTO(loss_type="kto", **settings)
    return grade(trainer._compute_loss(model, batch, return_outputs=False), leaf)


def reward_loss(case: Case, margin: Tensor) -> Graded:
    """``RewardTrainer.compute_loss``; each row has one value; ``margin`` is by pair."""
    leaf = case.logprobs.clone().requires_grad_()
    order = [*range(0, len(leaf), 2), *range(1, len(leaf), 2)]
    logits = (leaf * case.mask).sum(1, keepdim=True)[order]
    trainer = _GivenReward(args=SimpleNamespace(center_rewards_coefficient=None))
    inputs = {"margin": margin, "attention_mask": torch.ones_like(case.mask)}
    return grade(trainer.compute_loss(lambda **_: SimpleNamespace(logits=logits), inputs), leaf)
