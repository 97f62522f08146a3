"""A data set of the Hub, through ``datasets``: its card, and its first rows as a stream. It is not downloaded whole.

Only formats that are data and nothing else are read, so no code of a data set is run; loading scripts are refused by
the library itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from hermes_rl_mcp.contracts.datasets import DatasetInfo, DatasetSplit, ViewRequest
from hermes_rl_mcp.dataset_viewer.failing import ViewError, no_such_split
from hermes_rl_mcp.dataset_viewer.shaping import MAX_CONFIGS, columns_of, complete, some, some_splits

_READ = {"parquet", "json", "csv", "arrow", "text", "cache"}
"""Builders of ``datasets``; ``cache`` is a data set that was loaded on this machine before."""
_OTHERS_SHOWN = "Load it in an environment, or convert it to parquet."
_COUNTED_FILES = 16
"""Parquet files per split whose footers are asked for their rows, if the card does not say."""
_NAMES = 100
_CONNECT_S = 8.0
_ROWS, _ROWS_CHARS = 100, 4 * 2**20


def view(request: ViewRequest) -> DatasetInfo:
    """Raises ViewError."""
    with _said_as_view_error():
        builder, configs = _builder(request)
        kind = type(builder).__module__.rsplit(".", 1)[-1]
        if kind not in _READ:
            raise ViewError("invalid", f"its files are of a kind that is not shown here ({kind}).", hint=_OTHERS_SHOWN)
        splits = _splits(builder, kind)
        if not splits:
            raise ViewError("invalid", "it has no splits.")
        names = [split.name for split in splits]
        split = request.split or ("train" if "train" in names else names[0])
        if split not in names:
            raise no_such_split(split, names)
        stream = builder.as_streaming_dataset(split=split).decode(False)
        rows, exhausted = _looked_at(stream.skip(request.offset) if request.offset else stream, request.limit)
    features = stream.features or builder.info.features
    fields = {
        "id": f"{request.id}/{request.config}" if request.config else request.id,
        "source": "hub",
        "location": f"hf://datasets/{request.id}" + (f"@{builder.hash}" if builder.hash else ""),
        "format": kind,
        "config": builder.config.name,
        "configs": some(configs, MAX_CONFIGS),
        "splits": some_splits(
            [_counted(one, rows, exhausted, request.offset) if one.name == split else one for one in splits]
        ),
        "split": split,
        "columns": columns_of(rows, {name: feature_type(one) for name, one in features.items()} if features else None),
    }
    return complete(fields, rows, request)


def _looked_at(stream: Any, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """``limit`` rows, at least one more if there is one, and further ones to tell columns from as long as they are
    small. Whether these are all there are."""
    rows: list[dict[str, Any]] = []
    size = 0
    for row in islice(stream, max(limit, _ROWS)):
        rows.append(dict(row))
        size += sum(len(value) for value in row.values() if isinstance(value, str | bytes))
        if len(rows) > limit and size > _ROWS_CHARS:
            return rows, False
    return rows, len(rows) < max(limit, _ROWS)


def _counted(split: DatasetSplit, rows: list[dict[str, Any]], exhausted: bool, offset: int) -> DatasetSplit:
    """Where neither card nor files say how many rows there are: out of the size, as long as the format is text."""
    if split.rows is not None or not rows:
        return split
    if exhausted:
        return split.model_copy(update={"rows": offset + len(rows)})
    if not split.size_bytes:
        return split
    row_bytes = sum(len(json.dumps(row, ensure_ascii=False, default=str).encode()) + 1 for row in rows) / len(rows)
    return split.model_copy(update={"rows": round((split.size_bytes or 0) / row_bytes), "rows_estimated": True})


def _builder(request: ViewRequest) -> tuple[Any, list[str]]:
    """Of the configuration that was asked for, else of the default one, else of the first."""
    if not _reachable():
        os.environ["HF_HUB_OFFLINE"] = (
            "1"  # what was loaded before is there; else the client would try for half a minute
        )
    import datasets

    datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(request.id, request.config)
    except ValueError:
        configs = datasets.get_dataset_config_names(request.id)
        if request.config is not None and request.config not in configs:
            raise ViewError(
                "not_found",
                f"it has no configuration '{request.config}'.",
                hint=f"Name one: {request.id}/CONFIGURATION.",
                available=configs[:_NAMES],
            ) from None
        if request.config is not None or not configs:
            raise
        return datasets.load_dataset_builder(request.id, configs[0]), configs
    return builder, [str(name) for name in builder.builder_configs] or [str(builder.config.name)]


def _reachable() -> bool:
    import httpx

    try:
        httpx.head(os.environ.get("HF_ENDPOINT") or "https://huggingface.co", timeout=_CONNECT_S)
    except httpx.TransportError:
        return False
    return True


def _splits(builder: Any, kind: str) -> list[DatasetSplit]:
    """What its card says, else what its files do."""
    if builder.info.splits:
        return [
            DatasetSplit(name=str(name), rows=info.num_examples, size_bytes=info.num_bytes)
            for name, info in builder.info.splits.items()
        ]
    files = builder.config.data_files or {}
    return [_measured(str(name), [str(url) for url in urls], kind) for name, urls in files.items()]


def _measured(name: str, urls: list[str], kind: str) -> DatasetSplit:
    """Sizes out of the Hub's list of files; rows out of the footers of not too many parquet files."""
    from fsspec.core import url_to_fs

    if not 0 < len(urls) <= _COUNTED_FILES:
        return DatasetSplit(name=name)
    size, rows = 0, 0
    for url in urls:
        files, path = url_to_fs(url)
        size += files.info(path)["size"]
        if kind == "parquet":
            import pyarrow.parquet as parquet

            with files.open(path) as file:
                rows += parquet.ParquetFile(file).metadata.num_rows
    return DatasetSplit(name=name, rows=rows if kind == "parquet" else None, size_bytes=size)


def feature_type(feature: Any) -> str:
    """``string``, ``list[{role: string}]``, ``class label (neg, pos)``, ``Image``."""
    if isinstance(feature, Mapping):
        return "{" + ", ".join(f"{name}: {feature_type(inner)}" for name, inner in feature.items()) + "}"
    if isinstance(feature, list):
        return f"list[{feature_type(feature[0])}]" if feature else "list"
    if (names := getattr(feature, "names", None)) is not None:
        return f"class label ({', '.join(str(name) for name in names[:12])}{', …' if len(names) > 12 else ''})"
    if (inner := getattr(feature, "feature", None)) is not None:
        return f"list[{feature_type(inner)}]"
    kind = type(feature).__name__
    return str(feature.dtype) if kind == "Value" else kind


@contextmanager
def _said_as_view_error() -> Iterator[None]:
    try:
        yield
    except ViewError:
        raise
    except ImportError as error:
        raise ViewError("extra", "Reading a data set of the Hub") from error
    except MemoryError:
        raise
    except Exception as error:
        # The Hub's clients raise dozens of unrelated classes; what they have in common is a sentence.
        raise _failure(error) from error


def _failure(error: Exception) -> ViewError:
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    names = {cls.__name__ for one in _causes(error) for cls in type(one).__mro__}
    if "DatasetNotFoundError" in names or "EmptyDatasetError" in names or "DataFilesNotFoundError" in names:
        return ViewError(
            "not_found",
            said,
            hint="Check the name. A gated or private one needs HF_TOKEN (hermes-rl config set HF_TOKEN -), and its "
            "licence accepted on the Hub.",
        )
    if names & {"ConnectionError", "OfflineModeIsEnabled", "ConnectError", "TimeoutException", "TransportError"}:
        return ViewError(
            "unreachable",
            "the Hub cannot be reached, and the data set was not loaded on this machine before.",
            hint="Connect to the network (or set HTTPS_PROXY or HF_ENDPOINT, unset HF_HUB_OFFLINE), or give the name "
            "of a local data set.",
        )
    if "scripts are no longer supported" in said:
        return ViewError(
            "invalid",
            "it can be loaded only by code of its own, which is never run.",
            hint="Use one of plain files (parquet, jsonl, csv); the Hub often has a converted copy.",
        )
    return ViewError("invalid", f"{type(error).__name__}: {said}", hint="Its files may not be what their names say.")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
