"""The user's code in one episode, on threads and an event loop of its own.

An episode that blocks, hangs or leaves something behind harms no other. Plain functions run in order on one
thread, coroutine functions on one event loop; so what one call opens, a later one of the episode can use.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from tunesmith.environments import user_calls, user_code
from tunesmith.errors import ConfigError, DeadlineExceeded, EpisodeError, nearest


class EpisodeCode:
    """Runs the user's functions; ``timeout`` is in seconds, for each call."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._calls = user_calls.UserCalls()

    async def run(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The function's result; ``what`` names it in errors.

        Raises:
            EpisodeError: it raised; with the traceback.
            DeadlineExceeded: it did not return in time.
        """
        try:
            # `partial` hides what is a coroutine function from nobody: `is_async` looks through it.
            return await self._calls.run(functools.partial(function, *args), kwargs, self._timeout)
        except user_calls.RaisedInCall as raised:
            trace = user_code.describe_exception(raised.error, skip=_is_ours)
            raise EpisodeError(f"{what} raised\n{trace}") from raised.error
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{what} {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.close()


def _is_ours(filename: str) -> bool:
    return filename in (user_calls.__file__, __file__) or "/asyncio/" in filename


def keywords(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``given`` the function takes by keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(given)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in given.items() if name in names}


def check_keywords(function: Callable[..., Any], reference: str, available: set[str], skip: int = 0) -> None:
    """Refuse a function that requires what it is not given; the first ``skip`` parameters are given by place.

    Raises:
        ConfigError: names the parameter, and the nearest column.
    """
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    for p in parameters:
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or p.default is not p.empty:
            continue
        if p.name not in available or p.kind is p.POSITIONAL_ONLY:
            raise ConfigError(
                f"'{reference}' needs '{p.name}', which is no column of the data.{nearest(p.name, available)}"
            )
