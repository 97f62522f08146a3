"""What ``check`` says of an environment whose policy calls tools: what can be called, what was called, what failed.

Invariant: a tool that cannot be had here is said to be skipped with its reason; a fault of the environment's own tools
is told with its line, one of the policy's calls is no fault.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from hermes_rl_mcp.contracts.env_checks import CheckFinding, CheckVerdict
from hermes_rl_mcp.envs.agent_server import opening
from hermes_rl_mcp.envs.base import BaseEnv
from hermes_rl_mcp.envs.places import place_of_code, place_of_error, place_of_hook
from hermes_rl_mcp.envs.saying import said
from hermes_rl_mcp.envs.trajectory import Message
from hermes_rl_mcp.errors import HermesRLError, PreflightError

if TYPE_CHECKING:  # only environments with tools load the agent's parts
    from hermes_rl_mcp.envs.hermes import AgentRollout, HermesAgentBaseEnv

_LESS = "Set it up, or take the toolset out of enabled_toolsets; training goes on without it."


def with_tools(env: BaseEnv) -> HermesAgentBaseEnv | None:
    """The environment, if its policy calls tools by HermesAgentBaseEnv."""
    return cast("HermesAgentBaseEnv", env) if hasattr(type(env), "compute_reward") else None


def tools(env: HermesAgentBaseEnv) -> Iterator[CheckFinding]:
    """Those of a group. Raises InvalidValueError where a distribution has nothing that can be had; MCP servers must be
    connected."""
    selection = env.group_tools()
    names = [one["function"]["name"] for one in selection.toolbox.schemas()]
    where = place_of_hook(type(env), "config_init")
    if names:
        drawn = f", drawn from {env.config.distribution}" if env.config.distribution else ""
        text = f"{len(names)}: {', '.join(names)} (toolsets {', '.join(selection.toolsets)}{drawn})"
        yield CheckFinding(name="tools", verdict="ok", found=text)
    else:
        fix = "Name toolsets in enabled_toolsets, or give some by own_tools."
        yield CheckFinding(name="tools", verdict="warning", found="the policy has none", fix=fix, where=where)
    for line in selection.report.splitlines():
        yield CheckFinding(name="tools", verdict="skipped", found=line, fix=_LESS)


def without_sandbox(env: BaseEnv) -> CheckFinding | None:
    """Said of an engine for containers that is not there; None where sandboxes can be had. Blocks."""
    agent = with_tools(env)
    if agent is None or agent.config.terminal_backend == "local":
        return None
    from hermes_rl_mcp.agent.sandbox.docker import DockerSandbox

    try:
        DockerSandbox(options=agent.config.docker_options()).close()
    except PreflightError as error:
        fix = error.hint or "Start it, or set terminal_backend to local."
        return CheckFinding(name="sandbox", verdict="skipped", found=error.message, fix=fix)
    return None


def first_prompt(env: HermesAgentBaseEnv, item: Any) -> tuple[list[Message], str]:
    """The messages of a rollout's first turn, and the text that the policy gets, its tools included."""
    messages = env.messages(item)
    renderer = env.server.renderer
    told, offered = opening(renderer, messages, env.select_tools().toolbox.schemas())
    return messages, renderer.prompt(told, offered)


class ToolFaults(logging.Handler):
    """Keeps what the environment's own tools raised, while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.errors: list[tuple[str, BaseException]] = []
        self._logger = logging.getLogger("hermes_rl_mcp.agent.calls")
        self._level = self._logger.level

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, HermesRLError):
            self.errors.append((str(record.args[0]) if isinstance(record.args, tuple) else "", error))

    def __enter__(self) -> ToolFaults:
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


def judge_rollouts(
    env: HermesAgentBaseEnv, faults: Sequence[tuple[str, BaseException]], file: str
) -> Iterator[CheckFinding]:
    """Findings on the conversations of one group. ``file``: the environment's."""
    rollouts = env.recent_rollouts
    if not rollouts:
        return
    turns = [one.result.turns_used for one in rollouts]
    ended = sum(one.result.finished_naturally for one in rollouts)
    text = f"{fmean(turns):.1f} on average, at most {max(turns)}; {ended} of {len(rollouts)} ended by themselves"
    cut = [one.result.error for one in rollouts if one.result.error]
    yield CheckFinding(name="turns", verdict="ok", found=f"{text}; {cut[0]}" if cut else text)
    yield _calls(rollouts)
    yield from _rewritten(rollouts)
    unparsed = [line for one in rollouts for line in one.parse_errors]
    if unparsed:
        text = f"{len(unparsed)} blocks looked like calls and were none. The first: {unparsed[0]}"
        fix = "Does tool_call_parser suit the model? The policy learns the form if some of its calls are right."
        yield CheckFinding(name="call form", verdict="warning", found=text, fix=fix)
    places = {tool.name: place_of_code(tool.handler) for tool in env.own_tools()} if faults else {}
    for name, error in dict(faults).items():
        count = sum(one == name for one, _ in faults)
        text = f"the tool {name} raised {said(error)} ({count} time{'s' * (count > 1)}); the policy was told so."
        fix = "Correct it. A tool tells of bad arguments by a result with an error, or by InvalidValueError."
        where = place_of_error(error, file) or places.get(name, "")
        verdict: CheckVerdict = "problem" if where else "warning"
        yield CheckFinding(name="tool fault", verdict=verdict, found=text, fix=fix, where=where)


def _calls(rollouts: Sequence[AgentRollout]) -> CheckFinding:
    asked: Counter[str] = Counter()
    for one in rollouts:
        asked += one.tool_calls
    errors = [error for one in rollouts for error in one.result.tool_errors]
    if not asked:
        text = "no rollout called a tool"
        fix = "Say in the prompt what the tools are for, reward a call a little, or take a larger model."
        return CheckFinding(name="tool calls", verdict="warning", found=text, fix=fix)
    text = f"{asked.total()}: {', '.join(f'{name} {count}' for name, count in asked.most_common(8))}"
    if not errors:
        return CheckFinding(name="tool calls", verdict="ok", found=text)
    text += f"; {len(errors)} failed. The first: {errors[0].tool_name}({errors[0].arguments}): {errors[0].error[:200]}"
    if len(errors) < asked.total():
        return CheckFinding(name="tool calls", verdict="ok", found=text)
    return CheckFinding(name="tool calls", verdict="warning", found=text, fix="See whether any call can work.")


def _rewritten(rollouts: Sequence[AgentRollout]) -> Iterator[CheckFinding]:
    count = sum(len(one.trajectories) > 1 for one in rollouts)
    if count:
        text = (
            f"in {count} of {len(rollouts)} rollouts the chat template rewrote earlier turns (think blocks?), so only "
            "the turns since then are trained on."
        )
        fix = "Prefer a model whose template keeps them, or thinking_mode off where the environment has it."
        yield CheckFinding(name="earlier turns", verdict="warning", found=text, fix=fix)
