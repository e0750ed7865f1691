"""The page of the peers, the list it is made from and the tests the list names. No peer is needed
here."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

from tests.peers import comparisons
from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.reading.describe import choices_at
from tunesmith.learn.algorithms.advantages import Estimator
from tunesmith.learn.algorithms.corrections import Correction
from tunesmith.learn.algorithms.losses import Loss

PEERS = Path(comparisons.__file__).parent


def functions() -> set[str]:
    """Names of all tests that ``make test-peers`` runs."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PEERS.glob("agree_*.py")]
    defined = (
        node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)
    )
    return {name for name in defined if name.startswith(("agree_", "differ_"))}


def test_the_page_is_the_list() -> None:
    text = comparisons.PAGE.read_text(encoding="utf-8")
    assert text == comparisons.with_tables(text), "run: python -m tests.peers.comparisons"
    for version in comparisons.versions().values():
        assert version in text


def test_every_entry_names_a_test_and_every_test_has_an_entry() -> None:
    entries = [*comparisons.COMPARISONS, *comparisons.DIFFERENCES]
    assert {entry.test for entry in entries} == functions()
    assert all(d.test.startswith("differ_") and d.reason for d in comparisons.DIFFERENCES)


def test_everything_in_the_registries_is_compared_or_says_why_not() -> None:
    registered = {
        "advantage": set(Estimator.types),
        "loss": set(Loss.types),
        "correction": Correction.types.keys() - {"none"},
        "kl": set(choices_at(AlgorithmSection, ("kl", "estimator"))),
    }
    missing = {
        f"{kind} {name}"
        for kind, names in registered.items()
        for name in names - {o for c in comparisons.COMPARISONS if c.kind == kind for o in c.ours}
    }
    assert missing == comparisons.NOT_COMPARED.keys()


def test_the_tests_name_what_the_package_has() -> None:
    """They run in an environment of their own, so that a name that moved would go unnoticed
    here."""
    for path in PEERS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tunesmith."):
                module = import_module(node.module or "")
                for name in node.names:
                    assert hasattr(module, name.name), (
                        f"{path.name}: {node.module} has no {name.name}"
                    )
