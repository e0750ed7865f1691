"""Which kinds of matrix products decode fastest here: measured once, and kept on disk.

The choice affects rounding. So it is made once per machine, model shape, number of threads and torch version, and
later runs read it and repeat bitwise. If several processes measure at the same time, the first to write decides for
all. Where nothing can be stored, nothing is measured, and the choice is fixed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from tunesmith.engines.local.measuring import measured
from tunesmith.models.causal_lm import CausalLM
from tunesmith.models.lean import PRODUCTS, LeanDecoder
from tunesmith.models.products import HEADS, IN_CPP, LAYERS, PAIRS, PANELS, fastest, works
from tunesmith.plan.hardware import read_hardware
from tunesmith.plan.prepared import SMALL
from tunesmith.storage import measured_file

Choice = Mapping[str, str]
"""The kind of each product of a layer and of the head, by name."""
ROWS = (1, 4, 16, 64)
"""The row counts that are measured. Others use the choice of the next larger count, or of the last."""
FEW_ROWS = 12
"""Up to this many rows, a small bfloat16 model decodes in float32 unless something was measured."""
LEAST = 2 << 20
"""The fewest parameters of a model that is worth measuring."""


def fixed(numbers: int, kinds: Sequence[str], dtype: torch.dtype) -> dict[int, Choice]:
    """Choices of ``kinds`` without a measurement, by the largest row count."""
    if PANELS in kinds and (dtype == torch.float32 or numbers < LEAST):
        return {1: dict.fromkeys((*PRODUCTS, "head"), PANELS)}
    if dtype == torch.float32:
        return {1: dict.fromkeys((*PRODUCTS, "head"), "plain")}
    many = "packed" if numbers <= SMALL and works(LAYERS[dtype]["packed"], dtype) else "plain"
    choices: dict[int, Choice] = {FEW_ROWS + 1: {**dict.fromkeys(PRODUCTS, many), "head": "float32"}}
    if numbers <= SMALL:
        choices[FEW_ROWS] = dict.fromkeys((*PRODUCTS, "head"), "float32")
    return dict(sorted(choices.items()))


def choose(model: CausalLM, lean: LeanDecoder, *, compiled: bool) -> dict[int, Choice]:
    """The fastest kinds on this machine, by the largest row count that they are for.

    For a bfloat16 model, a CPU that multiplies bfloat16 tiles or pairs has one kind for all shapes and row counts.

    Args:
        compiled: whether products compiled for this CPU may be chosen.
    """
    dtype, head = model.module.dtype, model.head.weight
    if compiled and dtype == torch.bfloat16 and (kind := fastest()):
        return {1: dict.fromkeys((*PRODUCTS, "head"), kind)}
    shapes = [[*getattr(lean.layers[0], name).weight.shape] for name in PRODUCTS]
    numbers = sum(p.numel() for p in model.module.parameters())
    tried = {name: kind for name, kind in LAYERS[dtype].items() if (compiled or name not in IN_CPP) and name != PAIRS}
    kinds = [name for name, kind in tried.items() if works(kind, dtype)]
    if dtype == torch.float32 and PANELS in kinds:  # the memory plan does not count a second copy
        kinds.remove("packed")
    if numbers < LEAST:
        return fixed(numbers, kinds, dtype)
    shape = {"layers": len(lean.layers), "shapes": [*shapes, [*head.shape]], "dtype": str(dtype), "rows": ROWS}
    measure = partial(measured, model, lean, ROWS, kinds, small=numbers <= SMALL)
    found = kept({"kinds": kinds, **shape}, measure, partial(_valid, dtype=dtype))
    return fixed(numbers, kinds, dtype) if found is None else {int(rows): kinds for rows, kinds in found.items()}


def kept(key: Mapping[str, Any], measure: Callable[[], Any], valid: Callable[[Any], bool]) -> Any:
    """The measurement for ``key`` on this machine, made now or earlier; None if it cannot be stored.

    Args:
        key: what the measurement depends on, besides the machine and torch.
        valid: whether a stored measurement is usable; if not, it is measured and written again.
    """
    facts = {"cpu": read_hardware().cpu, "threads": torch.get_num_threads(), "torch": torch.__version__, **key}
    path = measured_file("products", facts)
    folder = path.parent
    try:
        if (found := _read(path, valid)) is not None:
            return found
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            mine = Path(scratch) / path.name
            mine.write_text(json.dumps({"facts": facts, "measured": measure()}, indent=1) + "\n", encoding="utf-8")
            try:
                os.link(mine, path)
            except FileExistsError:  # another process was faster, or the file is damaged
                if _read(path, valid) is None:
                    mine.replace(path)
        return _read(path, valid)
    except OSError:
        return None


def _read(path: Path, valid: Callable[[Any], bool]) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["measured"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return found if valid(found) else None


def _valid(found: Any, dtype: torch.dtype) -> bool:
    """Whether it has a choice for each of ``ROWS``, of kinds that work here and whose rows have the same dtype."""
    if not isinstance(found, dict) or [*cast("dict[str, Any]", found)] != [str(rows) for rows in ROWS]:
        return False
    for kinds in cast("dict[str, Any]", found).values():
        if not isinstance(kinds, dict) or set(cast("dict[str, Any]", kinds)) != {*PRODUCTS, "head"}:
            return False
        chosen = [LAYERS[dtype].get(kinds[name]) for name in PRODUCTS]
        able = all(kind is not None and works(kind, dtype) for kind in (*chosen, HEADS[dtype].get(kinds["head"])))
        if not able or len({kind.rows for kind in chosen if kind is not None}) > 1:
            return False
    return True
