"""Expressions of a script that is followed."""

from __future__ import annotations

import ast
import operator
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from tunesmith.guide.migrate.script.data import Data, Held, Length, Splits, Step, Unknown
from tunesmith.guide.migrate.script.values import (
    Function,
    Named,
    Object,
    Scope,
    ScriptClass,
    field_of,
    is_known,
    is_small,
    items_of,
    short,
    truth,
)

_BINARY: Mapping[type[ast.AST], Callable[[Held, Held], Held]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


LONGEST = 16
"""Most values of a list that a loop is followed over."""


class Expressions:
    """The expressions. ``options`` are those of the script's command line; ``made`` is every
    ``Object``, and ``loaded`` every data set, in order."""

    def __init__(self, file: str, options: Mapping[str, Held]) -> None:
        self.file = file
        self.options = options
        self.made: list[Object] = []
        self.loaded: list[Data] = []
        self.undecided = 0
        """How many conditions that are not known the current statement depends on."""

    # ---- expressions

    def value(self, node: ast.expr, scope: Scope) -> Held:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return scope[name] if name in scope else Named(name)
            case ast.Attribute(value=inner, attr=name):
                return self.attribute(self.value(inner, scope), name, node)
            case ast.Call():
                return self.call(node, scope)
            case ast.Await(value=inner):
                return self.value(inner, scope)
            case ast.NamedExpr(target=target, value=inner):
                self.bind(target, self.value(inner, scope), inner, scope)
                return self.value(target, scope)
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [one for item in items for one in self.spread(item, scope)]
            case ast.Dict(keys=keys, values=values):
                return self._dict(keys, values, scope)
            case ast.Slice(lower=lower, upper=upper, step=None):
                return slice(*(self.value(end, scope) if end else None for end in (lower, upper)))
            case ast.Subscript(value=inner, slice=key):
                return self._item(self.value(inner, scope), self.value(key, scope), node)
            case ast.Lambda():
                return Function(node, scope, self.file)
            case ast.IfExp(test=test, body=body, orelse=other):
                decided = truth(self.value(test, scope))
                if decided is not None:
                    return self.value(body if decided else other, scope)
                return self.merged([self.value(body, scope), self.value(other, scope)], test)
            case ast.BoolOp():
                return self._bool(node, scope)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                decided = truth(self.value(operand, scope))
                return self.unknown(node) if decided is None else not decided
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self.value(operand, scope)
                return -value if isinstance(value, int | float) else self.unknown(node)
            case (
                ast.BinOp(left=left, op=op, right=right)
                | ast.Compare(left=left, ops=[op], comparators=[right])
            ):
                sides = self.value(left, scope), self.value(right, scope)
                return self.binary(type(op), *sides, node)
            case ast.JoinedStr(values=values):
                inner = [v.value if isinstance(v, ast.FormattedValue) else v for v in values]
                parts = [self.value(one, scope) for one in inner]
                plain = all(isinstance(part, str | int | float) for part in parts)
                text = "".join(map(str, parts)) if plain else ""
                return text if plain and is_small(text) else self.unknown(node)
            case ast.ListComp() | ast.DictComp() | ast.SetComp() | ast.GeneratorExp():
                return self._comprehension(node, scope)
            case _:
                return self.unknown(node)

    def unknown(self, node: ast.AST, why: str = "") -> Unknown:
        return Unknown(short(node), getattr(node, "lineno", 0), why)

    def merged(self, values: Sequence[Held], why: ast.AST, name: str = "") -> Held:
        """The value that all alternatives agree on. Where they are a data set or nothing, the data
        set."""
        some = [value for value in values if value is not None]
        first = next(iter(some), None)
        compared = some if isinstance(first, Data | Splits) else values
        if all(type(value) is type(first) and value == first for value in compared):
            return first
        line = getattr(why, "lineno", 0)
        text = short(why) if isinstance(why, ast.expr) else name
        return Unknown(name or text, line, f"it depends on {text} (line {line})")

    def spread(self, arg: ast.expr, scope: Scope) -> Sequence[Held]:
        if isinstance(arg, ast.Starred):
            held = items_of(self.value(arg.value, scope))
            return [self.unknown(arg)] if held is None else held
        return [self.value(arg, scope)]

    def attribute(self, holder: Held, name: str, node: ast.expr) -> Held:
        if isinstance(holder, Named):
            return Named(f"{holder.dotted}.{name}")
        if isinstance(holder, Data) and name in ("num_rows", "__len__"):
            return Length()
        if isinstance(holder, Object):
            if name in holder.fields:
                return holder.fields[name]
            method = self.method_of(holder.of, name) if holder.of else None
            return method or field_of(holder, name, self.options, self.unknown(node))
        if isinstance(holder, ScriptClass):
            return self.fields_of(holder).get(name, self.unknown(node))
        if isinstance(holder, Unknown):
            depends = f"it depends on {holder.text} (line {holder.line})"
            return self.unknown(node, holder.why or depends)
        return self.unknown(node)

    def method_of(self, of: ScriptClass, name: str) -> Function | None:
        for item in of.node.body:
            if isinstance(item, ast.FunctionDef) and item.name == name:
                return Function(item, of.scope, self.file)
        return None

    def kind_of(self, of: ScriptClass) -> str:
        """A class of the script that extends a library's trainer or configuration is taken for that
        one."""
        bases = [self.value(base, of.scope) for base in of.node.bases]
        names = [base.dotted for base in bases if isinstance(base, Named)]
        known = (name for name in names if name.endswith(("Trainer", "Config", "Arguments")))
        return next(known, of.node.name)

    def fields_of(self, of: ScriptClass) -> dict[str, Held]:
        """The fields of a class of the script and of its bases there, with their defaults."""
        scope = of.scope.new_child()
        fields = dict[str, Held]()
        for base in of.node.bases:
            above = self.value(base, of.scope)
            if isinstance(above, ScriptClass) and above.node is not of.node:
                fields |= self.fields_of(above)
        for item in of.node.body:
            match item:
                case ast.AnnAssign(target=ast.Name(id=name), value=node):
                    value = self.value(node, scope) if node else Unknown(name, item.lineno)
                    fields[name] = scope[name] = self._default(name, value)
                case ast.Assign(targets=[ast.Name(id=name)], value=node):
                    fields[name] = scope[name] = self.value(node, scope)
                case _:
                    pass
        return fields

    def _default(self, name: str, value: Held) -> Held:
        """The default in ``field(default=...)``, ``field(default_factory=...)`` and pydantic's
        ``Field(...)``."""
        if not isinstance(value, Object) or value.name not in ("field", "Field"):
            return value
        made = value.fields.get("default_factory")
        if isinstance(made, Function) and isinstance(made.node, ast.Lambda):
            return self.value(made.node.body, made.scope)
        first = value.args[0] if value.args else Unknown(name, value.line)
        if isinstance(made, Named):
            first = {"list": [], "dict": {}}.get(made.dotted, first)
        return value.fields.get("default", first)

    def _item(self, holder: Held, key: Held, node: ast.Subscript) -> Held:
        if isinstance(holder, Splits) and isinstance(key, str):
            part = holder.get(key)
            return self.unknown(node) if part is None else part
        if isinstance(holder, Data):
            return self.unknown(node, "a column or some rows of a data set")
        with suppress(KeyError, IndexError, TypeError):
            if isinstance(holder, list | dict | str) and is_known(key):
                return holder[key]
        return self.unknown(node, getattr(holder, "why", ""))

    def _dict(
        self, keys: Sequence[ast.expr | None], values: Sequence[ast.expr], scope: Scope
    ) -> dict[Held, Held]:
        items: dict[Held, Held] = {}
        for key, node in zip(keys, values, strict=True):
            value = self.value(node, scope)
            name = self.value(key, scope) if key else None
            if isinstance(name, str | int | float):
                items[name] = value
            elif key is None and isinstance(value, dict):
                items |= value
        return items

    def _bool(self, node: ast.BoolOp, scope: Scope) -> Held:
        """``a or b``, ``a and b``: decided by the operands that are known."""
        value: Held = None
        unsure = False
        for operand in node.values:
            value = self.value(operand, scope)
            decided = truth(value)
            decides = decided is isinstance(node.op, ast.Or)
            if decides and (not unsure or isinstance(value, bool)):
                return value
            unsure |= decided is None
        return self.unknown(node) if unsure else value

    def binary(self, op: type[ast.AST], left: Held, right: Held, node: ast.AST) -> Held:
        if op in (ast.Is, ast.IsNot) and right is None and truth(left) is not None:
            return (left is None) == (op is ast.Is)
        match op(), left, right:
            case ast.Mult(), Length(share, 0), int() | float() as factor:
                return Length(share * factor)
            case ast.Mult(), int() | float() as factor, Length(share, 0):
                return Length(share * factor)
            case ast.Sub(), Length(1.0, 0), int(less):
                return Length(less=less)
            case ast.Div(), str(), str():
                return f"{left.rstrip('/')}/{right}"  # of a pathlib.Path
            case ast.Add(), list(), list():
                known = True
            case ast.Add() | ast.cmpop(), _, _:
                known = is_known(left) and is_known(right) and op in _BINARY
            case _, int() | float(), int() | float():
                known = op in _BINARY
            case _:
                known = False
        if known:
            try:
                result = _BINARY[op](left, right)
            except (TypeError, ValueError, ArithmeticError):
                return self.unknown(node)
            if is_small(result):
                return result
        why = (side.why for side in (left, right) if isinstance(side, Unknown))
        return self.unknown(node, next(why, ""))

    def _comprehension(self, node: Held, scope: Scope) -> Held:
        """A comprehension over one short list of known values."""
        first = node.generators[0]
        inner = scope.new_child()
        over = self.value(first.iter, scope)
        alone = len(node.generators) == 1
        items = items_of(over)
        sure = alone and items is not None and len(items) <= LONGEST
        pairs = list[Held]()
        for item in items if sure and items else [] if sure else [self.unknown(first.iter)]:
            self.bind(first.target, item, first.iter, inner)
            kept = [truth(self.value(test, inner)) for test in first.ifs]
            sure = sure and None not in kept
            if False not in kept:
                parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                pairs.append([self.value(part, inner) for part in parts])
        if isinstance(over, Data) and isinstance(node, ast.ListComp | ast.GeneratorExp) and alone:
            return self._rows(node, over, scope)
        if not sure:
            return self.unknown(node)
        return dict(pairs) if isinstance(node, ast.DictComp) else [value for [value] in pairs]

    def _rows(self, node: Held, over: Data, scope: Scope) -> Data:
        """``[function(row) for row in data]``, which is a map, and with a condition also a
        filter."""
        first = node.generators[0]
        row = ast.unparse(first.target)
        if first.ifs:
            step = Step("filter", short(node), node.lineno)
        elif ast.unparse(node.elt) == row:
            return over
        else:
            function = ""
            if isinstance(node.elt, ast.Call):
                called = self.value(node.elt.func, scope)
                passed = [ast.unparse(arg) for arg in (*node.elt.args, *node.elt.keywords)]
                function = getattr(called, "reference", "") if passed == [row] else ""
            step = Step("map", short(node), node.lineno, function)
        return replace(over, steps=(*over.steps, step))

    @abstractmethod
    def call(self, node: ast.Call, scope: Scope) -> Held:
        """The value of a call."""

    @abstractmethod
    def bind(self, target: ast.expr, value: Held, node: ast.expr, scope: Scope) -> None:
        """Assign a value."""
