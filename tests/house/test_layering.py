"""The house: imports point downward, adapters do not know each other, files and functions stay
small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tunesmith

ROOT = Path(tunesmith.__file__).parent

FLOORS = {
    "errors": 0,
    "costs": 0,
    "types": 0,
    "records": 1,
    "config": 2,
    "plan": 3,
    "models": 4,
    "learn": 5,
    "run": 6,
    "cli": 7,
    "guide": 8,
    "api": 8,
    "__main__": 8,
    "": 8,
}
BELOW_MODELS = ("experts", "kernels", "parallel", "cpu", "cuda")
LAYOUT = ("forest", "openmp")
"""What rooms of ``models/`` may import of the files beside them."""
KNOW_ADAPTERS = (("run", "assembly"), ("run", "placement"), ("run", "specs"))
ADAPTER_ROOMS = ("engines", "trainers", "weights")
SHARED = (
    "base",
    "deadline",
    "directories",
    "flat",
    "links",
    "loss_scale",
    "mapped",
    "masters",
    "memory",
    "muon",
    "partial",
    "passes",
    "rounds",
    "spread",
    "state_files",
    "step_thread",
    "timed",
)
"""Ports of those rooms, and parts that several adapters use."""
HEAVY = ("torch", "transformers")
LIGHT = ("config/", "plan/", "records/", "guide/", "cli/", "learn/algorithms/", "learn/usercode/")
MAY_IMPORT_TORCH = ("guide/simulate/", "guide/tune/machine.py", "guide/tune/probes.py")
DENSITY = {
    "assignments of three values and more": 0,
    "assignments of two values": 9,
    "walrus": 42,
    "lines of more than 100 characters": 0,
    "Any": 920,
    "cast": 45,
    "isinstance(…Config)": 62,
}
"""At most so many in all; they only fall."""
LONGEST_FILE = 400
LONGEST_FUNCTION = 60


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(path: Path) -> tuple[str, ...]:
    """``run/engines/local/engine.py`` → ``("engines", "local", "engine")``."""
    return tuple(
        part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"
    )


def imported(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import below a node, relative ones made absolute."""
    package = ["tunesmith", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*above, *([node.module] if node.module else [])])
            yield node.lineno, name
            # "from tunesmith.run.loop import rl" imports the module tunesmith.run.loop.rl.
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)


def own_imports(path: Path) -> list[tuple[int, tuple[str, ...]]]:
    return _own_imports(path.read_text(), path)


@cache
def _own_imports(text: str, path: Path) -> list[tuple[int, tuple[str, ...]]]:
    found = ((line, name.split(".")) for line, name in imported(parsed(text), path))
    return [(line, tuple(rest)) for line, (head, *rest) in found if head == "tunesmith"]


def module_level_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Imports that run when the module is imported: not in functions, not under ``if
    TYPE_CHECKING``."""
    pending: list[ast.AST] = list(parsed(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node, path)
        else:
            pending.extend(ast.iter_child_nodes(node))


def floor(module: tuple[str, ...]) -> int:
    return FLOORS[module[0] if module else ""]


def test_every_module_has_a_floor() -> None:
    rooms = {dotted(path)[0] for path in modules() if dotted(path)}
    assert rooms <= FLOORS.keys(), f"not in the table of floors: {sorted(rooms - FLOORS.keys())}"


def test_imports_point_downward() -> None:
    upward = [
        (
            f"{relative(path)}:{line} (floor {floor(dotted(path))}) imports {'.'.join(name)} "
            f"(floor {floor(name)})"
        )
        for path in modules()
        for line, name in own_imports(path)
        if (not name or name[0] in FLOORS) and floor(name) > floor(dotted(path))
    ]
    assert not upward, "\n".join(upward)


BEHIND_DOORS = {
    ("guide",): ("guide",),
    ("models", "cpu"): ("models.cpu",),
    ("models", "cuda"): ("models.cuda",),
    ("records", "report"): ("records.report", "guide"),
    ("records", "doctor"): ("records.doctor", "records.report", "guide"),
}
"""Rooms that the trainer works without, and who may import them; others find them by a door."""


def test_doors_open_one_way() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {'.'.join(name)}, which is found by a door"
        for path in modules()
        for line, name in own_imports(path)
        for room, visitors in BEHIND_DOORS.items()
        if name[: len(room)] == room
        and not f"{'.'.join(dotted(path))}.".startswith(tuple(f"{v}." for v in visitors))
    ]
    assert not wrong, "\n".join(wrong)


def below_models(room: str, name: str) -> bool:
    """Whether a room of ``models/`` may import a module beside it: kernels know no sharding, none
    knows a model."""
    return name in LAYOUT or (name in BELOW_MODELS and (room, name) != ("kernels", "parallel"))


def test_rooms_of_models_do_not_know_the_models() -> None:
    upward = [
        f"{relative(path)}:{line} imports {'.'.join(name)}"
        for path in modules()
        if dotted(path)[:1] == ("models",) and dotted(path)[1:2] and dotted(path)[1] in BELOW_MODELS
        for line, name in own_imports(path)
        if name[:1] == ("models",) and len(name) > 1 and not below_models(dotted(path)[1], name[1])
    ]
    assert not upward, "\n".join(upward)


def circles() -> list[list[str]]:
    """Modules that import each other, in whatever way: lazily and for type checkers too."""
    known = {dotted(path): path for path in modules()}
    arrows = {
        module: {name for _, name in own_imports(path) if name in known}
        for module, path in known.items()
    }
    reach: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for module in known:
        seen: set[tuple[str, ...]] = set()
        pending = list(arrows[module])
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                pending.extend(arrows[name])
        reach[module] = seen
    circle = {
        frozenset(m for m in reach[module] if module in reach[m])
        for module in known
        if module in reach[module]
    }
    return sorted(sorted(".".join(module) for module in members) for members in circle)


def test_no_circle_of_imports() -> None:
    assert circles() == []


def test_public_classes_have_names_of_their_own() -> None:
    places: dict[str, list[str]] = {}
    for path in modules():
        for node in parsed(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{relative(path)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def adapter(module: tuple[str, ...]) -> tuple[str, str] | None:
    """(room, adapter) a module belongs to; None for ports, shared parts and what is no adapter."""
    if (
        len(module) < 3
        or module[0] != "run"
        or module[1] not in ADAPTER_ROOMS
        or module[2] in SHARED
    ):
        return None
    folder = ROOT / "run" / module[1]
    is_module = (folder / f"{module[2]}.py").exists() or (folder / module[2]).is_dir()
    return (module[1], module[2]) if is_module else None


# Modules beside an adapter that serve one adapter only, by the adapter they belong to.
PARTS = {
    ("trainers", "experts"): "torch",
    ("trainers", "optimizer"): "torch",
    ("trainers", "backward_sums"): "torch",
    ("engines", "roster"): "pool",
}


def owner(module: tuple[str, ...]) -> tuple[str, str] | None:
    found = adapter(module)
    return (found[0], PARTS.get(found, found[1])) if found else None


def test_adapters_do_not_know_each_other_and_only_these_rooms_know_them() -> None:
    wrong = [
        f"{relative(path)}:{line} imports the adapter {'.'.join(name)}"
        for path in modules()
        for line, name in own_imports(path)
        if (target := owner(name)) and target != owner(dotted(path))
        if dotted(path)[:1] not in ((), ("guide",)) and dotted(path)[:2] not in KNOW_ADAPTERS
    ]
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_low_floors_load_neither_torch_nor_transformers() -> None:
    heavy = [
        f"{relative(path)}:{line} imports {name}"
        for path in modules()
        if relative(path).startswith(LIGHT) and not relative(path).startswith(MAY_IMPORT_TORCH)
        for line, name in module_level_imports(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not heavy, "\n".join(heavy)


def test_these_load_without_torch_in_a_real_process() -> None:
    code = "import sys\n"
    for module in ("cli.main", "run.assembly", "config.load", "plan.resolve", "records.progress"):
        code += (
            f"import tunesmith.{module}\n"
            f"if {{*{HEAVY}}} & sys.modules.keys(): sys.exit('{module} loads it')\n"
        )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


@cache
def code_lines(path: Path) -> set[int]:
    """Numbers of the lines that hold code: no blank ones, no comments, docstrings or imports."""
    text = path.read_text()
    aside: set[int] = set()
    for node in ast.walk(parsed(text)):
        for statement in (
            getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []
        ):
            match statement:
                case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                    aside |= lines_of(statement)
    numbered = enumerate(text.splitlines(), 1)
    return {n for n, line in numbered if line.strip() and line.strip()[0] != "#"} - aside


def test_files_are_short() -> None:
    sizes = {relative(path): len(code_lines(path)) for path in modules()}
    long = {name: size for name, size in sizes.items() if size > LONGEST_FILE}
    assert not long, f"files of more than {LONGEST_FILE} lines of code: {long}"


def test_functions_are_short() -> None:
    long = [
        f"{relative(path)}:{node.lineno} {node.name}: {size} lines"
        for path in modules()
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := len(code_lines(path) & lines_of(node))) > LONGEST_FUNCTION
    ]
    assert not long, "\n".join(long)


def packed(node: ast.AST) -> int:
    """The values of an assignment of several to several names."""
    match node:
        case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple(elts=values)):
            return len(values)
        case _:
            return 0


def called(node: ast.AST) -> str | None:
    """The name of the function that a node calls."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name
        case _:
            return None


def test_one_idea_per_line() -> None:
    found = dict.fromkeys(DENSITY, 0)
    for path in modules():
        text = path.read_text()
        for node in ast.walk(parsed(text)):
            found["assignments of three values and more"] += packed(node) >= 3
            found["assignments of two values"] += packed(node) == 2
            found["walrus"] += isinstance(node, ast.NamedExpr)
            found["Any"] += isinstance(node, ast.Name) and node.id == "Any"
            found["cast"] += called(node) == "cast"
            found["isinstance(…Config)"] += called(node) == "isinstance" and "Config" in (
                ast.unparse(node)
            )
        found["lines of more than 100 characters"] += sum(
            len(line) > 100 for line in text.splitlines()
        )
    assert all(found[what] <= most for what, most in DENSITY.items()), found


def reads_by_locale(node: ast.AST) -> bool:
    """Whether a call decodes or encodes text by the locale, which may be ASCII."""
    match node:
        case ast.Call(func=ast.Attribute(attr="read_text"), args=[]):
            pass
        case ast.Call(func=ast.Attribute(attr="write_text"), args=[_]):
            pass
        case ast.Call(func=ast.Attribute(attr="fdopen")) | ast.Call(func=ast.Name(id="open")):
            if any(isinstance(a, ast.Constant) and "b" in str(a.value) for a in node.args[1:]):
                return False
        case ast.Call(keywords=keywords) if "text=True" in map(ast.unparse, keywords):
            pass
        case _:
            return False
    return isinstance(node, ast.Call) and all(k.arg != "encoding" for k in node.keywords)


def test_text_is_utf_8_in_every_locale() -> None:
    found = [
        f"{relative(path)}:{node.lineno} {ast.unparse(node)}"
        for path in modules()
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.Call) and reads_by_locale(node)
    ]
    assert not found, "name the encoding, utf-8:\n" + "\n".join(found)


COUNTS_CPUS = {
    "plan/facts/hardware.py": "usable_cpus, within scheduler and quota",
    "records/other_programs.py": "measures each core",
    "models/openmp.py": "as libgomp counts them",
}


def test_cpus_are_counted_in_one_place() -> None:
    """A count without the container's quota starts a hundred programs on two cores."""
    found = [
        f"{relative(path)}:{node.lineno} {node.func.attr}"
        for path in modules()
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("cpu_count", "sched_getaffinity")
        if relative(path) not in COUNTS_CPUS
    ]
    assert not found, "call usable_cpus:\n" + "\n".join(found)


def test_the_checks_see_what_they_are_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A house with one of each fault."""
    files = {
        "config/up.py": "from tunesmith.run.loop import rl\n",
        "run/loop/rl.py": "from ..engines.local import engine\n",
        "run/engines/local/engine.py": "def f():\n    import tunesmith.run.engines.other\n",
        "run/engines/other.py": "",
        "plan/heavy.py": "if True:\n    import torch.nn\n",
        "plan/light.py": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n"
            "    import torch\n"
        ),
        "models/parallel/up.py": "from tunesmith.models import decoder\n",
        "run/door.py": "from tunesmith.records.doctor import findings\n",
        "run/count.py": "import os\nos.cpu_count()\n",
        "models/long.py": "def f():\n" + "    pass\n" * 401,
        "records/text.py": (
            "path.read_text()\npath.write_text(x)\nopen(path)\nos.fdopen(1, 'w')\n"
            "subprocess.run(command, text=True)\n"
        ),
        "records/light.py": (
            "path.read_text('utf-8')\nopen(path, 'rb')\nopen(path, encoding='utf-8')\nf(text=x)\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for check, expected in (
        (test_imports_point_downward, ["config/up.py:1 (floor 2) imports run.loop.rl (floor 6)"]),
        (test_doors_open_one_way, ["run/door.py:1 imports records.doctor"]),
        (
            test_rooms_of_models_do_not_know_the_models,
            ["models/parallel/up.py:1 imports models.decoder"],
        ),
        (
            test_adapters_do_not_know_each_other_and_only_these_rooms_know_them,
            [
                "run/loop/rl.py:1 imports the adapter run.engines.local",
                "run/engines/local/engine.py:2",
            ],
        ),
        (test_low_floors_load_neither_torch_nor_transformers, ["plan/heavy.py:2 imports torch.nn"]),
        (test_files_are_short, ["models/long.py"]),
        (test_text_is_utf_8_in_every_locale, [f"records/text.py:{n} " for n in range(1, 6)]),
        (test_cpus_are_counted_in_one_place, ["run/count.py:2 cpu_count"]),
        (test_functions_are_short, ["models/long.py:1 f: 402 lines"]),
    ):
        with pytest.raises(AssertionError) as caught:
            check()
        assert all(text in str(caught.value) for text in expected), str(caught.value)
        assert "light.py" not in str(caught.value)
