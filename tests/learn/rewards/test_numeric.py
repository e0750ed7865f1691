"""Reading and comparing numbers."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.learn.rewards.numeric import Number, equal, last_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("the answer is 72.", "72"),
        ("first 3, then 1,234.50", "1234.50"),
        ("x = -3", "-3"),
        ("−5 with a real minus sign", "-5"),
        ("10-20", "20"),
        ("f(3)-2", "2"),
        ("$1,000,000", "1000000"),
        ("-$5", "-5"),
        ("so...7", "7"),
        ("so....7", "7"),
        (".5", "0.5"),
        ("3/4 of it", "0.75"),
        (r"\frac{3}{4}", "0.75"),
        (r"-\dfrac{1}{2}", "-0.5"),
        ("2 1/2 cups", "2.5"),
        ("1.5e-3", "0.0015"),
        ("The result is 1.5e-3.", "0.0015"),
        ("1.5E+06.", "1500000"),
        (r"$1.5 \times 10^{-3}$", "0.0015"),
        ("2*10^3", "2000"),
        (r"\boxed{42}", "42"),
        (r"\boxed{12\,345}", "12345"),
        (r"$12{,}345$", "12345"),
        (r"1,\!234,\!567", "1234567"),
        ("#### 42", "42"),
        ("5km", "5"),
        ("7, or 1/0", "7"),
    ],
)
def test_last_number(text: str, value: str) -> None:
    number = last_number(text)
    assert number is not None and number.value == Decimal(value)


@pytest.mark.parametrize("text", ["", "no idea", "GPT4", "x2", "1/0", ".", "-", "%"])
def test_no_number(text: str) -> None:
    assert last_number(text) is None


def same(a: str, b: str) -> bool:
    x = last_number(a)
    y = last_number(b)
    assert x is not None and y is not None
    return equal(x, y)


def test_equality_is_by_value() -> None:
    assert same("0.5", "1/2") and same("1,234", "1234.0") and same("1e3", "1000")
    assert same("1/3", "0.3333333") and not same("1/3", "0.333")
    assert not same("123456789", "123456790")
    assert not same("1", "-1") and not same("0", "0.0000001")


def test_a_percent_sign_on_one_side_reads_either_way() -> None:
    assert same("50%", "0.5") and same("50", r"50\%") and same("50%", "50%")
    assert not same("50%", "5%") and not same("0.5%", "0.5 of 50")


@given(st.integers())
def test_integers_survive_with_and_without_separators(n: int) -> None:
    assert last_number(str(n)) == last_number(f"so {n:,}.") == Number(Decimal(n))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_survive(x: float) -> None:
    number = last_number(repr(x))
    assert number is not None and float(number.value) == x


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    number = last_number(text)
    assert number is None or number.value.is_finite()


def test_monstrous_numbers_are_cheap_and_compare() -> None:
    assert same("1e999999", "1e999999") and not same("1e999999", "1e999998")
    assert not same("9" * 5000, "9" * 4999 + "8")
    assert not same("1e999999", "12.5%") and not same("0.5", "9." + "9" * 50 + "e999999")
    assert last_number("1,111," * 20000) is not None
