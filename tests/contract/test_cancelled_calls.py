"""A call that is cancelled in the middle leaves what was, or what it had already brought about, whole; never a half.

Each tool is stopped at the place where it waits longest: for a child, for news, for a person, for the disk.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import mcp.types as t
import psutil
import pytest
from many_runs import fill
from mcp import Client
from mcp_rig import Tools, environment_file
from run_parts import run_request

from hermes_rl_mcp.contracts.runs import RunRecord, Starter
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.settings import Flags
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs import launch
from hermes_rl_mcp.server.app import HermesServer, build_server

ENDED, WAITING = "00000001", "0000beef"
pytestmark = pytest.mark.anyio
eras = pytest.mark.parametrize("mode", ["auto", "legacy"])
SLOW = """
import pathlib, time
here = pathlib.Path(__file__).parent
if (here / "slow").exists():
    (here / "begun").touch()
    time.sleep(300)
"""
"""An environment whose import takes for ever while a file ``slow`` lies beside it, and which says when it has begun."""


class World:
    """A server, its home and its environments."""

    def __init__(self, environ: dict[str, str], folder: Path) -> None:
        self.envs = folder / "envs"
        self.file = environment_file(self.envs, SLOW)
        self.home = Home.from_environ(environ)
        fill(self.home, 1, steps=3, log_bytes=100)
        self.server: HermesServer = build_server(Operations.from_environ(environ, Flags(env_dirs=[str(self.envs)])))

    @asynccontextmanager
    async def client(self, mode: Any, person: Any = None) -> AsyncIterator[Tools]:
        async with Client(self.server, mode=mode, elicitation_callback=person) as client:
            yield Tools(client, (await client.list_tools()).tools)

    def slow(self) -> None:
        """From now on the environment does not get done, and has to be described anew."""
        (self.envs / "slow").touch()
        self.file.write_text(self.file.read_text() + "\n")

    def quick(self) -> None:
        (self.envs / "slow").unlink(missing_ok=True)
        (self.envs / "begun").unlink(missing_ok=True)

    def begun(self) -> bool:
        return (self.envs / "begun").exists()

    def children(self) -> list[psutil.Process]:
        """That run the environment's code."""
        found = psutil.Process().children(recursive=True)
        alive = [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        return [one for one in alive if any(str(self.file) in part for part in one.cmdline())]

    def state(self) -> dict[str, bytes]:
        """All that a tool may change."""
        home = self.home
        folders = (home.runs, home.checks, home.inference_tests, home.exports)
        files = [home.session_file, *(path for folder in folders if folder.exists() for path in folder.rglob("*"))]
        return {str(path): path.read_bytes() for path in files if path.is_file()}


@pytest.fixture
def world(environ: dict[str, str], tmp_path: Path) -> World:
    return World(environ, tmp_path)


@pytest.fixture
def waiting(world: World) -> Iterator[RunRecord]:
    """A run that goes on: the test has its supervisor's lock."""
    request = run_request(WAITING, started_by=Starter(client="theirs"))
    with launch._draft(world.home, request) as (draft, lock):
        launch._publish(world.home, request, draft)
    yield world.server.operations.context.runs.get(WAITING)
    lock.release()


async def cancelled(
    call: Tools,
    tool: str,
    arguments: dict[str, Any],
    reached: Callable[[], object],
    *,
    release: Callable[[], None] = lambda: None,
    note: Any = None,
) -> None:
    """Calls, and cancels the call once ``reached``; ``release`` lets go of what no cancellation can end. ``note`` takes
    progress notes."""
    scope = anyio.CancelScope()
    answers: list[t.CallToolResult] = []

    async def ask() -> None:
        with scope:
            answers.append(await call.client.call_tool(tool, arguments, progress_callback=note))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: answers or reached())
        assert not answers, "it was not in the middle"
        scope.cancel()
        release()


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(60):
        while True:
            if condition():
                return
            await anyio.sleep(0.01)


@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.slow)])
async def test_one_that_waits_for_an_environments_own_code_ends_it_and_changes_nothing(world: World, mode: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("rl_select_environment", {"name": "own"}),
        ("rl_get_current_config", {}),
        ("rl_edit_config", {"field": "level", "value": 7}),
        ("rl_test_inference", {"wait_seconds": 0}),
        ("rl_start_training", {}),
    ]
    async with world.client(mode) as call:
        await call("rl_select_environment", name="own")
        await call("rl_edit_config", field="learning_rate", value=1e-4)
        before = world.state()
        for tool, arguments in calls:
            world.slow()
            await cancelled(call, tool, arguments, world.begun)
            await until(lambda: not world.children())
            assert world.state() == before, tool
            world.quick()
        assert (await call("rl_edit_config", field="level", value=2))["value"] == 2


class Blocked:
    """Stands in for a function that reads the disk: it does not come back until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        owner, _, attribute = name.rpartition(".")
        original = _resolved(owner, attribute)

        def blocked(*arguments: Any, **named: Any) -> Any:
            self.reached.set()
            assert self.released.wait(60)
            return original(*arguments, **named)

        monkeypatch.setattr(name, blocked)


def _resolved(owner: str, attribute: str) -> Any:
    import pydoc

    found: Any = pydoc.locate(owner)
    assert found is not None, owner
    return getattr(found, attribute)


@eras
@pytest.mark.parametrize(
    ("tool", "arguments", "reads"),
    [
        ("rl_list_environments", {}, "hermes_rl_mcp.operations.environments.scan"),
        ("rl_get_results", {"run_id": ENDED}, "hermes_rl_mcp.runs.store.RunStore.every"),
        ("rl_list_runs", {}, "hermes_rl_mcp.runs.store.RunStore.list"),
        ("rl_check_status", {"run_id": ENDED}, "hermes_rl_mcp.runs.store.RunStore.recent"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("rl_") else "",
)
async def test_one_that_only_reads_changes_nothing_and_the_server_goes_on(
    world: World, mode: str, tool: str, arguments: dict[str, Any], reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.client(mode) as call:
        await call(tool, **arguments)
        before = world.state()
        with monkeypatch.context() as patch:
            blocked = Blocked(patch, reads)
            await cancelled(call, tool, arguments, blocked.reached.is_set, release=blocked.released.set)
        await call(tool, **arguments)
        if tool != "rl_check_status":
            assert world.state() == before


@eras
async def test_one_that_waits_for_news_of_a_run_does_not_arm_the_limit_on_checks(
    world: World, waiting: RunRecord, mode: str
) -> None:
    noted: list[str | None] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        noted.append(message)

    async with world.client(mode) as call:
        before = world.state()
        await cancelled(call, "rl_check_status", {"run_id": WAITING, "wait_seconds": 50}, lambda: noted, note=note)
        assert world.state() == before
        answer = await call("rl_check_status", run_id=WAITING)
        assert (answer["status"], answer["rate_limited"]) == (waiting.status, False)


@eras
async def test_a_stop_that_was_asked_for_holds_though_its_call_was_cancelled(
    world: World, waiting: RunRecord, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = world.home.run(WAITING).stop_request
    monkeypatch.setattr("hermes_rl_mcp.runs.launch._STOP_ANSWER_S", 40.0)
    async with world.client(mode) as call:
        await cancelled(call, "rl_stop_training", {"run_id": WAITING, "confirm": True}, request.exists)
        assert json.loads(request.read_text())["reason"] == "rl_stop_training"
        monkeypatch.setattr("hermes_rl_mcp.runs.launch._STOP_ANSWER_S", 0.0)
        assert "Stopping" in (await call("rl_stop_training", run_id=WAITING))["message"]


async def test_a_question_that_is_cancelled_while_the_person_thinks_is_no_yes(world: World, waiting: RunRecord) -> None:
    asked: list[str] = []

    async def thinks(context: Any, params: t.ElicitRequestFormParams) -> t.ElicitResult:
        asked.append(params.message)
        await anyio.sleep_forever()
        raise AssertionError

    async with world.client("legacy", thinks) as call:
        before = world.state()
        await cancelled(call, "rl_stop_training", {"run_id": WAITING}, lambda: asked)
        assert world.state() == before
        assert (await call("rl_list_runs"))["count"] == 2
