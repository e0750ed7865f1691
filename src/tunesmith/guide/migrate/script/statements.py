"""Follows the values of a Python script without running it: a small evaluator of its statements.

Statements are evaluated in order, with the script's own functions at their calls. A value that only
running the script would give is an ``Unknown``. Where a condition is not known both branches are
followed, and a name that differs after them is ``Unknown``. A loop runs once, except over a short
list of known values.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from tunesmith.errors import ConfigError
from tunesmith.guide.migrate.script.calls import Calls
from tunesmith.guide.migrate.script.data import Call, Held, Splits, Unknown
from tunesmith.guide.migrate.script.expressions import LONGEST
from tunesmith.guide.migrate.script.values import (
    Function,
    Named,
    Object,
    Scope,
    ScriptClass,
    items_of,
    short,
    truth,
)

_FALLS = object()
_RAISES = object()
"""A block ran to its end; or it ends the program."""
_ENDING = ("sys.exit", "exit", "quit")
_DEEPEST = 12
_MOST = 10_000
"""Deepest call that is entered; maximum number of statements."""


class Flow(Calls):
    """A script that was followed: every ``Object`` it ``made``, and every data set it ``loaded``,
    in order."""

    def __init__(self, tree: ast.Module, file: str, options: Mapping[str, Held]) -> None:
        super().__init__(file, options)
        self._returned: list[list[Held]] = []
        self._entered = set[ast.AST]()
        self._depth = self._statements = 0
        self._copies = 1
        """How often the current statement is followed, by the loops around it."""
        self._functions: list[Function] = []
        self._run(tree.body, Scope({"__name__": "__main__"}))
        for function in self._functions:  # which nobody called; grows meanwhile
            if function.node not in self._entered:
                self.enter(function, [], {}, None)

    def _run(self, body: Sequence[ast.stmt], scope: Scope) -> Held:
        for statement in body:
            self._statements += 1
            if self._statements > _MOST:
                why = "calls its own functions too often to be followed"
                raise ConfigError(f"{self.file} {why}; migrate its parts")
            result = self._statement(statement, scope)
            if result is not _FALLS:
                return result
        return _FALLS

    def _statement(self, node: ast.stmt, scope: Scope) -> Held:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope[node.name] = function = Function(node, scope, self.file)
                self._functions.append(function)
            case ast.ClassDef(body=body):
                scope[node.name] = ScriptClass(node, scope, self.file)
                self._run(body, scope.new_child())  # a library may call its methods
            case ast.Import(names=names):
                for alias in names:
                    first = alias.name.partition(".")[0]
                    scope[alias.asname or first] = Named(alias.name if alias.asname else first)
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    dotted = f"{module or ''}.{alias.name}".lstrip(".")
                    scope[alias.asname or alias.name] = Named(dotted)
            case ast.Assign(targets=targets, value=value):
                held = self.value(value, scope)
                for target in targets:
                    self.bind(target, held, value, scope)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.bind(target, self.value(value, scope), value, scope)
            case ast.AugAssign(target=target, op=op, value=value):
                sides = self.value(target, scope), self.value(value, scope)
                self.bind(target, self.binary(type(op), *sides, node), value, scope)
            case ast.Expr(value=ast.Call(func=func)) if ast.unparse(func) in _ENDING:
                return _RAISES
            case ast.Expr(value=value):
                self.value(value, scope)
            case ast.Return(value=value):
                return self.value(value, scope) if value else None
            case ast.Raise():
                return _RAISES
            case ast.If(test=test, body=body, orelse=other):
                decided = truth(self.value(test, scope))
                if decided is None:
                    return self._either([body, other], test, scope)
                return self._run(body if decided else other, scope)
            case ast.For() | ast.AsyncFor():
                return self._for(node, scope)
            case ast.While(test=test, body=body):
                self.value(test, scope)
                return self._either([body, []], test, scope)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    held = self.value(item.context_expr, scope)
                    if item.optional_vars:
                        self.bind(item.optional_vars, held, item.context_expr, scope)
                return self._run(body, scope)
            case ast.Try(body=body, handlers=handlers, orelse=other, finalbody=final):
                result = self._run([*body, *other, *final], scope)
                for handler in handlers:
                    self._either([handler.body, []], node, Scope({}, *scope.maps))
                return result
            case ast.Match(subject=subject, cases=cases):
                return self._either([*(case.body for case in cases), []], subject, scope)
            case _:
                pass
        return _FALLS

    def bind(self, target: ast.expr, value: Held, node: ast.expr, scope: Scope) -> None:
        match target:
            case ast.Name(id=name):
                scope[name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                parts = items_of(value) or []
                if len(parts) != len(targets):
                    part = value if isinstance(value, Object) else self.unknown(node)
                    parts = [part] * len(targets)
                for one, part in zip(targets, parts, strict=True):
                    self.bind(one, part, node, scope)
            case ast.Attribute(value=inner, attr=name):
                holder = self.value(inner, scope)
                if isinstance(holder, Object):
                    holder.fields[name] = self._sure(value, node)
                    holder.texts[name] = (f"{name}={ast.unparse(node)}", node.lineno)
                elif isinstance(holder, Named):
                    dotted = f"{holder.dotted}.{name}"
                    set_to = Call([value], {}, f"{dotted} = {short(node)}", node.lineno)
                    self.record(dotted, target, set_to)
            case ast.Subscript(value=inner, slice=key):
                holder = self.value(inner, scope)
                name = self.value(key, scope)
                held: Held = holder.parts if isinstance(holder, Splits) else holder
                if isinstance(held, dict) and isinstance(name, str | int):
                    held[name] = self._sure(value, node)
            case _:
                pass

    def _sure(self, value: Held, node: ast.expr) -> Held:
        return self.unknown(node, "it depends on a condition") if self.undecided else value

    def _for(self, node: ast.For | ast.AsyncFor, scope: Scope) -> Held:
        items = items_of(self.value(node.iter, scope))
        if items is None or len(items) * self._copies > LONGEST:
            self.bind(node.target, self.unknown(node.iter), node.iter, scope)
            return self._either([node.body, []], node.iter, scope)
        self._copies *= max(len(items), 1)
        result = _FALLS
        for item in items:
            self.bind(node.target, item, node.iter, scope)
            result = self._run(node.body, scope)
            if result is not _FALLS:
                break
        self._copies //= max(len(items), 1)
        return result

    def _either(self, bodies: Sequence[Sequence[ast.stmt]], why: ast.AST, scope: Scope) -> Held:
        """Follow each of several bodies, only one of which runs; afterwards a name has a value if
        all agree on it."""
        before = dict(scope.maps[0])
        ends = list[dict[str, Held]]()
        last = _RAISES
        self.undecided += 1
        for body in bodies:
            scope.maps[0].clear()
            scope.maps[0].update(before)
            result = self._run(body, scope)
            if result is _FALLS:
                ends.append(dict(scope.maps[0]))
            elif result is not _RAISES:
                last = result
                if self._returned:
                    self._returned[-1].append(result)
        self.undecided -= 1
        scope.maps[0].clear()
        for name in dict.fromkeys(name for end in ends for name in end):
            values = [end.get(name, scope.get(name)) for end in ends]
            scope.maps[0][name] = self.merged(values, why, name)
        return _FALLS if ends else last

    def enter(
        self,
        function: Function,
        args: Sequence[Held],
        keywords: Mapping[str, Held],
        me: Object | None,
    ) -> Held:
        """The value that a function of the script returns."""
        node = function.node
        self._entered.add(node)
        if isinstance(node, ast.ClassDef) or self._depth >= _DEEPEST:
            return Unknown(function.reference, node.lineno)
        scope = function.scope.new_child()
        scope.update(self.parameters(node.args, [*([me] if me else []), *args], keywords, scope))
        if isinstance(node, ast.Lambda):
            return self.value(node.body, scope)
        self._depth += 1
        self._returned.append([])
        result = self._run(node.body, scope)
        self._depth -= 1
        results = self._returned.pop()
        if result is not _RAISES:
            results.append(None if result is _FALLS else result)
        return self.merged(results, node, node.name) if results else None
