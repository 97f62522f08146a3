"""``hermes-rl envs new``: a working environment and its test, to be changed into one's own.

Invariant: an existing file is never written over, and if not both files can be written, neither is left.
"""

from __future__ import annotations

import json
import keyword
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

import anyio
import typer

from hermes_rl_mcp.catalog.scan import find, scan
from hermes_rl_mcp.cli import runs
from hermes_rl_mcp.contracts.datasets import DatasetInfo
from hermes_rl_mcp.errors import HermesRLError, InvalidValueError, NotFoundError
from hermes_rl_mcp.operations import datasets
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.options import Flags
from hermes_rl_mcp.operations.settings import load_settings
from hermes_rl_mcp.paths import bundled_environments

_QUESTIONS = ("question", "problem", "prompt", "instruction", "query", "input", "text")
_ANSWERS = ("answer", "solution", "target", "label", "output", "response", "completion", "final_answer")
"""Usual names of columns, the likeliest first."""


class Wanted(NamedTuple):
    """The command line."""

    name: str
    dataset: str | None
    question: str | None
    answer: str | None
    kind: str
    folder: str


class Written(NamedTuple):
    """What was made."""

    environment: Path
    test: Path
    found: str
    """What was made of the data set; empty without one."""


def write(environ: Mapping[str, str], wanted: Wanted) -> Written:
    """Raises InvalidValueError for a name that cannot be one, or that is taken, and what is wrong with the data."""
    _check_name(wanted.name)
    if wanted.dataset is not None and wanted.kind != "single":
        raise InvalidValueError("--dataset goes with --kind single.", hint="Read the data in setup(self) yourself.")
    if wanted.dataset is None and (wanted.question or wanted.answer):
        raise InvalidValueError("--question and --answer are columns of --dataset.", hint="Leave them out.")
    folder = Path(wanted.folder).expanduser().absolute()
    targets = (folder / f"{wanted.name}.py", folder / f"test_{wanted.name}.py")
    for target in targets:
        if target.exists():
            raise InvalidValueError(f"{target} is already there.", hint="Choose another name or --folder.")
    _check_free(runs.context(environ), wanted.name, folder)
    values = {"name": wanted.name, "title": wanted.name.replace("_", " ").capitalize()}
    values["class_name"] = "".join(part.capitalize() for part in wanted.name.split("_")) + "Env"
    template, found = wanted.kind, ""
    if wanted.dataset is not None:
        template = "dataset"
        more, found = _of_data(environ, wanted)
        values |= more
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target, source in zip(targets, (template, f"test_{template}"), strict=True):
            text = (files("hermes_rl_mcp.cli") / "templates" / f"{source}.txt").read_text(encoding="utf-8")
            with target.open("x", encoding="utf-8") as file:
                file.write(Template(text).substitute(values))
    except FileExistsError as error:
        raise InvalidValueError(f"{error.filename} is already there.", hint="Choose another name.") from error
    except OSError as error:
        targets[0].unlink(missing_ok=True)
        raise HermesRLError(f"{folder} cannot be written to: {error}.", hint="Choose another --folder.") from error
    return Written(*targets, found)


def show(made: Written) -> None:
    if made.found:
        typer.echo(made.found)
    folder = made.environment.parent
    typer.echo(
        f"{made.environment}\n{made.test}\n"
        f"check  hermes-rl envs check {made.environment}\n"
        f"test   {Path(sys.executable).name} -m pytest {made.test}\n"
        f"use    hermes-rl config set HERMES_RL_ENV_DIRS {folder}   (servers started from then on offer it)"
    )


def _check_name(name: str) -> None:
    good = name.isascii() and name.isidentifier() and name == name.lower() and not name.startswith("_")
    if not good or keyword.iskeyword(name) or len(name) > 60:
        raise InvalidValueError(
            f"{name!r} cannot be the name of a Python file.",
            hint="Lower-case letters, digits and underscores, beginning with a letter: even_digits.",
        )
    if name in sys.stdlib_module_names or name.startswith("test_"):
        what = "begins like a test" if name.startswith("test_") else "is a module of Python"
        raise InvalidValueError(f"The name {name} {what}.", hint="Choose another one.")


def _check_free(at: Context, name: str, folder: Path) -> None:
    folders = [Path(one) for one in at.settings.env_dirs]
    known = scan(bundled_environments(), [*folders, *([folder] if folder.is_dir() and folder not in folders else [])])
    try:
        taken = find(known.environments, name)
    except NotFoundError:
        return
    raise InvalidValueError(f"{name} is already the name of {taken.file_path}.", hint="Choose another one.")


def _of_data(environ: Mapping[str, str], wanted: Wanted) -> tuple[dict[str, str], str]:
    """What the template is filled with, and a sentence."""
    source = str(wanted.dataset)
    path = Path(source).expanduser().absolute()
    here = path.exists()
    if not here and source.startswith(("/", "~", ".")):
        raise InvalidValueError(f"There is no file or folder {path}.", hint="Correct --dataset.")
    allowed = [str(path if path.is_dir() else path.parent)] if here else []
    at = Context(load_settings(environ, Flags(data_dirs=allowed)))
    if not here and (place := datasets.local_place(at, source)):  # one that comes along, or of the operator's folders
        path, here = place.path, True
    info = anyio.run(datasets.describe, at, str(path) if here else source)
    question = _column(info, wanted.question, _QUESTIONS, "question", set())
    answer = _column(info, wanted.answer, _ANSWERS, "answer", {question})
    named = str(path) if here else source
    values = {
        "source": json.dumps(named),
        "source_name": path.name if here else source,
        "split": info.split,
        "question": json.dumps(question),
        "answer": json.dumps(answer),
    }
    rows = next((split.rows for split in info.splits if split.name == info.split), None)
    count = f", {rows} rows" if rows is not None else ""
    return values, f"{named}: split {info.split}{count}; asks {question}, right is {answer}"


def _column(info: DatasetInfo, given: str | None, usual: tuple[str, ...], role: str, taken: set[str]) -> str:
    names = [column.name for column in info.columns]
    has = f"{info.id} has the columns {', '.join(names)}"
    if given is not None:
        if given not in names:
            raise InvalidValueError(f"There is no column {given!r}: {has}.", hint=f"Name one with --{role}.")
        return given
    lower = {name.lower(): name for name in reversed(names)}
    for name in usual:
        if name in lower and lower[name] not in taken:
            return lower[name]
    raise InvalidValueError(f"Which column is the {role}? {has}.", hint=f"Name it with --{role}.")
