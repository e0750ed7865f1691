"""Frozen linear modules in 8 or 4 bits (bitsandbytes), under a trained adapter.

A module's quantised weight, including its scales, is one tensor of bytes: a parameter without
gradient, which ranks shard and gather like any other. bitsandbytes' own modules keep scales outside
their parameters, where sharding misses them. bitsandbytes' functions quantise and multiply, so
results equal those of its modules.

Embeddings, norms and the vocabulary head are not quantised. ``int8`` quantises activations row by
row, without LLM.int8's search for outlier columns: that search reads the whole batch, and
log-probabilities would depend on how sequences are packed.

Shape legend: ``T`` rows, ``K`` inputs, ``N`` outputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunesmith.errors import ModelError, about, boundary
from tunesmith.models.kernels.layers import text_decoder

Quantize = Literal["int8", "nf4"]
Part = tuple[int, torch.dtype]
"""The number of elements and their dtype."""
BLOCK = 64
SECOND_BLOCK = 256
"""Weights that share a scale in 4 bits, and scales that share a second-level scale
(arXiv:2305.14314)."""
_ALIGNED = 16
"""The alignment of parts in bytes, as kernels require."""


class QuantisedLinear(nn.Linear):
    """A linear module whose ``weight`` is uint8 ``[bytes]``. Only its input gets a gradient.

    Args:
        module: gives the shape and the bias.
        dtype: the type to which weights are rounded before quantisation, and of the computation.
    """

    def __init__(self, module: nn.Linear | Conv1D, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        shape = tuple(module.weight.shape)
        self.transposed = isinstance(module, Conv1D)
        self.rows = shape[0]
        """Rows of the weight in a model's files."""
        self.out_features, self.in_features = reversed(shape) if self.transposed else shape
        self.dtype = dtype
        self._parts = self.parts()
        sizes = [-(-count * part.itemsize // _ALIGNED) * _ALIGNED for count, part in self._parts]
        self._starts = [0, *accumulate(sizes)]
        memory = torch.empty(self._starts[-1], dtype=torch.uint8, device=module.weight.device)
        self.weight = nn.Parameter(memory, requires_grad=False)
        bias = cast("nn.Parameter | None", module.bias)
        self.register_parameter(
            "bias", None if bias is None else nn.Parameter(bias, requires_grad=False)
        )
        self._seen: tuple[Tensor, Any] | None = None

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """The parts that make up the bytes, in order."""

    @abstractmethod
    def rounded(self, weight: Tensor) -> Sequence[Tensor]:
        """The parts of a weight ``[N, K]``."""

    @abstractmethod
    def opened(self, *parts: Tensor) -> Any:
        """The parts in the form that bitsandbytes takes."""

    @abstractmethod
    def product(self, x: Tensor, weight: Any) -> Tensor:
        """``[..., K]`` to ``[..., N]``, without gradients; ``weight`` is a result of ``opened``."""

    @abstractmethod
    def whole(self, weight: Any, dtype: torch.dtype) -> Tensor:
        """The dequantised weight ``[N, K]``, from a result of ``opened``."""

    @torch.no_grad()
    def quantised(self, weight: Tensor) -> Tensor:
        """The bytes, on the weight's device, of a weight laid out as in a model's files but of type
        ``dtype``."""
        parts = self.rounded(weight.t() if self.transposed else weight)
        found = torch.zeros(self._starts[-1], dtype=torch.uint8, device=weight.device)
        for view, part in zip(self._views(found), parts, strict=True):
            view.copy_(part.flatten())
        return found

    @torch.no_grad()
    def dequantised(self, weight: Tensor) -> Tensor:
        """The weight of these bytes, laid out as in a model's files."""
        found = self.whole(self.opened(*self._views(weight)), self.dtype)
        return found.t() if self.transposed else found

    def open(self, weight: Tensor) -> Any:
        """The ``opened`` parts, cached: sharded bytes are gathered into the same storage, so views
        stay valid."""
        seen = self._seen
        if seen is None or _storage(seen[0]) != _storage(weight):
            views = self._views(weight.detach())
            seen = self._seen = views[0], self.opened(*views)
        return seen[1]

    def _views(self, weight: Tensor) -> list[Tensor]:
        places = zip(self._starts, self._parts, strict=False)
        stops = [(start, start + count * part.itemsize, part) for start, (count, part) in places]
        return [weight[start:stop].view(part) for start, stop, part in stops]

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            return _Product.apply(input, self.weight, self)
        return self._product(input, self.weight)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.product(x, self.open(weight))

    def _bias(self, x: Tensor) -> Tensor | None:
        bias = cast("Tensor | None", self.bias)
        return None if bias is None else bias.to(x.dtype)


class _Product(torch.autograd.Function):
    """Saves the bytes for the backward pass, which dequantises them; by then they may have been
    gathered again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: QuantisedLinear) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.module = module
        return module._product(x, weight)  # pyright: ignore[reportPrivateUsage]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (weight,) = ctx.saved_tensors
        module: QuantisedLinear = ctx.module
        return grad @ module.whole(module.open(weight), grad.dtype), None, None


class Nf4Linear(QuantisedLinear):
    """4-bit normal floats, with scales in 8 bits around their mean (QLoRA, arXiv:2305.14314)."""

    levels: Tensor
    """The 16 values of a weight in units of its scale."""
    scale_levels: Tensor
    """The 256 values of a scale in units of its second-level scale."""

    def __init__(self, module: nn.Linear | Conv1D, dtype: torch.dtype) -> None:
        super().__init__(module, dtype)
        functions = _functions()
        self.register_buffer(
            "levels", functions.get_4bit_type("nf4", device="cpu"), persistent=False
        )
        self.register_buffer("scale_levels", functions.create_dynamic_map(), persistent=False)

    def parts(self) -> Sequence[Part]:
        numbers = self.in_features * self.out_features
        scales = -(-numbers // BLOCK)
        second = -(-scales // SECOND_BLOCK)
        return (
            (-(-numbers // 2), torch.uint8),
            (scales, torch.uint8),
            (second, torch.float32),
            (1, torch.float32),
        )

    def rounded(self, weight: Tensor) -> Sequence[Tensor]:
        options: dict[str, Any] = {
            "blocksize": BLOCK,
            "compress_statistics": True,
            "quant_type": "nf4",
        }
        codes, state = _functions().quantize_4bit(weight.contiguous(), **options)
        return codes, state.absmax, state.state2.absmax, state.offset

    def opened(self, *parts: Tensor) -> Any:
        codes, scales, second, mean = parts
        state = _functions().QuantState
        inner = state(
            absmax=second, code=self.scale_levels, blocksize=SECOND_BLOCK, dtype=torch.float32
        )
        shape = torch.Size((self.out_features, self.in_features))
        kept: dict[str, Any] = {
            "shape": shape,
            "code": self.levels,
            "blocksize": BLOCK,
            "quant_type": "nf4",
        }
        return codes.view(-1, 1), state(
            absmax=scales, dtype=self.dtype, offset=mean[0], state2=inner, **kept
        )

    def product(self, x: Tensor, weight: Any) -> Tensor:
        codes, state = weight
        return import_module("bitsandbytes").matmul_4bit(
            x, codes, quant_state=state, bias=self._bias(x)
        )

    def whole(self, weight: Any, dtype: torch.dtype) -> Tensor:
        return _functions().dequantize_4bit(*weight).to(dtype)


class Int8Linear(QuantisedLinear):
    """8-bit integers with a scale per output; rows of the input are quantised to 8 bits too
    (arXiv:2208.07339)."""

    def parts(self) -> Sequence[Part]:
        numbers = self.in_features * self.out_features
        return (numbers, torch.int8), (self.out_features, torch.float32)

    def rounded(self, weight: Tensor) -> Sequence[Tensor]:
        return _functions().int8_vectorwise_quant(weight.to(torch.float16).contiguous())[:2]

    def opened(self, *parts: Tensor) -> Any:
        codes, scales = parts
        return codes.view(self.out_features, self.in_features), scales

    def product(self, x: Tensor, weight: Any) -> Tensor:
        codes, scales = weight
        rows, row_scales, _ = _functions().int8_vectorwise_quant(
            x.reshape(-1, self.in_features).to(torch.float16)
        )
        multiply: Any = torch.ops.bitsandbytes.int8_scaled_mm.default
        out: Tensor = multiply(rows, codes, row_scales, scales, bias=self._bias(x), dtype=x.dtype)
        return out.view(*x.shape[:-1], self.out_features)

    def whole(self, weight: Any, dtype: torch.dtype) -> Tensor:
        codes, scales = weight
        return codes.to(dtype).mul_((scales / 127).unsqueeze(1))


FORMATS: dict[Quantize, type[QuantisedLinear]] = {"int8": Int8Linear, "nf4": Nf4Linear}


def quantise(module: PreTrainedModel, quantize: Quantize, dtype: torch.dtype) -> None:
    """Replace the linear modules of a decoder whose weights are still on the meta device.

    Raises:
        ModelError: bitsandbytes is not installed, or does not work on this machine.
    """
    refused = f"model.quantize = '{quantize}': bitsandbytes cannot be used here"
    with about("model.quantize"), boundary(ModelError, refused, Exception):
        _functions()
    decoder = text_decoder(module)
    for name, part in list(decoder.named_modules()):
        if type(part) is nn.Linear or isinstance(part, Conv1D):
            decoder.set_submodule(name, FORMATS[quantize](part, dtype))


def is_quantised(module: nn.Module) -> bool:
    return any(isinstance(part, QuantisedLinear) for part in module.modules())


def quantised_weights(module: nn.Module) -> dict[str, QuantisedLinear]:
    """The quantised linear modules, by the names of their weights."""
    parts = module.named_modules()
    return {f"{name}.weight": part for name, part in parts if isinstance(part, QuantisedLinear)}


def weights_of(module: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """The parameters of a module, and how many weights each holds."""
    linear = [part for part in module.modules() if isinstance(part, QuantisedLinear)]
    quantised = {id(part.weight): part.in_features * part.out_features for part in linear}
    for parameter in module.parameters():
        yield parameter, quantised.get(id(parameter), parameter.numel())


def _functions() -> Any:
    return import_module("bitsandbytes.functional")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
