"""terminal, process, files and todo, as a model uses them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.agent.tools.patches import parsed, worked_out
from hermes_rl_mcp.agent.tools.replacing import replaced
from hermes_rl_mcp.errors import InvalidValueError
from tests.tool_parts import Caller, wait_until


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Caller]:
    caller = Caller(tmp_path, {"TAVILY_API_KEY": "tvly-0123456789abcdef"})
    yield caller
    caller.close()


def test_a_command_gives_output_and_exit_code(call: Caller) -> None:
    assert call("terminal", command="echo out; echo err >&2; exit 3") == {
        "output": "out\nerr\n",
        "exit_code": 3,
        "error": None,
    }
    assert "no failure" in call("terminal", command="echo a | grep b")["exit_code_meaning"]
    assert call("terminal", command="sleep 60", timeout=1)["exit_code"] == 124
    with pytest.raises(InvalidValueError, match="empty"):
        call("terminal", command=" ")


def test_what_a_model_reads_of_a_command_is_bounded_plain_and_without_keys(call: Caller) -> None:
    shown = call("terminal", command="head -c 200000 /dev/zero | tr '\\0' x; echo end")["output"]
    assert len(shown) < 51_000 and shown.endswith("end\n") and "150004 characters left out" in shown
    shown = call("terminal", command=r"printf '\033[31mred\033[0m 10%%\r20%%\n tvly-0123456789abcdef'")["output"]
    assert shown == "red 10%\n20%\n ***"


def test_a_process_in_the_background_is_read_written_and_ended(call: Caller) -> None:
    command = 'while read line; do echo "got $line"; done'
    started = call("terminal", command=command, background=True, watch_patterns=["two"])
    name = started["session_id"]
    assert call("process", action="list")["processes"][0]["status"] == "running"
    call("process", action="submit", session_id=name, data="one")
    call("process", action="write", session_id=name, data="two\n")
    wait_until(lambda: call("process", action="log", session_id=name)["total_lines"] == 2)
    polled = call("process", action="poll", session_id=name)
    assert polled["output"] == "got one\ngot two\n" and polled["watch_matches"] == ["got two"]
    assert call("process", action="poll", session_id=name)["output"] == ""
    assert call("process", action="log", session_id=name, limit=1)["output"] == "got two"
    assert "still runs" in call("process", action="wait", session_id=name, timeout=1)["note"]
    call("process", action="close", session_id=name)
    assert call("process", action="wait", session_id=name)["exit_code"] == 0
    other = call("terminal", command="sleep 100", background=True)["session_id"]
    assert call("process", action="kill", session_id=other)["status"] == "killed"
    assert "There are: p1, p2" in call("process", action="poll", session_id="p9")["error"]


def test_a_file_is_written_and_read_in_parts_with_numbers(call: Caller) -> None:
    call("write_file", path="a/b.txt", content="".join(f"line {n}\n" for n in range(1, 1201)))
    first = call("read_file", path="a/b.txt")
    assert first["content"].startswith("1|line 1\n2|line 2\n") and first["content"].endswith("500|line 500")
    assert first["total_lines"] == 1200 and first["truncated"] and "offset=501" in first["hint"]
    last = call("read_file", path="a/b.txt", offset=1200)
    assert last["content"] == "1200|line 1200" and not last["truncated"]
    assert call("read_file", path="~/a/b.txt", limit=1)["content"] == "1|line 1"


def test_what_cannot_be_read_as_text_is_said_to_be_so(call: Caller) -> None:
    call("write_file", path="words.txt", content="x")
    missing = call("read_file", path="word.txt")
    assert "no file word.txt" in missing["error"] and missing["similar_files"] == ["words.txt"]
    call.sandbox.write_bytes("b.bin", b"\0\1\2")
    assert "no UTF-8 text" in call("read_file", path="b.bin")["error"]
    call.sandbox.write_bytes("d/x", b"")
    assert "folder" in call("read_file", path="d")["error"]
    assert "folder" in call("write_file", path="d", content="x")["error"]
    with pytest.raises(InvalidValueError, match="no UTF-8 text"):
        call("patch", path="b.bin", old_string="a", new_string="b")


def test_a_text_is_replaced_where_it_is_once(call: Caller) -> None:
    call("write_file", path="f.py", content="a = 1\nb = 1\n")
    done = call("patch", path="f.py", old_string="a = 1", new_string="a = 2")
    assert done["success"] and "-a = 1\n+a = 2" in done["diff"]
    with pytest.raises(InvalidValueError, match="2 times"):
        call("patch", path="f.py", old_string=" = ", new_string="=")
    assert call("patch", path="f.py", old_string=" = ", new_string="=", replace_all=True)["replacements"] == 2
    assert call.sandbox.read_bytes("f.py") == b"a=2\nb=1\n"
    assert call("patch", path="g.py", old_string="a", new_string="b")["success"] is False


@pytest.mark.parametrize(
    ("content", "old", "new", "wanted"),
    [
        ("a  \nb\n", "a\nb\n", "c\n", "c\n"),
        ("x = f(1,  2)\n", "x = f(1, 2)", "y", "y\n"),
        ("if a:\n        b\n        c\n", "b\nc", "d\ne", "if a:\n        d\n        e\n"),
        ("if a:\n    b\n", "        b", "        c", "if a:\n    c\n"),
        ("a\nb", "b", "c", "a\nc"),
    ],
    ids=["blanks-at-ends", "many-blanks", "indentation", "less-indentation", "no-line-end"],
)
def test_a_text_with_wrong_blanks_is_found_all_the_same(content: str, old: str, new: str, wanted: str) -> None:
    assert replaced(content, old, new) == (wanted, 1)


def test_a_file_keeps_its_line_ends_and_its_missing_last_one(call: Caller) -> None:
    call.sandbox.write_bytes("w.txt", b"\xef\xbb\xbfa\r\nb\r\nc\r\n")
    assert call("read_file", path="w.txt")["content"] == "1|a\n2|b\n3|c"
    assert "-b\n+B\n+B2" in call("patch", path="w.txt", old_string="a\nb", new_string="a\r\nB\nB2")["diff"]
    call("patch", mode="patch", patch="*** Update File: w.txt\n B\n-B2\n+d\n*** Move to: v.txt")
    assert call.sandbox.read_bytes("v.txt") == b"\xef\xbb\xbfa\r\nB\r\nd\r\nc\r\n"
    call.sandbox.write_bytes("n.txt", b"a\nb")
    call("patch", mode="patch", patch="*** Update File: n.txt\n a\n-b\n+c")
    assert call.sandbox.read_bytes("n.txt") == b"a\nc"
    call.sandbox.write_bytes("mixed.txt", b"a\r\nb\n")
    call("patch", path="mixed.txt", old_string="b", new_string="c")
    assert call.sandbox.read_bytes("mixed.txt") == b"a\r\nc\n"


def test_odd_files_are_searched_read_and_refused_for_what_they_are(call: Caller) -> None:
    for name in ("one\ntwo.txt", "名前 🙂.txt"):
        call("write_file", path=name, content="needle\n" * 2)
    call.sandbox.write_bytes("latin.txt", "caf\xe9 needle".encode("latin-1"))
    assert _paths(call("search_files", pattern="needle", file_glob="*[!n].txt", limit=2)) == [
        "one\ntwo.txt:1",
        "one\ntwo.txt:2",
    ]
    assert call("search_files", pattern="*o*", target="files")["files"] == ["one\ntwo.txt"]
    assert call("search_files", pattern="needle", path="名前 🙂.txt", output_mode="count")["counts"] == {
        "名前 🙂.txt": 2
    }
    assert "no UTF-8 text" in call("read_file", path="latin.txt")["error"]
    call("write_file", path="half.txt", content="\ud83d half")
    assert call("read_file", path="half.txt")["content"] == "1|? half"
    call.sandbox.write_bytes("empty", b"")
    assert call("read_file", path="empty") == {"content": "", "total_lines": 0, "file_size": 0, "truncated": False}
    call.sandbox.write_bytes("many", b"line\n" * 3_000_000 + b"last")
    found = call("read_file", path="many", offset=3_000_000, limit=5)
    assert found["content"] == "3000000|line\n3000001|last" and found["total_lines"] == 3_000_001
    assert "has 3000001 lines" in call("read_file", path="many", offset=3_000_009)["hint"]
    with pytest.raises(InvalidValueError):
        call("write_file", path="", content="x")


def test_a_text_that_is_not_there_is_no_guess() -> None:
    with pytest.raises(InvalidValueError, match="not in the file") as caught:
        replaced("def f():\n    return 1\n", "def f():\n    return 2\n", "x")
    assert "line 1" in caught.value.hint
    for old, new in (("", "x"), ("same", "same")):
        with pytest.raises(InvalidValueError):
            replaced("same", old, new)


PATCH = """*** Begin Patch
*** Update File: a.py
@@ def f
 def f():
-    return 1
+    return 2
@@
+# the end
*** Add File: new/b.py
+print("b")
*** Delete File: old.py
*** Move File: c.py -> d.py
*** End Patch
"""


def test_a_patch_changes_adds_deletes_and_moves(call: Caller) -> None:
    for name, content in {"a.py": "def f():\n    return 1\n", "old.py": "x", "c.py": "c\n"}.items():
        call("write_file", path=name, content=content)
    done = call("patch", mode="patch", patch=PATCH)
    assert done["success"] and set(done["files_modified"]) == {"a.py", "new/b.py", "d.py"}
    assert call.sandbox.list_files(".") == ["a.py", "d.py", "new/b.py"]
    assert call.sandbox.read_bytes("a.py") == b"def f():\n    return 2\n# the end\n"
    assert call.sandbox.read_bytes("new/b.py") == b'print("b")\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "begins with"),
        ("*** Update File: a\n x\n-y\n+z", "hunk 1"),
        ("*** Update File: none\n-y\n+z", "no file none"),
        ("*** Add File: a\n+x", "already"),
        ("*** Move File: a", "OLD -> NEW"),
        ("*** Update File: a\nx", "neither"),
    ],
    ids=["no-patch", "no-place", "no-file", "there-already", "no-goal", "no-sign"],
)
def test_a_patch_that_does_not_fit_changes_nothing(text: str, says: str) -> None:
    files = {"a": "line\n"}
    with pytest.raises(InvalidValueError, match=says):
        worked_out(parsed("*** Update File: a\n-line\n+row\n" + text if says == "hunk 1" else text), files.get)
    assert files == {"a": "line\n"}


def _paths(found: Any) -> list[str]:
    return [f"{one['path']}:{one['line']}" for one in found["matches"]]


def test_contents_and_names_are_searched(call: Caller) -> None:
    for name in ("b.py", "a.py", "sub/c.py", ".git/d.py", "e.txt"):
        call("write_file", path=name, content="one\ntwo 2\nthree\n")
    assert _paths(call("search_files", pattern=r"two \d", file_glob="*.py")) == ["a.py:2", "b.py:2", "sub/c.py:2"]
    around = call("search_files", pattern="two", path="e.txt", context=1)
    assert _paths(around) == ["e.txt:1", "e.txt:2", "e.txt:3"] and around["match_count"] == 1
    assert call("search_files", pattern="o", output_mode="count", file_glob="a.py")["counts"] == {"a.py": 2}
    some = call("search_files", pattern="one", output_mode="files_only", limit=2)
    assert some["files"] == ["a.py", "b.py"] and some["total_count"] == 4 and "offset=2" in some["hint"]
    assert call("search_files", pattern="*.py", target="files")["files"] == ["a.py", "b.py", "sub/c.py"]
    assert call("search_files", pattern="sub/*.py", target="files")["files"] == ["sub/c.py"]
    assert call("search_files", pattern="nothing of it")["matches"] == []
    assert "error" in call("search_files", pattern="(")
    assert "error" in call("search_files", pattern="x", path="none")
    assert "error" in call("search_files", pattern="*", target="files", path="none")


def test_names_are_no_commands(call: Caller) -> None:
    call("write_file", path="a b;touch x", content="found\n")
    assert _paths(call("search_files", pattern="found")) == ["a b;touch x:1"]
    assert call("search_files", pattern="$(touch y)", path="a b;touch x")["matches"] == []
    call("search_files", pattern="-f", path="-x")
    call("patch", mode="patch", patch="*** Delete File: a b;touch x")
    assert call.sandbox.list_files(".") == []


def test_a_list_of_things_to_do_is_kept_merged_and_counted(call: Caller) -> None:
    assert call("todo")["summary"]["total"] == 0
    call("todo", todos=[{"id": "1", "content": "a", "status": "in_progress"}, {"id": "2", "content": "b"}])
    found = call("todo", todos=[{"id": "1", "status": "completed"}, {"id": "3", "content": "c"}], merge=True)
    assert [(one["id"], one["status"]) for one in found["todos"]] == [
        ("1", "completed"),
        ("2", "pending"),
        ("3", "pending"),
    ]
    assert found["summary"] == {"total": 3, "pending": 2, "in_progress": 0, "completed": 1, "cancelled": 0}
    assert call("todo", todos=[{"id": "9", "content": "new"}])["summary"]["total"] == 1
    with pytest.raises(InvalidValueError, match="no content"):
        call("todo", todos=[{"id": "7"}], merge=True)
    with pytest.raises(InvalidValueError, match="done"):
        call("todo", todos=[{"id": "7", "content": "x", "status": "done"}])
    assert call("todo")["summary"]["total"] == 1
