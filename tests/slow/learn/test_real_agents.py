"""Agents of well-known packages train unmodified."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.data_tokenizers import byte_level, template
from tests.support.documents import SUPPORT
from tests.support.episodes import check_tokens, load, made_task, ok, play
from tests.support.tiny_runs import rl_settings, write_lines
from tunesmith.run.assembly import run_rl

SOURCE = SUPPORT / "real_agents.py"
PACKAGES = {
    "openai_agents": "agents",
    "smolagents": "smolagents",
    "pydantic_ai": "pydantic_ai",
    "pydantic_ai_messages": "pydantic_ai.models.anthropic",
    "openai_client": "openai",
    "anthropic_client": "anthropic",
    "langgraph": "langgraph.prebuilt",
    "llama_index": "llama_index.llms.openai_like",
    "langchain_anthropic": "langchain_anthropic",
    "instructor": "instructor",
    "mini_swe_agent": "minisweagent",
    "load_environment": "verifiers",
}


def scripted(text: str) -> str:
    """A policy that knows what to do: it calls the tool it is offered, and gives the answer once it
    has it."""
    last = text.rpartition("<|im_start|>user")[2]
    names = re.findall(r'"name": "(\w+)"', text)
    call = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call><|im_end|>'.format
    if ("tool_response" in last or "Observation" in last) and "bash" not in names:
        return call("final_answer", '{"answer": 5}') if "final_answer" in names else "5<|im_end|>"
    for typed in {"final_result", "Total"} & {*names}:
        return call(typed, '{"total": 5}')
    if "bash" in names:
        done = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        command = f"echo {done}" if "tool_response" in text else "echo 5 > answer.txt"
        return call("bash", json.dumps({"command": command}))
    if "Add." in text:
        once = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
        return f"Twice. {once}\n{once}<|im_end|>"
    return call("add", '{"a": 2, "b": 3}') if "add" in names else "5<|im_end|>"


@pytest.mark.parametrize("agent", PACKAGES)
def test_an_agent_gets_what_its_package_expects(agent: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[agent])
    tokenizer = byte_level(template("qwen2"))
    handler = signal.getsignal(signal.SIGINT)
    environments = load(tmp_path, SOURCE.read_text(), path=f"env.py:{agent}", max_turns=12)
    assert signal.getsignal(signal.SIGINT) is handler, "the run's own way to end stays"
    task = made_task(tokenizer, answer="5")
    (rollout,), engine = play(
        environments, tokenizer, [task], scripted, timeout=100.0, max_tokens=40_000
    )
    check_tokens(ok(rollout), engine)
    assert rollout.reward == (2.0 if agent == "openai_agents" else 1.0)
    if agent in ("anthropic_client", "langgraph", "mini_swe_agent"):
        assert [len(r.turns) for r in rollout.records if r.turns] == [2], "one growing conversation"
    if agent in ("smolagents", "pydantic_ai"):
        assert rollout.notes["not_enforced"]["tool_choice"] == "required"
    if agent == "load_environment":
        assert rollout.metrics["brief"] == 1.0, "the rubric's metrics"


@pytest.mark.parametrize(
    "agent",
    ["openai_agents", "pydantic_ai", "openai_client", "anthropic_client", "load_environment"],
)
def test_an_agent_trains_a_model(agent: str, tmp_path: Path) -> None:
    """A random model writes nonsense, which the packages must take as any other model's words."""
    pytest.importorskip(PACKAGES[agent])
    model = tiny.save_model(tmp_path / "model", max_position_embeddings=4096)
    tiny.tokenizer(template("qwen2")).save_pretrained(model)
    write_lines(tmp_path / "train.jsonl", [{"prompt": "Go.", "answer": "5"}])
    (tmp_path / "rewards.py").write_text("")
    changed: dict[str, Any] = {
        "data__chat": True,
        "reward__functions": [],
        "environment__path": f"{SOURCE}:{agent}",
        "environment__max_turns": 12,
        "train__steps": 1,
        "rollout__prompts_per_step": 1,
        "rollout__group_size": 2,
        "rollout__temperature": 0.9,
    }
    outcome = run_rl(None, rl_settings(tmp_path, model, **changed))
    (step,) = [
        json.loads(line) for line in (outcome.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert step["rollouts/failed"] == 0.0 and step["trained_tokens"] > 0
