"""Argument parsing for commands: unknown options and commands are answered with the right ones."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from tunesmith.errors import closest
from tunesmith.records.toml import table_beside

_MEANT: Mapping[str, str] = table_beside(__file__, "meant.toml")
"""Command → synonyms."""


class Command(TyperCommand):
    """A command with help for unknown options and a missing run file; its description is not
    cut."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {
            option for p in self.get_params(ctx) for option in (*p.opts, *p.secondary_opts)
        } | {"--verbose"}
        settings = any(p.name == "overrides" for p in self.params)
        valued = {o for p in self.params if not getattr(p, "is_flag", False) for o in p.opts}
        if settings and (unknown := _unknown(args, known, valued)):
            ctx.fail(_about_options(str(self.name), unknown, known))
        if settings and (verbose := {"-v", "--verbose"}.intersection(args)):
            args = [*(arg for arg in args if arg not in verbose), "monitor.verbose=true"]
        rest = super().parse_args(ctx, args)
        run = ctx.params.get("run")
        if run is not None and "=" in str(run) and not run.exists():
            ctx.fail(
                f"the run file is missing before {run}: tunesmith {self.name} RUN.toml "
                f"{shlex.quote(str(run))}"
            )
        return rest

    def get_short_help_str(self, limit: int = 45) -> str:
        del limit
        return " ".join((self.help or "").partition("\n\n")[0].split())


class CommandGroup(TyperGroup):
    """The commands, with suggestions for one that does not exist."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if word not in self.commands and not word.startswith("-"):
            ctx.fail(f"No such command '{word}'.{self._hint(word)} All commands: tunesmith --help")
        return super().resolve_command(ctx, args)

    def _hint(self, word: str) -> str:
        meant = [name for name, words in _MEANT.items() if word.lower() in words.split()]
        near = {other: name for name, words in _MEANT.items() for other in words.split()}
        close = closest(word, [*self.commands, *near], 0.75)
        if not meant and close:
            meant = [name for name, words in _MEANT.items() if close in words.split()] or [close]
        commands = " or ".join(f"tunesmith {name}" for name in meant)
        return f" Did you mean {commands}?" if meant else ""


def _unknown(args: Sequence[str], known: set[str], valued: set[str]) -> list[tuple[str, list[str]]]:
    """Long options unknown to a command, each with the values that follow it.

    Args:
        valued: options that the next word is the value of (``--sbatch --time=1:00:00``).
    """
    unknown: list[tuple[str, list[str]]] = []
    for position, text in enumerate(args):
        option, equals, value = text.partition("=")
        if text == "--":
            break
        value_of = position > 0 and args[position - 1] in valued
        if not option.startswith("--") or option in known or value_of:
            continue
        values = [value] if equals else []
        for following in [] if equals else args[position + 1 :]:
            if following.startswith("--") or following.endswith(".toml") or "=" in following:
                break
            values.append(following)
        unknown.append((option, values))
    return unknown


def _about_options(command: str, options: Sequence[tuple[str, list[str]]], known: set[str]) -> str:
    """A message with the right setting for each unknown option; ``known`` are the command's own
    options."""
    from tunesmith.config.commands import KINDS
    from tunesmith.config.reading.answers import answers

    lines: list[str] = []
    for option, values in options:
        own = closest(option.replace("_", "-"), [k for k in known if k.startswith("--")], 0.85)
        instead = f"did you mean {own}?"
        if not own:
            instead = answers().option(KINDS.get(command), option, values)
        lines.append(f"  {' '.join((option, *values))}: {instead}")
    first = "No such option. Settings are written section.key=value, after the run file:"
    return "\n".join([first, *lines])
