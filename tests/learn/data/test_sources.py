"""Every kind of source is read; every bad line is refused by file, line and reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.config.schema import Source
from tunesmith.errors import ConfigError, DataError
from tunesmith.learn.data.sources import BadLine, SourceRow, read

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "né?\n", "answer": "中"}]


def lines(path: Path, content: str | bytes, **source: Any) -> list[SourceRow | BadLine]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read(Source(path=str(path), **source)))


def columns(found: list[SourceRow | BadLine]) -> list[dict[str, Any]]:
    assert all(isinstance(row, SourceRow) for row in found), found
    return [row.columns for row in found if isinstance(row, SourceRow)]


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_jsonl(tmp_path: Path) -> None:
    found = lines(tmp_path / "a.jsonl", jsonl(ROWS))
    assert columns(found) == ROWS
    assert [row.where for row in found] == [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/a.jsonl:2"]


def test_jsonl_with_byte_order_mark_crlf_and_no_final_newline(tmp_path: Path) -> None:
    assert columns(lines(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}')) == [
        {"a": 1},
        {"a": 2},
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1, 2]\n", "holds a list"),
        (b"3\n", "holds a number"),
        (b"null\n", "holds null"),
        (b'{"a": NaN}\n', "NaN is not a JSON value"),
        (b'{"a": -Infinity}\n', "-Infinity is not a JSON value"),
        (b'{"a": 1, "a": 2}\n', "the key 'a' stands twice"),
        (b'{"a": 1,}\n', "not JSON"),
        (b'{"a": "\xff"}\n', "not UTF-8 at byte 7"),
        (b'{"a": "cut o', "the last line is cut off: Unterminated string starting at column"),
        (b'{"a": ' + b"[" * 100_000 + b"\n", "not JSON"),
    ],
)
def test_a_bad_jsonl_line_is_named_and_the_others_are_kept(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    after = b"" if reason.startswith("the last") else b'{"a": 3}\n'
    first, bad, *rest = lines(tmp_path / "a.jsonl", b'{"a": 1}\n' + line + after)
    assert isinstance(first, SourceRow) and isinstance(bad, BadLine)
    assert bad.where == f"{tmp_path}/a.jsonl:2"
    assert reason in bad.reason
    assert len(rest) == (1 if after else 0)


def test_blank_lines_are_no_rows_and_count_in_the_places(tmp_path: Path) -> None:
    objects = lines(tmp_path / "a.jsonl", b'\xef\xbb\xbf\n{"a": "1"}\r\n \t\r\n\n{"a": "2"}\n\n  ')
    table = lines(tmp_path / "a.csv", "\na\n\n1\r\n\r\n2\n\n")
    for found, places in ((objects, "25"), (table, "46")):
        assert columns(found) == [{"a": "1"}, {"a": "2"}]
        assert [row.where.rsplit(":", 1)[1] for row in found] == list(places)
    wide = lines(tmp_path / "c.csv", "a,b\n,\n1,\n , \n,,,\n")
    assert columns(wide) == [{"a": "1", "b": ""}], "spreadsheets write commas for empty rows"
    assert columns(lines(tmp_path / "d.csv", 'a\n""\n')) == [{"a": ""}]
    with pytest.raises(DataError, match=r"b\.csv:3: the column 'a'"):
        lines(tmp_path / "b.csv", "\n\na,a\n")


@pytest.mark.parametrize("text", ['[{"a": 1}]\n', '[\n {"a": 1}\n]\n'])
def test_a_json_list_in_a_jsonl_file_is_said_to_be_one(tmp_path: Path, text: str) -> None:
    first = lines(tmp_path / "a.jsonl", text)[0]
    assert isinstance(first, BadLine) and first.reason.endswith("JSON list .json")


def test_json_list_and_data_object_number_their_items(tmp_path: Path) -> None:
    text = '[\n {"a": 1},\n\n {"a":\n  2}, 7]\n'
    found = lines(tmp_path / "a.json", text)
    assert [row.where for row in found] == [f"{tmp_path}/a.json, item {n}" for n in (1, 2, 3)]
    assert isinstance(found[2], BadLine)
    inside = '{"version": {"data": [0]},\n"data": ' + text + ', "more": 1}'
    found = lines(tmp_path / "b.json", inside)
    assert [row.where for row in found] == [f"{tmp_path}/b.json, item {n}" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"a": 1},\n {"a": ', "a.json:2: not JSON.*cut off"),
        ('[{"a": 1}\n {"a": 2}]', "a.json:2: not JSON: Expecting ','"),
        ('{"a": 1}\n{"a": 2}\n', "one JSON object per line; name the file .jsonl"),
        ('{"rows": [1]}', r"the keys rows; needs a list"),
        ('"text"', "holds a string; needs a list"),
        ("[]]", "a.json:1: not JSON: Extra data"),
        ('[{"a": NaN}]', "NaN is not"),
        (b"[\n\xff]", "a.json:2: not UTF-8"),
    ],
)
def test_a_damaged_json_file_is_refused(tmp_path: Path, text: str | bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        lines(tmp_path / "a.json", text)


def test_csv_with_quoted_line_breaks_keeps_line_numbers(tmp_path: Path) -> None:
    found = lines(tmp_path / "a.csv", 'question,answer\n"a\nb",1\nc,2\nd\n\n"e",3\n"f"x,4\ng,5\n')
    assert [row.where.rsplit(":", 1)[1] for row in found] == ["2", "4", "5", "7", "8", "9"]
    bad = [row for row in found if isinstance(row, BadLine)]
    assert [row.reason.split(":")[0] for row in bad] == [
        "1 fields where the header has 2",
        "not CSV",
    ]
    assert columns([row for row in found if isinstance(row, SourceRow)]) == [
        {"question": "a\nb", "answer": "1"},
        {"question": "c", "answer": "2"},
        {"question": "e", "answer": "3"},
        {"question": "g", "answer": "5"},
    ]


def test_csv_cut_off_inside_quotes(tmp_path: Path) -> None:
    found = lines(tmp_path / "a.csv", 'a,b\n1,2\n3,"4\n5\n')
    assert isinstance(found[1], BadLine) and found[1].where.endswith(":3")
    assert found[1].reason.endswith("(lines 3 to 4)"), "what was taken along is named"
    with pytest.raises(DataError, match=r"a\.csv:1: not CSV: "):
        lines(tmp_path / "a.csv", 'a,"b\n1,2\n')


def test_csv_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'a' stands twice"):
        lines(tmp_path / "a.csv", "a,b,a\n1,2,3\n")
    for mark in ";\t|":
        with pytest.raises(DataError, match=r"a\.csv:1: columns are separated by .*commas"):
            lines(tmp_path / "a.csv", f"a{mark}b\n1{mark}2\n")


def test_parquet_rows_and_a_damaged_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "a.parquet"))
    found = list(read(Source(path=str(tmp_path / "a.parquet"))))
    assert columns(found) == ROWS and found[1].where.endswith("a.parquet:2")
    with pytest.raises(DataError, match=r"cannot read .*b.parquet as Parquet"):
        lines(tmp_path / "b.parquet", b"PAR1 nonsense")


def test_what_a_message_or_a_tool_lacks_in_a_table_is_not_there(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def row(arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": "x"}
        return {
            "messages": [{**said, "tool_calls": [call]}, said],
            "tools": [{"function": schema}],
            "tests": [schema],
        }

    rows = [
        row({"a": 1}, {"x": {"type": "string"}}),
        row({"city": "Rome"}, {"y": {"type": "integer"}}),
    ]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    for path in ("a.parquet", "saved"):
        found = columns(list(read(Source(path=str(tmp_path / path)))))
        assert [(one["messages"], one["tools"]) for one in found] == [
            (one["messages"], one["tools"]) for one in rows
        ]
        assert found[0]["tests"] == [{"x": {"type": "string"}, "y": None}], (
            "other columns are passed on untouched"
        )


def test_saved_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(
        str(tmp_path / "both")
    )
    assert columns(list(read(Source(path=str(tmp_path / "one"))))) == ROWS
    assert columns(list(read(Source(path=str(tmp_path / "both"), split="test")))) == ROWS[1:]
    with pytest.raises(DataError, match=r"no split 'tests'\. Did you mean 'test'"):
        list(read(Source(path=str(tmp_path / "both"), split="tests")))
    with pytest.raises(ConfigError, match="has no split 'test'"):
        list(read(Source(path=str(tmp_path / "one"), split="test")))


def test_a_directory_reads_all_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(jsonl(ROWS[1:]))
    (tmp_path / "a.json").write_text(json.dumps(ROWS[:1]))
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.jsonl").write_text(jsonl(ROWS))
    assert columns(list(read(Source(path=str(tmp_path))))) == ROWS
    with pytest.raises(
        DataError, match="no file here is named after a split, so there is no 'test'"
    ):
        list(read(Source(path=str(tmp_path), split="test")))


def test_a_test_set_beside_the_training_set_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00000-of-00001.jsonl").write_text(jsonl(ROWS[:1]))
    (tmp_path / "data" / "test-00000-of-00001.jsonl").write_text(jsonl(ROWS[1:]))
    assert columns(list(read(Source(path=str(tmp_path))))) == ROWS[:1]
    assert columns(list(read(Source(path=str(tmp_path), split="test")))) == ROWS[1:]
    with pytest.raises(DataError, match=r"no file of the split 'validation'. Found: test, train"):
        list(read(Source(path=str(tmp_path), split="validation")))


def test_what_is_not_there_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(jsonl(ROWS))
    with pytest.raises(DataError, match=r"not found: .*trian\.jsonl\. Did you mean 'train\.jsonl'"):
        list(read(Source(path=str(tmp_path / "trian.jsonl"))))
    with pytest.raises(DataError, match="does not exist either"):
        list(read(Source(path=str(tmp_path / "no" / "train.jsonl"))))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no data file in it.* Valid: .*jsonl"):
        list(read(Source(path=str(tmp_path / "empty"))))
    with pytest.raises(DataError, match=r"unknown kind of file '.txt'. Valid: .*jsonl"):
        lines(tmp_path / "a.txt", "x")


def test_settings_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    for extra, word in (({"subset": "main"}, "subset"), ({"split": "test"}, "split")):
        with pytest.raises(ConfigError, match=word):
            lines(tmp_path / "a.jsonl", jsonl(ROWS), **extra)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=5),
    indent=st.sampled_from([None, 1]),
)
@pytest.mark.more
def test_json_and_jsonl_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], indent: int | None
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    assert columns(lines(folder / "a.jsonl", jsonl(rows))) == rows
    assert columns(lines(folder / "a.json", json.dumps(rows, indent=indent))) == rows
    assert (
        columns(lines(folder / "b.json", json.dumps({"n": 1, "data": rows}, indent=indent))) == rows
    )


def test_a_saved_data_set_whose_table_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes().replace(b"one", b"\xff\xfe\xfd"))
    with pytest.raises(DataError, match=r"cannot read .*saved"):
        list(read(Source(path=str(tmp_path / "saved"))))


def test_a_nul_character_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"prompt,answer\na,b\nc\0,d\n")
    with pytest.raises(DataError, match=r"a.csv:3: .*NUL"):
        list(read(Source(path=str(tmp_path / "a.csv"))))


def test_a_directory_whose_files_vanish_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanishing(*_: object) -> Any:
        yield tmp_path / "a.jsonl"
        raise FileNotFoundError(2, "No such file or directory", str(tmp_path / "gone"))

    monkeypatch.setattr(Path, "rglob", vanishing)
    with pytest.raises(DataError, match="gone") as raised:
        list(read(Source(path=str(tmp_path))))
    assert str(tmp_path) in str(raised.value)


@pytest.fixture
def data_set(tmp_path: Path) -> str:
    """A data set that is loaded as one of the hub is, from a directory."""
    (tmp_path / "hub").mkdir()
    for split, start in (("train", 0), ("test", 100)):
        (tmp_path / "hub" / f"{split}.jsonl").write_text(
            jsonl([{"problem": f"{n}?", "answer": str(n)} for n in range(start, start + 6)])
        )
    return f"hf:{tmp_path / 'hub'}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("split", "answers"),
    [
        ("train[:2]", "0 1"),
        ("train[4:]", "4 5"),
        ("test[1:3]", "101 102"),
        ("train[6:]", ""),
        ("train[4:2]", ""),
    ],
)
def test_a_data_set_of_the_hub_by_name_and_split(
    data_set: str, stream: bool, split: str, answers: str
) -> None:
    source = Source(path=f"{data_set}[{split}]", stream=stream, columns={"prompt": "problem"})
    found = columns(list(read(source)))
    assert found == [{"prompt": f"{n}?", "answer": n} for n in answers.split()]


def test_the_revision_and_the_stream_are_asked_for(
    data_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked: list[dict[str, Any]] = []
    whole = datasets.load_dataset

    def load(*names: Any, **options: Any) -> Any:
        asked.append(options)
        return whole(*names, **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = Source(path=f"{data_set}[train[:3]]", stream=True, revision="main")
    assert len(columns(list(read(source)))) == 3
    assert asked == [{"split": "train", "revision": "main", "streaming": True}]


def test_a_data_set_without_rows_says_what_failed(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(DataError, match=r"failed: \w"):
        list(read(Source(path=f"hf:{tmp_path}")))


def test_a_column_that_is_not_there_makes_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl([{"problem": "1?"}, {"prompt": "2?"}]))
    source = Source(path=str(tmp_path / "a.jsonl"), columns={"prompt": "problem"})
    first, bad = read(source)
    assert isinstance(first, SourceRow) and first.columns == {"prompt": "1?"}
    assert isinstance(bad, BadLine) and "problem" in bad.reason


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"stream": True}, "stream"),
        ({"revision": "main"}, "revision"),
        ({"options": {"seed": 1}}, "options"),
    ],
)
def test_keys_of_other_kinds_of_source_are_refused(
    tmp_path: Path, said: dict[str, Any], key: str
) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(ROWS))
    with pytest.raises(ConfigError, match=f"'{key}'"):
        list(read(Source(path=str(tmp_path / "a.jsonl"), **said)))


def test_a_stream_has_no_shares(data_set: str) -> None:
    with pytest.raises(ConfigError, match="stream"):
        list(read(Source(path=f"{data_set}[train[90%:]]", stream=True)))
