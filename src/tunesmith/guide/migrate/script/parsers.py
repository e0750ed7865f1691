"""Command line parsers of a script: argparse, and those that fill dataclasses (transformers, TRL,
tyro)."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from tunesmith.guide.migrate.script.data import Held, Unknown
from tunesmith.guide.migrate.script.expressions import Expressions
from tunesmith.guide.migrate.script.values import Named, Object, ScriptClass
from tunesmith.guide.names.foreign import spelled

PARSERS = ("ArgumentParser", "HfArgumentParser", "TrlParser", "H4ArgumentParser")


def parse(
    flow: Expressions,
    parser: Object,
    name: str,
    node: ast.Call,
    args: Sequence[Held],
    words: Mapping[str, Held],
) -> Held:
    """The value of ``parser.name(...)``."""
    if parser.kind.endswith("ArgumentParser") and name == "add_argument":
        return _add(flow, parser, args, words, node.lineno)
    if name == "set_defaults":
        parser.fields |= words
        return None
    if not name.startswith("parse"):
        return parser  # groups and parsers of commands
    classes = parser.args[0] if parser.args else parser.fields.get("dataclass_types")
    if classes is None:
        space = Object("Namespace", parser.line, fields=dict(parser.fields), parsed=True)
        return [space, []] if name == "parse_known_args" else space
    listed = classes if isinstance(classes, list) else [classes]
    made = [filled(flow, kind, node) for kind in listed]
    return made[0] if name == "parse" and len(made) == 1 else made


def filled(flow: Expressions, kind: Held, node: ast.Call) -> Object:
    """An object of a dataclass with its defaults, and what the command line says."""
    made = Object("Arguments", node.lineno, parsed=True)
    if isinstance(kind, ScriptClass):
        made.kind = flow.kind_of(kind)
        made.of = kind
        defaults = flow.fields_of(kind)
        made.fields = {key: flow.options.get(spelled(key), defaults[key]) for key in defaults}
    elif isinstance(kind, Named):
        made.kind = kind.dotted
    return made


def _add(
    flow: Expressions, parser: Object, args: Sequence[Held], words: Mapping[str, Held], line: int
) -> None:
    flags = [flag for flag in args if isinstance(flag, str)]
    long = max(flags, key=lambda flag: flag.startswith("--"), default="")
    name = words.get("dest") if isinstance(words.get("dest"), str) else spelled(long)
    on = {"store_true": False, "store_false": True}.get(str(words.get("action")))
    default = on if on is not None else None if long.startswith("-") else Unknown(long, line)
    default = words.get("default", default)
    if words.get("required") is True:
        default = Unknown(long, line, f"the command line sets {long}")
    parser.fields[str(name)] = flow.options.get(spelled(long), default)
