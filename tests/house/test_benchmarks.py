"""The benchmarks: their arithmetic by hand, a run on the tiny workload, and the tables in their
README."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    compiled,
    gpu,
    ours,
    packing,
    peer_generate,
    peers,
    phase_times,
    presets,
    protocol,
    report,
    run,
    tuning,
)
from benchmarks.workload import QWEN3, WORKLOADS, build_model
from tests.support import forks
from tests.support.tiny import save_model
from tunesmith.costs import PeakRates


def record(
    number: int, system: str, dtype: str, runs: list[float], **facts: float
) -> dict[str, Any]:
    return {
        "round": number,
        "system": system,
        "part": "rollout",
        "workload": "A",
        "dtype": dtype,
        "seconds": {"rollout": runs},
        "tokens": 100,
        "peak_memory_mb": 500.0 + number,
        "facts": facts,
    }


ROUNDS = [
    record(0, "tunesmith", "float32", [1.0, 9.0, 2.0], limit_share=0.2),
    record(0, "peer", "float32", [8.0]),
    record(1, "tunesmith", "float32", [4.0], limit_share=0.1),
    record(1, "peer", "float32", [12.0]),
    record(2, "tunesmith", "float32", [1.0], limit_share=0.4),
    record(2, "peer", "float32", [11.0]),
]
RESULTS: dict[str, Any] = {
    "date": "2026-01-02",
    "rounds": 3,
    "machine": {
        "cpu": "C",
        "cores": 2,
        "threads": 2,
        "python": "3",
        "torch": "2",
        "transformers": "5",
    },
    "peers": {"trl": {"present": False, "version": None, "install": "pip install trl"}},
    "failed": [],
    **report.summarise(ROUNDS),
}


def test_ratios_are_taken_round_by_round() -> None:
    (ratio,) = RESULTS["ratios"]
    # 8 / median(1, 9, 2), 12 / 4, 11 / 1: the median of them is not the ratio of the medians, 11 /
    # 2.
    assert ratio["rounds"] == [4.0, 3.0, 11.0]
    assert ratio["median"] == 4.0
    assert (ratio["system"], ratio["dtype"], ratio["our_dtype"]) == ("peer", "float32", "float32")


def test_measures_are_medians_over_rounds() -> None:
    ours_, theirs = RESULTS["measures"]
    assert (ours_["seconds"], ours_["rounds"], ours_["peak_memory_mb"]) == (
        2.0,
        [2.0, 4.0, 1.0],
        501.0,
    )
    assert ours_["limit_share"] == 0.2
    assert theirs["seconds"] == 11.0
    assert "limit_share" not in theirs


def test_a_peer_is_compared_with_each_of_our_types() -> None:
    found = report.summarise([*ROUNDS, record(2, "tunesmith", "bfloat16", [0.5])])["ratios"]
    assert {r["our_dtype"]: r["rounds"] for r in found} == {
        "float32": [4.0, 3.0, 11.0],
        "bfloat16": [22.0],
    }


def test_a_round_in_which_a_measure_failed_is_left_out_of_its_ratios() -> None:
    (ratio,) = report.summarise(ROUNDS[:3] + ROUNDS[4:])["ratios"]
    assert ratio["rounds"] == [4.0, 11.0]


def test_tables() -> None:
    header, rows = report.speed_rows(RESULTS)
    assert header[-1] == "÷ ours float32"
    assert rows[0] == ["A", "rollout", "tunesmith", "float32", "3", "2.00", "501", ""]
    assert rows[1] == ["A", "rollout", "peer", "float32", "3", "11.00", "501", "4.0"]
    assert report.fact_rows(RESULTS)[1] == [
        ["A", "rollout", "tunesmith", "float32", "100", "50", "20.0%", "", ""]
    ]


def test_show_says_how_to_install_what_is_absent(capsys: pytest.CaptureFixture[str]) -> None:
    report.show(RESULTS)
    assert "trl is absent. To measure it: pip install trl" in capsys.readouterr().out


def test_tables_go_into_a_readme_and_come_out_again(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps(RESULTS))
    places = "".join(
        f"<!-- results: {name}.json -->\nold\n<!-- end of results -->\nafter\n"
        for name in ("a", "some")
    )
    text = report.put_into(f"before\n{places}", path)
    assert text.startswith("before\n") and text.endswith("\nafter\n") and text.count("old") == 1
    assert report.readme_results(text) == {"a.json": "old\n", "some.json": report.markdown(RESULTS)}
    assert report.put_into(text, path) == text


def test_the_readme_shows_the_results_file_it_names() -> None:
    for name, tables in report.readme_results(report.README.read_text(encoding="utf-8")).items():
        file = report.README.parent / "results" / name
        results = json.loads(file.read_text(encoding="utf-8"))
        assert tables == report.markdown(results), (
            f"run: python -m benchmarks.report {file} --readme"
        )


def test_workloads_are_what_their_description_says() -> None:
    lengths = WORKLOADS["A"].lengths()
    assert (len(lengths), sum(lengths), min(lengths) >= 8, max(lengths) <= 512) == (
        64,
        6153,
        True,
        True,
    )
    assert lengths == WORKLOADS["B"].lengths()
    assert [len(text.split()) for text in WORKLOADS["B"].texts()] == [512] * 8
    examples = WORKLOADS["A"].examples()
    assert [len(completion.split()) + 1 for _, completion in examples] == lengths
    assert (
        len({prompt for prompt, _ in examples}) == 64
        and WORKLOADS["A"].example_tokens == 64 * 64 + 6153
    )
    assert {w.group for w in WORKLOADS.values()} >= {4, 8, 16, 32}
    assert {w.model.vocabulary for w in WORKLOADS.values()} >= {4096, 32_000, 151_936}


def test_a_model_has_the_shape_of_its_workload(tmp_path: Path) -> None:
    shape = replace(QWEN3, vocabulary=40, layers=1)
    build_model(tmp_path, shape)
    config = json.loads((tmp_path / "config.json").read_text())
    keys = (
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
    )
    assert [config[key] for key in keys] == [40, 1024, 16, 8, 128, 3072]
    assert config["dtype"] == "bfloat16" and config["tie_word_embeddings"]
    words = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(words) == 40 and words[f"w{shape.vocabulary - 1}"] == 39
    # Of Qwen3-0.6B: 596,049,920 parameters.
    layer = 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072) + 2 * 1024 + 2 * 128
    assert QWEN3.vocabulary * QWEN3.hidden + QWEN3.layers * layer + QWEN3.hidden == 596_049_920


def test_forced_lengths_end_each_row_at_its_own() -> None:
    process = peer_generate.forced_lengths(3, [1, 2])
    first, second = (process(torch.zeros(4, n), torch.zeros(4, 5)) for n in (3, 4))
    eos = peer_generate.EOS_ID
    assert first.argmax(-1).tolist()[::2] == [eos, eos]
    assert first[1, eos] == -torch.inf and first[1, 0] == 0
    assert second.argmax(-1).tolist() == [eos] * 4


def test_a_peer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        peers.PEERS, "trl", peers.Peer(("no-such-package",), "NO_SUCH_VARIABLE", "pip install it")
    )
    assert peers.find("trl", None) == peers.Found(None, None)
    with pytest.raises(ValueError, match="trl is not installed in the environment of"):
        peers.find("trl", sys.executable)
    with pytest.raises(ValueError, match="does not run"):
        peers.find("trl", "/no/such/python")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "trk"], "'trk' is not one of auto, none, generate, trl, vllm"),
        (["--trl-python", "/no/such/python"], "the interpreter named for trl does not run"),
        (["--rounds", "0"], "at least 1"),
        (["slow"], "invalid choice: 'slow'"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run.main(arguments)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_rounds_are_added_to_those_of_the_same_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[str, ...]] = []

    def measured(
        system: peers.System, _: str, workload: str, part: str, dtype: str, *__: Path
    ) -> dict[str, Any]:
        taken.append((system.name, workload, part, dtype))
        made = record(0, system.name, dtype, [float(len(taken))])
        return {name: made[name] for name in made if name != "round"} | {
            "workload": workload,
            "part": part,
        }

    out = tmp_path / "out.json"
    peers_ = ["--peers", "none"]
    monkeypatch.setattr(run, "_measure", measured)
    monkeypatch.setattr(run, "build_model", lambda *_: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(run, "measure_limits", lambda *_: PeakRates(1.0, 1.0))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    again = ["quick", "--parts", "sft", "--workloads", "tiny", "--out", str(out), *peers_, "--add"]
    assert run.main(again) == run.main([*again, "--rounds", "2"]) == 0
    assert taken == [("tunesmith", "tiny", "sft", "bfloat16")] * 3
    results = json.loads(out.read_text())
    assert [each["round"] for each in results["records"]] == [0, 1, 2]
    assert results["measures"][0]["rounds"] == [1.0, 2.0, 3.0]
    out.write_text(json.dumps({**results, "machine": {**results["machine"], "units": "another"}}))
    with pytest.raises(SystemExit):
        run.main(again)


def test_a_measure_that_fails_says_why(tmp_path: Path) -> None:
    wanted = protocol.Measure("peer", "rollout", "tiny", "float32", "", str(tmp_path), 1)
    with pytest.raises(RuntimeError, match=r"exit code 1\n.*benchmarks.no_such_peer"):
        protocol.ask("benchmarks.no_such_peer", wanted, sys.executable)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_model(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "options", "figures", "tokens"),
    [
        ("train", {}, {"train"}, 2 * 8 + 15),
        ("train", {"system.share_prompts": False}, {"train"}, 4 * 8 + 15),
        ("step", {}, {"step", "step/rollout", "step/train"}, 15),
        ("sft", {}, {"sft"}, 4 * 8 + 15),
        ("generate", {}, {"generate", "generate/command"}, 15),
    ],
)
def test_our_measures(
    part: str, options: dict[str, Any], figures: set[str], tokens: int, model: Path, tmp_path: Path
) -> None:
    wanted = protocol.Measure(
        "tunesmith", part, "tiny", "float32", str(model), str(tmp_path), 1, options
    )
    result = ours.measure(wanted)
    assert result.seconds.keys() == figures
    assert all(len(runs) == 1 and runs[0] > 0 for runs in result.seconds.values())
    assert result.tokens == tokens
    assert part == "generate" or result.facts["limit_share"] > 0


@pytest.mark.slow
def test_a_run_without_peers_writes_the_documented_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork(
        command: list[str], *, timeout: float, cwd: Path, env: dict[str, str], **_: Any
    ) -> Any:
        return forks.run(command, timeout=timeout, cwd=cwd, env=env)

    monkeypatch.setattr(
        protocol, "subprocess", SimpleNamespace(run=fork, TimeoutExpired=subprocess.TimeoutExpired)
    )
    out = tmp_path / "results" / "tiny.json"
    wanted = {
        "workloads": "tiny",
        "parts": "rollout",
        "dtype": "float32",
        "peers": "none",
        "rounds": "1",
    }
    assert run.main([f"--{key}={value}" for key, value in {**wanted, "out": str(out)}.items()]) == 0
    results = json.loads(out.read_text())
    documented = {
        "date",
        "rounds",
        "machine",
        "workloads",
        "peers",
        "measures",
        "ratios",
        "records",
        "failed",
    }
    assert results.keys() == documented
    assert results["machine"].keys() >= {
        "cpu",
        "cores",
        "threads",
        "memory_gb",
        "python",
        "torch",
        "limits",
    }
    (measure,) = results["measures"]
    assert (
        measure["tokens"]
        == sum(WORKLOADS["tiny"].lengths())
        == results["workloads"]["tiny"]["completion_tokens"]
    )
    assert measure["mismatch_max"] <= 1e-3  # it samples with float16 weights
    assert measure["peak_memory_mb"] > 0
    assert results["failed"] == []
    assert "tunesmith" in capsys.readouterr().out


def test_the_page_of_presets_shows_its_results_file() -> None:
    page = presets.PAGE.read_text(encoding="utf-8")
    results = json.loads(presets.RESULTS.read_text(encoding="utf-8"))
    assert presets.with_results(page, results) == page, "run: python -m benchmarks.presets --page"
    assert (presets.PAGE.parent / presets.PICTURE).is_file()
    runs = {(run["preset"], run["seed"]) for run in results["runs"]}
    assert runs == {(name, seed) for name in presets.NAMES for seed in (0, 1, 2)}


def test_the_weight_planes_figures() -> None:
    """By hand: ratios round by round, over that round's plain copy; and the page shows what was
    measured."""
    from benchmarks import sync

    rows = [
        (0, sync.COPY, 2.0),
        (0, "gloo", 8.0),
        (1, sync.COPY, 1.0),
        (1, "gloo", 3.0),
        (2, sync.COPY, 1.0),
    ]
    taken = [
        {"round": n, "size": "12 MB", "plane": plane, "seconds": s}
        for n, plane, s in [*rows, (2, "gloo", 9.0)]
    ]
    plain, gloo = sync.summarise(taken)["measures"]
    assert (plain["seconds"], plain["over_copy"]) == (1.0, 1.0)
    assert (gloo["seconds"], gloo["over_copy"]) == (8.0, 4.0)
    ((name, table),) = report.readme_results(sync.PAGE.read_text(encoding="utf-8")).items()
    assert table == sync.table(json.loads(sync.RESULTS.with_name(name).read_text(encoding="utf-8")))


def test_speeds_beside_plain_vllm() -> None:
    """By hand: seconds of each arm, with and without new weights, and the median of the rounds'
    ratios."""
    from benchmarks import stepping

    rows = [
        (0, "plain", 4.0, 0),
        (0, "ours", 5.0, 0),
        (0, "plain", 6.0, 0),
        (0, "ours", 2.0, 0),
        (10, "plain", 6.0, 0),
        (10, "ours", 8.0, 2),
        (10, "plain", 9.0, 0),
        (10, "ours", 9.0, 1),
    ]
    plain, ours, plain_loading, loading = stepping.summarise(
        [
            {
                "loads": n,
                "arm": arm,
                "seconds": s,
                "loading": n / 10,
                "steps": s / 2,
                "cpu": s / 4,
                "wrong": wrong,
                "in_flight": n,
            }
            for n, arm, s, wrong in rows
        ]
    )
    assert (plain["ratio"], plain_loading["ratio"]) == (1.0, 1.0)
    assert (ours["least"], ours["median"], ours["ratio"], ours["wrong"]) == (2.0, 3.5, 1.9, 0)
    assert (loading["least"], loading["ratio"], loading["wrong"]) == (8.0, 0.875, 3)
    assert (loading["loading"], loading["steps"]) == (1.0, 4.25)
    assert (ours["in_flight"], loading["in_flight"]) == (0, 10)


@pytest.mark.slow
def test_weights_reach_another_process_and_are_timed(tmp_path: Path) -> None:
    import asyncio

    from benchmarks import sync

    records = asyncio.run(sync.run(["tiny"], 1, tmp_path))
    assert [r["plane"] for r in records] == [sync.COPY, "memory", "disk", "gloo", "ipc"]
    assert all(r["seconds"] > 0 for r in records) and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_bytes_of_new_weights_are_counted_where_they_are_taken(tmp_path: Path) -> None:
    """By hand for a tiny model: every plane takes the same, an adapter's two matrices alone."""
    import asyncio

    from benchmarks import sync_bytes
    from tunesmith.plan.cost.copies import adapter_numbers
    from tunesmith.plan.facts.model import read_model_facts

    path = save_model(tmp_path)
    facts = read_model_facts(path)
    assert facts is not None and facts.parameters is not None
    rows = asyncio.run(sync_bytes.measure(path))
    contents = ("full", "merged", "adapter", "adapter for vLLM")
    taken = {name: [row["bytes"] for row in rows if row["content"] == name] for name in contents}
    adapter = 4 * adapter_numbers(facts, sync_bytes.RANK)
    headers = 20_000  # of files, which also name and check each tensor
    for name in contents:
        bare = adapter if name.startswith("adapter") else 2 * facts.parameters
        assert len(taken[name]) == 4
        assert all(bare <= found < bare + headers for found in taken[name]), name
    recorded = json.loads(sync_bytes.RESULTS.read_text(encoding="utf-8"))
    assert sync_bytes.table(recorded) in sync_bytes.PAGE.read_text(encoding="utf-8")


def test_the_page_has_what_was_recorded_of_tuning() -> None:
    recorded = json.loads(tuning.RESULTS.read_text())
    _, _, rest = tuning.PAGE.read_text().partition(tuning.BEGIN)
    assert rest.partition(tuning.END)[0].strip() == tuning.table(recorded)
    for each in recorded["cases"].values():
        assert len(each["sweep"]) == each["points"] and each["trials"] <= each["points"] / 5


def test_the_page_has_the_recorded_ratios_of_compiled_layers() -> None:
    recorded = json.loads(compiled.RESULTS.read_text())
    _, _, rest = compiled.PAGE.read_text().partition(compiled.BEGIN)
    assert rest.partition(compiled.END)[0].strip() == compiled.table(recorded)
    for row in recorded["rows"]:
        assert all(len(found) == recorded["rounds"] for found in row["ratios"].values())


def test_the_page_has_the_recorded_seconds_of_phases() -> None:
    recorded = json.loads(phase_times.RESULTS.read_text())
    _, _, rest = phase_times.PAGE.read_text().partition(phase_times.BEGIN)
    assert rest.partition(phase_times.END)[0].strip() == phase_times.table(recorded)
    steps = [each for each in recorded["predictions"] if each["phase"] == "step"]
    assert len(steps) == recorded["checked"] and {each["dtype"] for each in steps} == {
        "float32",
        "bfloat16",
    }


@pytest.mark.slow
def test_balancing_saves_operations_where_ranks_wait_for_each_other() -> None:
    assert all(share == 0 for share in packing.saved(1).values())
    assert all(share > 0 for share in packing.saved(2).values())


def test_the_gpu_cases_repeat_what_is_published_and_fit_their_models() -> None:
    names = [case.name for case in gpu.CASES]
    assert len(set(names)) == len(names)
    for case in gpu.CASES:
        assert case.prompt + case.completion < 2 * gpu.LONG and case.steps > gpu.WARM_UP
        assert case.command == "rl" or case.prompt + case.completion + 1 == gpu.LONG
    assert any(case.published for case in gpu.CASES)


def test_operations_of_a_token_by_hand() -> None:
    shape = replace(
        QWEN3, vocabulary=10, layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, feed_forward=5
    )
    weights = 2 * (4 * 6 + 2 * 4 * 3 + 6 * 4 + 3 * 4 * 5) + 10 * 4
    attention = 2 * 3 * (4 * 7 * 6 / 2)
    assert gpu.operations_per_token(shape, 7, lora=False) == 6 * weights + attention
    assert gpu.operations_per_token(shape, 7, lora=True) == 4 * weights + attention


def test_a_gpu_case_gives_medians_after_the_warm_up_beside_plan_and_peer(tmp_path: Path) -> None:
    case = replace(gpu.CASES[0], published={"program": "other", "tokens_per_second": 50.0})
    rows = [
        {"step": n, "seconds": s, "tokens_per_second": 100.0} for n, s in enumerate([9, 9, 1, 3, 2])
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plan.json").write_text('{"memory": [], "seconds": {"step": 2.5}}')
    settings = {
        "system.device": {"value": "cuda", "source": "derived"},
        "train.lr": {"value": 1e-6, "source": "derived"},
        "system.engine": {"value": "local", "source": "default"},
    }
    (tmp_path / "resolved.json").write_text(json.dumps({"settings": settings}))
    row = {"name": case.name, **gpu.read(tmp_path, case)}
    assert row["steps"] == 3 and row["measured"] == {"seconds": 2, "tokens_per_second": 100.0}
    assert row["derived"] == {"system.device": "cuda"} and row["planned"]["seconds"] == {
        "step": 2.5
    }
    assert "(ratio 2.00)" in gpu.lines(row)[2]


@pytest.mark.slow
def test_gpu_cases_run_without_one(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--cases", "LoRA", "0.6B, derived", "--out", str(out)]) == 0
    cases = json.loads(out.read_text())["cases"]
    assert len(cases) == 2 and all("measured" in case for case in cases)
    assert gpu.main(["--tiny", "--minutes", "0", "--out", str(out)]) == 0
    assert all("left_out" in case for case in json.loads(out.read_text())["cases"])
