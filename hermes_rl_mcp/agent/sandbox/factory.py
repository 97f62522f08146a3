"""Which sandbox a task gets: by the name of a backend."""

from __future__ import annotations

from collections.abc import Callable

from hermes_rl_mcp.agent.interfaces import Sandbox
from hermes_rl_mcp.agent.sandbox.docker import DockerOptions, DockerSandbox
from hermes_rl_mcp.agent.sandbox.local import LocalSandbox
from hermes_rl_mcp.agent.sandbox.task import TaskSandbox
from hermes_rl_mcp.errors import InvalidValueError

BACKENDS = ("local", "docker")


def task_sandbox(backend: str, task_id: str, docker: DockerOptions | None = None) -> TaskSandbox:
    """The task's sandbox, made at its first use. Raises InvalidValueError for a backend that there is not."""
    makers: dict[str, Callable[[], Sandbox]] = {
        "local": lambda: LocalSandbox(task_id),
        "docker": lambda: DockerSandbox(task_id, docker),
    }
    if backend not in makers:
        raise InvalidValueError(
            f"terminal_backend is '{backend}', which there is not here.", hint=f"Set one of: {', '.join(BACKENDS)}."
        )
    return TaskSandbox(makers[backend])
