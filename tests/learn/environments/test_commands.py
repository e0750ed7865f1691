"""Agents that are programs: their commands, and the tokens that are trained."""

from __future__ import annotations

import pytest

from tests.support.command_agents import VERIFY, WRITES, played
from tests.support.episodes import check_tokens, ok
from tunesmith.config.sandboxes import Bubblewrap
from tunesmith.config.schema import EnvironmentSection
from tunesmith.learn.usercode.jail import missing
from tunesmith.types import Rollout


@pytest.mark.skipif(bool(missing()), reason=missing() or "it can")
def test_tokens_trained_are_those_sampled_and_verify_gives_the_reward() -> None:
    code = WRITES + "said += [reply, {'role': 'user', 'content': 'Again.'}]\nask(*said)\n"
    rollouts, engine = played(code, verify=VERIFY, group_size=2)
    for rollout in rollouts:
        assert ok(rollout).reward == 1.0
        assert rollout.metrics["exit_code"] == 0.0 and rollout.metrics["turns"] == 2.0
        mine = [e for e in engine.exchanges if e[0] == rollout.token_ids[: rollout.turns[0].start]]
        assert mine
    both = Rollout(rollouts[0].task, [record for r in rollouts for record in r.records])
    check_tokens(both, engine)


def test_commands_are_words_that_no_shell_reads() -> None:
    read = EnvironmentSection(command="mini -t {prompt} --model 'a b'")  # type: ignore[arg-type]
    assert read.command == ("mini", "-t", "{prompt}", "--model", "a b")
    for wrong in ("", [], "a && b", "a | b", "sh -c 'agent {prompt}'", "a 'b", [1]):
        with pytest.raises(ValueError, match="command"):
            EnvironmentSection(command=wrong)  # type: ignore[arg-type]
    assert EnvironmentSection(sandbox=Bubblewrap(env=("A",))).sandbox == Bubblewrap(env=("A",))
