"""News of resources: clients of both eras are told of changes on disk, whoever made them, and nobody else is."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.subscriptions import ResourcesListChanged, ResourceUpdated
from mcp.server.connection import Connection
from mcp.shared.exceptions import MCPError
from mcp.types import ResourceListChangedNotification, ResourceUpdatedNotification
from mcp_rig import SERVER, environment_file
from served import product
from test_server_resources import begun

from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.options import Flags
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.runs import locks
from hermes_rl_mcp.server.app import HermesServer, build_server
from hermes_rl_mcp.server.notifier import MAX_URIS, Notifier, _Client
from hermes_rl_mcp.server.resources.serving import Resources

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")]

RUN_ID = "0123abcd"
RUN = f"rl://runs/{RUN_ID}"
METRICS, LOG = f"{RUN}/metrics", f"{RUN}/logs/trainer?tail=20"
LISTS = "list"
MODES = ["legacy", "auto"]
PATIENCE_S = 100


class News:
    """What one client was told, with the moments."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def add(self, what: str) -> None:
        self.told.append((what, time.monotonic()))

    def of(self, what: str) -> list[float]:
        return [at for told, at in self.told if told == what]

    async def wait(self, what: str, count: int = 1) -> None:
        await until(lambda: len(self.of(what)) >= count)


class Subscriber:
    """A client of one era, with the same calls for both."""

    def __init__(self, client: Client, news: News, scope: AsyncExitStack, tasks: Any) -> None:
        self.client = client
        self.news = news
        self._scope = scope
        self._tasks = tasks

    async def subscribe(self, *uris: str, lists: bool = False) -> None:
        if self.client.protocol_version < "2026":
            for uri in uris:
                await self.client.subscribe_resource(uri)
            if lists:
                await self.client.list_resources()
            return
        listening = self.client.listen(resource_subscriptions=uris, resources_list_changed=lists)
        subscription = await self._scope.enter_async_context(listening)
        assert set(subscription.honored.resource_subscriptions or ()) == set(uris)

        async def pump() -> None:
            async for event in subscription:
                if isinstance(event, ResourceUpdated):
                    self.news.add(event.uri)
                elif isinstance(event, ResourcesListChanged):
                    self.news.add(LISTS)

        self._tasks.start_soon(pump)


@asynccontextmanager
async def subscriber(target: Any, mode: Any) -> AsyncIterator[Subscriber]:
    news = News()

    async def on_message(message: Any) -> None:
        if isinstance(message, ResourceUpdatedNotification):
            news.add(str(message.params.uri))
        elif isinstance(message, ResourceListChangedNotification):
            news.add(LISTS)

    handler = on_message if mode == "legacy" else None
    async with (
        Client(target, mode=mode, message_handler=handler) as client,
        anyio.create_task_group() as tasks,
        AsyncExitStack() as scope,
    ):
        yield Subscriber(client, news, scope, tasks)
        tasks.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await anyio.sleep(0.02)


def add_line(path: Path, text: str = '{"step": 1}') -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{text}\n")


@pytest.fixture
def home(environ: dict[str, str]) -> Home:
    return Home.from_environ(environ)


@pytest.fixture
def run(home: Home) -> RunPaths:
    begun(home, RUN_ID).move(RunStatus.FAILED, "test")
    return home.run(RUN_ID)


def serving(environ: dict[str, str], **flags: Any) -> HermesServer:
    """A server that looks twenty times a second, so that nobody waits for it; its notes keep their pauses."""
    server = build_server(Operations.from_environ(environ, Flags(**flags)))
    context = server.operations.context
    server.notifier = Notifier(context, Resources(context), interval_s=0.05)
    server.notifier.attach(server)
    return server


@pytest.fixture
def server(environ: dict[str, str]) -> HermesServer:
    return serving(environ)


async def test_clients_of_both_eras_are_told_of_their_resources_alone_and_nothing_is_left_of_them(
    server: HermesServer, home: Home, run: RunPaths
) -> None:
    assert server.notifier.idle
    async with subscriber(server, MODES[0]) as old, subscriber(server, MODES[1]) as new:
        for one in (old, new):
            capability = one.client.server_capabilities.resources
            assert capability is not None
            assert (capability.subscribe, capability.list_changed) == (True, True)
        assert server.notifier.idle, "nobody asked for anything yet"
        await old.subscribe(METRICS, LOG)
        await new.subscribe(LOG, lists=True)
        add_line(run.metrics)
        add_line(home.log("trainer", RUN_ID))
        await old.news.wait(METRICS)
        await old.news.wait(LOG)
        await new.news.wait(LOG)
        await old.client.unsubscribe_resource(METRICS)
        seen = len(old.news.of(METRICS))
        add_line(run.metrics)
        begun(home, "ffffffff").move(RunStatus.FAILED, "test")
        await new.news.wait(LISTS)
        add_line(home.log("trainer", RUN_ID))
        await old.news.wait(LOG, 2)
        assert len(old.news.of(METRICS)) == seen, "it unsubscribed"
        assert not old.news.of(LISTS), "it never asked for the list"
        assert not new.news.of(METRICS)
    assert server.notifier.idle


async def test_whoever_has_the_list_is_told_when_it_changes_and_not_when_something_else_does(
    environ: dict[str, str], tmp_path: Path, home: Home, run: RunPaths
) -> None:
    path = environment_file(tmp_path / "envs")
    (tmp_path / "data").mkdir()
    server = serving(environ, env_dirs=[str(tmp_path / "envs")], data_dirs=[str(tmp_path / "data")])
    async with subscriber(server, MODES[0]) as old, subscriber(server, MODES[1]) as new:
        for one in (old, new):
            await one.subscribe(METRICS, lists=True)
        add_line(path, "# the same environment")
        for count in (1, 2):  # with a pause between them that is longer than that between two looks at the list
            add_line(run.metrics)
            for one in (old, new):
                await one.news.wait(METRICS, count)
                assert not one.news.of(LISTS)
        begun(home, "ffffffff").move(RunStatus.FAILED, "test")
        for one in (old, new):
            await one.news.wait(LISTS)
        path.unlink()
        for one in (old, new):
            await one.news.wait(LISTS, 2)
            assert len(one.news.of(LISTS)) == 2
        add_line(tmp_path / "data" / "sums.jsonl")
        for one in (old, new):
            await one.news.wait(LISTS, 3)
    assert server.notifier.idle


async def test_a_resource_that_changes_all_the_time_is_told_of_once_a_second_at_most_and_its_last_change_always(
    server: HermesServer, run: RunPaths
) -> None:
    async with subscriber(server, MODES[0]) as old, subscriber(server, MODES[1]) as new:
        begin = time.monotonic()
        for one in (old, new):
            await one.subscribe(METRICS)
        while min(len(one.news.of(METRICS)) for one in (old, new)) < 3:
            add_line(run.metrics)
            await anyio.sleep(0.02)
        took_s = time.monotonic() - begin
        told = {one: len(one.news.of(METRICS)) for one in (old, new)}
        add_line(run.metrics)
        for one in (old, new):
            assert told[one] <= took_s + 1
            await one.news.wait(METRICS, told[one] + 1)


async def test_a_run_that_comes_later_and_one_whose_supervisor_died_are_news(server: HermesServer, home: Home) -> None:
    async with subscriber(server, "auto") as one:
        await one.subscribe(f"{RUN}/state")
        paths = home.run(RUN_ID)
        paths.dir.mkdir(parents=True)
        lock = locks.take(paths.supervisor_lock)
        assert lock is not None
        state = begun(home, RUN_ID)
        for status in (RunStatus.STARTING, RunStatus.RUNNING):
            state.move(status, "test")
        await one.news.wait(f"{RUN}/state")
        begin = time.monotonic()
        lock.release()
        await until(lambda: one.news.of(f"{RUN}/state")[-1] > begin)
        [content] = (await one.client.read_resource(f"{RUN}/state", cache_mode="bypass")).contents
        assert '"interrupted"' in content.text  # type: ignore[union-attr]


async def test_environments_and_checkpoints_are_followed(
    environ: dict[str, str], tmp_path: Path, run: RunPaths
) -> None:
    path = environment_file(tmp_path / "envs")
    server = serving(environ, env_dirs=[str(tmp_path / "envs")])
    source, other = "rl://environments/own/source", "rl://environments/later/source"
    async with subscriber(server, "legacy") as one:
        await one.subscribe(source, other, f"{RUN}/checkpoints", "rl://environments/arithmetic/schema")
        add_line(path, "# changed")
        await one.news.wait(source)
        environment_file(tmp_path / "envs", stem="later")
        await one.news.wait(other)
        add_line(run.checkpoints / "step_3" / "complete.json", "{}")
        await one.news.wait(f"{RUN}/checkpoints")
        assert not one.news.of("rl://environments/arithmetic/schema")


async def test_addresses_that_can_never_be_there_are_refused_and_there_is_an_end_to_subscriptions(
    server: HermesServer, run: RunPaths
) -> None:
    nowhere = [f"{RUN}/nothing", "rl://runs/xyz/state", f"{RUN}/logs/passwd", f"{METRICS}?tial=1", "rl://nope"]
    async with subscriber(server, "legacy") as old, subscriber(server, "auto") as new:
        for uri in nowhere:
            with pytest.raises(MCPError):
                await old.client.subscribe_resource(uri)
        many = [f"{METRICS}?offset={offset}" for offset in range(MAX_URIS + 50)]
        async with new.client.listen(resource_subscriptions=[*nowhere, *many]) as subscription:
            assert subscription.honored.resource_subscriptions == many[:MAX_URIS]
        for uri in many[:MAX_URIS]:
            await old.client.subscribe_resource(uri)
        await old.client.subscribe_resource(many[0])  # it has that already
        with pytest.raises(MCPError, match="Too many"):
            await old.client.subscribe_resource(many[MAX_URIS])
    assert server.notifier.idle


@pytest.mark.slow
async def test_a_server_that_was_killed_is_replaced_by_one_that_follows_the_same_run(
    environ: dict[str, str], home: Home, run: RunPaths, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    code = f"import os, runpy; open({str(pid_file)!r}, 'w').write(str(os.getpid())); "
    code += "runpy.run_module('hermes_rl_mcp.server', run_name='__main__')"
    first = StdioServerParameters(command=sys.executable, args=["-P", "-c", code], env=environ)
    second = StdioServerParameters(command=sys.executable, args=SERVER, env=environ)
    async with subscriber(first, "legacy") as old:
        await old.subscribe(METRICS)
        add_line(run.metrics)
        await old.news.wait(METRICS)
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
    for mode in MODES:
        async with subscriber(second, mode) as again:
            await again.subscribe(METRICS)
            add_line(run.metrics)
            await again.news.wait(METRICS)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_over_http_clients_of_both_eras_are_told_and_one_that_went_takes_nothing_with_it(
    environ: dict[str, str], home: Home, run: RunPaths, tmp_path: Path, transport: str
) -> None:
    with product(environ, tmp_path / "server.log", transport) as address:

        def target() -> Any:
            return f"{address}/mcp" if transport == "streamable-http" else sse_client(f"{address}/sse")

        async with subscriber(target(), MODES[0]) as old:
            await old.subscribe(METRICS, lists=True)
            async with subscriber(target(), MODES[1]) as new:
                await new.subscribe(METRICS, lists=True)
                add_line(run.metrics)
                begun(home, "ffffffff").move(RunStatus.FAILED, "test")
                for one in (old, new):
                    await one.news.wait(METRICS)
                    await one.news.wait(LISTS)
            add_line(run.metrics)
            await old.news.wait(METRICS, 2)


async def test_a_client_that_does_not_read_keeps_no_other_waiting_and_its_notes_do_not_pile_up() -> None:
    class Stuck:
        """A transport whose reader has stopped."""

        def __init__(self) -> None:
            self.goes_on = anyio.Event()
            self.sent: list[str] = []

        async def notify(self, method: str, params: Any, opts: Any = None) -> None:
            await self.goes_on.wait()
            self.sent.append(params["uri"] if params else method)

        async def send_raw_request(self, method: str, params: Any, opts: Any = None) -> dict[str, Any]:
            raise AssertionError(method)

    stuck = Stuck()
    client = _Client(Connection.for_loop(stuck))
    client.uris = {METRICS: True, LOG: True}
    for _ in range(1000):
        client.tell(METRICS)
        client.tell(LOG)
        await anyio.lowlevel.checkpoint()
    stuck.goes_on.set()
    await until(lambda: len(stuck.sent) == 3)
    assert stuck.sent == [METRICS, LOG, METRICS], "the one under way, and then each once"
    client.tell(LOG)
    client.leave()
    await anyio.sleep(0.05)
    assert len(stuck.sent) == 3
