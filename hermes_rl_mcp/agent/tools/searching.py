"""search_files: contents by a regular expression and files by a pattern, with what programs the sandbox has.

Invariant: whatever a file is called, its name is one entry of the result; names and patterns are no shell code.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from pydantic import JsonValue

from hermes_rl_mcp.agent.interfaces import CallContext, CommandResult
from hermes_rl_mcp.agent.tools.paths import cut_line, operand, resolved

SEARCH_LIMIT, MAX_SEARCH_LIMIT = 50, 500
_SEARCH_S = 60.0
_SEARCH_BYTES = 4_000_000
_SKIPPED = (".git", "node_modules", "__pycache__", ".venv")

# Whatever of these there is. The pattern's meaning is nearly the same in the first two.
_GREP = """
if command -v rg >/dev/null 2>&1; then
  exec rg --no-config --no-heading --line-number --with-filename --null --hidden --no-ignore {rg} -e {pattern} -- {path}
elif printf x | grep -qP x 2>/dev/null; then kind=-P; else kind=-E; fi
exec grep -rHnIZ $kind {grep} -e {pattern} -- {path}
"""


def search_files(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """``target`` content: ``{matches | files | counts, total_count, truncated}``; files: ``{files, ...}``."""
    limit = min(args.get("limit") or SEARCH_LIMIT, MAX_SEARCH_LIMIT)
    offset = args.get("offset") or 0
    path = args.get("path") or "."
    if args.get("target", "content") == "files":
        return _find(context, args["pattern"], path, offset, limit)
    return _grep(context, args, path, offset, limit)


def _find(context: CallContext, pattern: str, path: str, offset: int, limit: int) -> JsonValue:
    where = resolved(context, path)
    skipped = " -o ".join(f"-name {shlex.quote(name)}" for name in _SKIPPED)
    by = "-path" if "/" in pattern else "-name"
    glob = f"*/{pattern.removeprefix('./').removeprefix('**/')}" if by == "-path" else pattern
    done = _run(
        context,
        f"find {shlex.quote(operand(where))} -mindepth 1 \\( -type d \\( {skipped} \\) -prune \\) -o "
        f"\\( -type f {by} {shlex.quote(glob)} -print0 \\) 2>/dev/null",
    )
    *names, rest = done.output.decode(errors="replace").split("\0")  # a name that was cut is no name
    files = sorted(name.removeprefix("./") for name in names)
    if not files and (done.exit_code or rest):
        return {"error": done.error or f"{path} is not there, or not all of it can be read."}
    return {"files": [*files[offset : offset + limit]], **_totals(len(files), offset, limit, _is_cut(done))}


def _grep(context: CallContext, args: dict[str, Any], path: str, offset: int, limit: int) -> JsonValue:
    mode = args.get("output_mode", "content")
    around = min(args.get("context") or 0, 20) if mode == "content" else 0
    rg = [f"-C {around}"] + [f"--glob {shlex.quote('!' + name)}" for name in _SKIPPED]
    grep = [f"-C {around}"] + [f"--exclude-dir={shlex.quote(name)}" for name in _SKIPPED]
    if glob := args.get("file_glob"):
        rg.append(f"--glob {shlex.quote(glob)}")
        grep.append(f"--include={shlex.quote(glob)}")
    command = _GREP.format(
        rg=" ".join(rg),
        grep=" ".join(grep),
        pattern=shlex.quote(args["pattern"]),
        path=shlex.quote(operand(resolved(context, path))),
    )
    done = _run(context, command)
    hits = _hits(done.output)
    if any(hit["match"] for hit in hits):  # what is missing of a search that was ended is said by ``truncated``
        return _as_wanted(hits, mode, offset, limit, _is_cut(done))
    if done.error or done.exit_code not in (0, 1):
        return {"error": done.error or done.output.decode(errors="replace").strip()[:500] or "The search failed."}
    return _as_wanted([], mode, offset, limit, done.cut)


def _run(context: CallContext, command: str) -> CommandResult:
    return context.sandbox().run(command, timeout_s=_SEARCH_S, limit_bytes=_SEARCH_BYTES)


def _is_cut(done: CommandResult) -> bool:
    return done.cut or done.error is not None


def _hits(output: bytes) -> list[dict[str, Any]]:
    """Lines of grep or rg: path, a null byte, number, ':' for a match or '-' for a line around one, content."""
    hits, begun = [], b""
    for raw in output.split(b"\n"):
        path, null, rest = raw.partition(b"\0")
        found = re.match(rb"(\d+)([:-])(.*)", rest, re.DOTALL) if null else None
        if found is None:
            is_said = raw == b"--" or raw.startswith((b"grep: ", b"rg: "))
            begun = b"" if is_said else begun + raw + b"\n"  # a path may have a line end
            continue
        name = (begun + path).decode(errors="replace").removeprefix("./")
        line = cut_line(found[3].decode(errors="replace").rstrip("\r"))
        hits.append({"path": name, "line": int(found[1]), "content": line, "match": found[2] == b":"})
        begun = b""
    return sorted(hits, key=lambda hit: (hit["path"], hit["line"]))


def _as_wanted(hits: list[dict[str, Any]], mode: str, offset: int, limit: int, cut: bool) -> JsonValue:
    matched = [hit for hit in hits if hit["match"]]
    counts: dict[str, int] = {}
    for hit in matched:
        counts[hit["path"]] = counts.get(hit["path"], 0) + 1
    if mode == "files_only":
        return {"files": [*list(counts)[offset : offset + limit]], **_totals(len(counts), offset, limit, cut)}
    if mode == "count":
        return {
            "counts": dict(list(counts.items())[offset : offset + limit]),
            **_totals(len(counts), offset, limit, cut),
        }
    rows: list[JsonValue] = [
        {
            "path": hit["path"],
            "line": hit["line"],
            "content": hit["content"],
            **({} if hit["match"] else {"around": True}),
        }
        for hit in hits[offset : offset + limit]
    ]
    return {"matches": rows, **_totals(len(hits), offset, limit, cut), "match_count": len(matched)}


def _totals(total: int, offset: int, limit: int, cut: bool) -> dict[str, JsonValue]:
    rest = total > offset + limit
    hint: dict[str, JsonValue] = {"hint": f"Go on with offset={offset + limit}."} if rest else {}
    return {"total_count": total, "truncated": rest or cut, **hint}
