"""Local data sets as the reading child sees them: splits, formats, sizes, and what is cut or refused."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hermes_rl_mcp.contracts.datasets import DatasetInfo, ViewRequest
from hermes_rl_mcp.dataset_viewer import readers
from hermes_rl_mcp.dataset_viewer.failing import ViewError
from hermes_rl_mcp.dataset_viewer.local import view
from hermes_rl_mcp.dataset_viewer.shaping import type_of
from hermes_rl_mcp.dataset_viewer.splits import splits_of

ROWS = [{"question": f"What is {n} + 1?", "answer": n + 1, "weight": n / 2} for n in range(7)]


def seen(path: Path, **changes: Any) -> DatasetInfo:
    request = {"id": "x", "path": str(path), "root": str(path.parent), "limit": 3, "budget_chars": 10_000, **changes}
    return view(ViewRequest.model_validate(request))


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path: Path, rows: list[Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: list[Any]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_stream(path: Path, rows: list[Any]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def write_columns(path: Path, rows: list[Any]) -> None:
    path.write_text(json.dumps({name: [row[name] for row in rows] for name in rows[0]}))


WRITERS: dict[str, Callable[[Path, list[Any]], None]] = {
    "a.jsonl": write_jsonl,
    "a.json": lambda path, rows: path.write_text(json.dumps(rows)) and None,
    "data.json": lambda path, rows: path.write_text(json.dumps({"version": 1, "data": rows})) and None,
    "columns.json": write_columns,
    "lines.json": write_jsonl,
    "a.csv": write_csv,
    "a.tsv": write_csv,
    "a.parquet": write_parquet,
    "a.arrow": write_stream,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows_columns_and_count(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path, ROWS)
    found = seen(path)
    assert found.rows == ROWS[:3]
    assert [(split.name, split.rows, split.rows_estimated) for split in found.splits] == [("train", 7, False)]
    assert found.splits[0].size_bytes == path.stat().st_size
    assert [column.name for column in found.columns] == ["question", "answer", "weight"]
    kinds = [column.type for column in found.columns]
    assert kinds == (["string", "int64", "double"] if name[2:] in ("parquet", "arrow") else ["string", "int", "float"])
    assert (found.truncated, found.offset, found.next_offset) == (False, 0, 3)
    last = seen(path, offset=5)
    assert (last.rows, last.next_offset, seen(path, offset=50).rows) == (ROWS[5:], None, [])
    assert (found.columns[0].max_chars, found.columns[1].max_chars) == (len("What is 0 + 1?"), None)


def test_files_are_sorted_into_splits_by_the_words_in_their_names(tmp_path: Path) -> None:
    names = [
        *(
            "train-00001-of-00002.jsonl",
            "data/train-00000-of-00002.jsonl",
            "dev.csv",
            "my_test_set.json",
            "attest.jsonl",
        ),
        *("test/part.parquet", ".hidden.jsonl", "README.md", "dataset_info.json", "__pycache__/train.jsonl"),
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    found = {split: [str(file.relative_to(tmp_path)) for file in files] for split, files in splits_of(tmp_path).items()}
    assert found == {
        "train": ["data/train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"],
        "validation": ["dev.csv"],
        "test": ["my_test_set.json", "test/part.parquet"],
        "attest": ["attest.jsonl"],
    }


def test_the_split_that_is_named_is_shown_and_its_files_count_together(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "test-0.jsonl", ROWS[:2])
    write_jsonl(tmp_path / "test-1.jsonl", ROWS[2:4])
    assert seen(tmp_path, root=str(tmp_path)).split == "train"
    found = seen(tmp_path, root=str(tmp_path), split="test")
    assert (found.split, found.rows) == ("test", ROWS[:3])
    assert [(split.name, split.rows) for split in found.splits] == [("train", 7), ("test", 4)]
    assert seen(tmp_path, root=str(tmp_path), split="test", offset=1).rows == ROWS[1:4]
    assert seen(tmp_path, root=str(tmp_path), split="test", offset=3).rows == ROWS[3:4]
    with pytest.raises(ViewError) as refused:
        seen(tmp_path, root=str(tmp_path), split="validation")
    assert refused.value.failure.available == ["train", "test"]


def test_long_rows_are_cut_and_say_so_and_the_first_one_always_fits(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    write_jsonl(path, [{"text": "x" * 9_000, "items": list(range(500)), "deep": [[[[[[[[1]]]]]]]]}] * 5)
    found = seen(path, limit=5, budget_chars=4_000)
    assert found.truncated
    assert 1 <= len(found.rows) < 5
    assert len(found.model_dump_json()) < 4_000
    assert str(found.rows[0]["text"]).endswith("more characters]")
    assert found.columns[0].max_chars == 9_000
    assert len(json.dumps(seen(path, budget_chars=600).rows[0])) < 2_000
    wide = tmp_path / "wide.jsonl"
    write_jsonl(wide, [{f"column {n}" * 9: n for n in range(400)}] * 5)
    found = seen(wide, limit=5, budget_chars=14_000)
    assert len(found.model_dump_json()) < 14_000
    assert found.columns[-1].type.endswith("more columns]")


def test_hidden_characters_of_rows_and_names_come_as_escapes(tmp_path: Path) -> None:
    path = tmp_path / "sly.jsonl"
    write_jsonl(path, [{"na\u202eme": "go\x1b[2J\u200bod", "n": float("nan"), "huge": 10**40}])
    [row] = seen(path).rows
    assert row == {"na\\u202eme": "go\\x1b[2J\\u200bod", "n": None, "huge": "1.000000e+40"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("bad.jsonl", '{"a": 1}\n{"a": \n', "bad.jsonl, line 2, is not jsonl"),
        ("deep.jsonl", "[" * 100_000, "line 1"),
        ("bad.json", "{", "bad.json is not json"),
        ("bad.parquet", "PAR1 not really", "bad.parquet is not parquet"),
        ("bad.arrow", "ARROW1 not really", "bad.arrow is not arrow"),
        ("bytes.jsonl", "\udcff\n", "line 1"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named_with_the_place(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(ViewError, match=said):
        seen(tmp_path / name)


def test_rows_of_a_large_file_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_COUNT_BYTES", 1_000)
    write_jsonl(tmp_path / "a.jsonl", ROWS * 100)
    write_csv(tmp_path / "a.csv", ROWS * 100)
    for name in ("a.jsonl", "a.csv"):
        [split] = seen(tmp_path / name).splits
        assert split.rows_estimated
        assert 690 <= (split.rows or 0) <= 710


def test_an_empty_file_has_no_rows_and_a_folder_without_data_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    found = seen(tmp_path / "a.jsonl")
    assert (found.rows, found.columns, found.splits[0].rows) == ([], [], 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ViewError, match="no data files"):
        seen(tmp_path / "empty")


def test_sec_11_sec_12_a_link_that_leads_out_is_not_opened_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    write_jsonl(tmp_path / "secret.jsonl", ROWS)
    (inside / "train.jsonl").symlink_to(tmp_path / "secret.jsonl")
    os.mkfifo(inside / "test.jsonl")
    with pytest.raises(ViewError, match="leads out"):
        seen(inside, root=str(inside))
    assert list(splits_of(inside)) == ["train"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2.5, None], "float | null"),
        ([True, 1], "bool | int"),
        ([["a"], [], [1]], "list[string | int]"),
        ([{"role": "user", "n": 1}, {"role": None}], "{role: string | null, n: int | null}"),
        ([b""], "bytes"),
        ([], "unknown"),
    ],
    ids=["numbers", "bool", "list", "object", "bytes", "nothing"],
)
def test_a_type_says_all_that_its_values_are(values: list[Any], expected: str) -> None:
    assert type_of(values) == expected
