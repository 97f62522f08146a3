"""Rows out of files and folders, and which of them are held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hermes_rl_mcp.envs.data import held_out_apart, load_rows
from hermes_rl_mcp.errors import PreflightError

ROWS = [{"q": "one", "a": "1"}, {"q": "zwei, ü", "a": "2"}]


def write(folder: Path, name: str) -> Path:
    file = folder / name
    match file.suffix:
        case ".jsonl":
            text = "\n".join(json.dumps(row) for row in ROWS) + "\n\n"
        case ".json":
            text = json.dumps({"version": 1, "data": ROWS})
        case ".csv":
            text = 'q,a\none,1\n"zwei, ü",2\n'
        case _:
            text = "q\ta\none\t1\nzwei, ü\t2\n"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.tsv"])
def test_a_file_of_any_kind_gives_its_rows(tmp_path: Path, name: str) -> None:
    assert load_rows(str(write(tmp_path, name)), columns=("q", "a")) == ROWS


def test_parquet_keeps_types(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"q": ["one"], "n": [3]}), tmp_path / "x.parquet")
    assert load_rows(str(tmp_path / "x.parquet")) == [{"q": "one", "n": 3}]


def test_a_folder_has_a_file_for_each_split(tmp_path: Path) -> None:
    write(tmp_path, "train-00000-of-00002.jsonl")
    write(tmp_path, "train-00001-of-00002.jsonl")
    assert load_rows(str(tmp_path), "train") == ROWS * 2
    with pytest.raises(PreflightError, match=r"no file for the split 'test'; it has dev.jsonl, train-00000"):
        (tmp_path / "dev.jsonl").write_text("{}")
        load_rows(str(tmp_path), "test")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.jsonl", '{"q": "one", "a": "1"}\n{"q"\n', "x.jsonl:2 is not JSON"),
        ("x.jsonl", "[1]\n", "x.jsonl:1 is no object"),
        ("x.jsonl", '{"q": "one"}\n', "has no a; it has q"),
        ("x.jsonl", "", "has no rows"),
        ("x.json", "{\n,", "x.json:2 is not JSON"),
        ("x.json", "3", "holds no list"),
        ("x.txt", "3", "is none of .jsonl"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PreflightError, match=words.replace(".", r"\.")) as caught:
        load_rows(str(tmp_path / name), columns=("q", "a"))
    assert caught.value.hint


@pytest.mark.parametrize("source", ["/nowhere/x.jsonl", "nowhere.jsonl", "nowhere"])
def test_what_is_no_file_and_no_name_of_the_hub_is_not_asked_for_there(source: str) -> None:
    with pytest.raises(PreflightError, match="no file or folder"):
        load_rows(source)


def test_about_a_tenth_is_held_out_by_its_text_alone() -> None:
    rows = [{"q": f"question {number}"} for number in range(1000)]
    train, held_out = held_out_apart(rows, "q")
    assert 60 < len(held_out) < 140 and len(train) + len(held_out) == 1000
    shuffled = held_out_apart(rows[::-1], lambda row: row["q"])
    assert shuffled == (train[::-1], held_out[::-1])
    assert held_out_apart(rows[:2], "q")[1], "of few rows one is kept"
