"""Whether a text is JSON of a schema. Runs in a worker process, because a pattern can backtrack
without end, and so can alternatives."""

from __future__ import annotations

from tunesmith.errors import shortened
from tunesmith.records.foreign import parse_json


def unlike(schema: dict[str, object], text: str) -> str:
    """Why a text is not JSON of this schema; empty if it is."""
    try:
        value = parse_json(text)
    except ValueError as error:
        return f"the text is not JSON: {error}"
    if schema == {"type": "object"}:
        return "" if isinstance(value, dict) else "the text is not a JSON object"
    try:
        from jsonschema import validators
        from jsonschema.exceptions import best_match
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ModuleNotFoundError:
        return "not checked against the schema: pip install tunesmith[schema]"
    # The registry is empty, so that no reference is fetched from the network.
    validator = validators.validator_for(schema)(schema, registry=Registry())
    try:
        error = best_match(validator.iter_errors(value))
    except (Unresolvable, RecursionError) as unknown:
        return f"not checked against the schema: {unknown}"
    return "" if error is None else f"{error.json_path}: {shortened(error.message)}"
