"""Whatever is logged becomes JSON."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.records.metrics import JsonLines, read_metrics
from tunesmith.records.plain import plain


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def tolist(self) -> Any:
        raise RuntimeError("no")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({1, 3, 2}, [1, 2, 3]),
        (Fraction(1, 4), 0.25),
        (Decimal("1.5"), 1.5),
        (np.float32(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        (np.bool_(True), True),
        ((1, "a"), [1, "a"]),
        ({(1, 2): {"a"}}, {"(1, 2)": ["a"]}),
        ("a\udc80b", "a\\udc80b"),
        (1 << 20_000, "a whole number of 20001 bits"),
        (b"x", "b'x'"),
        (Hostile(), "something of type Hostile without a repr"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_become_what_json_has(value: Any, expected: Any) -> None:
    assert plain(value) == expected


@pytest.mark.parametrize(
    "value",
    [CYCLE, nested(100_000), float("nan"), Decimal("NaN"), object(), "\ud800"],
    ids=lambda v: type(v).__name__,
)
def test_anything_can_be_written_and_read_again(value: Any, tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.write({"value": value, "\udc80": 1})
    lines.close()
    assert len(read_metrics(tmp_path / "x.jsonl")) == 1


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)))


@given(
    st.recursive(
        SCALARS | TEXTS,
        lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
        max_leaves=10,
    )
)
def test_json_stays_as_it_is(value: Any) -> None:
    assert plain(value) == value and json.loads(json.dumps(plain(value))) == value
