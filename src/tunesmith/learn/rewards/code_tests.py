"""``code_tests``: the share of a task's tests that the program in a completion passes.

Each test runs in a sandbox of its own. What the program has to print or return is compared outside
of it: a program cannot pass by knowing what is expected, because it is not there. Assertions are
the exception.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isclose

from tunesmith.config.sandboxes import Sandbox
from tunesmith.config.schema import RewardSection
from tunesmith.errors import shortened
from tunesmith.learn.rewards.function import (
    ItemFailure,
    Notes,
    RewardFunction,
    Score,
    completions_of,
    text_of,
)
from tunesmith.learn.sandboxes.base import SandboxError, SandboxJob, SandboxOutcome, SandboxRunner
from tunesmith.learn.sandboxes.making import make_runner
from tunesmith.records.foreign import json_or, parse_json
from tunesmith.types import Rollout, Status

CODE_TESTS = "code_tests"
_BLOCK = re.compile(r"```[ \t]*([^\s`]*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "python", "python3", "py")
_PASSED = "passed"
_CALLS = ("functional", "function_call")
"""Types of tests that published data sets call a function with."""
_CALL = """\
import json, sys
_arguments = json.loads(sys.stdin.read())
_out, sys.stdout = sys.stdout, sys.stderr
import solution
_owner = solution if hasattr(solution, {name!r}) else solution.Solution()
_result = getattr(_owner, {name!r})(*_arguments)
json.dump(_result, _out)
"""


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test: a program's input and output, a call and its result, or an assertion."""

    given: str
    """The program's standard input, the arguments as JSON, or the assertion."""
    expected: object = None
    function: str = ""
    """The function that is called; empty: the program is run."""
    asserts: bool = False

    def job(self, code: str) -> SandboxJob:
        if self.asserts:
            return SandboxJob(f"{code}\n\n{self.given}\nprint({_PASSED!r})")
        if self.function:
            call = _CALL.format(name=self.function)
            return SandboxJob(call, stdin=self.given, files={"solution.py": code})
        return SandboxJob(code, stdin=self.given)

    def passes(self, outcome: SandboxOutcome) -> bool:
        if not outcome.ok:
            return False
        if self.asserts:
            return outcome.stdout.rstrip().endswith(_PASSED)
        if not self.function:
            return lines_of(outcome.stdout) == lines_of(str(self.expected))
        try:
            result: object = parse_json(outcome.stdout)
        except ValueError:
            return False
        # Published tests often put the one result into a list.
        match self.expected:
            case [only]:
                return alike(result, self.expected) or alike(result, only)
            case expected:
                return alike(result, expected)


def code_tests(section: RewardSection, sandbox: Sandbox) -> RewardFunction:
    """The reward function; ConfigError if the machine lacks what the sandbox needs."""
    runner = make_runner(sandbox)
    column = section.tests

    async def score(rollouts: Sequence[Rollout], texts: Sequence[str], notes: Notes) -> list[Score]:
        completions = [text_of(c) for c in completions_of(rollouts, texts)]
        tests = [read_tests(r.task.columns.get(column)) for r in rollouts]
        jobs = (_share(runner, *each) for each in zip(completions, tests, strict=True))
        shares = await asyncio.gather(*jobs)
        numbers = [share if isinstance(share, float) else None for share in shares]
        notes.log_extra("answered", list(map(_answered, completions, numbers)))
        notes.log_extra("correct", [None if n is None else float(n == 1.0) for n in numbers])
        notes.log_extra("tests_passed", numbers)
        if section.partial_credit:
            return list(shares)
        return [float(s == 1.0) if isinstance(s, float) else s for s in shares]

    return RewardFunction(
        CODE_TESTS,
        CODE_TESTS,
        score,
        builtin=True,
        columns=frozenset({column}),
        close=runner.close,
        check_gold=_problem_of,
    )


async def _share(runner: SandboxRunner, completion: str, tests: Sequence[CodeTest] | str) -> Score:
    if isinstance(tests, str):
        return ItemFailure(Status.REWARD_FAILED, f"data error in the column of tests: it {tests}")
    if not tests:
        return None
    code = program_in(completion)
    try:
        outcomes = await asyncio.gather(*(runner.run(test.job(code)) for test in tests))
    except SandboxError as error:
        return ItemFailure(Status.REWARD_FAILED, f"the sandbox failed: {error}")
    passed = [test.passes(outcome) for test, outcome in zip(tests, outcomes, strict=True)]
    return sum(passed) / len(passed)


def _answered(completion: str, share: float | None) -> float | None:
    """Whether it has a block of code, or is right as it stands; None: it is not judged."""
    if share is None:
        return None
    return float(share == 1.0 or _BLOCK.search(completion) is not None)


def program_in(completion: str) -> str:
    """The last block of Python in a completion; all of it if it has no blocks."""
    blocks = [match[2] for match in _BLOCK.finditer(completion) if match[1].lower() in _PYTHON]
    return blocks[-1] if blocks else completion


def read_tests(value: object) -> list[CodeTest] | str:
    """The tests of a data line, or why they cannot be used; none for None.

    They are a list of tables with ``input``, ``output`` and perhaps ``fn_name``, the function that
    is called; a list of assertions; or a table with ``inputs``, ``outputs`` and perhaps
    ``fn_name``. JSON text of one of these will do.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            return "is text and no JSON"
    match value:
        case None:
            return []
        case {"inputs": [*inputs], "outputs": [*outputs], **rest} if len(inputs) == len(outputs):
            name = rest.get("fn_name")
            pairs = list(zip(inputs, outputs, strict=True))
            if name is None:
                return [CodeTest(_lines(given), _lines(wanted)) for given, wanted in pairs]
            return [CodeTest(_arguments(given), _value(out), str(name)) for given, out in pairs]
        case [*items] if all(isinstance(item, str) for item in items):
            return [CodeTest(str(item), asserts=True) for item in items]
        case [*items]:
            tests: list[CodeTest] = []
            for item in items:
                match item:
                    case {"input": given, "output": wanted, **rest}:
                        name = rest.get("fn_name")
                        kind = rest.get("testtype", rest.get("type"))
                        if name is not None:
                            tests.append(CodeTest(_arguments(given), _value(wanted), str(name)))
                        elif kind in _CALLS:
                            return f"has a test of type '{kind}' without 'fn_name', its function"
                        else:
                            tests.append(CodeTest(_lines(given), _lines(wanted)))
                    case _:
                        return f"has {shortened(repr(item))}; expected input and output"
            return tests
        case _:
            return "is neither a list of tests nor a table with inputs and outputs of equal number"


def _problem_of(value: object) -> str | None:
    tests = read_tests(value)
    if isinstance(tests, str):
        return tests
    return None if tests else "has no tests"


def _lines(value: object) -> str:
    match value:
        case str():
            return value
        case [*lines]:
            return "\n".join(map(str, lines))
        case _:
            return str(value)


def _arguments(given: object) -> str:
    """The arguments of a call as a JSON list; text has one JSON value in each line."""
    if isinstance(given, str):
        return json.dumps([_value(line) for line in given.splitlines() if line.strip()])
    return json.dumps(given if isinstance(given, list) else [given])


def _value(text: object) -> object:
    return json_or(text, text) if isinstance(text, str) else text


def lines_of(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def alike(result: object, expected: object) -> bool:
    """Whether two JSON values are equal, decimals up to rounding."""
    match result, expected:
        case [*some], [*others]:
            pairs = zip(some, others, strict=False)
            return len(some) == len(others) and all(alike(*pair) for pair in pairs)
        case (float(), int() | float()) | (int(), float()):
            with suppress(OverflowError):  # a whole number beyond all decimals
                return isclose(result, expected, rel_tol=1e-9, abs_tol=1e-9)
            return False
        case _:
            return result == expected
