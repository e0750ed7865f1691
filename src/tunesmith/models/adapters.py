"""LoRA (arXiv:2106.09685) with peft: ``W x`` becomes ``W x + (alpha / rank) · B A x``, and only A and B are trained.

The layers go into the Hugging Face module itself, so everything that runs it, the sampler included, runs the
adapter. B starts at zero: at first the model is the base. A and B are float32 whatever the base computes in.

Dropout falls on the adapter's input in passes that train, and nowhere else. Its draws depend on how samples are
packed, the one place where a micro-batch's split changes the numbers (not their distribution), which is why it is
off by default. In reinforcement learning it is refused: the trainer's log-probabilities would not be the sampler's.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunesmith.config.files import ADAPTER_CONFIG
from tunesmith.config.schema import LoraSection
from tunesmith.errors import CheckpointError, ConfigError, ModelError, StorageError, boundary, nearest
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.decoder import Decoder
from tunesmith.models.loading import check_names, load_config
from tunesmith.models.quantised import num_weights
from tunesmith.models.score_model import ScoreModel

WEIGHTS = "adapter_model.safetensors"
TRAINED, START = "default", "start"
_BEYOND = ("use_dora", "bias", "lora_bias", "trainable_token_indices", "target_parameters", "layer_replication")
_FOREIGN = (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, SafetensorError)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """The adapter in a model's module; ``attach`` makes one."""

    peft: PeftModel
    save_merged: bool = False
    trust_remote_code: bool = False

    @contextmanager
    def reference(self) -> Generator[None]:
        """The model as it was before training: the base alone or, where a saved adapter is continued, with that."""
        if START not in self.peft.peft_config:
            with self.peft.disable_adapter():
                yield
            return
        self.peft.set_adapter(START, inference_mode=True)
        try:
            yield
        finally:
            self.peft.set_adapter(TRAINED)

    @torch.inference_mode(False)
    def merged(self) -> PreTrainedModel:
        """A frozen float32 copy of the model with the adapter merged in."""
        whole = cast(Any, copy.deepcopy(self.peft).float()).merge_and_unload()
        return cast(PreTrainedModel, whole.requires_grad_(False).eval())

    def own_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, under the names that it has in the module."""
        for name, tensor in self.peft.get_base_model().state_dict().items():
            if f".{TRAINED}." in name and ".lora_" in name:
                yield name, tensor

    @torch.no_grad()
    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the model that base and adapter make, under the base's names; the module stays as it is.

        Each sum ``W + scale · B A`` is taken in float32, then rounded to the base's number format. Sums come on the
        CPU: who wants all of them together would otherwise have a second model on the GPU.
        """
        module = self.peft.get_base_model()
        adapted = {name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)}
        for name, tensor in module.state_dict().items():
            owner, inside, rest = name.partition(".base_layer.")
            if inside:
                if rest == "weight":
                    delta = cast(Any, adapted[owner]).get_delta_weight(TRAINED)
                    tensor = (tensor.float() + delta.float()).to("cpu", tensor.dtype)
                yield f"{owner}.{rest}", tensor
            elif ".lora_" not in name:
                yield name, tensor

    def save(self, directory: Path) -> None:
        """Write a peft adapter directory, and with ``save_merged`` the whole model beside it, in ``…_merged``."""
        self.peft.save_pretrained(str(directory), selected_adapters=[TRAINED], save_embedding_layers=False)
        if self.save_merged:
            merge(directory, directory.with_name(f"{directory.name}_merged"), trust_remote_code=self.trust_remote_code)

    def load(self, directory: Path) -> None:
        """Take the weights of ``save``.

        Raises:
            CheckpointError: they are missing or damaged, or another adapter's.
        """
        if not (directory / WEIGHTS).is_file():
            raise CheckpointError(
                f"{directory} holds no adapter: that run trained the whole model. "
                "Resume without lora.rank, or start a new run_dir."
            )
        with boundary(CheckpointError, f"cannot read {directory / WEIGHTS}", _FOREIGN):
            saved = load_file(directory / WEIGHTS)
        current = get_peft_model_state_dict(self.peft, adapter_name=TRAINED, save_embedding_layers=False)
        for name in sorted(saved.keys() | current.keys()):
            if name not in saved or name not in current or saved[name].shape != current[name].shape:
                raise CheckpointError(
                    f"{directory} holds another adapter than this run's: '{name}' differs. "
                    "Resume with the lora.rank and lora.targets the run was started with, or start a new run_dir."
                )
        set_peft_model_state_dict(self.peft, saved, adapter_name=TRAINED)

    def counts(self) -> tuple[int, int]:
        """Parameters that are trained, and all of them."""
        sizes = [(p.requires_grad, num_weights(p)) for p in self.peft.parameters()]
        return sum(n for trained, n in sizes if trained), sum(n for _, n in sizes)


def attach(
    model: Decoder,
    section: LoraSection,
    *,
    path: Path | None = None,
    trust_remote_code: bool = False,
    frozen: bool = False,
) -> LoraAdapter:
    """Put an adapter into ``model`` and freeze the rest of it, but for a new score head.

    Args:
        section: resolved.
        path: a saved adapter to continue.
        frozen: nothing is trained, so that no copy of the saved adapter is kept as the reference.

    Raises:
        ConfigError: a target that the model does not have.
        ModelError: the saved adapter is of another kind or of another model.
    """
    kind = "SEQ_CLS" if isinstance(model, ScoreModel) else "CAUSAL_LM"
    peft = _fresh(model, section, kind) if path is None else _continued(model, section, kind, path, frozen)
    model.adapter = LoraAdapter(peft, section.save_merged, trust_remote_code)
    return model.adapter


def _fresh(model: Decoder, section: LoraSection, kind: str) -> PeftModel:
    rank = section.rank
    assert rank is not None, "the section asks for no new adapter"
    linear = linear_modules(model.module.base_model)
    config = LoraConfig(
        task_type=kind,
        r=rank,
        lora_alpha=cast(int, section.alpha or 2 * rank),
        lora_dropout=section.dropout,
        target_modules=choose_targets(linear, section.targets),
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in linear.values()),
    )
    with boundary(ModelError, "lora: peft cannot adapt this model", _FOREIGN):
        return cast(PeftModel, get_peft_model(model.module, config))


def _continued(model: Decoder, section: LoraSection, kind: str, path: Path, frozen: bool) -> PeftModel:
    config = _read_config(path)
    if config.task_type != kind:
        raise ModelError(f"{path} is an adapter for {config.task_type}, and this model is a {kind}")
    plain, head = LoraConfig(), {"score", "classifier"}  # which peft gives every adapter of a score model
    beyond = [name for name in _BEYOND if getattr(config, name) != getattr(plain, name)]
    if beyond or not head.issuperset(config.modules_to_save or ()):
        raise ModelError(
            f"{path} is more than two matrices beside each linear module ({', '.join(beyond or ['modules_to_save'])}); "
            f"make one model of it and its base: tunesmith merge {path} OUT_DIR"
        )
    config.lora_dropout = section.dropout
    with boundary(ModelError, f"the adapter {path} does not fit the model", _FOREIGN):
        name = {"adapter_name": TRAINED, "is_trainable": not frozen}
        peft = PeftModel.from_pretrained(model.module, path, config=config, **cast(Any, name))
        check_adapter_names(path, peft, TRAINED)
        if frozen:
            return peft
        peft.load_adapter(str(path), START, is_trainable=False)
        peft.set_adapter(TRAINED)
    return peft


def check_targets(base: str | Path, section: LoraSection, *, trust_remote_code: bool = False) -> None:
    """Refuse targets that a model does not have before its weights load.

    Raises:
        ConfigError: as ``choose_targets``.
    """
    if isinstance(section.targets, tuple):
        config = load_config(base, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        choose_targets(linear_modules(cast(Any, module).base_model), section.targets)


def linear_modules(decoder: nn.Module) -> dict[str, nn.Module]:
    """The linear modules below a decoder, by dotted name; the vocabulary or score head is not among them."""
    return {name: m for name, m in decoder.named_modules() if isinstance(m, nn.Linear | Conv1D)}


def choose_targets(linear: Iterable[str], targets: str | Sequence[str] | None) -> list[str]:
    """Names that pick modules: each a module's own name, such as ``q_proj``, or the end of a dotted one.

    Raises:
        ConfigError: one that no module has, with the nearest of those there are.
    """
    names = list(linear)
    own = sorted({name.rpartition(".")[2] for name in names})
    if targets is None or isinstance(targets, str):
        return own
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(f"lora.targets: the model has no linear module '{target}'.{nearest(target, own)}")
    return list(targets)


def merge(
    adapter: Path, out: Path, *, base: str | None = None, dtype: str | None = None, trust_remote_code: bool = False
) -> str:
    """Write the model that base and adapter make together, as a whole one; return the base's path.

    The sum is taken in float32, then rounded to ``dtype``; None is that of the base.

    Raises:
        ModelError: no adapter, no base, or the two do not fit.
    """
    config = _read_config(adapter)
    base = base or config.base_model_name_or_path
    if not base:
        raise ModelError(f"{adapter} does not say which model it belongs to; name it with --base")
    stored = load_config(base, trust_remote_code=trust_remote_code).dtype
    kind = ScoreModel if config.task_type == "SEQ_CLS" else CausalLM
    model = kind.load(base, trust_remote_code=trust_remote_code)
    if (adapter / "tokenizer_config.json").is_file():
        with boundary(ModelError, f"cannot load the tokenizer of {adapter}", _FOREIGN):
            model.tokenizer = AutoTokenizer.from_pretrained(adapter, trust_remote_code=trust_remote_code)
    with boundary(ModelError, f"the adapter {adapter} does not fit {base}", _FOREIGN):
        peft = PeftModel.from_pretrained(model.module, adapter)
        check_adapter_names(adapter, peft, TRAINED)
        merged = cast(Any, peft).merge_and_unload(safe_merge=True)
    merged.to(getattr(torch, dtype) if dtype else stored or torch.float32)
    with boundary(StorageError, f"cannot write {out}", OSError):
        model.save(out)
    return base


def check_adapter_names(path: Path, peft: PeftModel, name: str) -> None:
    """Refuse an adapter's file that has other weights than the adapter ``name`` in the model: peft only warns.

    Raises:
        ModelError: naming some of them.
    """
    if (path / WEIGHTS).is_file():
        saved = load_file(path / WEIGHTS).keys()
        current = get_peft_model_state_dict(peft, adapter_name=name, save_embedding_layers=False).keys()
        check_names(f"the adapter {path}", current - saved, saved - current)


def _read_config(path: Path) -> Any:
    if not (path / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{path} holds no LoRA adapter: there is no {ADAPTER_CONFIG} in it")
    with boundary(ModelError, f"cannot read {path / ADAPTER_CONFIG}", _FOREIGN):
        config = cast(Any, PeftConfig.from_pretrained(str(path)))
    if not isinstance(config, LoraConfig):
        raise ModelError(f"{path} is an adapter of type {config.peft_type}; only LoRA adapters work here")
    return config
