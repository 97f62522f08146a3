"""What a reward function may do in the rollout's own sandbox, after the model is done.

Invariant: files go and come back byte by byte, of any size and under any name; what cannot be done is an answer with
its reason. Methods block: an async reward function calls them by ``asyncio.to_thread``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hermes_rl_mcp.agent.calls import answer_json
from hermes_rl_mcp.agent.interfaces import CallContext, Toolbox
from hermes_rl_mcp.agent.sandbox.task import TaskSandbox
from hermes_rl_mcp.agent.tools.builtin import builtin_tools

log = logging.getLogger(__name__)

Found = dict[str, Any]


class ToolContext:
    """Tools and files of one task. ``sandbox`` and ``state`` are those that the rollout's tools had."""

    def __init__(
        self,
        task_id: str,
        sandbox: TaskSandbox,
        toolbox: Toolbox,
        *,
        settings: Mapping[str, str] = MappingProxyType({}),
        state: dict[str, Any] | None = None,
    ) -> None:
        self.task_id = task_id
        self._toolbox = toolbox
        self._sandbox = sandbox
        self._state: dict[str, Any] = {} if state is None else state
        self._context = CallContext(task_id, sandbox, settings, "", self._state)

    def terminal(self, command: str, timeout: float = 180) -> Found:
        """A shell command's whole output: ``{output, exit_code, error}``; 124 when ``timeout`` (seconds) ran out."""
        try:
            done = self._context.sandbox().run(command, timeout_s=timeout)
        except OSError as error:
            return {"output": "", "exit_code": -1, "error": str(error)}
        return {"output": done.output.decode(errors="replace"), "exit_code": done.exit_code, "error": done.error}

    def read_file(self, path: str) -> Found:
        return self._called("read_file", {"path": path})

    def write_file(self, path: str, content: str) -> Found:
        return self._called("write_file", {"path": path, "content": content})

    def search(self, query: str, path: str = ".") -> Found:
        """Lines that match a regular expression in the files below ``path``."""
        return self._called("search_files", {"pattern": query, "path": path})

    def upload_file(self, local_path: str | Path, remote_path: str) -> Found:
        """``{output, exit_code, error}``: 0 or -1."""
        try:
            self._context.sandbox().write_bytes(remote_path, Path(local_path).read_bytes())
        except OSError as error:
            return {"output": "", "exit_code": -1, "error": f"{local_path} -> {remote_path}: {error}"}
        return {"output": remote_path, "exit_code": 0, "error": None}

    def upload_dir(self, local_dir: str | Path, remote_dir: str) -> list[Found]:
        """Every regular file below ``local_dir``; one answer each."""
        folder = Path(local_dir)
        if not folder.is_dir():
            return [{"output": "", "exit_code": -1, "error": f"{local_dir} is not a folder"}]
        files = sorted(one for one in folder.rglob("*") if one.is_file())
        return [self.upload_file(one, f"{remote_dir}/{one.relative_to(folder)}") for one in files]

    def download_file(self, remote_path: str, local_path: str | Path) -> Found:
        """``{success, bytes}`` or ``{success, error}``. An empty file is a file."""
        try:
            data = self._context.sandbox().read_bytes(remote_path)
            target = Path(local_path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        except OSError as error:
            return {"success": False, "error": f"{remote_path} -> {local_path}: {error}"}
        return {"success": True, "bytes": len(data)}

    def download_dir(self, remote_dir: str, local_dir: str | Path) -> list[Found]:
        """Every regular file below ``remote_dir``; one answer each. Nothing is written outside ``local_dir``."""
        try:
            names = self._context.sandbox().list_files(remote_dir)
        except OSError as error:
            return [{"success": False, "error": f"{remote_dir}: {error}"}]
        within = [name for name in names if not name.startswith("/") and ".." not in Path(name).parts]
        return [self.download_file(f"{remote_dir}/{name}", Path(local_dir, name)) for name in within]

    def web_search(self, query: str) -> Found:
        return self._called("web_search", {"query": query})

    def web_extract(self, urls: Sequence[str]) -> Found:
        return self._called("web_extract", {"urls": list(urls)})

    def browser_navigate(self, url: str) -> Found:
        return self._called("browser_navigate", {"url": url})

    def browser_snapshot(self) -> Found:
        return self._called("browser_snapshot", {})

    def call_tool(self, name: str, args: Mapping[str, Any] | None = None) -> str:
        """Any of the rollout's tools, or one that comes with the package whether the policy had it or not: its result
        as JSON text, or ``{"error"}``."""
        tools = {tool.name: tool for tool in builtin_tools()}
        tools |= {one: tool for one in self._toolbox.names() if (tool := self._toolbox.get(one)) is not None}
        return answer_json(name, args or {}, tools=tools, context=self._context)

    def cleanup(self) -> None:
        """Ends the task's processes, browser and sandbox. Errors are logged; twice is fine."""
        for one in list(self._state.values()):
            close = getattr(one, "close", None)
            if callable(close):
                self._ended(close)
        self._state.clear()
        self._ended(self._sandbox.close)

    def _ended(self, close: Callable[[], object]) -> None:
        try:
            close()
        except Exception:  # the next one is to be ended, too
            log.warning("task %s: not everything could be ended", self.task_id, exc_info=True)

    def _called(self, name: str, args: Mapping[str, Any]) -> Found:
        found = json.loads(self.call_tool(name, args))
        return found if isinstance(found, dict) else {"result": found}
