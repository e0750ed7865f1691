"""Finding and loading reward functions: what is wrong is said before the user's code runs, with its
place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tunesmith.config.schema import RewardSection
from tunesmith.errors import ConfigError
from tunesmith.learn.rewards.loading import check_rewards, load_rewards


def section(*functions: str, **rest: object) -> RewardSection:
    return RewardSection.model_validate({"functions": functions, "isolation": "thread", **rest})


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds ``rewards.py`` and, beside it, a module it imports. ``sys.path`` is restored
    afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rewards.py").write_text(
        "import neighbour_of_rewards\n"
        "def correct(prompts, completions, answer): return [1.0] * len(prompts)\n"
        "async def judged(completions, **columns): return [None] * len(completions)\n"
        "class Judge: pass\n"
        "alias = correct\n"
        "number = 3\n"
    )
    (tmp_path / "neighbour_of_rewards.py").write_text("")
    return tmp_path


def refused(base_dir: Path, *functions: str, **rest: object) -> str:
    with pytest.raises(ConfigError) as error:
        check_rewards(section(*functions, **rest), base_dir)
    return str(error.value)


def test_loads_functions_of_a_file_beside_the_run_file(directory: Path) -> None:
    rewards = load_rewards(
        section("rewards.py:correct", "rewards.py:judged", "rewards.py:alias"), directory
    )
    assert [f.name for f in rewards.functions] == ["correct", "judged", "alias"]
    assert rewards.functions[0].columns == {"answer"}
    assert rewards.functions[0].function is rewards.functions[2].function


def test_a_path_not_beside_the_run_file_is_looked_up_in_the_working_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    rewards = load_rewards(section("rewards.py:correct"), directory / "runs")
    assert rewards.functions[0].name == "correct"


def test_a_name_that_is_not_there_is_refused_whatever_a_comment_says(directory: Path) -> None:
    (directory / "commented.py").write_text(
        "# import * is bad\ndef right(completions): return completions\n"
    )
    assert "'wrong'" in refused(directory, "commented.py:wrong")


def test_a_file_in_another_encoding_is_told_without_a_line(directory: Path) -> None:
    (directory / "latin.py").write_bytes(b"def f(completions): return '\xe9'\n")
    said = refused(directory, "latin.py:f")
    assert (
        "latin.py is not valid Python: invalid or missing encoding declaration" in said
        and "None" not in said
    )


def test_loads_from_a_package_beside_the_run_file(directory: Path) -> None:
    package = directory / "pkg_for_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported too early')")
    (package / "inner.py").write_text("def good(completions): return [0.0]")
    check_rewards(section("pkg_for_rewards.inner:good"), directory)
    assert "Did you mean 'good'" in refused(directory, "pkg_for_rewards.inner:goood")
    assert "no module 'pkg_for_rewards.outer'" in refused(directory, "pkg_for_rewards.outer:good")
    (package / "__init__.py").write_text("")
    assert (
        load_rewards(section("pkg_for_rewards.inner:good"), directory).functions[0].name == "good"
    )


def test_same_file_name_in_two_directories(directory: Path) -> None:
    other = directory / "other"
    other.mkdir()
    (other / "rewards.py").write_text("def correct(completions): return [2.0]")
    rewards = load_rewards(section("rewards.py:correct", "other/rewards.py:correct"), directory)
    assert [f.name for f in rewards.functions] == ["rewards.py:correct", "other/rewards.py:correct"]
    assert rewards.functions[1].function([""]) == [2.0]


def test_an_edited_file_is_loaded_anew(directory: Path) -> None:
    load_rewards(section("rewards.py:correct"), directory)
    (directory / "rewards.py").write_text("def correct(completions): return [5.0]")
    assert load_rewards(section("rewards.py:correct"), directory).functions[0].function([""]) == [
        5.0
    ]


def test_wrong_names_are_refused_with_the_nearest(directory: Path) -> None:
    assert "Did you mean 'correct'" in refused(directory, "rewards.py:corect")
    assert "Did you mean 'rewards.py'" in refused(directory, "reward.py:correct")
    assert "Did you mean 'numeric_match'" in refused(directory, "numeric_mach")
    assert "rewards.py:correct, rewards.py:judged" in refused(directory, "rewards.py")
    assert "no module 'no_such_package'" in refused(directory, "no_such_package.x:f")


def test_only_names_at_the_top_level_count(directory: Path) -> None:
    (directory / "local.py").write_text(
        "def f(completions):\n    inner = completions\n    return inner\n"
    )
    assert "'inner'" in refused(directory, "local.py:inner")


def test_check_runs_nothing_of_the_users(directory: Path) -> None:
    (directory / "loud.py").write_text("raise SystemExit('ran')\ndef f(completions): ...\n")
    check_rewards(section("loud.py:f"), directory)


def test_not_a_function(directory: Path) -> None:
    for name, kind in (("Judge", "a class"), ("number", "of type int")):
        with pytest.raises(ConfigError, match=kind):
            load_rewards(section(f"rewards.py:{name}"), directory)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(completions, /): return []", "by position only"),
        ("def f(completions, environments): return []", "'environments'.*environment.path"),
    ],
)
def test_signatures_that_cannot_be_called(directory: Path, source: str, words: str) -> None:
    (directory / "odd.py").write_text(source)
    with pytest.raises(ConfigError, match=words):
        load_rewards(section("odd.py:f"), directory)


def test_syntax_error_names_file_and_line(directory: Path) -> None:
    (directory / "broken.py").write_text("x = 1\ndef f(:\n")
    message = refused(directory, "broken.py:f")
    assert "broken.py, line 2" in message


def test_import_error_shows_the_users_traceback(directory: Path) -> None:
    (directory / "broken.py").write_text(
        "x = 1\nimport no_such_module_at_all\ndef f(completions): ...\n"
    )
    with pytest.raises(ConfigError) as error:
        load_rewards(section("broken.py:f"), directory)
    message = str(error.value)
    assert 'broken.py", line 2' in message
    assert "No module named 'no_such_module_at_all'" in message
    assert "importlib" not in message and "user_code" not in message


def test_a_star_import_leaves_the_question_to_the_import(directory: Path) -> None:
    (directory / "star.py").write_text("from neighbour_of_rewards import *\n")
    check_rewards(section("star.py:f"), directory)
    with pytest.raises(ConfigError, match="has no function 'f'"):
        load_rewards(section("star.py:f"), directory)


def test_lists_and_weights(directory: Path) -> None:
    assert "reward.functions is empty" in refused(directory)
    assert "more than once" in refused(directory, "math", "math")
    assert "2 entries for 1" in refused(directory, "math", weights=(1.0, 2.0))
    assert "all 0" in refused(directory, "math", weights=(0.0,))


@pytest.mark.parametrize(
    ("functions", "keys", "words"),
    [
        (("regex_format",), {}, "reward.pattern is missing"),
        (("regex_format",), {"pattern": "(a"}, "not a regular expression"),
        (("numeric_match",), {"pattern": "a"}, "no group"),
        (("math",), {"pattern": "(a)"}, "reward.pattern is set"),
        (("regex_format",), {"pattern": "a", "answer": "solution"}, "reward.answer is set"),
        (("math",), {"answer": "completions"}, "not a data column"),
    ],
)
def test_settings_that_no_builtin_can_use(
    tmp_path: Path, functions: tuple[str, ...], keys: dict[str, object], words: str
) -> None:
    assert words in refused(tmp_path, *functions, **keys)


def test_a_pattern_without_group_is_for_the_format_alone(tmp_path: Path) -> None:
    check_rewards(section("regex_format", "exact_match", pattern=".*"), tmp_path)


def test_checking_and_loading_do_not_import_torch(directory: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from tunesmith.config.schema import RewardSection\n"
        "from tunesmith.learn.rewards.loading import load_rewards\n"
        "load_rewards(RewardSection(functions=('math', 'rewards.py:correct'), "
        "isolation='thread'), Path('.')).close()\n"
        "print([m for m in ('torch', 'transformers', 'sympy') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=directory, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
