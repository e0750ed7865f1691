"""Tables of the documents that are made from registries: ``python tests/docs_tables.py`` writes them anew.

Each stands between ``<!-- table: name -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from foreign_tables import FOREIGN
from hardware_table import GPUS, rows
from tunesmith.algorithms.advantages import ESTIMATORS
from tunesmith.algorithms.corrections import CORRECTIONS
from tunesmith.algorithms.losses import POLICY_LOSSES
from tunesmith.algorithms.presets import NEEDS, PRESETS
from tunesmith.algorithms.registry import Entry
from tunesmith.models.families import KNOWN, REFUSED
from tunesmith.monitor.catalogue import CATALOGUE

DOCS = Path(__file__).parent.parent / "docs"
PAGES = tuple(DOCS / f"{name}.md" for name in ("algorithms", "observability", "coming-from", "hardware", "models"))
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


WHEN: Mapping[str, Mapping[str, str]] = {
    "estimators": {
        "grpo": "the usual choice where several answers per prompt can be compared",
        "dr_grpo": "tasks of very different difficulty, long answers",
        "rloo": "small groups; an unbiased baseline",
        "opo": "strictly on-policy training with answers of very different lengths",
        "gpg": "many groups have equal rewards and dynamic filtering is too dear",
        "gdpo": "several rewards of different scale",
        "reinforce": "one answer per prompt, no second model",
        "reinforce_baseline": "groups, with advantages on one scale over the batch",
        "remax": "one or two answers per prompt, deterministic tasks",
        "gae": "credit should differ from token to token; rewards along the way; a critic is affordable",
        "vapo": "as gae, for long reasoning",
        "token_reward": "distillation: every token has its own reward",
    },
    "losses": {
        "ppo": "several optimizer steps per batch; the usual choice",
        "reinforce": "one optimizer step per batch; with a correction also off policy",
        "gpg": "one optimizer step per batch",
        "gspo": "mixtures of experts, long answers: token ratios are noisy there",
        "gspo_token": "as gspo, where advantages differ from token to token",
        "gmpo": "a few outlying tokens upset ppo",
        "gepo": "very stale samples, many machines",
        "cispo": "long reasoning, where ppo would drop the rare tokens that turn an answer",
        "sapo": "ppo's hard clip makes training jumpy",
        "dppo_tv": "rare tokens should move far, frequent ones should not",
        "clip_cov": "entropy falls too fast",
        "kl_cov": "entropy falls too fast; steadier than clip_cov",
    },
    "corrections": {
        "token_truncate": "sampler and trainer differ a little: another engine, quantised weights",
        "token_clamp": "as token_truncate, and small weights should not vanish",
        "icepop": "mixtures of experts: leave out the tokens on which the two disagree",
        "sequence_truncate": "unbiased for short answers; the weight of a long one varies widely",
        "sequence_mask": "stale samples: leave out the answers that the policy has left behind",
        "geometric": "only answers that both would have written: very strict",
    },
}
"""When to use each; a registered name that is missing here fails the page's test."""


def presets() -> str:
    """Every preset, with what it sets."""
    rows = [
        (f"`{name}`", _settings(preset.settings), preset.description, _source(preset.source))
        for name, preset in PRESETS.items()
    ]
    return _table(("preset", "sets", "what it is", "source"), rows)


def losses() -> str:
    return _registered(POLICY_LOSSES.values(), WHEN["losses"])


def estimators() -> str:
    return _registered(ESTIMATORS.values(), WHEN["estimators"])


def corrections() -> str:
    when = WHEN["corrections"]
    rows = [
        (f"`{c.name}`", f"`{_cell(c.formula)}`", when[c.name], _source(c.source), _settings(c.settings))
        for c in CORRECTIONS.values()
    ]
    return _table(("name", "weight of a token", "for", "source", "keys and defaults"), rows)


def metrics(kind: str) -> str:
    rows = [
        (f"`{m.name}`", m.unit, m.form, m.meaning, ", ".join(f"`{alias}`" for alias in m.aliases))
        for m in CATALOGUE[kind]
    ]
    return _table(("metric", "unit", "form", "meaning", "in sinks also"), rows)


def _foreign(name: str) -> str:
    return _table(*FOREIGN[name]())


def hardware() -> str:
    """What fits which GPU."""
    return _table(("model", "training", "takes", *GPUS), rows())


def families() -> str:
    names = sorted(KNOWN)
    rows = [[f"`{name}`" for name in names[place : place + 4]] for place in range(0, len(names), 4)]
    return _table(("", "", "", ""), [[*row, *[""] * (4 - len(row))] for row in rows])


def families_refused() -> str:
    reasons: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    return _table(("architectures", "why"), [(", ".join(names), reason) for reason, names in reasons.items()])


TABLES: Mapping[str, Callable[[], str]] = {
    **{
        made.__name__: made for made in (presets, losses, estimators, corrections, families, families_refused, hardware)
    },
    **{f"metrics_{kind}": partial(metrics, kind) for kind in CATALOGUE},
    **{name: partial(_foreign, name) for name in FOREIGN},
}


def with_tables(text: str) -> str:
    """The page with every table as the registries have it now."""
    return BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def _registered(entries: Iterable[Entry[Any]], when: Mapping[str, str]) -> str:
    rows = [
        (
            f"`{e.name}`",
            f"`{_cell(e.formula)}`",
            when[e.name],
            _source(e.source),
            _settings(e.settings),
            ", ".join(NEEDS[need] for need in sorted(e.needs)),
        )
        for e in entries
    ]
    return _table(("name", "formula", "for", "source", "keys and defaults", "needs"), rows)


def _settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"`{key}` {_value(value)}" for key, value in settings.items())


def _value(value: object) -> str:
    match value:
        case None:
            return "off"
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
