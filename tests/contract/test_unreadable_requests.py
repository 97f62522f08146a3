"""A request that cannot be read is answered, too: nobody waits for it until they give up."""

from __future__ import annotations

import json
import subprocess

import pytest
from leash import leash, leashed, on_leash

INITIALIZE = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "1"},
}
CALL = '{"jsonrpc": "2.0", "id": %s, "method": "tools/call", "params": %s}'
HALF = '{"name": "rl_list_runs", "arguments": {"text": "\\ud83d"}}'
DEEP = f'{{"name": "rl_list_runs", "arguments": {{"text": {"[" * 500}1{"]" * 500}}}}}'


@pytest.mark.parametrize("params", [HALF, DEEP, '"none"'], ids=["half a character", "deep", "no object"])
def test_a_request_that_cannot_be_read_is_answered_by_its_id(environ: dict[str, str], params: str) -> None:
    lines = [
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": INITIALIZE}),
        '{"jsonrpc": "2.0", "method": "notifications/initialized"}',
        CALL % (7, params),
        CALL % ('"\\ud800"', params),  # nobody can be told which
        '{"jsonrpc": "2.0", "method": "x", "params": 1}',  # wants no answer
        "no JSON",
        '{"jsonrpc": "2.0", "id": 8, "method": "ping"}',
    ]
    done = subprocess.run(
        on_leash("hermes_rl_mcp.server"),
        input="\n".join(lines).encode() + b"\n",
        capture_output=True,
        env=leashed(environ),
        pass_fds=(leash(),),
        timeout=60,
        check=True,
    )
    answers = {answer["id"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    assert set(answers) == {1, 7, 8}
    assert answers[7]["error"]["code"] == -32600 and "cannot be read" in answers[7]["error"]["message"]
