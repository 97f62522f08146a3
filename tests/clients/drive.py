"""Plays a scenario through one client library: ``python drive.py LIBRARY ERA SCENARIO < target.json``.

Prints what it saw as JSON and leaves with 0, or a traceback and 1. Runs in the virtual environment of that library.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from typing import Any

from scenario import SCENARIOS
from wire import Target


async def play(library: str, era: str, scenario: str, target: Target) -> dict[str, Any]:
    async with importlib.import_module(f"with_{library}").connect(target, era) as wire:
        return await SCENARIOS[scenario](wire)


if __name__ == "__main__":
    seen = asyncio.run(play(*sys.argv[1:], Target(**json.load(sys.stdin))))
    print(json.dumps(seen))  # noqa: T201 - this is what it is for
