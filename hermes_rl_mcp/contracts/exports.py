"""Exports that a tool started: what was asked for, as it is kept in the run's directory, and what is shown of it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from hermes_rl_mcp.contracts.runs import Starter

ExportFormat = Literal["adapter", "safetensors", "gguf"]
"""``adapter`` is a PEFT folder, the others are whole models."""

CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf", "convert_hf_to_gguf")
"""Names of llama.cpp's converter on PATH, which GGUF needs."""


class ExportRequest(BaseModel):
    """``exports/<name>.json`` of a run. How far it got is read off its lock and the folder, not off this."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    name: str
    """``step-40-gguf``: one export per checkpoint and format."""
    format: ExportFormat
    step: int
    path: str
    """The folder to make."""
    requested_at: str
    started_by: Starter
    mark: str
    """Value of the marker variable that its processes carry."""
    replaces: str | None = None
    """``created_at`` of the export that was in its place."""
    stopped: bool = False
    """Somebody asked for its end."""


class ExportState(BaseModel):
    """One export as it is now."""

    name: str
    format: ExportFormat
    step: int
    status: Literal["running", "completed", "failed", "stopped"]
    path: str
    """Folder, whole and checked once ``completed``."""
    log: str
    requested_at: str
    note: str = ""
    """What the check could not cover; while it runs, what it is doing."""
    error: str | None = None
    hint: str | None = None
