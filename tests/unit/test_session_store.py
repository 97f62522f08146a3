"""The selection on disk: nothing is lost, nothing is remembered elsewhere."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl_mcp.errors import HermesRLError, RevisionConflictError
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.session import Session, SessionStore


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "hermes")


def test_without_a_file_nothing_is_selected(home: Home) -> None:
    assert SessionStore(home).read() == Session()
    assert not home.root.exists()


def test_every_change_raises_the_revision_and_the_file_is_private(home: Home) -> None:
    store = SessionStore(home)
    first = store.select(Session(environment="a"))
    second = store.update(lambda now: now.model_copy(update={"edits": {**now.edits, "x": 1}}))
    assert (first.revision, second.revision) == (1, 2)
    assert SessionStore(home).read() == second
    assert stat.S_IMODE(home.session_file.stat().st_mode) == 0o600


def test_sessions_of_different_names_do_not_meet(home: Home) -> None:
    SessionStore(home).select(Session(environment="a"))
    assert SessionStore(Home(home.root, "other")).read().environment is None


def test_an_edit_for_an_environment_that_was_selected_anew_is_refused_and_changes_nothing(home: Home) -> None:
    store = SessionStore(home)
    before = store.select(Session(environment="a"))
    after = store.select(Session(environment="b"))
    with pytest.raises(RevisionConflictError, match="'b'"):
        store.update(lambda now: now.model_copy(update={"edits": {"x": 1}}), selection=before.selection)
    assert store.read() == after


def test_a_change_that_fails_leaves_the_file_as_it_was(home: Home) -> None:
    store = SessionStore(home)
    before = store.select(Session(environment="a"))

    def fails(now: Session) -> Session:
        raise ValueError

    with pytest.raises(ValueError):
        store.update(fails)
    assert store.read() == before
    assert store.update(lambda now: now).revision == 2  # and the lock is free


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
from hermes_rl_mcp.runs.session import SessionStore
store = SessionStore(Home(Path(sys.argv[1])))
for number in range(10):
    store.update(lambda now: now.model_copy(update={"edits": {**now.edits, f"{sys.argv[2]}{number}": 1}}))
"""
    children = [subprocess.Popen([sys.executable, "-c", code, str(home.root), name]) for name in "abc"]
    assert [child.wait(timeout=60) for child in children] == [0, 0, 0]
    final = SessionStore(home).read()
    assert len(final.edits) == 30
    assert final.revision == 31
