"""When FlashAttention 3 computes flash attention, and that it computes the same."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tunesmith.models.forest import Segment
from tunesmith.models.kernels import flash3, varlen_attention
from tunesmith.models.kernels.attention import AttentionRule
from tunesmith.models.kernels.flash3 import attended, flash3_problem, is_hopper
from tunesmith.models.kernels.varlen_attention import CudaFlash

CPU = torch.device("cpu")
Answers = Callable[..., list[str]]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """A Hopper on which flash attention gives these numbers, before and after the registry was
    asked; returns what it was asked."""

    def answering(*numbers: float, installed: bool = True, known: bool = True) -> list[str]:
        asked: list[str] = []
        answers = iter(numbers)

        def numbers_of(*_: Any) -> list[Tensor]:
            return [torch.full((3,), next(answers)), torch.ones(2)]

        monkeypatch.setattr(flash3, "is_hopper", Mock(return_value=True))
        monkeypatch.setattr(flash3, "attended", numbers_of)
        monkeypatch.setattr(flash3, "find_spec", Mock(return_value=installed or None))
        registry = "torch.nn.attention."
        monkeypatch.setattr(f"{registry}activate_flash_attention_impl", asked.append)
        monkeypatch.setattr(
            f"{registry}restore_flash_attention_impl", lambda: asked.append("restored")
        )
        monkeypatch.setattr(
            f"{registry}current_flash_attention_impl",
            lambda: "FA3" if asked and asked[-1] == "FA3" else None,
        )
        monkeypatch.setattr(
            f"{registry}list_flash_attention_impls", lambda: ["FA3"] if known else ["FA4"]
        )
        forget()
        return asked

    return answering


def forget() -> None:
    flash3_problem.cache_clear()
    flash3._refused.clear()  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    yield
    forget()


def test_it_is_used_on_hopper_where_it_computes_the_same(hopper: Answers) -> None:
    asked = hopper(1.0, 1.001)
    assert flash3_problem(CPU, 64) is None and flash3_problem(CPU, 64) is None
    assert asked == ["FA3"], "once"


def test_it_is_compared_for_each_size_of_heads(hopper: Answers) -> None:
    asked = hopper(1.0, 1.0, 1.0, 2.0)
    assert flash3_problem(CPU, 64) is None
    assert "differs" in (flash3_problem(CPU, 192) or "")
    assert asked == ["FA3", "restored", "FA3", "restored"]
    for size in (64, 128):  # the registry would let it compute the others again
        assert "differs" in (flash3_problem(CPU, size) or "")
    assert len(asked) == 4


def test_what_differs_is_not_used(hopper: Answers) -> None:
    for found in (1.1, float("nan")):
        asked = hopper(1.0, found)
        assert "differs from flash attention 2" in (flash3_problem(CPU, 64) or "")
        assert asked == ["FA3", "restored"]


def test_what_is_not_there_is_said(hopper: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hopper(installed=False)
    assert flash3_problem(CPU, 64) == "flash_attn_interface is not installed"
    asked += hopper(known=False)
    assert "does not know it" in (flash3_problem(CPU, 64) or "")
    monkeypatch.setattr(flash3, "is_hopper", is_hopper)
    forget()
    assert "not of Hopper" in (flash3_problem(CPU, 64) or "") and asked == []


def test_a_build_that_cannot_be_loaded_is_not_used(
    hopper: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: str) -> None:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    asked = hopper(1.0)
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", broken)
    assert "libcudart.so.12" in (flash3_problem(CPU, 64) or "") and asked == ["restored"]


def test_with_it_one_call_computes_all_segments(hopper: Answers) -> None:
    """Without it, long ones are cuDNN's calls, each alone."""
    segments = [Segment(0, 5, -1), Segment(5, 3, -1)]
    query = torch.randn(8, 2, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen_attention, "takes_dense", Mock(return_value=True))
        patch.setattr(varlen_attention, "LONG", 4)
        for same in (True, False):
            hopper(1.0, 1.0 if same else 2.0)
            apply = Mock()
            patch.setattr("tunesmith.models.kernels.varlen_attention._Varlen.apply", apply)
            CudaFlash(segments, CPU).attend(query, query, query, AttentionRule(0.3))
            assert len(apply.call_args.args[0]) == (1 if same else 2)


def test_the_compared_calls_are_flash_attention_s() -> None:
    results = attended(torch.device("meta"), 64)
    assert [tuple(each.shape) for each in results] == [
        *((135, 4, 64), (4, 135), (135, 4, 64), (135, 2, 64), (135, 2, 64)),
        *((199, 4, 64), (4, 199), (199, 4, 64), (335, 2, 64), (335, 2, 64)),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_it_computes_what_flash_attention_2_does(size: int) -> None:
    device = torch.device("cuda", 0)
    if not is_hopper(device) or find_spec(flash3.PACKAGE) is None:
        pytest.skip("needs Hopper and FlashAttention 3")
    assert flash3_problem(device, size) is None
