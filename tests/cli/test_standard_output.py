"""A standard output that is closed in the middle of a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from tunesmith.cli.standard_output import lasting_output
with lasting_output():
    print("before", flush=True)
    if sys.argv[1] == "close":
        sys.stdout.close()
    if sys.argv[1] == "descriptor":
        os.close(1)
        opened = open(sys.argv[2], "w")  # which may get the number of standard output
    for number in range(50_000 if sys.argv[1] == "pipe" else 3):
        print("after", number, flush=True)
print("went on", file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["close", "descriptor"])
def test_what_closes_it_is_ignored(how: str, tmp_path: object) -> None:
    command = [sys.executable, "-c", PROGRAM, how, f"{tmp_path}/file"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stderr == "went on\n"
    assert done.stdout.splitlines() == ["before", "after 0", "after 1", "after 2"]


def test_a_reader_that_goes_away_is_said_once() -> None:
    command = [sys.executable, "-c", PROGRAM, "pipe"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "before\n"
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0 and said.splitlines()[-1] == "went on"
    assert said.count("standard output") == 1 and "Traceback" not in said


@pytest.mark.parametrize(("patience", "speaks"), [(600.0, False), (0.1, True)])
def test_a_command_that_is_silent_for_long_says_that_it_starts(
    patience: float, speaks: bool
) -> None:
    program = (
        "import time\n"
        "from tunesmith.cli import standard_output as out\n"
        f"out.FIRST_WORDS = ({patience},)\n"
        "out.report_start()\n"
        f"with out.lasting_output():\n    time.sleep(1)\n    print('a word', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "a word\n"
    assert done.stderr.startswith("starting") == speaks


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
@pytest.mark.more
def test_commands_work_without_standard_streams(closed: str, tmp_path: Path) -> None:
    """And no file that they open gets the number of one, into which libraries print."""
    program = (
        "import os, sys; from tunesmith.cli.main import main; sys.argv[1:] = ['init', 'rl', "
        "'new']\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    code = ended.code\n"
        "print('printed', file=sys.stderr)\n"
        "os.write(1, b'printed'); os.write(2, b'printed'); sys.stdin.read()\n"
        "open('code', 'w').write(f'{code} {os.dup(0) > 2}')\n"
    )
    (tmp_path / "program.py").write_text(program)
    subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} program.py {closed}"],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert (tmp_path / "code").read_text() == "0 True"
    assert (tmp_path / "new" / "run.toml").exists() and "printed" not in (
        tmp_path / "new" / "run.toml"
    ).read_text()


@pytest.mark.parametrize(("command", "reports"), [("explain", False), ("rl", True)])
def test_a_command_that_only_prints_says_nothing_when_its_reader_goes_away(
    command: str, reports: bool
) -> None:
    program = (
        "from tunesmith.cli.guard import guarded\n"
        f"def {command}():\n    for number in range(50_000):\n"
        f"        print('line', number, flush=True)\n"
        f"guarded({command})()\n"
    )
    arguments = [sys.executable, "-c", program]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert (
        process.returncode == 0
        and ("standard output" in said) == reports
        and "Traceback" not in said
    )
