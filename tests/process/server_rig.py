"""An MCP server as a process of its own, spoken to line by line, so that a test has its pid and can kill it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from process_rig import Rig

from hermes_rl_mcp.runs.configuration.session import Session, SessionStore

ANSWER_S = 120.0
"""Only guards against hanging: an answer takes milliseconds, a start some seconds."""
ENVIRONMENT = '''
from hermes_rl_mcp.envs import APIServerConfig, BaseEnv, BaseEnvConfig

class Own(BaseEnv):
    """Only its configuration is ever used: the processes of the run are scripted."""
    name = "own"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=2, batch_size=4, total_steps=3, max_token_length=16), [APIServerConfig()]

    async def get_next_item(self):
        return "item"

    def get_messages(self, item):
        return [{"role": "user", "content": item}]

    def score_answer(self, item, completion):
        return 1.0
'''


class ToolError(Exception):
    """The tool answered with an error; ``payload`` is its structured content."""

    def __init__(self, payload: dict[str, Any]) -> None:
        super().__init__(str(payload))
        self.payload = payload


class ServerProcess:
    """Started as the SDK's stdio client does: pipes, and a session and process group of its own."""

    def __init__(self, environ: dict[str, str], *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hermes_rl_mcp.server", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
            text=True,
            start_new_session=True,
        )
        self._answers: dict[int, dict[str, Any]] = {}
        self._closed = False
        self._changed = threading.Condition()
        self._last = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        client = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        self.answer(self.send("initialize", client))
        self.notify("notifications/initialized", {})

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = json.loads(line)
            with self._changed:
                if "id" in message:
                    self._answers[message["id"]] = message
                self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def notify(self, method: str, params: dict[str, Any]) -> None:
        self._write({"method": method, "params": params})

    def send(self, method: str, params: dict[str, Any]) -> int:
        """Asks; ``answer`` waits for the reply."""
        self._last += 1
        self._write({"id": self._last, "method": method, "params": params})
        return self._last

    def ask(self, tool: str, **arguments: Any) -> int:
        """Calls a tool and does not wait."""
        return self.send("tools/call", {"name": tool, "arguments": arguments})

    def cancel(self, number: int) -> None:
        """As a client whose user pressed the stop button."""
        self.notify("notifications/cancelled", {"requestId": number, "reason": "the user cancelled"})

    def answer(self, number: int) -> dict[str, Any]:
        with self._changed:
            done = self._changed.wait_for(lambda: number in self._answers or self._closed, ANSWER_S)
            assert done, "no answer"
            assert number in self._answers, f"the server is gone: {self.process.poll()}"
            result: dict[str, Any] = self._answers[number]["result"]
        return result

    def result(self, number: int) -> dict[str, Any]:
        """Structured content of a tool's answer. Raises ToolError."""
        answer = self.answer(number)
        content: dict[str, Any] = answer["structuredContent"]
        if answer.get("isError"):
            raise ToolError(content)
        return content

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        return self.result(self.ask(tool, **arguments))

    def text(self, tool: str, **arguments: Any) -> str:
        """What a model reads of the answer."""
        blocks = self.answer(self.ask(tool, **arguments))["content"]
        return "\n".join(block["text"] for block in blocks)

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        """SIGKILL, and gone from the process table."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Ends it in whatever state it is."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._reader.join(10)
        self.process.stdout.close()

    def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self.process.stdin.flush()


def select(rig: Rig, **edits: Any) -> Path:
    """Selects a small environment in the rig's home, with a model that needs no download. Returns its file."""
    folder = rig.folder / "envs"
    folder.mkdir(exist_ok=True)
    path = folder / "own.py"
    path.write_text(ENVIRONMENT)
    chosen = Session(
        environment="own",
        file_path=str(path),
        class_name="Own",
        wandb_name="own",
        edits={"model_name": "builtin:tiny", **edits},
    )
    SessionStore(rig.home).select(chosen)
    return path


def environ_with(rig: Rig, environ: dict[str, str]) -> dict[str, str]:
    """For a server that finds that environment."""
    return {**environ, "HERMES_RL_ENV_DIRS": str(rig.folder / "envs"), "PATH": os.environ["PATH"]}
