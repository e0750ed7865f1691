"""The report reads a run's files as they are: growing, rotated, cut, damaged, of another
version."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from tests.support.hand_made_runs import HOSTILE, make_run, rollout
from tests.support.tiny_runs import write_lines
from tunesmith.cli.main import app
from tunesmith.errors import ConfigError
from tunesmith.records.doctor.record import read_record
from tunesmith.records.http_server import LIMITS, listening
from tunesmith.records.report.metrics import MetricsFile, Table, curves, totals
from tunesmith.records.report.page import page
from tunesmith.records.report.rollouts import Query, RolloutIndex, sample
from tunesmith.records.report.run import embedded_rollouts, model, names, open_run
from tunesmith.records.report.server import Watch, make_app
from tunesmith.records.report.steps import step_timelines
from tunesmith.records.report.trace import read_trace
from tunesmith.records.wilson import wilson


def test_columns_are_filled_where_lines_lack_them() -> None:
    table = Table()
    for line in ({"step": 1, "a": 1.0}, {"step": 2, "b": 2.0}, {"step": 3, "a": 3.0, "b": 4.0}):
        table.add(line)
    assert table.rows == 3 and [math.isnan(v) for v in table.column("a")] == [False, True, False]
    assert list(table.column("b")[1:]) == [2.0, 4.0] and all(
        map(math.isnan, table.column("no such"))
    )


def test_a_long_curve_has_few_points_with_mean_and_extremes() -> None:
    table = Table()
    for step in range(1, 10_001):
        table.add(
            {"step": step, "time": float(step), "odd": step % 2, "rare": 5.0}
            if step == 7
            else {"step": step, "time": float(step), "odd": step % 2}
        )
    found = curves(table, most=100)
    odd = found["metrics"]["odd"]
    assert len(found["step"]) == 100 and found["step"][0] == 100 and found["step"][-1] == 10_000
    assert set(odd["mean"]) == {0.5} and set(odd["low"]) == {0} and set(odd["high"]) == {1}
    assert found["metrics"]["rare"]["mean"][:2] == [5.0, None]
    short = curves(table, most=20_000)["metrics"]["odd"]
    assert short["mean"][:3] == [1, 0, 1] and "low" not in short
    assert curves(Table())["step"] == []


def test_metrics_are_read_on_and_anew_where_the_file_was_cut_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert not file.read_on()
    path.write_bytes(b'{"step": 1, "time": 1.0, "x": 1}\n{"step": 2, "ti')
    assert file.read_on() and file.steps.rows == 1 and not file.damaged, (
        "a line that is being written is no damage"
    )
    assert not file.read_on()
    with path.open("ab") as out:
        out.write(
            b'me": 2.0, "x": 2}\nnot json\n[1]\n\xff\xfe\n{"x": 1}\n'
            b'{"step": 3, "x": null, "y": 1e999}\n'
        )
    assert file.read_on()
    assert list(file.steps.column("step")) == [1, 2, 3] and file.damaged == [3, 4, 5, 6]
    write_lines(
        path,
        [
            {"step": 1, "time": 1.0, "x": 1},
            {"step": 2, "time": 9.0, "x": 7},
            *({"step": n} for n in range(3, 99)),
        ],
    )
    assert file.read_on() and list(file.steps.column("x")[:2]) == [1, 7] and file.steps.rows == 98
    path.unlink()
    assert file.read_on() and file.steps.rows == 0


def test_wilson_and_totals() -> None:
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    low, high = wilson(0.0, 10)
    assert low == pytest.approx(0, abs=1e-12) and high == pytest.approx(0.2775, abs=1e-4)
    table = Table()
    table.add({"step": 1, "seconds/train": 1.0, "seconds/rollout": 5.0, "seconds": 6.0})
    table.add({"step": 2, "seconds/train": 2.0, "seconds": 2.0})
    assert list(totals(table, "seconds/").items()) == [("rollout", 5.0), ("train", 3.0)]


def test_the_index_knows_groups_by_step_kind_and_number(tmp_path: Path) -> None:
    failed = rollout(2, 1, None, status="reward_failed", error="it raised")
    lines = [
        rollout(1, 0, 0.0),
        rollout(1, 0, 1.0),
        rollout(1, 0, 0.5),
        rollout(1, 1),
        rollout(1, 1, kind="eval"),
        failed,
    ]
    write_lines(tmp_path / "rollouts.jsonl", [*lines, {"no": "rollout"}])
    index = RolloutIndex(tmp_path / "rollouts.jsonl")
    index.read_on()
    groups = [
        (g.step, g.kind, g.number, g.rollouts, g.failed, g.reward, g.low, g.high)
        for g in index.groups()
    ]
    assert groups == [
        (1, "train", 0, 3, 0, 0.5, 0.0, 1.0), (1, "train", 1, 1, 0, 1.0, 1.0, 1.0),
        (1, "eval", 1, 1, 0, 1.0, 1.0, 1.0), (2, "train", 1, 1, 1, None, None, None),
    ]  # fmt: skip
    assert index.damaged == 1 and [line["reward"] for line in index.lines(0)] == [0.0, 1.0, 0.5]
    assert index.lines(99) == []


@pytest.mark.parametrize(
    ("query", "steps"),
    [
        (Query(), [4, 3, 2, 1]),
        (Query(kind="eval"), [3]),
        (Query(first=2, last=3), [3, 2]),
        (Query(status="failed"), [4]),
        (Query(status="contrast"), [1]),
        (Query(status="equal"), [3, 2]),
        (Query(text="ÉCOLE"), [2]),
        (Query(text="it raised"), [4]),
        (Query(text="by_token"), []),
        (Query(text="42", kind="eval"), [3]),
    ],
)
def test_groups_are_found(tmp_path: Path, query: Query, steps: list[int]) -> None:
    lines = [
        rollout(1, reward=0.0),
        rollout(1, reward=1.0),
        rollout(2, completion="à l'école", by_token={"text": ["x"]}),
        rollout(3, kind="eval", columns={"answer": 42}),
        rollout(4, reward=None, status="timed_out", error="it raised"),
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    index = RolloutIndex(path)
    index.read_on()
    places, more = index.find(query, None, 10)
    assert [index.groups()[place].step for place in places] == steps and more is None


def test_what_is_found_comes_in_pages_that_go_on(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [rollout(step) for step in range(1, 8)])
    index = RolloutIndex(tmp_path / "rollouts.jsonl")
    index.read_on()
    seen = []
    start = None
    for _ in range(4):
        places, start = index.find(Query(), start, 2)
        seen += [index.groups()[place].step for place in places]
    assert seen == [7, 6, 5, 4, 3, 2, 1] and start is None


def test_positions_stay_while_the_log_grows_and_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    older = tmp_path / "rollouts-older.jsonl"
    index = RolloutIndex(path)
    for number in range(1, 8):  # each file holds two groups, and the third one's are dropped
        if number % 2 and number > 1:
            os.replace(path, older)
        with path.open("a") as file:
            file.write(json.dumps(rollout(number)) + "\n")
        index.read_on()
        kept = [group.step for group in index.groups()]
        assert kept == list(range(index.dropped + 1, number + 1)), "what is kept is in order"
        for place, step in enumerate(kept, index.dropped):
            assert [line["step"] for line in index.lines(place)] == [step]
    assert index.dropped == 4 and index.lines(0) == []
    path.write_text(
        json.dumps(rollout(7, completion="another, after a resumption, and longer")) + "\n"
    )
    index.read_on()
    found, _ = index.find(Query(), None, 1)
    assert [line["completion"][:7] for line in index.lines(found[0])] == ["another"]


def test_a_sample_is_bounded_and_has_of_each_kind(tmp_path: Path) -> None:
    lines = [rollout(step, completion="x" * 1000) for step in range(1, 301)]
    lines += [rollout(300, group, kind="eval") for group in range(50)]
    lines += [rollout(301, reward=None, status="timed_out", error="late")]
    write_lines(tmp_path / "rollouts.jsonl", lines)
    index = RolloutIndex(tmp_path / "rollouts.jsonl")
    index.read_on()
    places = sample(index, 60_000)
    chosen = [index.groups()[place] for place in places]
    assert sum(group.stop - group.start for group in chosen) <= 60_000 and places == sorted(
        set(places)
    )
    assert {group.kind for group in chosen} == {"train", "eval"} and any(
        group.failed for group in chosen
    )
    steps = [group.step for group in chosen if group.kind == "train" and not group.failed]
    assert steps[0] == 1 and steps[-1] == 300 and len(steps) > 10
    assert sample(index, 10**9) == list(range(len(index.groups())))


def test_all_of_a_run_is_in_its_model(tmp_path: Path) -> None:
    run = model([open_run(make_run(tmp_path / "a"))])["runs"][0]
    assert (run["name"], run["state"], run["steps"], run["total_steps"]) == ("a", "done", 5, 5)
    assert (
        run["curves"]["metrics"]["reward"]["mean"] == [0.1, 0.2, 0.3, 0.4, 0.5]
        and "loss" not in run["curves"]["metrics"]
    )
    assert run["seconds"] == {"rollout": 10.0, "train": 5.0}
    accuracy = run["evaluations"]["metrics"]["eval/accuracy"]
    assert accuracy["mean"] == [0.25, 0.5] and accuracy["low"][1] == pytest.approx(0.4038, abs=1e-4)
    assert (
        run["settings"]["train.lr"]["reason"] == "why"
        and run["notes"] == ["a note"]
        and not run["problems"]
    )
    assert run["rollouts"]["groups"] == 4
    assert run["plan"]["memory"][0]["peak"] == 30 and run["plan"]["seconds"] == {"step": 2.5}


def test_examples_are_the_first_and_the_last_answers(tmp_path: Path) -> None:
    lines = [rollout(s, g, kind="eval", completion=f"{s}:{g}") for s in (0, 3, 6) for g in (0, 1)]
    run = model([open_run(make_run(tmp_path / "a", lines=lines))])["runs"][0]
    assert [(e["before"]["completion"], e["after"]["completion"]) for e in run["examples"]] == [
        ("0:0", "6:0"),
        ("0:1", "6:1"),
    ]


def test_runs_are_named_by_what_tells_them_apart() -> None:
    assert names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert names([Path("/x/a/rl"), Path("/x/b/rl")]) == ["a/rl", "b/rl"]
    assert names([Path("/x/a"), Path("/x/a")]) == ["a", "a"]


def test_damage_and_other_versions_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (run / "resolved.json").write_text('{"settings": ["of another version"]}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write("torn\n")
    (run / "rollouts.jsonl").write_text(
        "torn\n" + json.dumps({"step": 1, "text": "of another version"}) + "\n"
    )
    (run / "plan.json").write_text("{")
    (run / "trace").mkdir()
    (run / "trace/step-000002.json").write_text('{"traceEvents": [')
    made = model([open_run(run)])["runs"][0]
    assert len(made["problems"]) == 3 and made["settings"] == {} and made["plan"] is None
    assert all(trace["metrics"] for trace in made["traces"])
    assert embedded_rollouts(open_run(run), 10**6)[0]["lines"] == [
        {"step": 1, "text": "of another version"}
    ]


def test_a_run_without_a_step_is_shown_and_no_run_is_refused(tmp_path: Path) -> None:
    begun = tmp_path / "runs/begun"
    begun.mkdir(parents=True)
    (begun / "resolved.json").write_text('{"settings": {}}')
    made = model([open_run(begun)])["runs"][0]
    assert (
        made["steps"] == 0 and made["no_findings"] and "no step is complete yet" in made["problems"]
    )
    for path in (tmp_path, tmp_path / "runs", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            open_run(path)
    with pytest.raises(ConfigError, match="begun"):
        open_run(tmp_path / "runs")


def test_a_run_is_judged_again_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on = True

    def goes_on(_: Path) -> bool:
        return going_on

    for module in ("doctor.record", "report.run"):
        monkeypatch.setattr(f"tunesmith.records.{module}.is_running", goes_on)
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "time": 1.0, "loss": 2.0}])
    settings = {"train.steps": {"value": 9, "source": "said"}}
    (tmp_path / "resolved.json").write_text(json.dumps({"settings": settings}))
    run = open_run(tmp_path)
    assert run.findings() == ([], None)
    going_on = False
    assert [finding["key"] for finding in run.findings()[0]] == ["stopped_early"]


def test_traces_have_rows_with_lanes(tmp_path: Path) -> None:
    def event(phase: str, name: str, pid: int, **more: Any) -> dict[str, Any]:
        return {"ph": phase, "name": name, "pid": pid, "tid": pid, **more}

    events = [
        event("M", "process_name", 1, args={"name": "trainer"}),
        event("M", "process_name", 2, args={"name": "engine 0"}),
        event("X", "train", 1, ts=2e6, dur=1e6, args={}),
        event("X", "wait", 1, ts=0, dur=2e6, args={"waits for": "rollouts"}),
        event("X", "generate", 2, ts=0, dur=2e6, args={"tokens": 5}),
        event("C", "queue", 0, ts=1, args={"value": 1}),
    ]
    (tmp_path / "step-000003.json").write_text(
        json.dumps({"traceEvents": events, "otherData": {"step": 3}})
    )
    assert read_trace(tmp_path / "step-000003.json") == {
        "step": 3,
        "left_out": 0,
        "rows": [
            {
                "lane": "trainer",
                "spans": [["wait", 0.0, 2.0, "rollouts"], ["train", 2.0, 1.0, None]],
            },
            {"lane": "engine 0", "spans": [["generate", 0.0, 2.0, None]]},
        ],
    }


def test_the_page_holds_any_text_as_data_and_nothing_from_elsewhere() -> None:
    document = page(
        {"live": False, "model": {"runs": [{"name": HOSTILE}]}, "rollouts": []}
    ).decode()
    assert document.count("</script>") == 2, "the data ends no script"
    held = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', document, re.DOTALL
    )
    assert held and json.loads(held[1])["model"]["runs"][0]["name"] == HOSTILE
    assert "connect-src" not in document and "unsafe" not in document
    assert not re.findall(r"https?://|src=(?!x)|url\(", document.replace(held[0], ""))


@asynccontextmanager
async def watching(*paths: Path) -> AsyncGenerator[Callable[..., Awaitable[tuple[int, Any]]]]:
    """Asks a server for paths; None instead of a body that is no JSON."""
    app_of_runs = make_app(Watch([open_run(path) for path in paths], "secret"))
    serving = listening(app_of_runs, "127.0.0.1", 0, limits=LIMITS, shutdown=1)
    async with serving as port, aiohttp.ClientSession() as session:

        async def ask(path: str, token: str = "secret") -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as answer:
                return (
                    answer.status,
                    await answer.json() if answer.content_type == "application/json" else None,
                )

        yield ask


async def test_the_server_answers_with_the_token_only(tmp_path: Path) -> None:
    async with watching(make_run(tmp_path / "a")) as ask:
        for path in ("/", "/?token=other", "/?token=s%C3%A9"):
            assert (await ask(path))[0] == 401
        for path in ("/api/model", "/api/groups?run=0", "/api/lines?run=0&place=0", "/nowhere"):
            assert (await ask(path, ""))[0] == (await ask(path, "other"))[0] == 401
        assert (await ask("/?token=secret"))[0] == 200
        for path in (
            "groups",
            "groups?run=1",
            "groups?run=-1",
            "groups?run=0&first=x",
            "lines?run=0",
            "lines?run=0&place=x",
        ):
            status, answer = await ask(f"/api/{path}")
            assert status == 400 and answer["error"], path
        assert (await ask("/nowhere"))[0] == 404


async def test_the_server_reads_on_while_a_run_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    async with watching(run) as ask:
        _, first = await ask("/api/model")
        assert first["runs"][0]["steps"] == 5 and first["version"] == 1
        assert (await ask("/api/model?seen=1"))[0] == 204
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "time": 300.0, "reward": 9.0}\n')
        _, second = await ask("/api/model?seen=1")
        assert (
            second["version"] == 2
            and second["runs"][0]["curves"]["metrics"]["reward"]["mean"][-1] == 9.0
        )
        _, groups = await ask("/api/groups?run=0&kind=train&first=2")
        assert [(g["step"], g["number"]) for g in groups["groups"]] == [(2, 1), (2, 0)] and groups[
            "next"
        ] is None
        with (run / "rollouts.jsonl").open("a") as file:
            file.write(json.dumps(rollout(6, completion="new")) + "\n")
        _, groups = await ask("/api/groups?run=0&text=NEW")
        _, lines = await ask(f"/api/lines?run=0&place={groups['groups'][0]['place']}")
        assert [line["completion"] for line in lines["lines"]] == ["new"]
        assert (await ask("/api/lines?run=0&place=99"))[1] == {"lines": []}


def test_of_a_long_run_the_doctor_judges_the_newest_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "a", 2000)
    size = (run / "metrics.jsonl").stat().st_size
    monkeypatch.setattr("tunesmith.records.doctor.record.MOST_BYTES", size // 4)
    steps = [line["step"] for line in read_record(run).steps]
    assert steps == list(range(int(steps[0]), 2001)) and 400 < len(steps) < 600


def test_the_command_writes_one_private_file(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two")
    done = CliRunner().invoke(app, ["report", str(one), str(two)])
    assert done.exit_code == 0, done.output
    written = one / "report.html"
    assert written.stat().st_mode & 0o777 == 0o600 and "4 of 4" in done.output
    for arguments, exit_code in (
        ([str(tmp_path)], 2),
        ([str(one), "--rollouts", "much"], 2),
        ([str(one), "--out", "/nowhere/a.html"], 2),
    ):
        refused = CliRunner().invoke(app, ["report", *arguments])
        assert (
            refused.exit_code == exit_code
            and "error:" in refused.output
            and "Traceback" not in refused.output
        )


def test_steps_have_a_timeline_without_a_trace() -> None:
    steps = Table()
    usual = {"seconds": 5.0, "seconds/rollout": 3.0, "seconds/train": 1.5, "seconds/sync": 0.5}
    steps.add(
        {
            "step": 1.0,
            **usual,
            "seconds": 9.0,
            "seconds/eval": 4.0,
            "idle/engine": 0.4,
            "waiting/reward": 0.2,
        }
    )
    steps.add(
        {"step": 2.0, **usual, "idle/engine": 0.5, "idle/engine/0": 0.3, "idle/engine/1": 0.7}
    )
    slow, newest = step_timelines(steps, [])
    rows = {row["lane"]: row["spans"] for row in slow["rows"]}
    assert [(name, start, seconds) for name, start, seconds, _ in rows["trainer"]] == [
        ("sync", 0.0, 0.5), ("rollout", 0.5, 3.0), ("train", 3.5, 1.5),
    ]  # fmt: skip
    assert (
        rows["trainer"][1][3]
        and rows["trainer"][2][3] is None
        and rows["loop"] == [["eval", 5.0, 4.0, None]]
    )
    assert rows["engine"][0][1:3] == [0.5, 3.0] and rows["reward"][0][1:3] == [
        0.5,
        1.0,
    ]  # shares of 5 s
    assert {row["lane"] for row in newest["rows"]} == {"trainer", "engine 0", "engine 1"}
    assert [each["step"] for each in step_timelines(steps, [1])] == [2] and step_timelines(
        Table(), []
    ) == []
