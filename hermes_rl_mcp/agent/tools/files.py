"""read_file, write_file, patch and search_files in the task's sandbox.

Invariant: a change is worked out before it is written, and a file that is no text is never changed by a text tool.
"""

from __future__ import annotations

import difflib
import posixpath
import re
import shlex
from typing import Any

from pydantic import JsonValue

from hermes_rl_mcp.agent.interfaces import CallContext, Tool
from hermes_rl_mcp.agent.tools.patches import FORM, parsed, worked_out
from hermes_rl_mcp.agent.tools.replacing import replaced
from hermes_rl_mcp.agent.tools.schema import arguments, choice, flag, text, whole
from hermes_rl_mcp.errors import InvalidValueError

READ_LINES, MAX_READ_LINES = 500, 2000
MAX_LINE_CHARS = 2000
SEARCH_LIMIT, MAX_SEARCH_LIMIT = 50, 500
_SEARCH_S = 60.0
_SEARCH_BYTES = 4_000_000
_DIFF_LINES = 400
_SKIPPED = (".git", "node_modules", "__pycache__", ".venv")

# Whatever of these there is. The pattern's meaning is nearly the same in the first two.
_GREP = """
if command -v rg >/dev/null 2>&1; then
  exec rg --no-config --no-heading --line-number --with-filename --null --hidden --no-ignore {rg} -e {pattern} -- {path}
elif printf x | grep -qP x 2>/dev/null; then kind=-P; else kind=-E; fi
exec grep -rHnIZ $kind {grep} -e {pattern} -- {path}
"""


def read_file(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """``{content, total_lines, file_size, truncated}``; each line with its number and a bar in front."""
    path: str = args["path"]
    try:
        data = context.sandbox().read_bytes(_resolved(context, path))
    except FileNotFoundError:
        return {"error": f"There is no file {path}.", "similar_files": _similar(context, path)}
    except OSError as error:
        return {"error": _reason(path, error)}
    content = _decoded(data)
    if content is None:
        return {"error": f"{path} is no text ({len(data)} bytes).", "file_size": len(data)}
    lines = content.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    first = args.get("offset") or 1
    limit = min(args.get("limit") or READ_LINES, MAX_READ_LINES)
    shown = lines[first - 1 : first - 1 + limit]
    result: dict[str, JsonValue] = {
        "content": "\n".join(f"{number}|{_cut(line)}" for number, line in enumerate(shown, first)),
        "total_lines": len(lines),
        "file_size": len(data),
        "truncated": first - 1 + len(shown) < len(lines),
    }
    if result["truncated"]:
        result["hint"] = f"Go on with offset={first + len(shown)}."
    elif first > max(len(lines), 1):
        result["hint"] = f"The file has {len(lines)} lines."
    return result


def write_file(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """``{bytes_written, path}``."""
    data = _encoded(args["content"])
    if error := _write(context, args["path"], data):
        return {"error": error}
    return {"bytes_written": len(data), "path": args["path"]}


def patch(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """``{success, diff, files_modified}``."""
    if args.get("mode", "replace") == "patch":
        return _apply_patch(context, args)
    path, old, new = args.get("path"), args.get("old_string"), args.get("new_string")
    if not path or old is None or new is None:
        raise InvalidValueError("mode 'replace' needs path, old_string and new_string.", hint="Give all three.")
    content = _text_of(context, path)
    if content is None:
        return {"success": False, "error": f"There is no file {path}.", "similar_files": _similar(context, path)}
    changed, count = replaced(content, old, new, replace_all=bool(args.get("replace_all")))
    if error := _write(context, path, _encoded(changed)):
        return {"success": False, "error": error}
    return {"success": True, "diff": _diff(path, content, changed), "files_modified": [path], "replacements": count}


def search_files(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """``target`` content: ``{matches | files | counts, total_count, truncated}``; files: ``{files, ...}``."""
    limit = min(args.get("limit") or SEARCH_LIMIT, MAX_SEARCH_LIMIT)
    offset = args.get("offset") or 0
    path = args.get("path") or "."
    if args.get("target", "content") == "files":
        return _find(context, args["pattern"], path, offset, limit)
    return _grep(context, args, path, offset, limit)


def _apply_patch(context: CallContext, args: dict[str, Any]) -> JsonValue:
    if not args.get("patch"):
        raise InvalidValueError("mode 'patch' needs the argument patch.", hint=f"Its form is: {FORM}.")
    before: dict[str, str | None] = {}

    def read(path: str) -> str | None:
        if path not in before:
            before[path] = _text_of(context, path)
        return before[path]

    after = worked_out(parsed(args["patch"]), read)
    for path, content in after.items():
        error = _delete(context, path) if content is None else _write(context, path, _encoded(content))
        if error:
            return {"success": False, "error": error, "note": "Files named before this one in the patch are changed."}
    diff = "\n".join(_diff(path, before.get(path) or "", content or "") for path, content in after.items())
    return {
        "success": True,
        "diff": diff,
        "files_modified": [path for path, content in after.items() if content is not None],
    }


def _find(context: CallContext, pattern: str, path: str, offset: int, limit: int) -> JsonValue:
    where = _resolved(context, path)
    skipped = " -o ".join(f"-name {shlex.quote(name)}" for name in _SKIPPED)
    by = "-path" if "/" in pattern else "-name"
    glob = f"*/{pattern.removeprefix('./').removeprefix('**/')}" if by == "-path" else pattern
    command = (
        f"find {shlex.quote(_operand(where))} -mindepth 1 \\( -type d \\( {skipped} \\) -prune \\) -o "
        f"\\( -type f {by} {shlex.quote(glob)} -print \\)"
    )
    done = context.sandbox().run(command, timeout_s=_SEARCH_S, limit_bytes=_SEARCH_BYTES)
    lines = done.output.decode(errors="replace").splitlines()
    problems = [line for line in lines if line.startswith("find: ")]
    files = sorted(line.removeprefix("./") for line in lines if not line.startswith("find: "))
    if not files and problems:
        return {"error": problems[0][:300]}
    return {"files": [*files[offset : offset + limit]], **_totals(len(files), offset, limit, done.cut)}


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
        path=shlex.quote(_operand(_resolved(context, path))),
    )
    done = context.sandbox().run(command, timeout_s=_SEARCH_S, limit_bytes=_SEARCH_BYTES)
    if done.error:
        return {"error": done.error}
    hits = _hits(done.output)
    if done.exit_code > 1 and not any(hit["match"] for hit in hits):
        return {"error": done.output.decode(errors="replace").strip()[:500] or "The search failed."}
    return _as_wanted(hits, mode, offset, limit, done.cut)


def _hits(output: bytes) -> list[dict[str, Any]]:
    """Lines of grep or rg: path, a null byte, number, ':' for a match or '-' for a line around one, content."""
    hits = []
    for raw in output.split(b"\n"):
        path, null, rest = raw.partition(b"\0")
        found = re.match(rb"(\d+)([:-])(.*)", rest, re.DOTALL) if null else None
        if found:
            name = path.decode(errors="replace").removeprefix("./")
            line = _cut(found[3].decode(errors="replace").rstrip("\r"))
            hits.append({"path": name, "line": int(found[1]), "content": line, "match": found[2] == b":"})
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
    shown = hits[offset : offset + limit]
    rows: list[JsonValue] = [
        {
            "path": hit["path"],
            "line": hit["line"],
            "content": hit["content"],
            **({} if hit["match"] else {"around": True}),
        }
        for hit in shown
    ]
    return {"matches": rows, **_totals(len(hits), offset, limit, cut), "match_count": len(matched)}


def _totals(total: int, offset: int, limit: int, cut: bool) -> dict[str, JsonValue]:
    rest = total > offset + limit
    hint: dict[str, JsonValue] = {"hint": f"Go on with offset={offset + limit}."} if rest else {}
    return {"total_count": total, "truncated": rest or cut, **hint}


def _resolved(context: CallContext, path: str) -> str:
    """``~`` is the sandbox's home."""
    if path != "~" and not path.startswith("~/"):
        return path
    home = context.state.get("home")
    if home is None:
        done = context.sandbox().run('printf %s "$HOME"', timeout_s=30.0, limit_bytes=4096)
        home = context.state["home"] = done.output.decode(errors="replace") or context.sandbox().workdir
    return home + path[1:]


def _operand(path: str) -> str:
    """A path that no program takes for an option."""
    return f"./{path}" if path.startswith("-") else path


def _text_of(context: CallContext, path: str) -> str | None:
    """A text file's content, None where there is no file. Raises InvalidValueError."""
    try:
        data = context.sandbox().read_bytes(_resolved(context, path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidValueError(_reason(path, error), hint="Choose another file.") from None
    content = _decoded(data)
    if content is None:
        raise InvalidValueError(f"{path} is no text.", hint="Change it with a command.")
    return content


def _write(context: CallContext, path: str, data: bytes) -> str | None:
    """Why it could not be written."""
    try:
        context.sandbox().write_bytes(_resolved(context, path), data)
    except OSError as error:
        return _reason(path, error)
    return None


def _delete(context: CallContext, path: str) -> str | None:
    done = context.sandbox().run(f"rm -- {shlex.quote(_resolved(context, path))}", timeout_s=30.0, limit_bytes=4096)
    return None if done.exit_code == 0 else f"{path} could not be deleted: {done.output.decode(errors='replace')[:200]}"


def _reason(path: str, error: OSError) -> str:
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder."
    return f"{path}: {error.strerror or type(error).__name__}."


def _decoded(data: bytes) -> str | None:
    if b"\0" in data[:8192]:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _encoded(content: str) -> bytes:
    return content.encode(errors="replace")  # half an emoji, which a model's JSON may hold


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:MAX_LINE_CHARS]}... [{len(line) - MAX_LINE_CHARS} more]"


def _similar(context: CallContext, path: str) -> list[JsonValue]:
    """Files of nearly the same name in the same folder."""
    folder, name = posixpath.split(_resolved(context, path))
    try:
        files = [one for one in context.sandbox().list_files(folder or ".") if "/" not in one]
    except OSError:
        return []
    near = difflib.get_close_matches(name, files, n=5, cutoff=0.5)
    return [posixpath.join(folder, one) for one in near]


def _diff(path: str, before: str, after: str) -> str:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), f"a/{path}", f"b/{path}", lineterm=""))
    more = [f"... [{len(lines) - _DIFF_LINES} more lines]"] if len(lines) > _DIFF_LINES else []
    return "\n".join(lines[:_DIFF_LINES] + more)


TOOLS = (
    Tool(
        "read_file",
        "file",
        "Read a text file. Each line comes as NUMBER|CONTENT.",
        arguments(
            ("path",),
            path=text("The file"),
            offset=whole("First line, from 1", minimum=1, default=1),
            limit=whole(f"How many lines (at most {MAX_READ_LINES})", minimum=1, default=READ_LINES),
        ),
        read_file,
        result_size_chars=float("inf"),
    ),
    Tool(
        "write_file",
        "file",
        "Write a whole file; replaces what is there and makes missing folders. For small changes use patch.",
        arguments(("path", "content"), path=text("The file"), content=text("All of its content")),
        write_file,
    ),
    Tool(
        "patch",
        "file",
        "Change files. mode 'replace': old_string, which must be in the file once, becomes new_string. mode 'patch': "
        "several changes at once.",
        arguments(
            (),
            mode=choice("How", "replace", "patch", default="replace"),
            path=text("For replace: the file"),
            old_string=text("For replace: the text as it stands, with enough around it to be there once"),
            new_string=text("For replace: what to put there; may be empty"),
            replace_all=flag("For replace: change every place"),
            patch=text(f"For patch: {FORM}"),
        ),
        patch,
    ),
    Tool(
        "search_files",
        "file",
        "Search contents of files by a regular expression (target 'content'), or files by a pattern such as *.py "
        "(target 'files').",
        arguments(
            ("pattern",),
            pattern=text("Regular expression, or for files a pattern with * and ?"),
            target=choice("What to search", "content", "files", default="content"),
            path=text("Folder or file to search in", default="."),
            file_glob=text("For content: only files of this pattern, such as *.py"),
            limit=whole(f"How many results (at most {MAX_SEARCH_LIMIT})", minimum=1, default=SEARCH_LIMIT),
            offset=whole("How many results to leave out", minimum=0, default=0),
            output_mode=choice(
                "For content: the lines, the files' names, or how many in each",
                "content",
                "files_only",
                "count",
                default="content",
            ),
            context=whole("For content: lines before and after each", minimum=0, default=0),
        ),
        search_files,
    ),
)
