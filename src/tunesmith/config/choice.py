"""Settings that are one of several types, each with its own fields: ``loss = "sapo"``, or a table
with ``type``.

A family (``Loss``, ``Estimator``, ...) is a direct subclass of ``Choice``, and a type is a subclass
of its family. The package's types have a ``name``; the name of a user-defined type is its
reference, ``file.py:Class``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, Self, cast

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from tunesmith.config.section import Section
from tunesmith.errors import closest

NEAR = 0.7
NEAR_ELSEWHERE = 0.8
"""Required similarity of a key to another of its type, or of other types, for a hint."""


class Choice(Section):
    """One frozen class per type; its fields are the keys of its table."""

    what: ClassVar[str] = ""
    """The family's name in messages, such as "loss"; only families set it."""
    home: ClassVar[str] = ""
    """The class that its types extend, if another wing defines them; imported on first use."""
    types: ClassVar[dict[str, type[Any]]] = {}
    """The family's types in the package, by name; complete once ``base`` has been called."""
    usual: ClassVar[str] = ""
    """The default type of a table without ``type``, if the preset has none either."""
    open_to_users: ClassVar[bool] = True
    """Whether a type may be a class in a user's file."""
    family: ClassVar[type[Any]]

    name: ClassVar[str] = ""
    """The type's name in a run file: a word, or the reference to a user's class."""
    formula: ClassVar[str] = ""
    source: ClassVar[str] = ""
    use: ClassVar[str] = ""
    """When to use it, in a few words."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Data that the training loop must provide (keys of ``presets.NEEDS``)."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.__dict__.get("what"):
            cls.family = cls
            cls.types = {}
        elif "name" in cls.__dict__ and cls.__module__.startswith("tunesmith."):
            cls.types[cls.name] = cls

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        if not cls.__dict__.get("what"):
            return handler(source)
        dumped = core_schema.plain_serializer_function_ser_schema(cls.dumped, info_arg=True)
        return core_schema.no_info_plain_validator_function(cls.chosen, serialization=dumped)

    def dumped(self, info: core_schema.SerializationInfo | None = None) -> dict[str, Any]:
        """This object as a table in a run file."""
        return {"type": self.name, **self.model_dump(mode=info.mode if info else "json")}

    @classmethod
    def chosen(cls, value: object, usual: str = "") -> Self:
        """The object for a run file's name or table.

        Args:
            usual: the type of a table without ``type``. An explicit ``type`` is also in
                ``model_fields_set``.

        Raises:
            ValidationError: an unknown type, a key that the type lacks, or a bad value.
            ConfigError: the file of a user's class cannot be imported.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, str | Mapping):
            raise PydanticCustomError("choice_value", "neither a name nor a table")
        table = {"type": value} if isinstance(value, str) else {**value}
        name: Any = table.pop("type", None)
        kind = cls.typed(name or (usual if usual not in ("", "none") else cls.usual))
        try:
            choice = kind.model_validate_json(json.dumps(table, default=str), strict=True)
        except ValidationError as error:
            raise kind.explained(error) from None
        if name:
            choice.model_fields_set.add("type")
        return choice

    @classmethod
    def base(cls) -> type[Self]:
        """The class that the family's types extend: its home, or the family itself."""
        if not cls.home:
            return cls.family
        module, _, name = cls.home.rpartition(".")
        return getattr(import_module(module), name)

    @classmethod
    def named(cls) -> dict[str, type[Self]]:
        """The family's types in the package, by name."""
        cls.base()
        return cls.types

    @classmethod
    def typed(cls, name: object) -> type[Self]:
        """The class of a name or reference."""
        if cls.open_to_users and isinstance(name, str) and ":" in name:
            return cls._loaded(name)
        if not name:
            raise ValueError(
                f"the table has no type; set type to one of {', '.join(map(repr, cls.named()))}"
            )
        if not isinstance(name, str) or name not in cls.named():
            raise PydanticCustomError("choice_type", "unknown type", {"name": name})
        return cls.named()[name]

    @classmethod
    def _loaded(cls, reference: str) -> type[Self]:
        from tunesmith.config.objects import load_named

        kind = load_named(reference)
        base = cls.base()
        name = f"{base.__module__}.{base.__name__}"
        if not isinstance(kind, type):
            raise ValueError(f"{reference} is not a class; a {cls.what} is a subclass of {name}")
        problem = f"{kind.__name__} is not a {cls.what}; make it a subclass of {name}"
        if issubclass(kind, base):
            problem = cls._problem_of(kind)
        if problem:
            place = f"{inspect.getsourcefile(kind)}, line {inspect.getsourcelines(kind)[1]}"
            raise ValueError(f"{place}: {problem}")
        kind.name = reference
        return cast("type[Self]", kind)

    @classmethod
    def _problem_of(cls, kind: type[Self]) -> str:
        """The problem with a method of a user's class; empty if there is none."""
        bases = [each for each in reversed(kind.__mro__) if issubclass(each, cls)]
        ours = [each for each in bases if each.__module__.startswith("tunesmith.")]
        own = [item for each in ours for item in vars(each).items()]
        methods = {name: value for name, value in own if inspect.isfunction(value)}
        for name, method in methods.items():
            if name.startswith("_") and name != "__call__":
                continue
            wanted = list(inspect.signature(method).parameters)
            if name in kind.__abstractmethods__:
                return f"{kind.__name__} has no {name}({', '.join(wanted)})"
            bound = isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
            try:
                inspect.signature(getattr(kind, name)).bind(*wanted[bound:])
            except TypeError:
                return f"{kind.__name__}.{name} has to take ({', '.join(wanted)})"
        return ""

    @classmethod
    def explained(cls, error: ValidationError) -> ValidationError:
        """The same error, naming the valid keys where the type lacks a key."""
        details: list[InitErrorDetails] = []
        for line in error.errors(include_url=False):
            kind: Any = line["type"]
            if kind == "extra_forbidden":
                kind = PydanticCustomError(
                    "choice_key", "{text}", {"text": cls._no_key(str(line["loc"][0]))}
                )
            elif kind != "value_error":
                kind = PydanticCustomError(
                    "choice_field", "not valid here", {"kind": cls, "missing": kind == "missing"}
                )
            details.append(
                {
                    "type": kind,
                    "loc": line["loc"],
                    "input": line["input"],
                    "ctx": line.get("ctx", {}),
                }
            )
        return ValidationError.from_exception_data(cls.__name__, details)

    @classmethod
    def _no_key(cls, key: str) -> str:
        others = [repr(name) for name, kind in cls.types.items() if key in kind.model_fields]
        has = f"it has {', '.join(cls.model_fields)}" if cls.model_fields else "it has none"
        elsewhere = f"; {key} is a key of {' and '.join(others)}" if others else ""
        return f"the {cls.what} '{cls.name}' has no key {key}; {has}{elsewhere or cls._near(key)}"

    @classmethod
    def _near(cls, key: str) -> str:
        """A hint at the key with the nearest spelling, of this type or else of others."""
        close = closest(key, cls.model_fields, NEAR)
        if close:
            return f". Did you mean '{close}'?"
        close = closest(
            key,
            (field for kind in cls.types.values() for field in kind.model_fields),
            NEAR_ELSEWHERE,
        )
        if close:
            having = [repr(name) for name, kind in cls.types.items() if close in kind.model_fields]
            return f". Did you mean '{close}', a key of {' and '.join(having)}?"
        return ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a user's class by its reference: another process cannot import its module by
        name."""
        if ":" in self.name:
            return self.family.chosen, (self.dumped(),)
        return super().__reduce_ex__(protocol)


def on_is_a_table(value: object) -> object:
    """``true`` becomes a table with default values."""
    return {} if value is True else value
