"""A person is asked before their work is undone or their machine is taken: by a form where the client has one, else by
an error that says how to confirm. Both protocol eras, the same answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mcp.types as t
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp_rig import Tools, environment_file
from run_parts import run_request

from hermes_rl_mcp.contracts.runs import Identity, RunStatus, Starter
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.settings import Flags
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs import launch
from hermes_rl_mcp.runs.store import RunStore
from hermes_rl_mcp.server.app import HermesServer, build_server

RUN = "0123abcd"
THEIRS = Starter(
    client="their-client", version="3", server=Identity(pid=4_000_000, started_at=1.0, boot_id="an earlier one")
)
pytestmark = pytest.mark.anyio
eras = pytest.mark.parametrize("mode", ["auto", "legacy"])


class Person:
    """Answers forms, and remembers what they were asked."""

    def __init__(self, action: str = "accept", **content: Any) -> None:
        self.asked: list[str] = []
        self._answer = t.ElicitResult.model_validate({"action": action, "content": content or None})

    async def __call__(self, context: Any, params: t.ElicitRequestParams) -> t.ElicitResult:
        assert isinstance(params, t.ElicitRequestFormParams)
        assert set(params.requested_schema["properties"]) == {"go_ahead"}
        self.asked.append(params.message)
        return self._answer


@pytest.fixture
def home(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """With a run of another client that goes on: its supervisor, which is the test, has it and answers to nothing."""
    monkeypatch.setattr("hermes_rl_mcp.runs.launch._STOP_ANSWER_S", 0.0)
    home = Home.from_environ(environ)
    request = run_request(RUN, started_by=THEIRS)
    with launch._draft(home, request) as (draft, lock):
        launch._publish(home, request, draft)
    yield home
    lock.release()


def server(environ: dict[str, str], **flags: Any) -> HermesServer:
    return build_server(Operations.from_environ(environ, Flags(**flags)))


@asynccontextmanager
async def client(of: HermesServer, mode: Any, person: Any = None, name: str = "mine") -> AsyncIterator[Tools]:
    info = t.Implementation(name=name, version="1")
    async with Client(of, mode=mode, elicitation_callback=person, client_info=info) as connected:
        yield Tools(connected, (await connected.list_tools()).tools)


def asked_to_stop(home: Home) -> bool:
    return home.run(RUN).stop_request.exists()


@eras
async def test_without_forms_the_run_of_another_client_is_stopped_only_with_confirm_and_the_error_says_so(
    environ: dict[str, str], home: Home, mode: str
) -> None:
    async with client(server(environ), mode) as call:
        error = await call.error("rl_stop_training", run_id=RUN)
        assert "their-client 3" in error["question"] and "mine" in error["question"] and RUN in error["question"]
        assert "confirm=true" in error["hint"] and "person" in error["hint"]
        assert not asked_to_stop(home)
        assert "Stopping" in (await call("rl_stop_training", run_id=RUN, confirm=True))["message"]
        assert asked_to_stop(home)
        assert "Stopping" in (await call("rl_stop_training", run_id=RUN))["message"], "it is being stopped already"


@eras
async def test_with_forms_the_person_is_asked_whatever_confirm_says_and_their_yes_stops_it(
    environ: dict[str, str], home: Home, mode: str
) -> None:
    no, yes = Person(go_ahead=False), Person(go_ahead=True)
    name = "mine\nGo ahead, it is yours"
    async with client(server(environ), mode, no, name) as call:
        assert "said no" in (await call.error("rl_stop_training", run_id=RUN, confirm=True))["error"]
        assert len(no.asked) == 1 and RUN in no.asked[0]
        assert "\n" not in no.asked[0], "a client's name puts no lines into a question"
        assert not asked_to_stop(home)
    async with client(server(environ), mode, yes, name) as call:
        assert "Stopping" in (await call("rl_stop_training", run_id=RUN))["message"]
        assert asked_to_stop(home) and yes.asked == no.asked


@eras
@pytest.mark.parametrize(
    ("person", "says"),
    [
        (Person("decline"), "declined"),
        (Person("cancel"), "gave no answer"),
        (Person(go_ahead="perhaps"), "no answer that fits"),
        (Person(), "no answer that fits"),
    ],
    ids=["declined", "dismissed", "misfit", "empty"],
)
async def test_anything_but_a_yes_leaves_the_run_alone_and_is_an_error_with_a_way_on(
    environ: dict[str, str], home: Home, mode: str, person: Person, says: str
) -> None:
    async with client(server(environ), mode, person) as call:
        error = await call.error("rl_stop_training", run_id=RUN)
        assert says in error["error"] and "hermes-rl runs" in error["hint"]
    assert not asked_to_stop(home)


async def test_a_client_that_promised_forms_and_has_none_gets_an_error_that_its_model_can_read(
    environ: dict[str, str], home: Home
) -> None:
    async def unable(context: Any, params: t.ElicitRequestParams) -> t.ErrorData:
        return t.ErrorData(code=-32601, message="no forms here")

    async with client(server(environ), "legacy", unable) as call:
        error = await call.error("rl_stop_training", run_id=RUN)
        assert "could not be reached through this client (no forms here)" in error["error"]
        assert "hermes-rl runs" in error["hint"]
    assert not asked_to_stop(home)


@eras
async def test_nobody_is_asked_about_ones_own_run_or_about_one_that_has_ended(
    environ: dict[str, str], home: Home, mode: str
) -> None:
    person = Person("decline")
    async with client(server(environ), mode, person, name="their-client") as call:
        assert "Stopping" in (await call("rl_stop_training", run_id=RUN))["message"], "its server is gone: it is theirs"
    request = run_request("0000beef", started_by=THEIRS)
    with launch._draft(home, request) as (draft, lock):
        launch._publish(home, request, draft)
    lock.release()
    assert RunStore(home).get("0000beef").status is RunStatus.INTERRUPTED
    async with client(server(environ), mode, person) as call:
        assert "is not running" in (await call("rl_stop_training", run_id="0000beef"))["message"]
        assert "not found" in (await call.error("rl_stop_training", run_id="ffffffff"))["error"]
    assert person.asked == []


async def test_a_question_that_was_not_asked_has_no_answer(environ: dict[str, str], home: Home) -> None:
    """An answer made up beforehand, or one to the question about another run, counts for nothing."""
    other = run_request("0000beef", started_by=THEIRS)
    with launch._draft(home, other) as (draft, lock):
        launch._publish(home, other, draft)
    try:
        async with client(server(environ), "auto", Person(go_ahead=True)) as call:
            session = call.client.session
            first = await session.call_tool("rl_stop_training", {"run_id": RUN}, allow_input_required=True)
            assert isinstance(first, t.InputRequiredResult) and first.input_requests is not None
            [key] = first.input_requests
            yes = {key: t.ElicitResult(action="accept", content={"go_ahead": True})}
            again = await session.call_tool(
                "rl_stop_training", {"run_id": RUN}, input_responses=yes, allow_input_required=True
            )
            assert isinstance(again, t.InputRequiredResult), "asked again"
            for run_id, state in (("0000beef", first.request_state), (RUN, "made-up")):
                with pytest.raises(MCPError):
                    await session.call_tool(
                        "rl_stop_training", {"run_id": run_id}, input_responses=yes, request_state=state
                    )
        assert not asked_to_stop(home) and not home.run("0000beef").stop_request.exists()
    finally:
        lock.release()


@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.slow)])
async def test_a_start_beyond_a_soft_ceiling_waits_for_a_persons_word_and_a_dry_run_says_so(
    environ: dict[str, str], tmp_path: Path, mode: str
) -> None:
    environment_file(tmp_path / "envs")
    replaced = tmp_path / "commands.json"  # a trainer that is not ours is not measured
    replaced.write_text(json.dumps({"commands": {"trainer": ["false"]}}))
    environ = {**environ, "HERMES_RL_CHILD_COMMANDS": str(replaced)}
    of = server(environ, env_dirs=[str(tmp_path / "envs")], ask_disk_gib="0.0001", ask_hours="1000")
    person = Person("decline")
    async with client(of, mode) as call:
        await call("rl_select_environment", name="own")
        assert (await call("rl_get_current_config"))["run_limits"]["ask_disk_gib"] == 0.0001
        error = await call.error("rl_start_training")
        assert (
            "GiB of disk (asked above 0.0001: ask_disk_gib)" in error["question"] and "hours" not in error["question"]
        )
        assert "confirm=true" in error["hint"]
        planned = await call("rl_start_training", dry_run=True)
        assert any(error["question"] in text for text in planned["warnings"])
    async with client(of, mode, person) as call:
        assert "declined" in (await call.error("rl_start_training", confirm=True))["error"]
        assert person.asked == [error["question"]]
        assert (await call("rl_list_runs"))["count"] == 0


async def test_a_hostile_client_name_is_quoted_as_plain_text_and_short(environ: dict[str, str], home: Home) -> None:
    name = "x\x1b[2J\u202e" + "y" * 500
    async with client(server(environ), "legacy", name=name) as call:
        question = (await call.error("rl_stop_training", run_id=RUN))["question"]
    assert "\x1b" not in question and "\u202e" not in json.dumps(question, ensure_ascii=False)
    assert len(question) < 400
