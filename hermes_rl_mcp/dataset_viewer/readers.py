"""Some rows of one local file, and how many it has: jsonl, json, csv, parquet, arrow. Nothing in a file is executed.

Rows are counted exactly up to _COUNT_BYTES of a file; beyond that their number is worked out from its size.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from hermes_rl_mcp.dataset_viewer.failing import ViewError
from hermes_rl_mcp.dataset_viewer.splits import format_of
from hermes_rl_mcp.files import opened

_COUNT_BYTES = 256 * 2**20
_JSON_BYTES = 64 * 2**20
"""A JSON document is read whole."""
_LINE_BYTES = 16 * 2**20
_FIELD_CHARS = 16 * 2**20
_SAMPLE_BYTES = 4 * 2**20
_ARROW_ERRORS = (OSError, ValueError, KeyError, TypeError, NotImplementedError)
"""What pyarrow's own errors derive from."""
_BATCH = 128
"""Rows of a parquet file in memory at once."""


@dataclass(frozen=True)
class Part:
    """Some rows of a file."""

    rows: list[dict[str, Any]]
    declared: Mapping[str, str] = field(default_factory=dict)
    """Column to type, where the file says so."""


@dataclass(frozen=True)
class Count:
    rows: int | None
    estimated: bool = False


def part(path: Path, root: Path, skip: int, count: int) -> Part:
    """``count`` rows after the first ``skip``. Raises ViewError for a file that is not what its name says."""
    reader = {
        "jsonl": _jsonl_part,
        "json": _json_part,
        "csv": _csv_part,
        "parquet": _parquet_part,
        "arrow": _arrow_part,
    }
    with _open(path, root) as file:
        return reader[format_of(path) or "jsonl"](file, path, skip, count)


def rows_in(path: Path, root: Path) -> Count:
    """How many rows a file has. None if it cannot be told; what is wrong with it is said by ``part``."""
    counter = {"jsonl": _lines, "json": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows, "arrow": _arrow_rows}
    try:
        with _open(path, root) as file:
            return counter[format_of(path) or "jsonl"](file, path)
    except ViewError:
        return Count(None)


@contextmanager
def _open(path: Path, root: Path) -> Iterator[BinaryIO]:
    try:
        with opened(path, inside=root) as file:
            yield file
    except OSError as error:
        raise ViewError("invalid", f"{path.name} cannot be read: {error.strerror or error}.") from error


def _broken(path: Path, where: str, error: object) -> ViewError:
    said = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return ViewError("invalid", f"{path.name}{where} is not {format_of(path)}: {said}.", hint="Repair the file.")


def _loads(text: str | bytes) -> Any:
    return json.loads(text, parse_constant=lambda _: None)


def _as_row(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"value": value}


def _jsonl_part(file: BinaryIO, path: Path, skip: int, count: int) -> Part:
    return Part(list(islice(_jsonl(file, path), skip, skip + count)))


def _jsonl(file: BinaryIO, path: Path) -> Iterator[dict[str, Any]]:
    number = 0
    while line := file.readline(_LINE_BYTES + 1):
        number += 1
        if len(line) > _LINE_BYTES:
            raise _broken(path, f", line {number},", f"longer than {_LINE_BYTES // 2**20} MiB")
        if line.strip():
            try:
                yield _as_row(_loads(line.decode("utf-8-sig")))
            except (ValueError, RecursionError) as error:
                raise _broken(path, f", line {number},", error) from error


def _lines(file: BinaryIO, path: Path) -> Count:
    size = path.stat().st_size
    if size <= _COUNT_BYTES:
        return Count(sum(1 for line in file if line.strip()))
    begin = file.read(_SAMPLE_BYTES)
    lines = begin.count(b"\n")
    return Count(round(lines * size / len(begin)) if lines else None, estimated=True)


def _json_part(file: BinaryIO, path: Path, skip: int, count: int) -> Part:
    return Part([_as_row(row) for row in _json_document(file, path)[skip : skip + count]])


def _json_rows(file: BinaryIO, path: Path) -> Count:
    return Count(len(_json_document(file, path)))


def _json_document(file: BinaryIO, path: Path) -> list[Any]:
    """A list of rows, a list under the only key that has one (``data``), columns of equal length, or a single row."""
    text = file.read(_JSON_BYTES + 1)
    if len(text) > _JSON_BYTES:
        raise ViewError(
            "invalid",
            f"{path.name} is one JSON document of more than {_JSON_BYTES // 2**20} MiB.",
            hint="Write it as JSON lines (.jsonl), one row a line.",
        )
    try:
        found = _loads(text.decode("utf-8-sig"))
    except ValueError as error:
        lines = _json_lines(text)
        if lines is None:
            raise _broken(path, "", error) from error
        return lines
    except RecursionError as error:
        raise _broken(path, "", "nested too deeply") from error
    if isinstance(found, dict):
        lists = {name: value for name, value in found.items() if isinstance(value, list)}
        if len(lists) == len(found) > 1 and len({len(value) for value in lists.values()}) == 1:
            return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        if len(lists) == 1 and all(isinstance(row, dict) for row in next(iter(lists.values()))):
            return next(iter(lists.values()))
    return found if isinstance(found, list) else [found]


def _json_lines(text: bytes) -> list[Any] | None:
    """Many a .json file is JSON lines."""
    try:
        return [_loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return None


@contextmanager
def _csv_reader(file: BinaryIO, path: Path) -> Iterator[csv.DictReader[str]]:
    csv.field_size_limit(_FIELD_CHARS)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")
    try:
        yield csv.DictReader(text, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", restkey="…")
    except csv.Error as error:
        raise _broken(path, "", error) from error
    finally:
        text.detach()  # the file is not this reader's to close


def _csv_part(file: BinaryIO, path: Path, skip: int, count: int) -> Part:
    with _csv_reader(file, path) as reader:
        rows: list[dict[str, Any]] = [dict(row) for row in islice(reader, skip, skip + count)]
    for name in rows[0] if rows else ():
        _as_numbers(rows, name)
    return Part(rows)


def _as_numbers(rows: list[dict[str, Any]], name: str) -> None:
    """A column in which every text that is not empty is a number."""
    for convert in (int, float):
        values = [_number(row.get(name), convert) for row in rows]
        known = any(value is not None for value in values)
        if known and all(value is not None or not row.get(name) for value, row in zip(values, rows, strict=True)):
            for row, value in zip(rows, values, strict=True):
                row[name] = value
            return


def _number(text: Any, convert: type[int] | type[float]) -> int | float | None:
    if not isinstance(text, str) or "_" in text:  # Python's own digit separators are no CSV
        return None
    try:
        return convert(text)
    except ValueError:
        return None


def _csv_rows(file: BinaryIO, path: Path) -> Count:
    if path.stat().st_size > _COUNT_BYTES:
        guess = _lines(file, path)
        return Count(guess.rows and guess.rows - 1, estimated=True)
    with _csv_reader(file, path) as reader:
        return Count(sum(1 for _ in reader))


def _parquet_part(file: BinaryIO, path: Path, skip: int, count: int) -> Part:
    try:
        import pyarrow.parquet as parquet

        found = parquet.ParquetFile(file)
        rows = _of_batches(found.iter_batches(batch_size=_BATCH), skip, count)
        return Part(rows, {column.name: str(column.type) for column in found.schema_arrow})
    except ImportError as error:
        raise _needs_pyarrow(path) from error
    except _ARROW_ERRORS as error:
        raise _broken(path, "", error) from error


def _parquet_rows(file: BinaryIO, path: Path) -> Count:
    try:
        import pyarrow.parquet as parquet

        return Count(parquet.ParquetFile(file).metadata.num_rows)
    except (ImportError, *_ARROW_ERRORS):
        return Count(None)


def _arrow_part(file: BinaryIO, path: Path, skip: int, count: int) -> Part:
    try:
        schema, batches = _arrow_batches(file)
        rows = _of_batches(batches, skip, count)
        return Part(rows, {column.name: str(column.type) for column in schema})
    except ImportError as error:
        raise _needs_pyarrow(path) from error
    except _ARROW_ERRORS as error:
        raise _broken(path, "", error) from error


def _of_batches(batches: Iterable[Any], skip: int, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in batches:
        if len(rows) == count:
            break
        rows += batch.slice(skip, count - len(rows)).to_pylist()
        skip = max(0, skip - batch.num_rows)
    return rows


def _arrow_rows(file: BinaryIO, path: Path) -> Count:
    if path.stat().st_size > _COUNT_BYTES:
        return Count(None)
    try:
        return Count(sum(batch.num_rows for batch in _arrow_batches(file)[1]))
    except (ImportError, *_ARROW_ERRORS):
        return Count(None)


def _arrow_batches(file: BinaryIO) -> tuple[Any, Iterator[Any]]:
    """The schema, and the batches: as ``datasets`` writes them (a stream), or with an index at the end (a file)."""
    from pyarrow import ipc

    begin = file.read(6)
    file.seek(0)
    if begin != b"ARROW1":
        stream = ipc.open_stream(file)
        return stream.schema, iter(stream)
    found = ipc.open_file(file)
    return found.schema, (found.get_batch(number) for number in range(found.num_record_batches))


def _needs_pyarrow(path: Path) -> ViewError:
    return ViewError("extra", f"Reading {path.name}")
