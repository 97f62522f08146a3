"""``PYTHON -P bootstrap.py FILE.py:Class serve|process|evaluate|describe ...`` under another Python than the product's.

Invariant: of the product's installation only the package ``hermes_rl_mcp`` can be imported; everything else comes from
that other Python, and the folder's name ``environments`` stays free for the community's.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def _offer(package: Path) -> None:
    """Makes one package importable from where it lies, and nothing that lies beside it."""
    root = str(package.parent)
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != os.path.realpath(root)]
    os.environ.pop("PYTHONPATH", None)
    spec = importlib.util.spec_from_file_location(
        package.name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{package} is not a package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[package.name] = module
    spec.loader.exec_module(module)


def _run() -> None:
    _offer(Path(__file__).resolve().parents[2])
    from hermes_rl_mcp.envs.commands import main

    main(sys.argv[1:])


if __name__ == "__main__":
    _run()
