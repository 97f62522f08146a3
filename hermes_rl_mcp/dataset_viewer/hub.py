"""A data set of the Hub, through ``datasets``: its card, and its first rows as a stream. It is not downloaded whole.

Only formats that are data and nothing else are read, so no code of a data set is run; loading scripts are refused by
the library itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from hermes_rl_mcp.contracts.datasets import DatasetInfo, DatasetSplit, ViewRequest
from hermes_rl_mcp.dataset_viewer.failing import ViewError, no_such_split
from hermes_rl_mcp.dataset_viewer.shaping import columns_of, fitted

_READ = {"parquet", "json", "csv", "arrow", "text", "cache"}
"""Builders of ``datasets``; ``cache`` is a data set that was loaded on this machine before."""
_OTHERS_SHOWN = "Load it in an environment, or convert it to parquet."
_COUNTED_FILES = 16
"""Parquet files per split whose footers are asked for their rows, if the card does not say."""
_NAMES = 100


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
        rows = [dict(row) for row in islice(stream, request.limit)]
    features = stream.features or builder.info.features
    shown = fitted(rows, request.budget_chars)
    return DatasetInfo(
        id=request.id,
        source="hub",
        location=f"hf://datasets/{request.id}" + (f"@{builder.hash}" if builder.hash else ""),
        format=kind,
        config=builder.config.name,
        configs=configs[:_NAMES],
        splits=splits[:_NAMES],
        split=split,
        columns=columns_of(rows, {name: feature_type(one) for name, one in features.items()} if features else None),
        rows=shown,
        truncated=len(shown) < len(rows),
    )


def _builder(request: ViewRequest) -> tuple[Any, list[str]]:
    """Of the configuration that was asked for, else of the default one, else of the first."""
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
            f"the Hub cannot be reached: {said}",
            hint="Connect to the network (or set HTTPS_PROXY or HF_ENDPOINT, unset HF_HUB_OFFLINE), or give the name "
            "of a local data set.",
        )
    return ViewError("invalid", f"{type(error).__name__}: {said}", hint="Its files may not be what their names say.")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
