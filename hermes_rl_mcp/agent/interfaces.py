"""What the parts of the agent layer ask of each other: a model, a sandbox, a tool. Types only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from pydantic import JsonValue

ChatMessage = dict[str, Any]
"""One message in OpenAI's chat form: role, content and where they apply tool_calls, tool_call_id, reasoning_content."""
ToolSchema = dict[str, Any]
"""One entry of OpenAI's ``tools``: ``{"type": "function", "function": {name, description, parameters}}``."""


class ChatServer(Protocol):
    """The model that an agent loop talks to: an environment's sampling client, or a wrapped OpenAI client."""

    async def chat_completion(self, *, messages: list[ChatMessage], **params: Any) -> Any:
        """A reply in OpenAI's form: ``.choices[0].message`` with ``content``, ``tool_calls``, ``reasoning_content``.

        ``params``: n, temperature, and where set tools, max_tokens, extra_body.
        """


@dataclass(frozen=True)
class CommandResult:
    """What a command left behind."""

    output: bytes
    """stdout and stderr as they came, whole unless ``cut``."""
    exit_code: int
    """124 when the time ran out; minus the signal's number when a signal ended it; -1 when it could not be run."""
    error: str | None = None
    """Why it could not be run, or that its time ran out."""
    cut: bool = False
    """More than the asked-for bytes came; the middle is missing."""


class BackgroundProcess(Protocol):
    """A command that goes on while the conversation does."""

    session_id: str
    command: str

    def poll(self) -> int | None:
        """Exit code, None while it runs."""

    def output(self, offset: int = 0, limit: int | None = None) -> bytes:
        """What it wrote, from byte ``offset``; old bytes beyond the sandbox's bound are gone."""

    def write(self, data: bytes) -> None:
        """To its stdin. Raises OSError when it has ended."""

    def close_input(self) -> None:
        """Ends its stdin."""

    def wait(self, timeout_s: float) -> int | None:
        """Exit code, None if it still runs after ``timeout_s``."""

    def kill(self) -> None:
        """Ends it and all it started."""


class Sandbox(Protocol):
    """One task's own place to run commands and keep files. Methods block: call them in a thread, not in the event loop.

    Relative paths start at ``workdir``. After ``close`` nothing is left: no process, no file; closing twice is fine.
    """

    task_id: str
    workdir: str
    """Where commands start; a path inside the sandbox."""
    tmpdir: str
    """For what is kept for later; outside ``workdir``, a path inside the sandbox."""

    def run(
        self,
        command: str,
        *,
        timeout_s: float,
        workdir: str | None = None,
        stdin: bytes | None = None,
        environ: Mapping[str, str] | None = None,
        limit_bytes: int | None = None,
    ) -> CommandResult:
        """A shell command to its end; all it started is ended with it when its time runs out."""

    def start(self, command: str, *, workdir: str | None = None, pty: bool = False) -> BackgroundProcess:
        """A shell command in the background."""

    def processes(self) -> list[BackgroundProcess]:
        """Started in the background and not yet forgotten."""

    def read_bytes(self, path: str) -> bytes:
        """A file of any size. Raises FileNotFoundError, IsADirectoryError, PermissionError."""

    def write_bytes(self, path: str, data: bytes) -> None:
        """Makes parent folders. Raises OSError."""

    def list_files(self, path: str) -> list[str]:
        """Regular files below ``path``, relative to it, sorted. Raises FileNotFoundError, NotADirectoryError."""

    def close(self) -> None:
        """Ends every process and removes every file."""


@dataclass(frozen=True)
class CallContext:
    """What a tool's handler may use besides its arguments."""

    task_id: str
    sandbox: Callable[[], Sandbox]
    """The task's sandbox, made at the first call."""
    settings: Mapping[str, str]
    """Operator's settings (search URLs, keys); environment variable names to values."""
    user_task: str = ""
    """The first 500 characters of the first user message."""
    state: dict[str, Any] = field(default_factory=dict)
    """Kept for the task between calls (todo lists, an open browser); closed with the task where it has ``close``."""


Handler = Callable[[CallContext, dict[str, Any]], JsonValue | Awaitable[JsonValue]]
"""Its arguments are checked against the schema. Plain functions run in the pool of threads, async ones on the loop."""


@dataclass(frozen=True)
class Tool:
    """Something a model can call."""

    name: str
    toolset: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    handler: Handler
    missing: Callable[[Mapping[str, str]], str | None] = lambda settings: None
    """Why the tool cannot be had here and what to do about it; None = it can."""
    result_size_chars: float = 100_000
    """Longer results are kept in the sandbox and replaced by a preview. Infinity = never."""

    @property
    def schema(self) -> ToolSchema:
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


class Toolbox(Protocol):
    """The tools that one agent has."""

    def schemas(self) -> list[ToolSchema]: ...

    def names(self) -> set[str]: ...

    def get(self, name: str) -> Tool | None: ...


@dataclass(frozen=True)
class ToolCall:
    """One call that a model asked for."""

    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it; need not be valid."""


@dataclass(frozen=True)
class Parsed:
    """A model's text taken apart."""

    content: str | None
    """Text around the calls; None when there is none."""
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """One line for each block that looks like a call and is none."""


class ToolCallParser(Protocol):
    """Reads the tool calls of one family of models out of plain text, and writes what it reads."""

    name: ClassVar[str]

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
        """Never raises. A damaged block is an entry of ``errors`` and does not cost the others. ``tools`` say which
        arguments are strings, for formats that write none of the quotes."""

    def render(self, calls: Sequence[ToolCall]) -> str:
        """The calls as a model of this family writes them."""
