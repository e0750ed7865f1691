"""What commands import: packages that take long are loaded where they are used."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.commands import HEAVY
from tests.support.tiny import save_model
from tests.support.tiny_runs import rl_settings, sft_settings, write_lines

FOR_ADAPTERS = ("peft", "bitsandbytes")
FOR_COMPILING = ("torch._inductor.compile_fx", "torch._inductor.lowering")
ELSEWHERE = ("datasets", "pandas", "pyarrow", "ray", "vllm", "triton", "matplotlib", "sklearn")
"""Those that no command needs for local files and the embedded engine."""
UNUSED = (*FOR_ADAPTERS, *FOR_COMPILING, *ELSEWHERE)
WITHOUT = {
    "config": (*HEAVY, *UNUSED),
    "plan": (*HEAVY, *UNUSED),
    "sft": UNUSED,
    "rl": UNUSED,
    "generate": UNUSED,
}
"""Command → modules that it does not import."""
CODE = """\
import atexit, gc, json, sys
ended = lambda: (list(sys.modules), gc.get_threshold(), gc.get_freeze_count())
atexit.register(lambda: print("\\0", json.dumps(ended()), file=sys.stderr))
from tunesmith.__main__ import main
sys.argv[0] = "tunesmith"
main()
"""


def settings(command: str, folder: Path, model: Path) -> Sequence[str]:
    if command == "rl":
        return rl_settings(folder, model, train__steps=1)
    if command == "generate":
        write_lines(folder / "prompts.jsonl", [{"prompt": "1+1="}])
        return ("model.path=model", "data.train=prompts.jsonl", "sampling.max_new_tokens=2")
    return sft_settings(folder, model, train__steps=1)


@pytest.mark.parametrize("command", WITHOUT)
def test_a_command_imports_only_what_it_uses(command: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    said = settings(command, tmp_path, save_model(tmp_path / "model"))
    ended = subprocess.run(
        [sys.executable, "-c", CODE, command, "run.toml", *said],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    words, _, state = ended.stderr.partition("\0")
    assert ended.returncode == 0, words
    modules, thresholds, frozen = json.loads(state)
    assert not {*modules} & {*WITHOUT[command]}
    assert frozen, "the end of the process looks through no modules"
    if WITHOUT[command] == UNUSED:
        assert tuple(thresholds) == gc.get_threshold(), "a run's own garbage is collected as usual"
