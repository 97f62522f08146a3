"""``python -m trainer.models NAME [--into DIR]``: put a model where transformers can load it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.paths import Home
from trainer.models.materialise import BUILTINS, materialise

logger = logging.getLogger("trainer.models")


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 once the model is there, 1 with a sentence on stderr if it cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m trainer.models", description=__doc__)
    parser.add_argument("name", help=f"{', '.join(BUILTINS)}, a Hub id or a local folder")
    parser.add_argument("--into", type=Path, help="folder for a builtin model; default: models/ under HERMES_HOME/rl")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    builtin = options.name.startswith("builtin:")
    place = options.into or Home.from_environ(os.environ).model_dir(options.name)
    try:
        loaded = materialise(options.name, place if builtin else options.name, logger.info)
    except HermesRLError as error:
        logger.error("%s", error)
        return 1
    logger.info("%s: %s", options.name, loaded)
    return 0


if __name__ == "__main__":
    sys.exit(main())
