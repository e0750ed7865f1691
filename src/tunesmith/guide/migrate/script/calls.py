"""Calls in a script that is followed: of its own functions and classes, of containers, and of
libraries."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from tunesmith.errors import shortened
from tunesmith.guide.migrate.script.data import (
    Call,
    Data,
    Held,
    Length,
    RowSpan,
    Splits,
    Unknown,
    all_data,
)
from tunesmith.guide.migrate.script.expressions import Expressions
from tunesmith.guide.migrate.script.loading import LOADERS, method
from tunesmith.guide.migrate.script.parsers import PARSERS, filled, parse
from tunesmith.guide.migrate.script.values import (
    Function,
    Named,
    Object,
    Scope,
    ScriptClass,
    is_known,
    is_small,
    items_of,
    short,
)

_PLAIN: Mapping[str, Callable[..., Held]] = {
    "int": int, "float": float, "str": str, "bool": bool, "list": list, "tuple": tuple,
    "dict": dict, "min": min, "max": max, "sorted": sorted, "abs": abs, "round": round,
    "len": len, "range": range,
}  # fmt: skip


_OF_TEXT = (
    "startswith", "endswith", "lower", "upper", "strip", "lstrip", "rstrip", "split", "replace",
    "removeprefix", "removesuffix",
)  # fmt: skip


class Calls(Expressions):
    """The calls."""

    def parameters(
        self, of: ast.arguments, args: Sequence[Held], keywords: Mapping[str, Held], scope: Scope
    ) -> dict[str, Held]:
        names = [*of.posonlyargs, *of.args]
        rest = [one for one in (of.vararg, of.kwarg) if one]
        every = [*names, *of.kwonlyargs]
        held: dict[str, Held] = {a.arg: Unknown(a.arg, a.lineno) for a in (*every, *rest)}
        given = {a.arg: value for a, value in zip(names, args, strict=False)}
        given |= {a.arg: keywords[a.arg] for a in every if a.arg in keywords}
        with_default = names[len(names) - len(of.defaults) :] + of.kwonlyargs
        for each, default in zip(with_default, [*of.defaults, *of.kw_defaults], strict=True):
            if default and each.arg not in given:
                held[each.arg] = self.value(default, scope)
        return held | given

    def call(self, node: ast.Call, scope: Scope) -> Held:
        function = node.func
        holder = self.value(function.value, scope) if isinstance(function, ast.Attribute) else None
        name = function.attr if isinstance(function, ast.Attribute) else ""
        callee = self.attribute(holder, name, function) if name else self.value(function, scope)
        args = [item for arg in node.args for item in self.spread(arg, scope)]
        keywords: dict[str, Held] = {}
        for word in node.keywords:
            value = self.value(word.value, scope)
            if word.arg:
                keywords[word.arg] = value
            elif isinstance(value, dict):
                keywords |= {str(key): one for key, one in value.items()}
        arguments = ", ".join(ast.unparse(arg) for arg in (*node.args, *node.keywords))
        call = Call(args, keywords, short(node), node.lineno, shortened(arguments, 90))
        if isinstance(holder, Data | Splits):
            return method(holder, name, call)
        if isinstance(holder, Function) and name == "remote":  # a function of Ray or Modal
            callee = holder
        if isinstance(callee, Function):
            return self._of_script(callee, node, call, holder)
        if isinstance(holder, str) and name in _OF_TEXT and is_known(args):
            return self._plain(getattr(holder, name), node, call)
        if isinstance(holder, dict | list):
            return self._of_container(holder, name, node, call)
        if isinstance(holder, Object):
            return self._of_object(holder, name, node, call)
        if isinstance(callee, Named):
            return self._of_library(callee.dotted, node, call)
        self.record(name or short(function), node, call)
        return self.unknown(node, callee.why if isinstance(callee, Unknown) else "")

    def record(self, kind: str, node: ast.AST, call: Call) -> Object:
        """Remember what a call makes."""
        made = Object(kind, call.line, call.text, dict(call.keywords), args=call.args)
        if isinstance(node, ast.Call):
            made.arg_texts = [(ast.unparse(arg), arg.lineno) for arg in node.args]
            for word in node.keywords:
                if word.arg:
                    text = f"{word.arg}={ast.unparse(word.value)}"
                    made.texts[word.arg] = text, word.value.lineno
        self.made.append(made)
        return made

    def _of_script(self, callee: Function, node: ast.Call, call: Call, holder: Held) -> Held:
        if not isinstance(callee, ScriptClass):
            me = holder if isinstance(holder, Object) else None
            return self.enter(callee, call.args, call.keywords, me)
        made = self.record(self.kind_of(callee), node, call)
        made.of = callee
        fields = self.fields_of(callee)
        start = self.method_of(callee, "__init__")
        if start and made.kind == callee.node.name:
            made.fields = dict(fields)
            self.enter(start, call.args, call.keywords, made)
        else:
            made.fields = {**fields, **dict(zip(fields, call.args, strict=False)), **call.keywords}
        return made

    def _of_container(self, holder: Held, name: str, node: ast.Call, call: Call) -> Held:
        args: Held = call.args
        added = args[0] if args else None
        sure = not self.undecided
        if isinstance(holder, list):
            if name in ("append", "extend"):
                items = [added] if name == "append" else items_of(added)
                holder += items if sure and items else [self.unknown(node)]
                return None
            return self.unknown(node)
        if name == "update":
            known = added is None or isinstance(added, dict)
            changed = {**call.keywords, **((added or {}) if known else holder)}
            holder |= changed if sure and known else dict.fromkeys(changed, self.unknown(node))
            return None
        if name == "copy":
            return holder.copy()
        if name in ("get", "pop") and len(args) < 3 and is_known(list(args[:1])):
            return holder.get(*args)
        if name == "items":
            return [list(pair) for pair in holder.items()]
        return list(getattr(holder, name)()) if name in ("keys", "values") else self.unknown(node)

    def _of_object(self, holder: Object, name: str, node: ast.Call, call: Call) -> Held:
        if holder.name in PARSERS:
            return parse(self, holder, name, node, call.args, call.keywords)
        self.record(f"{holder.kind}.{name}", node, call)
        return holder if holder.is_model else self.unknown(node)

    def _of_library(self, dotted: str, node: ast.Call, call: Call) -> Held:
        last = dotted.rpartition(".")[2]
        loader = LOADERS.get(last) or LOADERS.get(".".join(dotted.split(".")[-2:]))
        if loader:
            loaded = loader(call)
            self.loaded += all_data(loaded) if last.startswith("load") else []
            return loaded
        if dotted in _PLAIN:
            return self._built_in(dotted, node, call)
        if last in ("getenv", "get") and dotted.startswith("os.") and len(call.args) == 2:
            return call.args[1]
        texts = [arg for arg in call.args if isinstance(arg, str)]
        joins = dotted in ("os.path.join", "pathlib.Path", "Path")
        if joins and texts and len(texts) == len(call.args):
            return "/".join([*(text.rstrip("/") for text in texts[:-1]), texts[-1]])
        functions = [arg for arg in call.args if isinstance(arg, Function)]
        if last == "cli" and functions and isinstance(functions[0], ScriptClass):
            return filled(self, functions[0], node)
        if last in ("Fire", "run", "cli") and functions:
            return self.enter(functions[0], [], {}, None)
        made = self.record(dotted, node, call)
        if made.is_model or last[:1].isupper() or last in ("field", "partial"):
            return made
        first = call.args[0] if call.args else call.keywords.get("model")
        if isinstance(first, Object) and first.is_model:
            return first
        of_data = isinstance(first, Data | Splits)
        why = f"what {short(node)} (line {node.lineno}) returns is not known"
        return self.unknown(node, why if of_data else "")

    def _plain(self, function: Callable[..., Held], node: ast.Call, call: Call) -> Held:
        """A function of Python's own on values that are known."""
        try:
            result = function(*call.args, **call.keywords)
        except (TypeError, ValueError, OverflowError):
            return self.unknown(node)
        return result if is_small(result) else self.unknown(node)

    def _built_in(self, name: str, node: ast.Call, call: Call) -> Held:
        """A built-in function; the length of a data set is a ``Length``."""
        args: Held = list(call.args)
        lengths = [arg for arg in args if isinstance(arg, Length)]
        if name == "len" and args and isinstance(args[0], Data):
            return Length()
        if name in ("int", "round") and lengths:
            return lengths[0]
        if name == "min" and lengths == [Length()] and len(args) == 2:  # at most so many rows
            return next(arg for arg in args if arg != Length())
        whole = all(isinstance(arg, int | Length) for arg in args)
        if name == "range" and lengths and len(args) < 3 and whole:
            return RowSpan(*(0, *args)[-2:])
        if name in ("list", "tuple") and args and isinstance(args[0], range | RowSpan | list):
            return list(args[0]) if isinstance(args[0], list) else args[0]
        if name == "dict" and all(isinstance(arg, dict) for arg in args):
            return {**(args[0] if args else {}), **call.keywords}
        known = is_known(args) and is_known(dict(call.keywords))
        if not known or any(isinstance(arg, range) for arg in args):
            return self.unknown(node)
        return self._plain(_PLAIN[name], node, call)

    @abstractmethod
    def enter(
        self,
        function: Function,
        args: Sequence[Held],
        keywords: Mapping[str, Held],
        me: Object | None,
    ) -> Held:
        """The value that a function of the script returns."""
