"""``hermes-rl serve``: a trained model behind the OpenAI API, for people and programs of this machine.

Invariant: nobody else can reach it unless that was asked for in so many words.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from hermes_rl_mcp.cli.programs import Program, started
from hermes_rl_mcp.cli.text import printable
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.loopback import bound_socket, is_loopback
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.paths import RUN_ID

_POLL_S = 0.2


class Wanted(NamedTuple):
    """What was asked for."""

    what: str
    """A run's id, or a model."""
    step: int | None
    adapter: str | None
    host: str
    port: int
    allow_remote: bool
    device: str


def run(at: Context, wanted: Wanted) -> int:
    """Until Ctrl-C (0) or until it ends by itself (its exit code; it has said why). Raises UnknownRunError and what
    else is wrong with the request."""
    if not wanted.allow_remote and not is_loopback(wanted.host):
        raise InvalidValueError(
            f"{wanted.host} is not a loopback address: anybody in the network could use this machine.",
            hint="Add --allow-remote if that is what you want.",
        )
    arguments = _what(at, wanted)
    with bound_socket(wanted.host, wanted.port) as listener:
        arguments += ["--listen-fd", str(listener.fileno()), "--host", wanted.host, "--device", wanted.device]
        arguments += ["--allow-remote"] if wanted.allow_remote else []
        with started(at, "trainer.serve", arguments, (listener.fileno(),)) as program:
            address = f"http://{_shown(wanted.host)}:{listener.getsockname()[1]}"
            if models := _models(program, address):
                sys.stdout.write(_welcome(address, models))
                sys.stdout.flush()
            code = program.wait()
            return 0 if program.interrupted else code


def _what(at: Context, wanted: Wanted) -> list[str]:
    if RUN_ID.match(wanted.what):
        if wanted.adapter is not None:
            raise InvalidValueError("A run has its own adapter.", hint="Leave --adapter out, or give a model.")
        step = ["--step", str(wanted.step)] if wanted.step is not None else []
        return ["--run", str(at.runs.paths(wanted.what).dir), *step]
    if wanted.step is not None:
        raise InvalidValueError(f"--step is of a run, and {wanted.what} is none.", hint="Leave it out.")
    model = Path(wanted.what).expanduser()
    adapter = ["--adapter", str(Path(wanted.adapter).expanduser().absolute())] if wanted.adapter else []
    return ["--model", str(model.absolute()) if model.is_dir() else wanted.what, *adapter]


def _models(program: Program, address: str) -> list[str]:
    """Their names once requests are answered; none if the program ends before. Says what is being waited for."""
    phase = "starting"
    _say(phase)
    with httpx.Client(base_url=address, timeout=5.0, trust_env=False) as client:
        while program.running():
            health = _get(client, "/health")
            if (now := str(health.get("phase") or phase)) != phase:
                _say(phase := now)
            if health.get("status") == "ok":
                return [str(one["id"]) for one in _get(client, "/v1/models").get("data", [])]
            time.sleep(_POLL_S)
    return []


def _say(phase: str) -> None:
    sys.stderr.write(printable(f"{phase} ...\n"))
    sys.stderr.flush()


def _get(client: httpx.Client, path: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = client.get(path).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return answer


def _welcome(address: str, models: list[str]) -> str:
    body = f'{{"model": "{models[0]}", "messages": [{{"role": "user", "content": "2+3="}}], "max_tokens": 64}}'
    names = ", ".join([f"{models[0]} (default)", *models[1:]])
    return printable(
        f"serving {names}\n"
        f"address {address}/v1   (OPENAI_BASE_URL, with any key; Ctrl-C ends it)\n"
        f"try     curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
    )


def _shown(host: str) -> str:
    """As it stands in an address. What listens everywhere is reached over loopback."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1" if host != "::" else "[::1]"
    return f"[{host}]" if ":" in host else host
