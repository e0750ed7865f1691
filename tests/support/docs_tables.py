"""Tables of the documents that are made from registries;
``python -m tests.support.docs_tables`` writes them anew.

Each stands between ``<!-- table: name -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as SCORED,
)

from tests.support.families import settings_of as tiny_settings
from tests.support.hardware_table import GPUS
from tests.support.hardware_table import rows as hardware_rows
from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.choice import Choice
from tunesmith.config.presets import NEEDS, PRESETS
from tunesmith.guide.explain.settings import settings_of
from tunesmith.plan.facts.families import REFUSED, family, published
from tunesmith.plan.facts.layers import first
from tunesmith.plan.facts.llama_cpp import FAMILIES as CPP
from tunesmith.plan.facts.model import decoder_config, facts_of
from tunesmith.plan.facts.parameters import EXPERTS
from tunesmith.plan.layout.profiles import SYSTEM_PROFILES, ProfileValue
from tunesmith.records.catalogue import CATALOGUE
from tunesmith.records.doctor.answers import ROUND, RUN
from tunesmith.records.doctor.findings import RULES
from tunesmith.records.doctor.rules import Rule
from tunesmith.run.engines.vllm import KIND as VLLM

DOCS = Path(__file__).parents[2] / "docs"
PAGES = tuple(
    DOCS / f"{name}.md"
    for name in (
        "algorithms",
        "configuration",
        "observability",
        "hardware",
        "models",
        "sandboxes",
        "troubleshooting",
        "tune",
    )
)
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def presets() -> str:
    """Every preset, with what it sets."""
    rows = [
        (f"`{name}`", _settings(preset.settings), preset.text, _source(preset.source))
        for name, preset in PRESETS.items()
    ]
    return _table(("preset", "sets", "what it is", "source"), rows)


def choices(family: type[Choice]) -> str:
    """The types of a family; what they ask of the loop where any asks anything."""
    family.base()  # from then on its types are complete
    kinds: list[type[Choice]] = list(family.types.values())
    rows = [
        [
            f"`{kind.name}`",
            f"`{_cell(kind.formula)}`" if kind.formula else "",
            kind.use,
            _source(kind.source),
            _settings({name: field.default for name, field in kind.model_fields.items()}),
            *(
                [", ".join(NEEDS[need] for need in sorted(kind.needs))]
                if any(k.needs for k in kinds)
                else []
            ),
        ]
        for kind in kinds
    ]
    return _table(
        ("name", "formula", "for", "source", "keys and defaults", "needs")[: len(rows[0])], rows
    )


def keys(table: str, section: str = "algorithm") -> str:
    """Every key in a table of a section."""
    rows = [
        (
            f"`{setting.key.removeprefix(f'{section}.')}`",
            setting.kind,
            setting.default,
            _cell(setting.meaning),
        )
        for setting in settings_of(f"{section}.{table}")
        if setting.key != f"{section}.{table}"
    ]
    return _table(("key", "value", "default", "meaning"), rows)


def metrics(kind: str) -> str:
    rows = [
        (f"`{m.name}`", m.unit, m.form, m.meaning, ", ".join(f"`{alias}`" for alias in m.aliases))
        for m in CATALOGUE[kind]
    ]
    return _table(("metric", "unit", "form", "meaning", "in sinks also"), rows)


def hardware() -> str:
    """What fits which GPU."""
    return _table(("model", "training", "takes", "in host memory", *GPUS), hardware_rows())


def families() -> str:
    """What each family's layers are, and what follows for it."""
    rows: list[list[str]] = []
    for name in published():
        config: Any = AutoConfig.for_model(name, **tiny_settings(name))
        written = config.to_dict()
        facts = facts_of(written)
        assert facts is not None, name
        rows.append(
            [
                f"`{name}`",
                "lean" if facts.lean else "modules",
                "✓" if first(decoder_config(written), *EXPERTS) else "",
                "" if facts.carrying else "✓",
                "" if name in (*VLLM.lacks, *VLLM.fixed_families) else "✓",
                "✓" if family(name).images else "",
                "" if family(name).multimodal else "✓" if name in SCORED else "here",
            ]
        )
    shared = "shared sequences, draft models"
    titles = ("`model_type`", "layers", "experts", shared, "vLLM", "images", "score head")
    return _table(titles, rows)


def families_refused() -> str:
    reasons: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    return _table(
        ("architectures", "why"), [(", ".join(names), reason) for reason, names in reasons.items()]
    )


def gguf_families() -> str:
    """Families that are read from GGUF and written to it."""
    read = {each.architecture: name for name, each in reversed(CPP.items())}
    return _table(
        ("`model_type`", "in llama.cpp", "read from GGUF as"),
        [
            (f"`{name}`", f"`{each.architecture}`", f"`{read[each.architecture]}`")
            for name, each in CPP.items()
        ],
    )


def findings(rules: Sequence[Rule[Any]]) -> str:
    """Every finding of the doctor, with the settings that it names."""
    cells = [
        (
            f"`{rule.key}`",
            rule.severity,
            _cell(rule.cause),
            ", ".join(f"`{change.key}`" for change in rule.change),
        )
        for rule in rules
    ]
    return _table(("finding", "severity", "cause", "settings to change"), cells)


def profiles() -> str:
    """What each profile of ``[system]`` sets."""
    rows = [
        (
            f"`{name}`",
            f"`{entry.key.partition('.')[2]} = {_value(entry.value)}`",
            entry.why,
            _condition(entry),
        )
        for name, entries in SYSTEM_PROFILES.items()
        for entry in entries
    ]
    return _table(("profile", "sets", "why", "where"), rows)


def _condition(entry: ProfileValue) -> str:
    """Where a profile sets a value, in words."""
    return ", ".join(
        filter(None, (entry.where, "where a sample fits with it" if entry.if_fits else ""))
    )


TABLES: Mapping[str, Callable[[], str]] = {
    "profiles": profiles,
    "doctor": partial(findings, RULES),
    "doctor_answers": partial(findings, [*RUN, *ROUND]),
    **{
        made.__name__: made
        for made in (presets, families, families_refused, gguf_families, hardware)
    },
    **{
        f"types_{key}": partial(choices, family)
        for key, family in AlgorithmSection.families.items()
    },
    "muon": partial(keys, "optimizer", "train"),
    "keys_sandbox": partial(keys, "sandbox", "environment"),
    **{
        f"keys_{key}": partial(keys, key)
        for key in (*AlgorithmSection.families, "overlong", "dynamic_filter")
    },
    **{f"metrics_{kind}": partial(metrics, kind) for kind in CATALOGUE},
}


def with_tables(text: str) -> str:
    """The page with every table as the registries have it now."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def _settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"`{key}` {_value(value)}" for key, value in settings.items())


def _value(value: object) -> str:
    match value:
        case None:
            return "off"
        case dict():
            return f"{value['type']} with " + ", ".join(
                f"{k} {_value(v)}" for k, v in value.items() if k != "type"
            )
        case bool():
            return str(value).lower()
        case _:
            return str(value)


def _source(source: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", _cell(source))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
