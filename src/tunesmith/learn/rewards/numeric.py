"""Numbers as people and models write them, and when two of them are equal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Context, Decimal, InvalidOperation

RELATIVE_TOLERANCE = Decimal("1e-6")

# No traps: overflow and division by zero produce infinity or NaN, which then count as "not a
# number".
_CONTEXT = Context(prec=60, traps=[])

_COMMA = r"(?:,|\{,\}|,?\\[,!])"
"""Thousands separators; all but the plain comma are LaTeX's."""
_PLAIN = rf"(?:(?:\d{{1,3}}(?:{_COMMA}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+)"
_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z_\d])(?<!\d\.)            # not inside a word, not the tail of another number
    (?P<sign>(?<![\w)\]}}])[-−+])?       # a sign, unless it subtracts from what is before it
    (?:\\?[$€£¥])?
    (?:
        \\[dt]?frac\{{\s?(?P<top>-?{_PLAIN})\s?\}}\{{\s?(?P<bottom>{_PLAIN})\s?\}}
      | (?P<whole>\d+)\s{{1,2}}(?P<part>\d+)/(?P<of>\d+)(?![\d/])
      | (?P<numerator>{_PLAIN})\s?/\s?(?P<denominator>{_PLAIN})
      | (?P<plain>{_PLAIN})
        (?: [eE](?P<exponent>[-+]?\d{{1,6}})(?!\w|\.\d)
          | \s?(?:×|\*|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?\{{?(?P<power>[-−+]?\d{{1,6}})\}}? )?
    )
    (?P<percent>\s?\\?%)?
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Number:
    """A value as written: ``12.5%`` is 12.5 with ``percent``."""

    value: Decimal
    percent: bool = False


def last_number(text: str) -> Number | None:
    """The last number of a text; None if there is none.

    Understands ``1,234.5``, ``-3``, ``$5``, ``3/4``, ``2 1/2``, ``\\frac{3}{4}``, ``12.5%``,
    ``1.5e-3`` and ``1.5 \\times 10^{-3}``. A minus after a letter, digit or closing bracket is a
    subtraction.
    """
    last = None
    for match in _NUMBER.finditer(text):
        last = _number(match) or last
    return last


def equal(a: Number, b: Number) -> bool:
    """Equality by value.

    Whole numbers must be exactly equal, others within a relative 1e-6. Where only one of the two
    carries a percent sign it may be read either way (0.5 and 50 both equal 50%): answers often
    leave the sign out.
    """
    if a.percent == b.percent:
        return _close(a.value, b.value)
    bare, percent = (a, b) if b.percent else (b, a)
    hundredfold = _CONTEXT.multiply(bare.value, Decimal(100))
    return _close(bare.value, percent.value) or _close(hundredfold, percent.value)


def _close(a: Decimal, b: Decimal) -> bool:
    if a == b:
        return True
    if not (a.is_finite() and b.is_finite()) or (_is_whole(a) and _is_whole(b)):
        return False
    # ``abs`` would round in the default context, where an overflow raises.
    allowed = _CONTEXT.multiply(RELATIVE_TOLERANCE, max(a.copy_abs(), b.copy_abs()))
    return _CONTEXT.subtract(a, b).copy_abs() <= allowed


def _is_whole(value: Decimal) -> bool:
    return value == value.to_integral_value()


def _number(match: re.Match[str]) -> Number | None:
    def read(group: str) -> Decimal:
        return Decimal(re.sub(_COMMA, "", match[group]))

    try:
        if match["top"]:
            value = _CONTEXT.divide(read("top"), read("bottom"))
        elif match["part"]:
            value = _CONTEXT.add(read("whole"), _CONTEXT.divide(read("part"), read("of")))
        elif match["numerator"]:
            value = _CONTEXT.divide(read("numerator"), read("denominator"))
        else:
            value = read("plain")
            exponent = match["exponent"] or match["power"]
            if exponent:
                value = value.scaleb(int(exponent.replace("−", "-")), _CONTEXT)
    except InvalidOperation:
        return None
    if not value.is_finite():
        return None
    negative = match["sign"] in ("-", "−")
    return Number(value.copy_negate() if negative else value, match["percent"] is not None)
