"""Random damage to data files of every format: each is read, or refused with the file and, in text,
the line."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.tiny import tokenizer
from tunesmith.config.schema import DataSection
from tunesmith.errors import TunesmithError
from tunesmith.learn.data.prepare import load_samples, load_tasks, peek

SEED = int(os.environ.get("TRIES_SEED", "0"))
COUNT = int(os.environ.get("TRIES_COUNT", "800"))
SLOW = 10.0
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    " ",
    "x",
    "\ud800",
    "\0",
    "a\0b",
    "é" * 300,
    "\u202e",
    [],
    [[]],
    {},
    {"a": 1},
    [None],
    ["x"],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "wizard", "content": "x"}],
    [{"role": "assistant", "content": "x"}],
    [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
    "[]",
    "{",
    [{"role": "user", "content": "x", "weight": 0.5}],
    [{"from": "human", "value": 3}],
    '[{"role": "user"}]',
]
TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
SHAPES: dict[str, list[dict[str, Any]]] = {
    "prompt": [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "id": i} for i in range(6)],
    "pair": [{"question": f"{i}?", "response": f"{i}."} for i in range(6)],
    "text": [{"text": f"a text {i}"} for i in range(6)],
    "messages": [{"messages": [*TURNS, *TURNS[: 2 * (i % 2)]], "tools": None} for i in range(6)],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
        for _ in range(6)
    ],
}
Write = Callable[[Path, list[dict[str, Any]]], Path]


def write_jsonl(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_json(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "data.json"
    path.write_text(json.dumps(rows, indent=1))
    return path


def write_csv(folder: Path, rows: list[dict[str, Any]]) -> Path:
    out = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(out, columns)
    writer.writeheader()
    writer.writerows(
        {k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()}
        for row in rows
    )
    path = folder / "data.csv"
    path.write_bytes(out.getvalue().encode("utf-8", "surrogatepass"))
    return path


def table(rows: list[dict[str, Any]]) -> Any:
    import pyarrow as pa

    return pa.Table.from_pylist(rows)


def write_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow.parquet as pq

    path = folder / "data.parquet"
    pq.write_table(table(rows), path)
    return path


def write_saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset(table(rows)).save_to_disk(folder / "saved")
    return folder / "saved"


def write_directory(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "dir").mkdir()
    write_jsonl(folder / "dir", rows[:3]).rename(folder / "dir/train-1.jsonl")
    write_jsonl(folder / "dir", rows[3:]).rename(folder / "dir/train-2.jsonl")
    return folder / "dir"


FORMATS: list[Write] = [
    write_jsonl,
    write_json,
    write_csv,
    write_parquet,
    write_saved,
    write_directory,
]


def damaged_rows(rows: list[dict[str, Any]], chance: random.Random) -> list[dict[str, Any]]:
    rows = json.loads(json.dumps(rows))
    for _ in range(chance.choice([0, 1, 1, 2])):
        row = chance.choice(rows) if rows else {}
        key = chance.choice([*row, "extra", "", "prompt", "messages", "tools", "text"])
        match chance.randrange(5):
            case 0 if row:
                row.pop(chance.choice(list(row)))
            case 1:
                rows = rows[: chance.choice([0, 1, 5])]
            case _:
                row[key] = chance.choice(ODD)
    return rows


def damage_bytes(path: Path, chance: random.Random) -> None:
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    file = chance.choice(files)
    raw = file.read_bytes()
    at = chance.randrange(len(raw) + 1)
    inserted = chance.choice(
        [b"\0", b"\xff\xfe", b'"', b"\n\n", b"{", b"]", b",", b"\r", b"[" * 3000, b"\xef\xbb\xbf"]
    )
    match chance.randrange(4):
        case 0:
            raw = raw[:at]
        case 1:
            raw = raw[:at] + inserted + raw[at:]
        case 2:
            raw = raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]
        case _:
            raw = chance.choice(
                [b"", raw.decode("latin-1").encode("utf-16"), os.urandom(200), raw * 2]
            )
    file.write_bytes(raw)


def test_random_data_files(tmp_path: Path) -> None:
    counts = Counter[str]()
    bad = list[str]()
    chance = random.Random(SEED)
    tok = tokenizer()
    for number in range(COUNT):
        folder = tmp_path / str(number)
        folder.mkdir()
        write = chance.choice(FORMATS)
        shape = chance.choice(list(SHAPES))
        goal = chance.choice(["rl", "sft"])
        rows = damaged_rows(SHAPES[shape], chance)
        try:
            path = write(folder, rows)
        except Exception:  # a table has one type for a column: no such file can be
            counts["cannot be written"] += 1
            continue
        if chance.random() < 0.4:
            damage_bytes(path, chance)
        skip = chance.random() < 0.3
        limit = chance.choice([None, 5, 200])
        key = "max_prompt_tokens" if goal == "rl" else "max_tokens"
        too_long = (
            chance.choice(["error", "skip", "truncate_left", "truncate_right"])
            if limit
            else "error"
        )
        section = DataSection.model_validate(
            {
                "train": str(path),
                "skip_bad": skip,
                "too_long": too_long,
                key: limit,
                "chat": chance.choice([None, None, False]),
            }
        )
        started = time.monotonic()
        what = f"case {number}: {write.__name__}, {shape}, {goal}, skip_bad={skip}, {too_long}"
        try:
            peek(section, section.train, goal)
            load = load_tasks if goal == "rl" else load_samples
            made = load(section, section.train, tok)
            assert len(made) > 0
            counts["read"] += 1
        except TunesmithError as error:
            counts["refused"] += 1
            if error.exit_code != 2 or (
                str(folder) not in str(error) and "data." not in str(error)
            ):
                bad.append(f"{what}: no place: {error}")
        except Exception as error:
            bad.append(f"{what}: {type(error).__name__}: {error}")
        seconds = time.monotonic() - started
        if seconds > SLOW:
            bad.append(f"{what}: {seconds:.0f} s")
    print(f"\n{COUNT} data files: {dict(counts)}, {len(bad)} wrong")
    assert not bad, "\n\n".join(bad[:20])
