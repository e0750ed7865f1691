"""The user's code, misbehaving in every way that could be thought of: rewards and environments.

Each case is a kind of misbehaviour, in a plain or an async function, on a thread or in a process.
Each must give rewards or typed failures of its own call, leave a following good call alone, and
leave nothing behind in the run's process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.data_tokenizers import byte_level, template
from tests.support.episodes import load, made_task, play
from tunesmith.config.schema import RewardSection
from tunesmith.learn.rewards.loading import load_rewards
from tunesmith.records.metrics import JsonLines, read_metrics
from tunesmith.types import Completion, Rollout, Status, Task

N = "len(completions)"
FINE: dict[str, str] = {
    "numbers": f"return [1.0] * {N}",
    "ints": f"return [1] * {N}",
    "bools": f"return [True] * {N}",
    "tuple": f"return (1.0,) * {N}",
    "numpy": f"import numpy; return numpy.ones({N})",
    "numpy32": f"import numpy; return numpy.ones({N}, 'float32')",
    "numpy items": f"import numpy; return [numpy.float32(1)] * {N}",
    "zero dim": f"import numpy; return [numpy.array(1.0)] * {N}",
    "torch": f"import torch; return torch.ones({N})",
    "torch grad": f"import torch; return torch.ones({N}, requires_grad=True)",
    "torch half": f"import torch; return torch.ones({N}, dtype=torch.bfloat16)",
    "fractions": f"from fractions import Fraction; return [Fraction(1)] * {N}",
    "decimals": f"from decimal import Decimal; return [Decimal(1)] * {N}",
    "chdir": f"import os; os.chdir('/'); return [1.0] * {N}",
    "environ": f"import os; os.environ['HOME'] = '/'; return [1.0] * {N}",
    "locale": f"import locale; locale.setlocale(locale.LC_ALL, 'C'); return [1.0] * {N}",
    "seeds": f"import random, numpy; random.seed(0); numpy.random.seed(0); return [1.0] * {N}",
    "dtype": f"import torch; torch.set_default_dtype(torch.float64); return [1.0] * {N}",
    "gc": f"import gc; gc.disable(); gc.collect(); gc.enable(); return [1.0] * {N}",
    "thread": f"import threading; threading.Thread(target=print).start(); return [1.0] * {N}",
    "daemon": (
        f"import threading, time; threading.Thread(target=time.sleep, args=(60,), "
        f"daemon=True).start(); return [1.0] * {N}"
    ),
    "subprocess": f"import subprocess; subprocess.run(['true']); return [1.0] * {N}",
    "prints": f"print('x' * 100_000); return [1.0] * {N}",
    "prints surrogates": (
        f"import sys; sys.stdout.reconfigure(errors='replace') if "
        f"hasattr(sys.stdout, 'reconfigure') else 0; print('y'); return [1.0] * {N}"
    ),
    "warns": f"import warnings; warnings.warn('w'); return [1.0] * {N}",
    "mutates": f"kw.clear(); completions.append(1); return [1.0] * ({N} - 1)",
    "logs sets": f"kw['log_extra']('a', [{{1}}] * {N}); return [1.0] * {N}",
    "logs objects": f"kw['log_extra']('a', [object()] * {N}); return [1.0] * {N}",
    "logs arrays": f"import numpy; kw['log_extra']('a', [numpy.ones(3)] * {N}); return [1.0] * {N}",
    "logs surrogates": f"kw['log_extra']('a\\udc80', ['\\udc80'] * {N}); return [1.0] * {N}",
    "logs cycle": f"c = []; c.append(c); kw['log_extra']('a', [c] * {N}); return [1.0] * {N}",
    "logs huge": f"kw['log_metric']('m', 1e308); kw['log_metric']('m', 1e308); return [1.0] * {N}",
    "logs nan": f"kw['log_metric']('m', float('nan')); return [1.0] * {N}",
    "logs big int": f"kw['log_extra']('a', [1 << 30_000] * {N}); return [1.0] * {N}",
    "logs names": f"kw['log_extra'](7, [1] * {N}); kw['log_metric'](None, 1); return [1.0] * {N}",
    "closes stdin": f"import sys; sys.stdin and sys.stdin.close(); return [1.0] * {N}",
}
FAILS: dict[str, str] = {
    "raises": "raise ValueError('x')",
    "raises odd": "raise type('Odd', (Exception,), {'__str__': lambda s: 1 / 0})()",
    "exits": "raise SystemExit(0)",
    "interrupts": "raise KeyboardInterrupt",
    "generator exit": "raise GeneratorExit",
    "recursion": "f = lambda: f(); f()",
    "assert": "assert False",
    "none": "return None",
    "number": "return 1.0",
    "text": "return 'abc'",
    "dict": "return {}",
    "generator": "return (1.0 for _ in completions)",
    "class": "return object",
    "short": "return []",
    "long": f"return [1.0] * ({N} + 1)",
    "strings": f"return ['1'] * {N}",
    "nan": f"return [float('nan')] * {N}",
    "inf": f"return [float('inf')] * {N}",
    "huge": f"return [1e300] * {N}",
    "big int": f"return [10 ** 400] * {N}",
    "complex": f"return [1j] * {N}",
    "lists": f"return [[1.0]] * {N}",
    "all none": f"return [None] * {N}",
    "coroutine": "async def c(): return [1.0]\n    c = c(); c.close(); return c",
    "wrong extra": "kw['log_extra']('a', [1] * 99); return [1.0]",
    "wrong metric": "kw['log_metric']('a', 'b'); return [1.0]",
    "bad repr": f"return [type('R', (), {{'__repr__': lambda s: 1 / 0}})()] * {N}",
    "bad float": f"return [type('F', (), {{'__float__': lambda s: 1 / 0}})()] * {N}",
    "bad tolist": "return type('T', (), {'tolist': lambda s: 7})()",
    "group": "raise ExceptionGroup('g', [ValueError(1)])",
    "memory": "raise MemoryError",
    "state": "kw['trainer_state'].nonsense",
    "unknown": "return undefined_name",
    "column": "kw['no_such_column']",
    "big eval": "return eval('[' * 500)",
    "unicode": "raise ValueError('\\udc80')",
}
ENDS: dict[str, str] = {
    "regex": "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "spins": "while True: pass",
    "sleeps": "import time; time.sleep(60)",
    "waits": "import threading; threading.Event().wait()",
    "_exit": "import os; os._exit(0)",
    "_exit 3": "import os; os._exit(3)",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "terminates": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "eats": "held = bytearray(8 << 30)",
    "grows": "held = []\n    while True: held.append(bytearray(1 << 24))",
    "closes all": "import os; os.closerange(0, 200)",
    "big power": "x = 7 ** (10 ** 9)",
    "stack": "import sys; sys.setrecursionlimit(10 ** 9)\n    def f(n): return [f(n)]\n    f(0)",
    "ignores and spins": (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    while True: pass"
    ),
    "forks and exits": "import os\n    if os.fork() == 0: os._exit(0)\n    os._exit(1)",
}
WAYS = list(itertools.product(("", "async "), ("thread", "process")))
CASES = [
    (kind, body, way) for group in (FINE, FAILS) for kind, body in group.items() for way in WAYS
]
CASES += [
    (kind, body, (asynchronous, "process"))
    for kind, body in ENDS.items()
    for asynchronous in ("", "async ")
]


def scored(rewards: Any, texts: list[str]) -> list[Rollout]:
    made = [Rollout(Task(f"t{i}", "q", (1,), {"answer": "4"})) for i in range(len(texts))]
    for one in made:
        one.act(Completion([1], [0.0], [0], "stop"))
    asyncio.run(rewards.score(made, texts))
    return made


@pytest.mark.parametrize(
    ("kind", "body", "way"), CASES, ids=lambda v: v if isinstance(v, str) and len(v) < 25 else ""
)
def test_rewards(
    kind: str, body: str, way: tuple[str, Literal["thread", "process"]], tmp_path: Path
) -> None:
    asynchronous, isolation = way
    code = (
        f"def good(completions, **kw):\n    return [0.5] * len(completions)\n\n"
        f"{asynchronous}def f(completions, **kw):\n    {body}\n"
    )
    (tmp_path / "code.py").write_text(code, errors="surrogatepass")
    here = os.getcwd()
    begun = time.monotonic()
    memory = "1GB" if isolation == "process" else None
    section = RewardSection(
        functions=("code.py:f", "code.py:good"),
        isolation=isolation,
        timeout=60.0 if kind in FINE else 2.0,
        memory=memory,
    )
    rewards = load_rewards(section, tmp_path)
    try:
        first = scored(rewards, ["a", "b"])
        second = scored(rewards, ["a"])
        numbers = rewards.metrics([*first, *second])
    finally:
        rewards.close()
        os.chdir(here)
    for one in (*first, *second):
        if kind in FINE:
            assert one.status is Status.OK and one.rewards["f"] == 1.0, one.error
        elif kind == "all none":
            assert one.status is Status.OK and one.rewards["f"] is None
        else:
            assert (
                one.status in (Status.REWARD_FAILED, Status.TIMED_OUT)
                and one.reward is None
                and one.error
            )
        assert one.rewards.get("good", 0.5) == 0.5
    log = JsonLines(tmp_path / "log.jsonl")
    log.write({**numbers, "notes": [r.notes for r in first], "errors": [r.error for r in first]})
    log.close()
    assert len(read_metrics(tmp_path / "log.jsonl")) == 1 and time.monotonic() - begun < 60


ENDINGS = {k: v for k, v in ENDS.items() if k not in ("sleeps", "spins", "waits", "eats")}
ENVIRONMENTS = {
    **{k: v for k, v in FAILS.items() if "kw" not in v and "completions" not in v},
    "sleeps": ENDS["sleeps"],
}


KINDS = [(kind, body, way) for kind, body in ENVIRONMENTS.items() for way in WAYS]
KINDS += [(kind, body, ("", "process")) for kind, body in ENDINGS.items()]


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("kind", "body", "way"), KINDS, ids=lambda v: v if isinstance(v, str) and len(v) < 25 else ""
)
def test_environments(
    kind: str, body: str, way: tuple[str, str], where: str, tmp_path: Path
) -> None:
    asynchronous, isolation = way
    bodies = {"reset": "return None", "step": "return None, 1.0, True"}
    bodies[where] = f"if self.bad: return self.bad_{where}()\n        {bodies[where]}"
    code = (
        f"class E:\n    {asynchronous}def reset(self, bad):\n        self.bad = bad\n"
        f"        {bodies['reset']}\n"
        f"    {asynchronous}def step(self, action):\n        {bodies['step']}\n"
        f"    def bad_{where}(self):\n        " + body.replace("\n    ", "\n        ") + "\n"
    )
    tokenizer = byte_level(template("chatml"))
    environments = load(tmp_path, code, path="env.py:E", timeout=3.0, isolation=isolation)
    tasks = [
        made_task(tokenizer, identity="bad", bad=True),
        made_task(tokenizer, identity="good", bad=False),
    ]
    (bad_one, good), _ = play(environments, tokenizer, tasks, lambda _: "x<|im_end|>", timeout=60.0)
    assert good.status is Status.OK and good.reward == 1.0, (kind, good.error)
    assert bad_one.status in (Status.OK, Status.ENVIRONMENT_FAILED, Status.TIMED_OUT)
    assert bad_one.status is not Status.OK or where == "reset", bad_one
    assert bad_one.status is Status.OK or bad_one.error
