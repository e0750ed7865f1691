"""Published combinations as data, and what a run file's ``[algorithm]`` resolves to. No torch.

A preset fills in the keys that were left out. Whoever changes the loss or the estimator of a preset gets
the bounds that belong to the new one, not the preset's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from tunesmith.algorithms.advantages import ESTIMATORS
from tunesmith.algorithms.corrections import CORRECTIONS
from tunesmith.algorithms.kl import KL_IN_LOSS, KL_IN_REWARD
from tunesmith.algorithms.losses import POLICY_LOSSES
from tunesmith.config.foreign import value_of
from tunesmith.config.schema import AlgorithmSection
from tunesmith.errors import ConfigError, nearest

Setting = float | int | bool | str | None
Reasons = list[tuple[str, object, str]]

NEEDS: Mapping[str, str] = {
    "group": "several rollouts per prompt",
    "critic": "a value model",
    "greedy_rollout": "a greedy rollout per prompt",
    "group_logprobs": "the sampling probabilities of the whole group",
    "selection": "a choice of tokens by covariance over the batch",
    "reward_weights": "each reward by itself",
    "teacher": "a teacher (`tunesmith distill`)",
}
"""What losses and estimators ask of the loop, in words."""


@dataclass(frozen=True, slots=True)
class Preset:
    """``settings`` are keys of ``[algorithm]``, always with ``advantage``, ``loss`` and ``aggregation``."""

    source: str
    description: str
    settings: Mapping[str, Setting]

    @property
    def needs(self) -> frozenset[str]:
        """What the loop has to provide (keys of ``NEEDS``)."""
        return _needs(str(self.settings["advantage"]), str(self.settings["loss"]))


def _needs(advantage: str, loss: str) -> frozenset[str]:
    return ESTIMATORS[advantage].needs | POLICY_LOSSES[loss].needs


def _preset(advantage: str, loss: str, aggregation: str, *, source: str, text: str, **settings: Setting) -> Preset:
    base: dict[str, Setting] = {"advantage": advantage, "loss": loss, "aggregation": aggregation}
    return Preset(source, text, {**base, **settings})


PRESETS: dict[str, Preset] = {
    "grpo": _preset("grpo", "ppo", "seq_mean_token_mean", source="DeepSeekMath, arXiv:2402.03300",
        text="Advantages standardised within the group and PPO's clip, averaged per sequence as in the paper; without "
             "the paper's KL of 0.04, as in TRL."),
    "dr_grpo": _preset("dr_grpo", "ppo", "seq_mean_token_sum_norm", source="Dr. GRPO, arXiv:2503.20783",
        text="GRPO without its two biases: no deviation to divide by, and a constant length instead of each own."),
    "dapo": _preset("grpo", "ppo", "token_mean", clip_high=0.28, dynamic_filter=True, overlong_factor=1.0,
        source="DAPO, arXiv:2503.14476",
        text="GRPO with a wider upper clip, a mean over tokens, no KL, a ramp down for overlong answers, and groups "
             "that teach nothing replaced."),
    "gspo": _preset("grpo", "gspo", "seq_mean_token_mean", source="GSPO, arXiv:2507.18071",
        text="One ratio per sequence, clipped tightly; steadier for mixtures of experts."),
    "gspo_token": _preset("grpo", "gspo_token", "seq_mean_token_mean", source="GSPO-token, arXiv:2507.18071",
        text="GSPO's ratio where advantages differ from token to token."),
    "rloo": _preset("rloo", "ppo", "token_mean", kl_coef=0.05, kl_in="reward", kl_estimator="k1",
        source="RLOO, arXiv:2402.14740",
        text="Each rollout against the mean of its siblings, with a KL penalty in the reward."),
    "reinforce": _preset("reinforce", "reinforce", "token_mean",
        source="Williams 1992; whitening as in REINFORCE++, arXiv:2501.03262",
        text="The plain policy gradient on whitened returns: no clip, no groups, no KL."),
    "reinforce_pp": _preset("reinforce", "ppo", "token_mean", kl_coef=0.01, kl_in="reward", kl_estimator="k1",
        source="REINFORCE++, arXiv:2501.03262",
        text="Whitened returns with a per-token KL in the reward and PPO's clip; needs one rollout per prompt."),
    "reinforce_pp_baseline": _preset("reinforce_baseline", "ppo", "token_mean",
        kl_coef=0.001, kl_in="loss", kl_estimator="k2",
        source="REINFORCE++-baseline, arXiv:2501.03262",
        text="The group's mean as baseline, whitened over the batch, with a k2 KL in the loss."),
    "ppo": _preset("gae", "ppo", "token_mean", kl_coef=0.01, kl_in="reward", kl_estimator="k1",
        source="PPO, arXiv:1707.06347; for language models arXiv:2203.02155",
        text="A critic, generalised advantages, clipped ratios and a KL penalty in the reward."),
    "vapo": _preset("vapo", "ppo", "token_mean", clip_high=0.28, source="VAPO, arXiv:2504.05118",
        text="PPO for long reasoning: λ grows with length, the critic learns undiscounted returns, wider upper clip; "
             "without the paper's extra likelihood of right answers."),
    "cispo": _preset("grpo", "cispo", "token_mean", source="CISPO, MiniMax-M1, arXiv:2506.13585",
        text="Clips the weight of a token and keeps its gradient, so rare tokens go on learning."),
    "gepo": _preset("grpo", "gepo", "seq_mean_token_mean", source="GEPO, arXiv:2508.17850",
        text="Ratios against the group's expected sampling probability: steady with very stale samples."),
    "gmpo": _preset("grpo", "gmpo", "seq_mean_token_mean", source="GMPO, arXiv:2507.20673",
        text="The geometric mean of token ratios in place of the arithmetic one, with a wide clip."),
    "sapo": _preset("grpo", "sapo", "seq_mean_token_mean", source="SAPO, arXiv:2511.20347",
        text="A smooth gate on the ratio instead of a clip, tighter for negative advantages."),
    "gpg": _preset("gpg", "gpg", "token_mean", source="GPG, arXiv:2504.02546",
        text="The plain policy gradient with a group baseline, scaled up for groups without spread."),
    "opo": _preset("opo", "reinforce", "token_mean", source="OPO, arXiv:2505.23585",
        text="Exact on-policy steps against the baseline of least variance, weighted by length."),
    "remax": _preset("remax", "reinforce", "token_mean", source="ReMax, arXiv:2310.10505",
        text="Each rollout against a greedy one of the same prompt."),
    "gdpo": _preset("gdpo", "ppo", "seq_mean_token_mean", source="GDPO, arXiv:2601.05242",
        text="For several rewards: each is standardised by itself before they are added."),
    "clip_cov": _preset("grpo", "clip_cov", "token_mean", source="Clip-Cov, arXiv:2505.22617",
        text="GRPO that leaves out the few tokens that cost most entropy."),
    "kl_cov": _preset("grpo", "kl_cov", "token_mean", source="KL-Cov, arXiv:2505.22617",
        text="GRPO that holds back the few tokens that cost most entropy with a KL to the old policy."),
    "dppo": _preset("grpo", "dppo_tv", "token_mean", source="DPPO, arXiv:2602.04879",
        text="A trust region in probability instead of in the ratio: rare tokens may move far."),
    "distill": _preset("token_reward", "ppo", "token_mean", kl_coef=1.0, kl_in="reward", kl_estimator="k1",
        source="on-policy distillation, Thinking Machines 2025; MiniLLM, arXiv:2306.08543; GKD, arXiv:2306.13649",
        text="Reverse KL to a teacher on the student's own samples: each token's advantage is how much likelier the "
             "teacher finds it."),
}  # fmt: skip

_COMMON: Mapping[str, tuple[Setting, str]] = {
    "kl_coef": (0.0, "no KL to a reference"),
    "entropy_coef": (0.0, "no entropy bonus"),
    "overlong_buffer": (0, "no overlong ramp"),
    "mask_truncated": (False, "truncated rollouts are learned from"),
    "dynamic_filter": (False, "every group is trained on"),
    "correction": ("none", "sampler and trainer agree"),
}
"""What holds where a preset says nothing."""


_STALE = ("token_truncate", "with rollout.max_staleness an older policy may have sampled")


def resolve_algorithm(
    section: AlgorithmSection, *, max_new_tokens: int, max_staleness: int = 0, altered_by: Collection[str] = ()
) -> tuple[AlgorithmSection, Reasons]:
    """Fill in every key that was left out; return the section and ``(key, value, reason)`` for each.

    With ``max_staleness`` what an older policy sampled is corrected for (truncated importance sampling) unless another
    thing is said. ``altered_by`` names what alters the distribution that is sampled: what the
    sampler reports is then no old log-probability of the distribution that is trained.

    Raises:
        ConfigError: an unknown name, a combination that cannot learn, or a key that nothing would read.
    """
    preset = PRESETS[_known("name", section.name, PRESETS)]
    filling = _Filling(section, preset)
    for key, registry in (("advantage", ESTIMATORS), ("loss", POLICY_LOSSES)):
        _known(key, filling.fill(key, preset.settings[key]), registry)
    filling.fill("aggregation", preset.settings["aggregation"])
    for kind, registry in (("loss", POLICY_LOSSES), ("advantage", ESTIMATORS)):
        name = str(filling[kind])
        for key, default in registry[name].settings.items():  # the preset's only where the choice is the preset's
            filling.fill(key, default, f"default of the {kind} {name}", use_preset=preset.settings[kind] == name)
    common = {**_COMMON, "correction": _STALE} if max_staleness else dict(_COMMON)
    if "overlong_factor" in preset.settings:
        # DAPO's ramp covers the last 4096 of 20480 tokens.
        reason = f"preset {section.name}: a fifth of rollout.max_new_tokens"
        common["overlong_buffer"] = (max_new_tokens // 5, reason)
    for key, (value, why) in common.items():
        filling.fill(key, value, why)
    _fill_kl(filling)
    _fill_correction(filling, altered_by)
    if filling["overlong_buffer"]:
        filling.fill("overlong_factor", 1.0, "the ramp goes down by a full reward")
    _refuse_unread(filling)
    return section.model_copy(update=filling.found), filling.reasons


class _Filling:
    """The section as it fills up."""

    def __init__(self, section: AlgorithmSection, preset: Preset) -> None:
        self.section, self.preset = section, preset
        self.found: dict[str, object] = {}
        self.reasons: Reasons = []
        self.read: set[str] = {"name"}
        """Keys that something reads."""

    def __getitem__(self, key: str) -> object:
        return self.found.get(key, getattr(self.section, key))

    def fill(self, key: str, default: Setting, why: str = "", *, use_preset: bool = True) -> object:
        """The key's value: as said, else the preset's, else ``default`` because ``why``."""
        self.read.add(key)
        if (said := getattr(self.section, key)) is not None:
            return said
        if use_preset and key in self.preset.settings:
            default, why = self.preset.settings[key], f"preset {self.section.name} ({self.preset.source})"
        if default is not None:
            self.found[key] = default
            self.reasons.append((f"algorithm.{key}", default, why))
        return default


def _known(key: str, name: object, names: Iterable[str]) -> str:
    choices = list(names)
    if name not in choices:
        ours = value_of(f"algorithm.{key}", name)
        hint = f" Write {ours}." if ours else nearest(str(name), choices)
        raise ConfigError(f"algorithm.{key}: there is no '{name}'.{hint}")
    return str(name)


def algorithm_needs(section: AlgorithmSection) -> frozenset[str]:
    """What a resolved section asks of the loop (keys of ``NEEDS``); ``group`` refuses groups of one."""
    return _needs(str(section.advantage), str(section.loss))


def _fill_kl(filling: _Filling) -> None:
    if not filling["kl_coef"]:
        return
    place = filling.fill("kl_in", "loss", "a KL with a gradient of its own")
    valid = KL_IN_LOSS if place == "loss" else KL_IN_REWARD
    preset_place = filling.preset.settings.get("kl_in", place)
    default = "k3" if place == "loss" else "k1"
    why = "low variance, never negative" if place == "loss" else "unbiased"
    kl = filling.fill("kl_estimator", default, why, use_preset=preset_place == place)
    if kl not in valid:
        problem = {
            "loss": "has an expected gradient of zero in the loss; k1+ has its value and the right gradient",
            "reward": "differs from the plain one only in its gradient, and a reward has none",
        }[str(place)]
        raise ConfigError(
            f"algorithm.kl_estimator: '{kl}' {problem}. Valid with kl_in=\"{place}\": {', '.join(valid)}."
        )
    if filling.fill("kl_target", None) is not None:
        filling.fill("kl_horizon", 10_000, "as in Ziegler et al., arXiv:1909.08593")


def _fill_correction(filling: _Filling, altered_by: Collection[str]) -> None:
    name = filling["correction"]
    if altered_by:
        _fill_for_altered(filling, altered_by)
    elif name == "none":
        filling.fill("decoupled", False, "the sampler's log-probabilities are the old ones")
    elif filling.fill("decoupled", True, f"the correction {name} compares them with the sampler's") is False:
        raise ConfigError(
            f"algorithm.correction: '{name}' weighs the trainer's log-probabilities against the sampler's, "
            'which are the same with decoupled=false. Leave decoupled out, or set correction="none".'
        )
    if name == "none":
        return
    for key, default in CORRECTIONS[str(name)].settings.items():
        filling.fill(key, default, f"default of the correction {name}")
    low, high = filling["correction_low"], filling["correction_high"]
    if isinstance(low, float) and isinstance(high, float) and low >= high:
        raise ConfigError(f"algorithm.correction_low={low:g} must be below correction_high={high:g}.")


def _fill_for_altered(filling: _Filling, by: Collection[str]) -> None:
    """The loss's ratio has to start at 1, and the sampler's log-probabilities are those of another distribution."""
    cause = " and ".join(by) + (" alters" if len(by) == 1 else " alter")
    reason = f"{cause} the distribution that is sampled, and the old log-probabilities are those of the whole one"
    if filling.fill("decoupled", True, reason) is False:
        raise ConfigError(
            f"algorithm.decoupled = false takes the sampler's log-probabilities for the old ones, and {cause} the "
            "distribution that they belong to: the ratio of the loss would not start at 1. Leave one of them out."
        )
    if filling["correction"] == "geometric":
        raise ConfigError(
            'algorithm.correction = "geometric" keeps the answers that trainer and sampler find nearly equally likely, '
            f"and {cause} the sampler's probabilities: hardly any answer would be kept. Leave one of them out."
        )


_OVERLONG, _HORIZON = frozenset({"overlong_factor"}), frozenset({"kl_horizon"})
_FILTER = frozenset({"filter_low", "filter_high", "rest_epochs"})
_KL = frozenset({"kl_in", "kl_estimator", "kl_target", "kl_horizon", "reference_every"})
_SHAPING = frozenset({"overlong_buffer", "reward_clip", "stop_properly"})
_CONDITIONS: list[tuple[frozenset[str], str, Callable[[_Filling], bool]]] = [
    (_OVERLONG, "overlong_buffer is 0", lambda f: not f["overlong_buffer"]),
    (_FILTER, "dynamic_filter is off", lambda f: not f["dynamic_filter"]),
    (_KL, "kl_coef is 0", lambda f: not f["kl_coef"]),
    (_HORIZON, "there is no kl_target", lambda f: f["kl_target"] is None),
    (_SHAPING | {"kl_in"}, "the advantage 'gdpo' takes each reward as it is given", lambda f: f["advantage"] == "gdpo"),
    (_SHAPING, "the advantage 'token_reward' reads no rollout's reward", lambda f: f["advantage"] == "token_reward"),
]
_OFF = {"overlong_buffer": 0, "kl_in": "loss"}
"""Values with which keys that shape the reward leave it alone."""


def _refuse_unread(filling: _Filling) -> None:
    """A key that was said and that nothing reads is an error."""
    section, fields = filling.section, AlgorithmSection.model_fields
    said = [k for k in fields if k in section.model_fields_set and getattr(section, k) != fields[k].default]
    for key in said:
        for keys, why, holds in _CONDITIONS:
            if key in keys and holds(filling) and not (keys >= _SHAPING and filling[key] == _OFF.get(key)):
                raise ConfigError(f"algorithm.{key} would have no effect: {why}.")
        if key in _READ_BY_CHOICE and key not in filling.read:
            kind = _READ_BY_CHOICE[key]
            raise ConfigError(f"algorithm.{key} would have no effect: the {kind} '{filling[kind]}' does not read it.")


_READ_BY_CHOICE: dict[str, str] = {
    **{key: "correction" for entry in CORRECTIONS.values() for key in entry.settings},
    **{key: "advantage" for entry in ESTIMATORS.values() for key in entry.settings},
    **{key: "loss" for entry in POLICY_LOSSES.values() for key in entry.settings},
}
"""Keys that only some losses, estimators or corrections read, and which of the three it is."""
