"""Rows of question and answer out of a file, a folder or the Hub, and which of them are kept for evaluation.

Invariant: which rows are held out depends on their own text alone, so runs, seeds and machines agree on it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hermes_rl_mcp.errors import MissingExtraError, PreflightError

Row = dict[str, Any]

HELD_OUT_ONE_IN = 10
_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w.-]+)?")


def load_rows(source: str, split: str = "train", columns: Sequence[str] = ()) -> list[Row]:
    """All rows of one split. ``source``: a file (.jsonl, .json, .csv, .tsv, .parquet), a folder with a file for each
    split (``train.jsonl``, ``train-00000-of-00002.parquet``), or a Hub id (``owner/name``, ``owner/name/config``).

    A file is one split, whatever ``split`` says. Each row must have ``columns``. Raises PreflightError that names file
    and line, or MissingExtraError.
    """
    path = Path(source).expanduser()
    if path.is_file():
        rows = _file(path)
    elif path.is_dir():
        rows = [row for file in _of_split(path, split) for row in _file(file)]
    elif path.is_absolute() or path.suffix in _SUFFIXES or not _HUB_ID.fullmatch(source):
        raise PreflightError(f"There is no file or folder {path.absolute()}.", hint="Correct the path of the data.")
    else:
        rows = _hub(source, split)
    for number, row in enumerate(rows, 1):
        missing = [name for name in columns if row.get(name) is None]
        if missing:
            has = ", ".join(row) or "nothing"
            raise PreflightError(
                f"Row {number} of {source} ({split}) has no {' and no '.join(missing)}; it has {has}.",
                hint="Name the columns that are there, or leave the row out.",
            )
    if not rows:
        raise PreflightError(f"{source} has no rows ({split}).", hint="Correct the path or the split.")
    return rows


def held_out_apart(
    rows: Sequence[Row], key: str | Callable[[Row], str], one_in: int = HELD_OUT_ONE_IN
) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and about one in ``one_in`` that are kept for evaluation. ``key``: the column (or what makes
    the text) that is asked; equal texts land on the same side. Both sides keep the order of ``rows``."""
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        text = str(row[key] if isinstance(key, str) else key(row))
        digest = hashlib.sha256(text.encode()).digest()
        sides[int.from_bytes(digest[:8], "big") % one_in == 0].append(row)
    if len(rows) > 1 and not sides[1]:  # few rows: rather one than none
        return sides[0][:-1], sides[0][-1:]
    return sides


def _of_split(folder: Path, split: str) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    mine = [file for file in files if re.split(r"[-_.]", file.name)[0] == split or split in file.parts[:-1]]
    if mine:
        return mine
    if len(files) == 1:
        return files
    names = ", ".join(str(file.relative_to(folder)) for file in files[:10]) or "nothing that can be read"
    raise PreflightError(f"{folder} has no file for the split '{split}'; it has {names}.", hint="Name another split.")


def _file(path: Path) -> list[Row]:
    readers: dict[str, Callable[[Path], list[Row]]] = {
        ".jsonl": _json_lines,
        ".json": _json,
        ".csv": _table,
        ".tsv": _table,
        ".parquet": _parquet,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        raise PreflightError(f"{path} is none of {', '.join(_SUFFIXES)}.", hint="Save it as JSON lines.")
    try:
        return reader(path)
    except OSError as error:
        raise PreflightError(f"{path} cannot be read: {error.strerror or error}.", hint="Correct the path.") from error
    except UnicodeDecodeError as error:
        raise PreflightError(f"{path} is not UTF-8: {error}.", hint="Save it as UTF-8.") from error


def _json_lines(path: Path) -> list[Row]:
    return [_row(value, f"{path}:{number}") for number, value in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise PreflightError(f"{path}:{number} is not JSON: {error}.", hint="One object per line.") from error


def _json(path: Path) -> list[Row]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise PreflightError(f"{path}:{error.lineno} is not JSON: {error.msg}.", hint="Correct that line.") from error
    if isinstance(document, dict):  # {"data": [...]}
        document = next((value for value in document.values() if isinstance(value, list)), document)
    if not isinstance(document, list):
        raise PreflightError(f"{path} holds no list of rows.", hint="Save it as a list of objects.")
    return [_row(value, f"{path}, row {number}") for number, value in enumerate(document, 1)]


def _table(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return [dict(row) for row in csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")]


def _parquet(path: Path) -> list[Row]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise MissingExtraError("Reading parquet", "train") from error
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise PreflightError(f"{path} is no parquet file: {error}.", hint="Fetch it again.") from error
    return rows


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise PreflightError(f"{where} is no object but {type(value).__name__}.", hint="A row maps columns to values.")
    return value


def _hub(source: str, split: str) -> list[Row]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtraError("Reading a data set of the Hub", "train") from error
    name, config = "/".join(source.split("/")[:2]), "/".join(source.split("/")[2:]) or None
    try:
        return [dict(row) for row in load_dataset(name, config, split=split)]
    except Exception as error:
        # The Hub's client raises a dozen unrelated classes; all mean the same to whoever started this.
        first_line = (str(error).strip() or "no message").splitlines()[0]
        raise PreflightError(
            f"{source} could not be loaded from the Hub: {type(error).__name__}: {first_line}",
            hint="Give a local file or folder, or make the Hub reachable.",
        ) from error
