"""A data set on this machine: a file, or a folder of files. What leads out of its root is not opened."""

from __future__ import annotations

from pathlib import Path

from hermes_rl_mcp.contracts.datasets import DatasetInfo, DatasetSplit, ViewRequest
from hermes_rl_mcp.dataset_viewer import readers
from hermes_rl_mcp.dataset_viewer.failing import ViewError, no_such_split
from hermes_rl_mcp.dataset_viewer.shaping import MAX_FILES, columns_of, complete, some, some_splits
from hermes_rl_mcp.dataset_viewer.splits import FORMATS, format_of, splits_of

_LOOKED_AT = 100
"""Rows that columns are told from, where the file declares none."""


def view(request: ViewRequest) -> DatasetInfo:
    """Raises ViewError."""
    assert request.path is not None
    assert request.root is not None
    path, root = Path(request.path), Path(request.root)
    found = splits_of(path)
    if not found:
        raise ViewError(
            "not_found",
            f"'{request.id}' has no data files.",
            hint=f"Files that are read end in {', '.join(FORMATS)}.",
        )
    split = request.split or next(iter(found))
    if split not in found:
        raise no_such_split(request.split or "", list(found))
    splits = [_described(name, files, path, root) for name, files in found.items()]
    rows, declared = _rows(found[split], root, request.offset, max(request.limit, _LOOKED_AT))
    fields = {
        "id": request.id,
        "source": "local",
        "location": str(path),
        "format": ", ".join(sorted({format_of(file) or "" for files in found.values() for file in files})),
        "splits": some_splits(splits),
        "split": split,
        "columns": columns_of(rows, declared),
    }
    return complete(fields, rows, request)


def _rows(files: list[Path], root: Path, skip: int, count: int) -> tuple[list[dict[str, object]], dict[str, str]]:
    """Over the files of a split, one after the other. What the first one declares counts for all."""
    rows: list[dict[str, object]] = []
    declared: dict[str, str] = {}
    for file in files:
        part = readers.part(file, root, skip, count - len(rows))
        rows += part.rows
        declared = declared or dict(part.declared)
        if len(rows) >= count:
            break
        if skip and len(files) > 1:
            skip = max(0, skip - (readers.rows_in(file, root).rows or 0))
    return rows, declared


def _described(name: str, files: list[Path], path: Path, root: Path) -> DatasetSplit:
    counts = [readers.rows_in(file, root) for file in files]
    known = [count.rows for count in counts if count.rows is not None]
    base = path if path.is_dir() else path.parent
    return DatasetSplit(
        name=name,
        rows=sum(known) if len(known) == len(counts) else None,
        rows_estimated=any(count.estimated for count in counts),
        size_bytes=sum(file.stat().st_size for file in files),
        files=some([str(file.relative_to(base)) for file in files], MAX_FILES),
    )
