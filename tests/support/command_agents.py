"""Episodes that programs play in sandboxes, with a policy that always says 42."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.data_tokenizers import byte_level, template
from tests.support.episodes import Policy, RecordingEngine, made_task, play
from tunesmith.config.schema import EnvironmentSection
from tunesmith.learn.environments.commands import Played
from tunesmith.learn.environments.loading import load_environments
from tunesmith.types import Rollout

PYTHON = "python3"
ASKS = """\
import json, os, sys, urllib.request

def ask(*said):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [dict(m) for m in said]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    key["Content-Type"] = "application/json"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), key)) as a:
        return json.load(a)["choices"][0]["message"]

prompt = sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read()
said = [{"role": "user", "content": prompt}]
reply = ask(*said)
"""
WRITES = ASKS + "open('answer.txt', 'w').write(reply['content'])\n"


VERIFY = [PYTHON, "-c", "raise SystemExit(open('answer.txt').read() != '42')"]


def played(
    code: str,
    *,
    prompt: str = "Go.",
    group_size: int = 1,
    scorer: Any = None,
    policy: Policy = lambda _: "42<|im_end|>",
    **section: Any,
) -> tuple[list[Rollout], RecordingEngine]:
    """Episodes of ``python3 -c code``, with a policy that says 42."""
    tokenizer = byte_level(template("qwen2"))
    section.setdefault("command", [PYTHON, "-c", code])
    environments = load_environments(EnvironmentSection(**section), Path())
    environments.keeps_instances = scorer is not None
    task = made_task(tokenizer, prompt, answer="42")
    return play(
        environments,
        tokenizer,
        [task],
        policy,
        group_size=group_size,
        scorer=scorer,
        timeout=100.0,
        max_tokens=40_000,
    )


def one(code: str, **given: Any) -> Rollout:
    (rollout,), _ = played(code, **given)
    return rollout


class Seen:
    """A scorer that keeps what reward functions get."""

    def __init__(self) -> None:
        self.played: list[Played] = []

    async def score(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> None:  # noqa: ARG002
        self.played += [rollout.instance for rollout in rollouts]
