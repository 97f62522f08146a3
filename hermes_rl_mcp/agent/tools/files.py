"""read_file, write_file and patch in the task's sandbox.

Invariant: a change is worked out before it is written, a file that is no text is never changed by a text tool, and a
file keeps the line ends that it has.
"""

from __future__ import annotations

import difflib
import io
import itertools
import posixpath
import shlex
from typing import Any

from pydantic import JsonValue

from hermes_rl_mcp.agent.interfaces import CallContext, Tool
from hermes_rl_mcp.agent.tools.patches import FORM, parsed, worked_out
from hermes_rl_mcp.agent.tools.paths import cut_line, resolved
from hermes_rl_mcp.agent.tools.replacing import replaced
from hermes_rl_mcp.agent.tools.schema import arguments, choice, flag, text, whole
from hermes_rl_mcp.agent.tools.searching import MAX_SEARCH_LIMIT, SEARCH_LIMIT, search_files
from hermes_rl_mcp.errors import InvalidValueError

READ_LINES, MAX_READ_LINES = 500, 2000
_DIFF_LINES = 400
_BOM = "\ufeff"


def read_file(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """``{content, total_lines, file_size, truncated}``; each line with its number and a bar in front."""
    path: str = args["path"]
    try:
        data = context.sandbox().read_bytes(resolved(context, path))
    except FileNotFoundError:
        return {"error": f"There is no file {path}.", "similar_files": _similar(context, path)}
    except OSError as error:
        return {"error": _reason(path, error)}
    if _decoded(data) is None:
        return {"error": f"{path} is no UTF-8 text ({len(data)} bytes).", "file_size": len(data)}
    total = data.count(b"\n") + bool(data and not data.endswith(b"\n"))
    first = args.get("offset") or 1
    limit = min(args.get("limit") or READ_LINES, MAX_READ_LINES)
    # Not all lines as strings at once: a file may have many millions.
    shown = [raw.decode().rstrip("\r\n") for raw in itertools.islice(io.BytesIO(data), first - 1, first - 1 + limit)]
    result: dict[str, JsonValue] = {
        "content": "\n".join(f"{n}|{cut_line(line.removeprefix(_BOM))}" for n, line in enumerate(shown, first)),
        "total_lines": total,
        "file_size": len(data),
        "truncated": first - 1 + len(shown) < total,
    }
    if first > max(total, 1):
        result |= {"truncated": False, "hint": f"The file has {total} lines."}
    elif result["truncated"]:
        result["hint"] = f"Go on with offset={first + len(shown)}."
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
    unix, line_end = content
    old, new = (one.replace("\r\n", "\n") if line_end != "\n" else one for one in (old, new))
    changed, count = replaced(unix, old, new, replace_all=bool(args.get("replace_all")))
    if error := _write(context, path, _encoded(changed, line_end)):
        return {"success": False, "error": error}
    return {"success": True, "diff": _diff(path, unix, changed), "files_modified": [path], "replacements": count}


def _apply_patch(context: CallContext, args: dict[str, Any]) -> JsonValue:
    if not args.get("patch"):
        raise InvalidValueError("mode 'patch' needs the argument patch.", hint=f"Its form is: {FORM}.")
    before: dict[str, str | None] = {}
    line_ends: dict[str, str] = {}

    def read(path: str) -> str | None:
        if path not in before:
            found = _text_of(context, path)
            before[path], line_ends[path] = found or (None, "\n")
        return before[path]

    changes = parsed(args["patch"])
    after = worked_out(changes, read)
    moved = {one.new_path: one.path for one in changes if one.new_path}
    for path, content in after.items():
        line_end = line_ends.get(moved.get(path, path), "\n")
        error = _delete(context, path) if content is None else _write(context, path, _encoded(content, line_end))
        if error:
            return {"success": False, "error": error, "note": "Files named before this one in the patch are changed."}
    diff = "\n".join(_diff(path, before.get(path) or "", content or "") for path, content in after.items())
    return {
        "success": True,
        "diff": diff,
        "files_modified": [path for path, content in after.items() if content is not None],
    }


def _text_of(context: CallContext, path: str) -> tuple[str, str] | None:
    """A text file's content with plain line ends, and the line end it has; None where there is no file. A file whose
    line ends differ stays as it is. Raises InvalidValueError."""
    try:
        data = context.sandbox().read_bytes(resolved(context, path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidValueError(_reason(path, error), hint="Choose another file.") from None
    content = _decoded(data)
    if content is None:
        raise InvalidValueError(f"{path} is no UTF-8 text.", hint="Change it with a command.")
    if "\r\n" in content and content.count("\r\n") == content.count("\n"):
        return content.replace("\r\n", "\n"), "\r\n"
    return content, "\n"


def _write(context: CallContext, path: str, data: bytes) -> str | None:
    """Why it could not be written."""
    try:
        context.sandbox().write_bytes(resolved(context, path), data)
    except OSError as error:
        return _reason(path, error)
    return None


def _delete(context: CallContext, path: str) -> str | None:
    done = context.sandbox().run(f"rm -- {shlex.quote(resolved(context, path))}", timeout_s=30.0, limit_bytes=4096)
    return None if done.exit_code == 0 else f"{path} could not be deleted: {done.output.decode(errors='replace')[:200]}"


def _reason(path: str, error: OSError) -> str:
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder."
    return f"{path}: {error.strerror or error or type(error).__name__}."


def _decoded(data: bytes) -> str | None:
    if b"\0" in data[:8192]:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _encoded(content: str, line_end: str = "\n") -> bytes:
    if line_end != "\n":
        content = content.replace("\n", line_end)
    return content.encode(errors="replace")  # half an emoji, which a model's JSON may hold


def _similar(context: CallContext, path: str) -> list[JsonValue]:
    """Files of nearly the same name in the same folder."""
    folder, name = posixpath.split(resolved(context, path))
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
            path=text("The file", minLength=1),
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
        arguments(("path", "content"), path=text("The file", minLength=1), content=text("All of its content")),
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
