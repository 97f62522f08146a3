"""terminal and process: commands in the task's sandbox, to their end or in the background.

Invariant: what a model reads is bounded, free of control sequences, and holds none of the operator's keys.
"""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic import JsonValue

from hermes_rl_mcp.agent.interfaces import BackgroundProcess, CallContext, Tool
from hermes_rl_mcp.agent.settings import TERMINAL_TIMEOUT, secrets_of, setting
from hermes_rl_mcp.agent.tools.schema import arguments, choice, flag, text, texts, whole
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.redact import redact_text

DEFAULT_TIMEOUT_S = 180.0
MAX_TIMEOUT_S = 600.0
MAX_OUTPUT_CHARS = 50_000
_HEAD_SHARE = 0.4
_KEPT_BYTES = 1_000_000
"""Of a command's output; more than is shown, so that nothing is lost by decoding."""
LOG_LINES = 200
_WAIT_S = 30.0

_CONTROL = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\]"
    r"[^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\|[@-Z\\-_])|[\x00-\x08\x0b\x0c\x0e-\x1f]"
)
_MEANINGS: dict[str, dict[int, str]] = {
    "grep": {1: "No lines matched; this is no failure."},
    "rg": {1: "No lines matched; this is no failure."},
    "diff": {1: "The files differ; this is no failure."},
    "cmp": {1: "The files differ; this is no failure."},
    "test": {1: "The condition is false; this is no failure."},
    "[": {1: "The condition is false; this is no failure."},
    "find": {1: "Some folders could not be read."},
}


def terminal(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """``{output, exit_code, error}``, with ``exit_code_meaning`` where an exit code above 0 is no failure."""
    command: str = args["command"]
    if not command.strip():
        raise InvalidValueError("The command is empty.", hint="Give a shell command.")
    workdir = args.get("workdir") or None
    if args.get("background"):
        return _in_background(context, command, workdir, args)
    timeout_s = _timeout(context, args.get("timeout"))
    if args.get("pty"):
        return _in_terminal(context, command, workdir, timeout_s)
    done = context.sandbox().run(command, timeout_s=timeout_s, workdir=workdir, limit_bytes=_KEPT_BYTES)
    return _result(context, command, done.output, done.exit_code, done.error)


def process(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """Looks after what ``terminal(background=true)`` started."""
    action: str = args["action"]
    sandbox = context.sandbox()
    if action == "list":
        return {"processes": [_described(one) for one in sandbox.processes()]}
    session_id = args.get("session_id")
    if not session_id:
        raise InvalidValueError(f"{action} needs a session_id.", hint="process(action='list') shows what there is.")
    found = next((one for one in sandbox.processes() if one.session_id == session_id), None)
    if found is None:
        known = ", ".join(one.session_id for one in sandbox.processes()) or "none"
        return {"error": f"There is no background process {session_id!r}. There are: {known}."}
    return _act(context, found, action, args)


def _act(context: CallContext, found: BackgroundProcess, action: str, args: dict[str, Any]) -> JsonValue:
    match action:
        case "poll":
            return {**_described(found), "output": _new_output(context, found), **_matches(context, found)}
        case "log":
            return _log(context, found, args)
        case "wait":
            code = found.wait(_bounded(float(args.get("timeout") or _WAIT_S)))
            waited = {} if code is not None else {"note": "It still runs; wait again, or go on with something else."}
            return {**_described(found), "output": _new_output(context, found), **waited}
        case "kill":
            found.kill()
            return {**_described(found), "status": "killed"}
        case "close":
            found.close_input()
            return _described(found)
    data = str(args.get("data") or "")
    try:
        found.write((data + "\n" if action == "submit" else data).encode())
    except OSError:
        return {**_described(found), "error": "It does not read any more."}
    return _described(found)


def _in_background(context: CallContext, command: str, workdir: str | None, args: dict[str, Any]) -> JsonValue:
    started = context.sandbox().start(command, workdir=workdir, pty=bool(args.get("pty")))
    patterns = [one for one in args.get("watch_patterns") or [] if one]
    context.state.setdefault("watched", {})[started.session_id] = patterns
    note = f"It runs in the background. process(action='poll', session_id='{started.session_id}') shows how it goes."
    if args.get("notify_on_complete") or patterns:
        note += " Nothing is sent when it ends or writes something: ask."
    return {"output": note, "session_id": started.session_id, "exit_code": 0, "error": None}


def _in_terminal(context: CallContext, command: str, workdir: str | None, timeout_s: float) -> JsonValue:
    started = context.sandbox().start(command, workdir=workdir, pty=True)
    code = started.wait(timeout_s)
    output = started.output()
    if code is None:
        started.kill()
        return _result(context, command, output, 124, f"Its time of {timeout_s:g} s ran out.")
    return _result(context, command, output, code, None)


def _result(context: CallContext, command: str, output: bytes, exit_code: int, error: str | None) -> JsonValue:
    result: dict[str, JsonValue] = {
        "output": bounded(readable(context, output)),
        "exit_code": exit_code,
        "error": error,
    }
    last = re.split(r"\|\||&&|[|;\n]", command)[-1].split()
    if exit_code > 0 and last and (meaning := _MEANINGS.get(last[0].rpartition("/")[2], {}).get(exit_code)):
        result["exit_code_meaning"] = meaning
    return result


def readable(context: CallContext, output: bytes) -> str:
    """Text for a model: no control sequences, no carriage returns of progress bars, none of the operator's keys."""
    decoded = _CONTROL.sub("", output.decode(errors="replace").replace("\r\n", "\n")).replace("\r", "\n")
    return redact_text(decoded, secrets_of(context.settings))


def bounded(output: str, limit: int = MAX_OUTPUT_CHARS) -> str:
    """The first 40 and the last 60 percent of what may be shown, with a line between that says what is missing."""
    if len(output) <= limit:
        return output
    head = int(limit * _HEAD_SHARE)
    cut = len(output) - limit
    return f"{output[:head]}\n\n... [{cut} characters left out of {len(output)}] ...\n\n{output[head + cut :]}"


def _timeout(context: CallContext, asked: float | None) -> float:
    if asked is not None:
        return _bounded(float(asked))
    try:
        return _bounded(float(setting(context.settings, TERMINAL_TIMEOUT) or DEFAULT_TIMEOUT_S))
    except ValueError:
        return DEFAULT_TIMEOUT_S


def _bounded(timeout_s: float) -> float:
    if not math.isfinite(timeout_s) or timeout_s <= 0:
        raise InvalidValueError(f"timeout is {timeout_s:g}.", hint="Give seconds, more than 0.")
    return min(timeout_s, MAX_TIMEOUT_S)


def _described(one: BackgroundProcess) -> dict[str, JsonValue]:
    code = one.poll()
    return {
        "session_id": one.session_id,
        "command": one.command[:200],
        "status": "running" if code is None else "exited",
        "exit_code": code,
    }


def _new_output(context: CallContext, one: BackgroundProcess) -> str:
    """What it wrote since the last look."""
    places: dict[str, int] = context.state.setdefault("read_to", {})
    output = one.output(places.get(one.session_id, 0))
    places[one.session_id] = places.get(one.session_id, 0) + len(output)
    return bounded(readable(context, output))


def _matches(context: CallContext, one: BackgroundProcess) -> dict[str, JsonValue]:
    patterns: list[str] = context.state.get("watched", {}).get(one.session_id, [])
    if not patterns:
        return {}
    lines = readable(context, one.output()).splitlines()
    found = [line[:500] for line in lines if any(pattern in line for pattern in patterns)]
    return {"watch_matches": [*found[-20:]]}


def _log(context: CallContext, one: BackgroundProcess, args: dict[str, Any]) -> JsonValue:
    lines = readable(context, one.output()).splitlines()
    limit = args.get("limit") or LOG_LINES
    offset = args.get("offset")
    first = max(0, len(lines) - limit) if offset is None else offset
    shown = "\n".join(lines[first : first + limit])
    return {**_described(one), "output": bounded(shown), "total_lines": len(lines), "offset": first}


TOOLS = (
    Tool(
        "terminal",
        "terminal",
        "Run a shell command in your sandbox. Files stay between calls; variables and the current folder do not. Read "
        "and change files with the file tools where you have them. For servers and long work use background=true, then "
        "the tool process.",
        arguments(
            ("command",),
            command=text("The command"),
            background=flag("Start it and go on; returns a session_id"),
            timeout=whole(f"Seconds it may take (at most {MAX_TIMEOUT_S:g})", minimum=1),
            workdir=text("Folder to run it in"),
            pty=flag("Give it a terminal of its own, for programs that want one"),
            notify_on_complete=flag("With background: remark in the answer how to learn of its end"),
            watch_patterns=texts("With background: texts whose lines poll picks out"),
        ),
        terminal,
    ),
    Tool(
        "process",
        "terminal",
        "Look after what terminal(background=true) started. list: all; poll: state and new output; log: lines of its "
        "output; wait: until it ends; kill: end it; write: send data; submit: and a line end; close: end its input.",
        arguments(
            ("action",),
            action=choice("What to do", "list", "poll", "log", "wait", "kill", "write", "submit", "close"),
            session_id=text("Which process; for all but list"),
            data=text("For write and submit"),
            timeout=whole(f"For wait: seconds (at most {MAX_TIMEOUT_S:g})", minimum=1),
            offset=whole("For log: first line, from 0; default: the last lines", minimum=0),
            limit=whole(f"For log: how many lines (default {LOG_LINES})", minimum=1),
        ),
        process,
    ),
)
