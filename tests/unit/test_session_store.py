"""The selection on disk: nothing is lost, nothing is remembered elsewhere."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl_mcp.errors import HermesRLError, RevisionConflictError
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.configuration.session import Edit, Session, SessionStore


def edit(field: str, session: Session, value: int = 1, writer: str = "us", **seen: int | None) -> Edit:
    return Edit(field, value, writer, session.selection, **seen)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "hermes")


def test_without_a_file_nothing_is_selected(home: Home) -> None:
    assert SessionStore(home).read() == Session()
    assert not home.root.exists()


def test_every_change_raises_the_revision_and_the_file_is_private(home: Home) -> None:
    store = SessionStore(home)
    first = store.select(Session(environment="a"))
    second = store.edit(edit("x", first))
    assert (first.revision, second.revision) == (1, 2)
    assert SessionStore(home).read() == second
    assert stat.S_IMODE(home.session_file.stat().st_mode) == 0o600


def test_a_session_that_cannot_be_written_is_as_it_was_and_says_the_way_out(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore(home)
    first = store.select(Session(environment="a"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("hermes_rl_mcp.runs.configuration.session.write_atomic", full)
    with pytest.raises(HermesRLError, match=r"No space left on device. Nothing was changed") as caught:
        store.edit(edit("x", first))
    assert "Free some disk space" in caught.value.hint and store.read() == first


def test_sessions_of_different_names_do_not_meet(home: Home) -> None:
    SessionStore(home).select(Session(environment="a"))
    assert SessionStore(Home(home.root, "other")).read().environment is None


def test_an_edit_for_an_environment_that_was_selected_anew_is_refused_and_changes_nothing(home: Home) -> None:
    store = SessionStore(home)
    before = store.select(Session(environment="a"))
    after = store.select(Session(environment="b", selected_by="them"))
    with pytest.raises(RevisionConflictError, match="'b' was selected by them"):
        store.edit(edit("x", before))
    with pytest.raises(RevisionConflictError, match="since revision 1 environment 'b' was selected by them"):
        store.edit(edit("x", after, shown=before.revision))
    assert store.read() == after


def test_a_change_by_another_writer_that_was_not_shown_is_not_written_over(home: Home) -> None:
    store = SessionStore(home)
    first = store.select(Session(environment="a"))
    store.edit(edit("x", first, 2, "them"))
    with pytest.raises(
        RevisionConflictError, match=r"'x' was not changed: since revision 1 changed were x \(by them\)"
    ) as caught:
        store.edit(edit("x", first, 3, shown=first.revision))
    assert caught.value.details == {"revision": 2, "environment": "a", "changed_fields": {"x": "them"}}
    assert (store.read().revision, store.read().edits) == (2, {"x": 2})
    assert store.edit(edit("x", first, 3, shown=2)).edits == {"x": 3}
    assert store.edit(edit("y", first, 4, shown=None)).edits == {"x": 3, "y": 4}, "who was shown nothing may begin"


def test_ones_own_edits_since_the_last_look_are_no_conflict_unless_the_revision_is_given(home: Home) -> None:
    store = SessionStore(home)
    first = store.select(Session(environment="a", selected_by="us"))
    for number in range(3):
        store.edit(edit(f"x{number}", first, shown=first.revision))
    with pytest.raises(RevisionConflictError, match="x0") as caught:
        store.edit(edit("y", first, expected=first.revision, shown=first.revision))
    assert set(caught.value.details["changed_fields"]) == {"x0", "x1", "x2"}
    assert store.edit(edit("y", first, expected=4, shown=first.revision)).revision == 5
    with pytest.raises(RevisionConflictError):
        store.edit(edit("y", first, expected=6))


def test_a_file_that_was_damaged_and_begun_anew_is_nobodys_last_look(home: Home) -> None:
    store = SessionStore(home)
    seen = store.select(Session(environment="a"))
    seen = store.edit(edit("x", seen))
    home.session_file.write_text("{")
    anew = store.select(Session(environment="a"))
    assert anew.revision < seen.revision
    with pytest.raises(RevisionConflictError, match="was selected"):
        store.edit(edit("x", anew, shown=seen.revision))


def test_a_write_that_fails_leaves_the_file_as_it_was_and_the_lock_free(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore(home)
    before = store.select(Session(environment="a"))

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken, pytest.raises(HermesRLError, match="No space left"):
        broken.setattr("hermes_rl_mcp.runs.configuration.session.write_atomic", full)
        store.edit(edit("x", before))
    assert store.read() == before
    assert store.edit(edit("x", before)).revision == 2


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 99}', '{"surprise": 1}'])
def test_a_damaged_file_is_an_error_until_something_is_selected(home: Home, text: str) -> None:
    home.rl.mkdir(parents=True)
    home.session_file.write_text(text)
    store = SessionStore(home)
    with pytest.raises(HermesRLError, match="rl_select_environment"):
        store.read()
    assert store.select(Session(environment="a")).environment == "a"


def test_processes_that_edit_at_once_lose_no_edit(home: Home) -> None:
    SessionStore(home).select(Session(environment="a"))
    code = """
import sys
from pathlib import Path
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.configuration.session import Edit, SessionStore
store = SessionStore(Home(Path(sys.argv[1])))
for number in range(10):
    store.edit(Edit(f"{sys.argv[2]}{number}", 1, sys.argv[2], 1))
"""
    children = [subprocess.Popen([sys.executable, "-c", code, str(home.root), name]) for name in "abc"]
    assert [child.wait(timeout=60) for child in children] == [0, 0, 0]
    final = SessionStore(home).read()
    assert len(final.edits) == 30
    assert final.revision == 31
