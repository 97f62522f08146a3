"""What is read from folders that others can write to: regular files of a bounded size inside of them, nothing else."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from pathlib import Path

import pytest
from diagnosis_parts import record
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_rl_mcp import files
from hermes_rl_mcp.catalog import scan as scan_module
from hermes_rl_mcp.catalog.scan import find, scan
from hermes_rl_mcp.checkpoints import MARKER
from hermes_rl_mcp.contracts.runs import RunRecord
from hermes_rl_mcp.errors import UnknownEnvironmentError, UnknownRunError, UnreadableRunError
from hermes_rl_mcp.files import NotAFileError, append_line, read_file, read_tail, trim_log
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.operations.status import snapshot
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.env_state import read_env_state
from hermes_rl_mcp.runs.state import RunState
from hermes_rl_mcp.runs.store import RunStore, Unreadable
from hermes_rl_mcp.runs.watch import vitals

RUN = "0123abcd"
ENVIRONMENT = "from hermes_rl_mcp.envs import BaseEnv\nclass A(BaseEnv):\n    name = 'a'\n"
QUICK_S = 30.0
"""Far more than a look takes, far less than for ever."""

NASTY_NAMES = st.one_of(
    st.text(),
    st.sampled_from(
        [
            *("..", "../", "../../etc/passwd", "/etc/passwd", "%2e%2e%2f", "..\\..\\x", "CON", "nul.txt", "a.", "a "),
            *(
                "0123abcd\n",
                "0123abcd\0",
                "0123ABCD",
                "\uff10\uff11\uff12\uff13abcd",
                "0123abcd/",
                "./0123abcd",
                "0123\u0430bcd",
                "x" * 5000,
            ),
            *("~", "~root", "-rf", "$(id)", "file:///etc/passwd", "", ".", "session", "\ud800"),
        ]
    ),
    st.builds(lambda parts: "/".join(parts), st.lists(st.sampled_from(["..", "etc", "passwd", ".", "", "rl", "runs"]))),
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.run(RUN).dir.mkdir(parents=True)
    home.logs.mkdir(parents=True)
    return home


@given(name=NASTY_NAMES)
def test_sec_10_no_name_but_eight_hex_digits_is_a_run(name: str) -> None:
    home = Home(Path("/nowhere"))
    if len(name) == 8 and all(c in "0123456789abcdef" for c in name):
        return
    with pytest.raises(ValueError, match="not a run id"):
        home.run(name)


@given(name=NASTY_NAMES, process=NASTY_NAMES)
def test_sec_10_no_log_lies_outside_of_the_folder_of_logs(name: str, process: str) -> None:
    home = Home(Path("/nowhere"))
    try:
        path = home.log(process, RUN)
    except ValueError:
        return
    assert path.parent == home.logs and path.name == f"{process}_{RUN}.log"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(name=NASTY_NAMES)
def test_sec_10_a_store_and_a_catalog_know_only_what_they_listed(name: str, home: Home) -> None:
    if name == RUN:
        return
    with pytest.raises(UnknownRunError):
        RunStore(home).get(name)
    with pytest.raises(UnknownEnvironmentError):
        find([], name)


def test_sec_11_a_link_to_a_file_elsewhere_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "passwd"
    secret.write_text("root:x")
    folder = tmp_path / "envs"
    folder.mkdir()
    (folder / "link.py").symlink_to(secret)
    with pytest.raises(NotAFileError, match="leads out"):
        read_file(folder / "link.py", inside=folder)
    with pytest.raises(OSError, match="not a regular file"):
        read_file(folder / "link.py")


def test_sec_11_a_neighbour_whose_name_begins_alike_is_outside(tmp_path: Path) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs-evil").mkdir()
    (tmp_path / "envs-evil" / "a.py").write_text(ENVIRONMENT)
    (tmp_path / "envs" / "a.py").symlink_to(tmp_path / "envs-evil" / "a.py")
    found = scan(None, [tmp_path / "envs"])
    assert found.environments == [] and "leads out" in found.problems[0].reason


def test_sec_11_a_file_swapped_for_a_link_between_look_and_open_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text(ENVIRONMENT)
    folder = tmp_path / "envs"
    folder.mkdir()
    victim = folder / "a.py"
    victim.write_text(ENVIRONMENT)
    honest = os.open

    def swapping(path: str | Path, flags: int, *rest: int) -> int:
        if Path(path) == victim:  # after every look at it, before the open
            victim.unlink()
            victim.symlink_to(secret)
        return honest(path, flags, *rest)

    monkeypatch.setattr(files.os, "open", swapping)
    found = scan(None, [folder])
    assert found.environments == [] and "leads out" in found.problems[0].reason


def test_sec_11_a_log_swapped_for_a_link_between_look_and_open_is_not_read(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = home.log("trainer", RUN)
    log.write_text("harmless")
    (tmp_path / "secret").write_text("s3cret")
    honest = os.open

    def swapping(path: str | Path, flags: int, *rest: int) -> int:
        log.unlink()
        log.symlink_to(tmp_path / "secret")
        return honest(path, flags, *rest)

    monkeypatch.setattr(files.os, "open", swapping)
    with pytest.raises(OSError, match="symbolic links"):
        read_tail(log, 1000)


def test_sec_11_a_run_that_is_a_link_is_no_run(home: Home, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "89abcdef"
    elsewhere.mkdir(parents=True)
    (elsewhere / "run.json").write_text("{}")
    (home.runs / "89abcdef").symlink_to(elsewhere)
    with pytest.raises(UnknownRunError):
        RunStore(home).get("89abcdef")
    assert {run.run_id for run in RunStore(home).list()} == {RUN}


def test_sec_11_a_record_that_is_a_link_is_unreadable_and_its_target_unread(home: Home, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"token": "s3cret"}')
    home.run(RUN).record.symlink_to(tmp_path / "secret")
    with pytest.raises(UnreadableRunError) as error:
        RunStore(home).get(RUN)
    assert "s3cret" not in str(error.value)


def test_sec_11_a_log_that_is_a_link_is_neither_shown_nor_cut_nor_written_through(home: Home, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("x" * 5000)
    link = home.log("trainer", RUN)
    link.symlink_to(target)
    with pytest.raises(OSError):
        read_tail(link, 1000)
    assert not trim_log(link, 1000, 10)
    with pytest.raises(OSError):
        append_line(link, "more")
    assert target.read_text() == "x" * 5000


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def _device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # an endless one: /dev/zero
    except PermissionError:
        pytest.skip("this user cannot make device files")


def _five_gigabytes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(5 << 30)  # takes no room on the disk


@pytest.mark.parametrize("make", [_pipe, _socket, _device, _five_gigabytes])
def test_sec_12_what_is_no_file_of_a_sane_size_is_refused_at_once(tmp_path: Path, make: object, home: Home) -> None:
    folder = tmp_path / "envs"
    folder.mkdir()
    (folder / "good.py").write_text(ENVIRONMENT)
    paths = home.run(RUN)
    for place in (folder / "odd.py", paths.record):
        make(place)  # type: ignore[operator]
    began = time.monotonic()
    found = scan(None, [folder])
    assert [info.name for info in found.environments] == ["a"]
    assert "not a regular file" in found.problems[0].reason or "larger than" in found.problems[0].reason
    [run] = RunStore(home).list()
    assert isinstance(run, Unreadable)
    assert time.monotonic() - began < QUICK_S


@pytest.mark.parametrize("make", [_pipe, _device, _five_gigabytes])
def test_sec_12_a_log_of_another_kind_blocks_nobody(home: Home, make: object) -> None:
    log = home.log("env", RUN)
    make(log)  # type: ignore[operator]
    done = threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError):
            assert len(read_tail(log, 8192)) <= 8192
        done.set()

    threading.Thread(target=read, daemon=True).start()
    assert done.wait(QUICK_S)


@pytest.mark.parametrize("make", [_pipe, _device, _five_gigabytes])
def test_sec_12_no_file_of_a_run_that_is_something_else_blocks_who_looks_at_the_run(home: Home, make: object) -> None:
    paths = home.run(RUN)
    RunState.create(paths, record(), "test")
    checkpoint = paths.checkpoints / "step_1"
    checkpoint.mkdir(parents=True)
    paths.events.unlink()
    places = [paths.events, paths.stop_request, paths.metrics, paths.progress, paths.wandb_state, paths.env_metrics]
    places += [paths.env_state, paths.vitals, paths.request, paths.report("trainer"), checkpoint / MARKER]
    for place in places:
        make(place)  # type: ignore[operator]
    context = Operations.from_environ({"HERMES_HOME": str(home.root)}).context
    done = threading.Event()

    def look() -> None:
        [run] = context.runs.list()  # its supervisor is gone, so whoever looks closes it
        assert isinstance(run, RunRecord)
        assert snapshot(context, RunReader(context, run)).status == "interrupted"
        assert context.runs.checkpoints(RUN) == []
        assert read_env_state(paths) is None and vitals._text(paths.progress) is None
        done.set()

    threading.Thread(target=look, daemon=True).start()
    assert done.wait(QUICK_S)


def test_sec_12_a_hard_link_grants_nothing_and_is_read_as_the_file_it_is(tmp_path: Path) -> None:
    """Package managers hard-link what they install, so links of this kind cannot be refused; and nobody can make one
    to a file that the user could not read anyway. What is not an environment stays unread beyond its parse."""
    (tmp_path / "passwd").write_text("root:x:0:0\n")
    folder = tmp_path / "envs"
    folder.mkdir()
    os.link(tmp_path / "passwd", folder / "hard.py")
    found = scan(None, [folder])
    assert found.environments == [] and "root" not in found.problems[0].reason


def test_sec_12_a_scan_ends_also_in_a_folder_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "MAX_FILES", 5)
    for number in range(9):
        (tmp_path / f"{number}.py").write_text("")
    [problem] = scan(None, [tmp_path]).problems
    assert "more than 5" in problem.reason


def test_sec_25_what_is_made_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.make_private_dir(tmp_path / "a" / "b")
        files.write_atomic(tmp_path / "a" / "whole", "x")
        files.create_once(tmp_path / "a" / "once", "x")
        append_line(tmp_path / "a" / "line", "x")
        big = tmp_path / "a" / "log"
        big.touch(0o600)
        big.write_text("x" * 100)
        trim_log(big, 10, 5)
    finally:
        os.umask(before)
    for path in (tmp_path / "a").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert (tmp_path / "a" / "log.1").read_text() == "xxxxx"
