"""Whether a model's files hold its weights: all of its architecture, of its shapes, and finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch._guards import detect_fake_mode
from transformers import PreTrainedModel

from tunesmith.errors import ModelError, boundary
from tunesmith.models.parallel.shard_files import WeightFiles, is_finite
from tunesmith.models.source import ANY_ERROR, directory_of
from tunesmith.plan.facts.model_files import weights_in

ROWS_AT_ONCE = 4096
"""Rows of the vocabulary that are compared at once."""
Differences = tuple[tuple[str, ...], tuple[str, ...]]
"""Prefixes of weights that the files may lack, and that only they may have."""


def check_stored_values(path: str | Path) -> None:
    """Refuse files with values that are not finite; for an engine that reads them by itself and
    does not look.

    One weight at a time is read.

    Raises:
        ModelError: names the file and the weight.
    """
    files = WeightFiles(directory_of(path))
    with boundary(ModelError, f"cannot read the weights of model '{path}'", ANY_ERROR):
        wrong = [
            name
            for name, weight in files.weights.items()
            if not is_finite(files.rows(name, 0, weight.shape[0] if weight.shape else 1))
        ]
    check_values(path, wrong)


def check_shapes(
    path: str | Path, different: Iterable[tuple[str, Sequence[int], Sequence[int]]]
) -> None:
    """Refuse weights of other shapes than the configuration describes, each given as name, stored
    and described."""
    for name, stored, described in sorted(different):
        raise ModelError(
            f"{_place_of(path, name)} has the shape {list(stored)}, and config.json describes "
            f"{list(described)}: the two do not belong together"
        )


def check_values(path: str | Path, names: Iterable[str]) -> None:
    """Refuse weights that are not finite: every output would be, and training would be blamed for
    it."""
    for name in sorted(names):
        raise ModelError(
            f"{_place_of(path, name)} holds values that are not finite (nan or infinite): nothing "
            "can be computed with this model. Take a copy, or a checkpoint, from before the "
            "weights diverged"
        )


def check_tie(path: str | Path, module: PreTrainedModel) -> None:
    """Refuse a head of its own in the files of a model whose configuration ties it to the
    embedding."""
    directory = Path(path).expanduser()
    if not module.config.tie_word_embeddings or not directory.is_dir() or detect_fake_mode():
        return
    parts = (module.get_input_embeddings(), module.get_output_embeddings())
    ours = [
        f"{name}.weight" for part in parts for name, each in module.named_modules() if each is part
    ]
    files = WeightFiles(directory)
    if len(ours) < 2 or not files.names.issuperset(ours):
        return
    rows = files.weights[ours[0]].shape[0]
    for start in range(0, rows, ROWS_AT_ONCE):
        one, other = (files.rows(name, start, min(ROWS_AT_ONCE, rows - start)) for name in ours)
        if not one.equal(other):
            raise ModelError(
                f"{directory / 'config.json'}: tie_word_embeddings is true, and "
                f"{_place_of(path, ours[1])} differs from '{ours[0]}'. Set it to false if the head "
                "is the model's own; otherwise delete that weight"
            )


def _place_of(path: str | Path, name: str) -> str:
    """A weight and, in a local directory, its file."""
    directory = Path(path).expanduser()
    found = weights_in(directory).get(name) if directory.is_dir() else None
    return f"{found.file if found else path}: '{name}'"


def check_names(
    model: str,
    missing: Iterable[str],
    unexpected: Iterable[str],
    differences: Differences = ((), ()),
) -> None:
    """Refuse files whose weights do not match the architecture: transformers only logs a warning.

    Args:
        missing: names of the architecture that the files lack.
        unexpected: names that only the files have.
        differences: prefixes of the former and of the latter that are allowed.

    Raises:
        ModelError: with the first names.
    """
    others = "hold weights that its architecture does not have"
    for names, allowed, problem, effect in (
        (missing, differences[0], "lack weights of its architecture", "would be random numbers"),
        (unexpected, differences[1], others, "would be ignored"),
    ):
        wrong = sorted(name for name in names if not name.startswith(allowed))
        if wrong:
            raise ModelError(
                f"the files of {model} {problem}: {listed(wrong)}, and they {effect}. "
                "config.json and the files do not belong together, or a file is incomplete: "
                "download the model again"
            )


def listed(names: Iterable[str]) -> str:
    """The first names and their number, for a message."""
    ordered = sorted(names)
    first = ", ".join(f"'{name}'" for name in ordered[:3])
    return f"{first}{' ...' if len(ordered) > 3 else ''} ({len(ordered)} in all)"
