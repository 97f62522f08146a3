"""Makes the .mcpb bundle: stages its folder, then has the official tool validate and pack it.

    python bundle/make.py --mcpb PATH-OF-MCPB [--output build]

Invariant: the bundle holds what the wheel holds, and beside it only what starts it; its dependencies are those of
pyproject.toml, bounded by the versions that CI runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("train", "wandb")
"""Of the bundle's own environment: what a person may add to it."""
_FILES = ("README.md", "LICENSE")


def version() -> str:
    """Of the package, by its source."""
    text = (ROOT / "hermes_rl_mcp" / "__init__.py").read_text(encoding="utf-8")
    return text.partition('__version__ = "')[2].partition('"')[0]


def stage(folder: Path) -> None:
    """Fills ``folder``, which must not exist, with everything that goes into the bundle."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folder.mkdir(parents=True)
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        leave = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(ROOT / package, folder / package, ignore=leave)
    for name in _FILES:
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(ROOT / "bundle" / "manifest.json", folder / "manifest.json")
    (folder / "server").mkdir()
    shutil.copy(ROOT / "bundle" / "launcher.py", folder / "server" / "main.py")
    (folder / "pyproject.toml").write_text(_project(project), encoding="utf-8")


def _project(project: dict[str, Any]) -> str:
    """A pyproject.toml without the development's part. Texts and lists of JSON are TOML, too."""
    of, extras = project["project"], project["project"]["optional-dependencies"]
    tables: dict[str, dict[str, Any]] = {
        "build-system": project["build-system"],
        "project": {
            **{key: of[key] for key in ("name", "description", "readme", "license", "requires-python")},
            "version": version(),
            "dependencies": of["dependencies"],
        },
        "project.optional-dependencies": {name: extras[name] for name in EXTRAS},
        "project.scripts": of["scripts"],
        "tool.hatch.build.targets.wheel": project["tool"]["hatch"]["build"]["targets"]["wheel"],
        "tool.uv": {"constraint-dependencies": _pins()},
    }
    return "\n".join(
        f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        for table, values in tables.items()
    )


def _pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def main() -> None:
    arguments = argparse.ArgumentParser(description="Make the .mcpb bundle.")
    arguments.add_argument("--mcpb", required=True, help="the command of @anthropic-ai/mcpb")
    arguments.add_argument("--output", type=Path, default=ROOT / "build")
    options = arguments.parse_args()
    folder = options.output / "bundle"
    shutil.rmtree(folder, ignore_errors=True)
    stage(folder)
    packed = options.output / f"hermes-rl-mcp-{version()}.mcpb"
    for command in (["validate", str(folder / "manifest.json")], ["pack", str(folder), str(packed)]):
        done = subprocess.run([options.mcpb, *command], stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            sys.exit(done.returncode)
    sys.stderr.write(f"{packed}\n")


if __name__ == "__main__":
    main()
