"""Reads Python scripts of TRL, transformers and StateSet Agents, by following their values, never
running them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from tunesmith.errors import ConfigError, shortened
from tunesmith.guide.migrate.given import ForeignLaunch, Given
from tunesmith.guide.migrate.programs import MARKS, ForeignProgram, find_program
from tunesmith.guide.migrate.script.data import Data, Held, Splits, Step, Unknown, all_data, whole
from tunesmith.guide.migrate.script.statements import Flow
from tunesmith.guide.migrate.script.values import Function, Named, Object

_MARKS = MARKS["python"]


def read_python(
    text: str, name: str, options: Mapping[str, Held] | None = None
) -> list[ForeignLaunch]:
    """The training in a script: a launch per trainer, or none if it creates no known configuration.

    Args:
        options: what its command line says, by name.

    Raises:
        ConfigError: the text is not Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{name} is not valid Python: {error}") from None
    flow = Flow(tree, name, options or {})
    calls = [made for made in flow.made if _is_trainer(made)]
    trainers = {(made.line, made.kind): made for made in calls}.values()  # the last call of each
    configs = [made for made in flow.made if _is_config(made)]
    if not trainers:
        alone = configs or [made for made in flow.made if made.name in _MARKS["alone"]][:1]
        return [_launch(flow, None, alone)] if alone else []
    used = [_config_of(trainer) for trainer in trainers]
    shared = [config for config in configs if config not in used]
    pairs = zip(trainers, used, strict=True)
    return [_launch(flow, trainer, [own] if own in configs else shared) for trainer, own in pairs]


def docstrings(text: str) -> list[tuple[str, int]]:
    """Standalone string literals of a script, which may hold commands, each with its first line."""
    strings: list[tuple[str, int]] = []
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.parse(text).body:
            match node:
                case ast.Expr(value=ast.Constant(value=str(string))):
                    commands = re.sub(r"^\s*(```\w*|#.*)$", "", string, flags=re.MULTILINE)
                    strings.append((commands, node.lineno))
                case _:
                    pass
    return strings


def _launch(flow: Flow, trainer: Object | None, configs: Sequence[Object]) -> ForeignLaunch:
    """The launch of a trainer, or of a configuration without one."""
    first = next(iter(configs), trainer)
    assert first is not None
    program = _program(first, trainer)
    reading = _Reading(flow, program.framework)
    made = [*configs, *(m for m in flow.made if m.name in _MARKS["support"] and m not in configs)]
    settings = [given for one in made for given in reading.settings(one)]
    settings += [given for one in flow.made for given in reading.switches(one)]
    settings += reading.of_trainer(trainer) if trainer else []
    settings.sort(key=lambda given: given.line)
    passed = [given.value for given in settings if given.name.endswith("_dataset")]
    paths = {origin.path for data in all_data(passed) for origin in data.origins}
    loaded = dict.fromkeys((o.path, data.line) for data in flow.loaded for o in data.origins)
    text = "is loaded, and not passed to the trainer as data"
    notes = [f"line {line}: {path} {text}" for path, line in loaded if path not in paths]
    return ForeignLaunch(first.name, program, tuple(settings), notes=tuple(notes))


def _program(made: Object, trainer: Object | None) -> ForeignProgram:
    """The program of a configuration; if transformers' is given to a trainer for another command,
    that one's, with these defaults."""
    program = _find(made)
    assert program is not None
    of_trainer = _find(trainer) if trainer and program.framework == "transformers" else None
    if of_trainer is None or of_trainer.command == program.command:
        return program
    return replace(of_trainer, defaults={**of_trainer.defaults, **program.defaults})


class _Reading:
    """The settings in what a script makes."""

    def __init__(self, flow: Flow, framework: str) -> None:
        self.flow = flow
        self.framework = framework

    def settings(self, made: Object) -> Iterator[Given]:
        of_peft = made.name in ("LoraConfig", "get_peft_model")
        for name, value in made.fields.items():
            if name in made.texts and name not in ("model", "peft_config"):
                known = f"lora_{name}" if of_peft and name in _MARKS["peft"] else name
                yield self.given(known, value, *made.texts[name])
        if made.name == "LoraConfig" and "r" in made.fields and "lora_alpha" not in made.fields:
            yield self.given("lora_alpha", 8, "LoraConfig without lora_alpha", made.line)

    def switches(self, made: Object) -> Iterator[Given]:
        """``torch.compile(model)``, ``torch.backends.cuda.matmul.allow_tf32 = True`` and the
        like."""
        name = _MARKS["switches"].get(made.name, "")
        mode = made.fields.get("mode")
        value: Held = True
        if made.name == "allow_tf32" and made.args:
            value = made.args[0]
        elif name == "torch_compile" and isinstance(mode, str):
            value = mode
        if name == "gradient_checkpointing" or (name and made.kind.startswith("torch.")):
            yield self.given(name, value, made.text, made.line)

    def of_trainer(self, trainer: Object) -> Iterator[Given]:
        for name, (value, text, line) in _arguments(trainer).items():
            if name in ("train_dataset", "eval_dataset"):
                yield self.data(name, value, text, line)
            elif name == "model":
                yield from self.model(value, text, line)
            elif name not in _MARKS["parts"] and not (name == "ref_model" and value is None):
                yield self.given(name, value, text, line)
        yield from self.steps(trainer)

    def data(self, name: str, value: Held, text: str, line: int) -> Given:
        held = whole(value)
        if isinstance(value, dict):
            held = list(value.values())
        if isinstance(held, Splits):
            held = Unknown(text.partition("=")[2], line, "which of its splits is not said")
        return self.given(name, held, text, line)

    def model(self, value: Held, text: str, line: int) -> Iterator[Given]:
        models = [made for made in self.flow.made if made.is_model and "CausalLM" in made.kind]
        held = models[0] if len(models) == 1 and not isinstance(value, str | Object) else value
        yield self.given("model_name_or_path", held, text, line)
        if isinstance(held, Object) and held.is_model:
            for name in _MARKS["of_model"]:
                if name in held.fields:
                    place = held.texts.get(name, (name, held.line))
                    yield self.given(name, held.fields[name], *place)

    def steps(self, trainer: Object) -> Iterator[Given]:
        """What the script does to its rows: the steps of the training data, then those of the
        held-out data alone."""
        held = _arguments(trainer)
        values = [held.get(name, (None,))[0] for name in ("train_dataset", "eval_dataset")]
        train, held_out = (
            [s for data in all_data(whole(value)) for s in data.steps] for value in values
        )
        seen = {_what(step) for step in train}
        steps = dict.fromkeys([*train, *(step for step in held_out if _what(step) not in seen)])
        for number, step in enumerate(steps):
            same = not held_out or {_what(one) for one in held_out} == seen
            value = step.function if same and len(seen) == 1 else ""
            first = next((s for s in train if _what(s) == _what(step)), step)
            if step is first:  # once, where both have it
                name = f"{number}.dataset.{step.name}"
                yield Given(name, value, step.line, self.framework, step.text)

    def given(self, name: str, value: Held, text: str, line: int) -> Given:
        why = value.why if isinstance(value, Unknown) else ""
        return Given(name, self.plain(value), line, self.framework, shortened(text, 100), why)

    def plain(self, value: Held) -> Held:
        """The value as in a configuration file; ``${expression}`` if only running the script would
        tell."""
        match value:
            case Function():
                return value.reference or _placeholder(ast.unparse(value.node))
            case Named(dotted):
                plain = dotted.startswith(("torch.", "trl.rewards."))
                return dotted if plain else _placeholder(dotted)
            case Object():
                made = f"{value.kind}(...)"
                named = [value.fields[name] for name in _MARKS["paths"] if name in value.fields]
                paths = [*value.args[:1], *named] if value.is_model else []
                return self.plain(paths[0]) if paths else _placeholder(made)
            case Unknown():
                return _placeholder(value.text)
            case list() | tuple():
                return [self.plain(item) for item in value]
            case dict():
                return {str(key): self.plain(item) for key, item in value.items()}
            case str() | int() | float() | None | Data():
                return value
            case _:
                return _placeholder(str(value))


def _placeholder(text: str) -> str:
    return "${" + re.sub(r"[{}]", "", text)[:80] + "}"


def _what(step: Step) -> str:
    """A step without the data set that it is a method of."""
    return step.function or step.text


def _arguments(trainer: Object) -> dict[str, tuple[Held, str, int]]:
    """By name: the value, the text and the line of each argument, positional ones included."""
    places = _MARKS["places"].get(trainer.name, _MARKS["start"])
    arguments: dict[str, tuple[Held, str, int]] = {}
    for name, value, (text, line) in zip(places, trainer.args, trainer.arg_texts, strict=False):
        arguments[name] = (value, f"{name}={text}", line)
    for name, value in trainer.fields.items():
        arguments[name] = (value, *trainer.texts.get(name, (name, trainer.line)))
    return arguments


def _config_of(trainer: Object) -> Object | None:
    arguments = _arguments(trainer)
    value = next((arguments[name][0] for name in ("args", "config") if name in arguments), None)
    return value if isinstance(value, Object) and _is_config(value) else None


def _is_config(made: Object) -> bool:
    is_config = made.name.endswith(("Config", "Arguments", "Profile"))
    return is_config and made.name not in _MARKS["support"] and _find(made) is not None


def _is_trainer(made: Object) -> bool:
    program = _find(made) if made.name.endswith("Trainer") else None
    return program is not None and program.framework in ("trl", "transformers", "stateset-agents")


def _find(made: Object) -> ForeignProgram | None:
    """The program of a class, by its full name, so that classes of one name in several frameworks
    are told apart."""
    return find_program(made.kind) or find_program(made.name)
