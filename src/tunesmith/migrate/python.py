"""Reads Python scripts of TRL, transformers and StateSet Agents, by parsing, never running them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.migrate.given import ForeignLaunch, Given
from tunesmith.migrate.programs import find_program

_PEFT = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
"""Names in ``LoraConfig`` → names in TRL's ``ModelConfig``."""
_TRAINER = {"model": "model_name_or_path"}
_PARTS = ("args", "peft_config", "processing_class", "tokenizer", "quantization_config", "callbacks", "data_collator")
"""Arguments of a trainer that are objects, whose settings are read from their constructors."""
_CONFIGS = ("LoraConfig", "BitsAndBytesConfig", "ModelConfig", "ScriptArguments", "AgentConfig")


def read_python(text: str, name: str) -> list[ForeignLaunch]:
    """The training in a script: one launch, or none if it creates no known configuration.

    Raises:
        ConfigError: the text is not Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{name} is not valid Python: {error}") from None
    constants = _constants(tree)
    constants |= _loaded(tree, constants) | _options(tree)
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, defined)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda node: node.lineno)
    kinds = [_called(call) for call in calls if call.keywords]
    name_of_program = next(filter(_is_config, kinds), None) or next(filter(_is_trainer, kinds), None)
    if name_of_program is None:
        return []
    program = find_program(name_of_program)
    assert program is not None
    scope = _Scope(constants, functions, name, program.framework)
    settings = [given for call in calls for given in scope.settings(call)]
    settings += scope.assigned(tree)
    return [ForeignLaunch(name_of_program, program, tuple(settings))]


def docstrings(text: str) -> list[tuple[str, int]]:
    """Standalone string literals of a script, which may hold commands, each with its first line."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [
        (re.sub(r"^\s*(```\w*|#.*)$", "", node.value.value, flags=re.MULTILINE), node.lineno)
        for node in tree.body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


class _Scope:
    """The values of names in one script."""

    def __init__(self, constants: Mapping[str, Any], functions: set[str], file: str, framework: str) -> None:
        self.constants, self.functions, self.file, self.framework = constants, functions, file, framework

    def settings(self, call: ast.Call) -> Iterator[Given]:
        """The settings in one call that creates a configuration, a trainer, an adapter or a dataset."""
        kind = _called(call)
        if _is_config(kind) or kind in _CONFIGS:
            names = _PEFT if kind == "LoraConfig" else {}
            for word in call.keywords:
                if word.arg:
                    yield self._given(names.get(word.arg, word.arg), word.value)
        elif _is_trainer(kind):
            for word in call.keywords:
                if word.arg and word.arg not in _PARTS:
                    yield self._given(_TRAINER.get(word.arg, word.arg), word.value)
        elif kind == "load_dataset" and call.args:
            yield self._given("dataset_name", call.args[0])
            if len(call.args) > 1:
                yield self._given("dataset_config", call.args[1])
            for word in call.keywords:
                if word.arg in ("name", "split"):
                    yield self._given({"name": "dataset_config", "split": "dataset_train_split"}[word.arg], word.value)
        elif kind == "from_pretrained" and call.args and "CausalLM" in ast.unparse(call.func):
            yield self._given("model_name_or_path", call.args[0])

    def assigned(self, tree: ast.Module) -> Iterator[Given]:
        """``training_args.learning_rate = 1e-6``."""
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name), attr=key)]) if name.endswith("args"):
                    yield self._given(key, node.value)
                case _:
                    pass

    def _given(self, name: str, node: ast.expr) -> Given:
        value, text = self.value(node), f"{name}={ast.unparse(node)}"
        return Given(name, value, node.lineno, self.framework, text if len(text) < 100 else f"{text[:97]}...")

    def value(self, node: ast.expr) -> Any:
        """The value of an expression; ``${expression}`` if only running the script would tell."""
        if isinstance(node, ast.Name) and node.id in self.functions:
            return f"{self.file}:{node.id}"
        if isinstance(node, ast.Name | ast.Attribute) and (key := ast.unparse(node)) in self.constants:
            return self.constants[key]
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in self.constants:
            return self.constants[ast.unparse(node.value)]
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            return ast.unparse(node)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return "${" + re.sub(r"[{}]", "", ast.unparse(node))[:80] + "}"


def _is_config(kind: str) -> bool:
    return kind.endswith(("Config", "Arguments", "Profile")) and kind not in _CONFIGS and find_program(kind) is not None


def _is_trainer(kind: str) -> bool:
    return kind.endswith("Trainer") and find_program(kind) is not None


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names that are assigned exactly once."""
    values: dict[str, Any] = {}
    several: set[str] = set()
    for node in ast.walk(tree):
        for target, value in _assigned(node):
            several |= {target} & values.keys()
            try:
                values[target] = ast.literal_eval(value)
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                several.add(target)
    return {name: value for name, value in values.items() if name not in several}


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """``a = 1`` and ``a, b = 1, 2``."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(values):
            yield from ((t.id, v) for t, v in zip(targets, values, strict=True) if isinstance(t, ast.Name))
        case _:
            pass


def _loaded(tree: ast.Module, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Names that hold a dataset or a model, with the source that it was loaded from."""
    loaded: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            for part in ast.walk(node.value):
                if isinstance(part, ast.Call) and part.args and _called(part) in ("load_dataset", "from_pretrained"):
                    first = part.args[0]
                    value = first.value if isinstance(first, ast.Constant) else constants.get(ast.unparse(first))
                    if isinstance(value, str):
                        loaded[node.targets[0].id] = value
    return loaded


def _options(tree: ast.Module) -> dict[str, Any]:
    """``args.NAME`` for the options of a script's own parser that have a default."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) == "add_argument" and node.args:
            flag = node.args[-1]
            default = next((word.value for word in node.keywords if word.arg == "default"), None)
            if isinstance(flag, ast.Constant) and isinstance(flag.value, str) and isinstance(default, ast.Constant):
                found[f"args.{flag.value.lstrip('-').replace('-', '_')}"] = default.value
    return found
