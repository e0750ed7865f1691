"""Defaults written into a chat template, so that every program that renders it renders what the run
rendered.

``data.system_prompt`` and ``data.chat_template_kwargs`` become a few lines of Jinja before the
template. They apply where a caller gives neither a system message nor the variable, so both can
still be overridden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import copy
from math import isfinite
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.learn.data.chat_checks import check_options
from tunesmith.types import Tokenizer

_BEGIN = "{#- Defaults of the training run. -#}"
_END = "{#- The model's own template: #}\n"
"""Ends with a line break, which Jinja removes, so that the template after it still begins a
line."""


def set_defaults(
    tokenizer: Tokenizer, system_prompt: str | None, options: Mapping[str, object] | None
) -> None:
    """Write defaults into each chat template of a tokenizer; nothing changes if it has none.

    Raises:
        ConfigError: the template does not read one of the variables, or a value has no form in
            Jinja.
    """
    if not tokenizer.chat_template or (system_prompt is None and not options):
        return
    source = own_part(tokenizer.get_chat_template())
    check_options(options or {}, source, tokenizer.special_tokens_map)
    lines = [_variable(name, value) for name, value in (options or {}).items()]
    if system_prompt is not None:
        lines.append(_system(system_prompt))
    head = "".join([_BEGIN, *lines, _END])

    _rewrite(tokenizer, lambda template: template if template.startswith(head) else head + template)


def without_system_prompt(tokenizer: Tokenizer, options: Mapping[str, object] | None) -> Tokenizer:
    """A tokenizer that renders with the same defaults, except for the system message."""
    plain = copy(tokenizer)
    _rewrite(plain, own_part)
    set_defaults(plain, None, options)
    return plain


def _rewrite(tokenizer: Tokenizer, change: Callable[[str], str]) -> None:
    """Change each of a tokenizer's chat templates."""
    template: str | dict[str, str] | None = tokenizer.chat_template
    if isinstance(template, dict):
        tokenizer.chat_template = {name: change(one) for name, one in template.items()}
    elif template is not None:
        tokenizer.chat_template = change(template)


def own_part(template: object) -> Any:
    """A chat template without the defaults that runs have written before it."""
    return template.rpartition(_END)[2] if isinstance(template, str) else template


def _variable(name: str, value: object) -> str:
    setting = f"{{% set {name} = {_literal(name, value)} %}}"
    return f"{{%- if {name} is not defined %}}{setting}{{% endif -%}}"


def _system(text: str) -> str:
    first = f"[{{'role': 'system', 'content': {json.dumps(text, ensure_ascii=False)}}}]"
    given = "messages | selectattr('role', 'equalto', 'system') | list"
    added = f"{{% set messages = {first} + messages | list %}}"
    return f"{{%- if not ({given}) %}}{added}{{% endif -%}}"


def _literal(name: str, value: object) -> str:
    """A value in Jinja's syntax."""
    match value:
        case None:
            return "none"
        case list() | tuple():
            return f"[{', '.join(_literal(name, item) for item in value)}]"
        case dict():
            pairs = (f"{_literal(name, k)}: {_literal(name, v)}" for k, v in value.items())
            return f"{{{', '.join(pairs)}}}"
        case bool() | int() | str():
            return json.dumps(value, ensure_ascii=False)
        case float() if isfinite(value):
            return repr(value)
        case _:
            raise ConfigError(
                f"data.chat_template_kwargs: '{name}' holds {value!r}, which a chat template "
                "cannot be given; use text, a finite number, true, false, a list or a table",
                keys=("data.chat_template_kwargs",),
            )
