"""Which tools an agent has: toolsets resolved, what cannot be had here left out and named, and calls carried out.

Invariant: a tool that is offered to a model can be called; whatever was asked for and is not offered has its reason in
``Selection.dropped``.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_rl_mcp.agent.calls import NOT_IN_ROLLOUTS, answer_json
from hermes_rl_mcp.agent.distributions import sample_toolsets_from_distribution
from hermes_rl_mcp.agent.interfaces import CallContext, Tool, ToolSchema
from hermes_rl_mcp.agent.tools.builtin import builtin_tools
from hermes_rl_mcp.agent.toolsets import BUILTIN, Toolset, Toolsets
from hermes_rl_mcp.errors import InvalidValueError

log = logging.getLogger(__name__)


class ToolSelection:
    """The tools that one agent has, in a fixed order. A ``Toolbox``."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def schemas(self) -> list[ToolSchema]:
        return [tool.schema for tool in self._tools.values()]

    def names(self) -> set[str]:
        return set(self._tools)

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)


@dataclass(frozen=True)
class Selection:
    """What came of a wish for toolsets."""

    toolbox: ToolSelection
    toolsets: list[str] = field(default_factory=list)
    """The chosen ones of which at least one tool is there."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Tool names to why they are not there and what to do about it."""

    @property
    def report(self) -> str:
        """One line for each reason; empty when nothing was left out."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.dropped.items():
            by_reason.setdefault(reason, []).append(name)
        return "\n".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def missing_tools(
    names: Iterable[str], settings: Mapping[str, str], extra: Iterable[Tool] = ()
) -> tuple[list[Tool], dict[str, str]]:
    """Tools of these names that can be had, and the others with their reasons."""
    known = tools_by_name(extra)
    found: list[Tool] = []
    dropped: dict[str, str] = {}
    for name in names:
        tool = known.get(name)
        if tool is None:
            dropped[name] = _unknown(name)
        elif reason := tool.missing(settings):
            dropped[name] = reason
        else:
            found.append(tool)
    return found, dropped


def select_tools(
    enabled: Iterable[str] | None = None,
    disabled: Iterable[str] | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    extra: Iterable[Tool] = (),
    toolsets: Toolsets = BUILTIN,
) -> Selection:
    """Tools of the ``enabled`` toolsets (None = all) without those of the ``disabled`` ones.

    ``extra``: further tools, such as an MCP server's; the name of their toolset counts as one, and with None enabled
    they are all in. ``settings``: the operator's (None = this process's environment). Raises InvalidValueError for a
    name that is no toolset.
    """
    settings = os.environ if settings is None else settings
    extra = list(extra)
    registry = with_tools(toolsets, extra)
    wanted = registry.names() if enabled is None else list(enabled)
    unwanted = list(disabled or ())
    registry.require([*wanted, *unwanted])
    out = {tool for name in unwanted for tool in registry.resolve(name)}
    names = [tool for tool in dict.fromkeys(t for one in wanted for t in registry.resolve(one)) if tool not in out]
    if enabled is None:  # nobody asked for what another server would have to offer
        names = [name for name in names if name in tools_by_name(extra)]
    found, dropped = missing_tools(names, settings, extra)
    there = {tool.name for tool in found}
    return Selection(ToolSelection(found), [one for one in wanted if there & set(registry.resolve(one))], dropped)


def sample_tools(
    distribution: str,
    disabled: Iterable[str] | None = None,
    *,
    seed: int | str | None = None,
    rng: random.Random | None = None,
    settings: Mapping[str, str] | None = None,
    extra: Iterable[Tool] = (),
) -> Selection:
    """Tools of one draw from a distribution. What cannot be had, or is disabled, is left out before the draw and
    reported; ``extra`` tools are always in. Raises InvalidValueError for an unknown distribution or toolset, and where
    nothing of the distribution can be had."""
    settings = os.environ if settings is None else settings
    extra = list(extra)
    unwanted = list(disabled or ())
    off = {tool for name in unwanted for tool in BUILTIN.resolve(name)}
    available = [
        name
        for name in BUILTIN.names()
        if any(tool.name not in off for tool in missing_tools(BUILTIN.resolve(name), settings)[0])
    ]
    drawn = sample_toolsets_from_distribution(distribution, seed=seed, rng=rng, available=available)
    if not drawn and not extra:
        raise InvalidValueError(
            f"No toolset of the distribution {distribution!r} can be had here.",
            hint=f"hermes-rl doctor says what is missing; available: {', '.join(available) or 'none'}.",
        )
    return select_tools([*drawn, *sorted({tool.toolset for tool in extra})], unwanted, settings=settings, extra=extra)


def with_tools(toolsets: Toolsets, extra: Iterable[Tool]) -> Toolsets:
    """The registry with one set more for each toolset of ``extra`` that it does not have; known ones grow."""
    sets = dict(toolsets.sets)
    for tool in extra:
        known = sets.get(tool.toolset)
        tools = tuple(dict.fromkeys([*(known.tools if known else ()), tool.name]))
        sets[tool.toolset] = Toolset(
            tool.toolset, known.description if known else "Added tools", tools, known.includes if known else ()
        )
    return Toolsets(sets, toolsets.aliases)


def tools_by_name(extra: Iterable[Tool] = ()) -> dict[str, Tool]:
    """Every tool there is; ``extra`` ones replace ours of the same name."""
    return {tool.name: tool for tool in [*builtin_tools(), *extra]}


def _unknown(name: str) -> str:
    if name.startswith("rl_"):
        return "add the server hermes-rl-mcp as an MCP toolset to have the training tools"
    return "there is no such tool"


# The original's functions.


def get_tool_definitions(
    enabled_toolsets: Iterable[str] | None = None,
    disabled_toolsets: Iterable[str] | None = None,
    quiet_mode: bool = False,
    *,
    settings: Mapping[str, str] | None = None,
    extra: Iterable[Tool] = (),
) -> list[ToolSchema]:
    """OpenAI's ``tools`` for these toolsets, without what cannot be had here (logged unless ``quiet_mode``)."""
    selection = select_tools(enabled_toolsets, disabled_toolsets, settings=settings, extra=extra)
    if selection.dropped and not quiet_mode:
        log.warning("tools that cannot be had here:\n%s", selection.report)
    return selection.toolbox.schemas()


def get_all_tool_names() -> list[str]:
    return [tool.name for tool in builtin_tools()]


def get_toolset_for_tool(name: str) -> str | None:
    tool = tools_by_name().get(name)
    return tool.toolset if tool else None


def tool_to_toolset_map() -> dict[str, str]:
    """Tool name to toolset name; the original's ``TOOL_TO_TOOLSET_MAP``."""
    return {tool.name: tool.toolset for tool in builtin_tools()}


def check_toolset_requirements(settings: Mapping[str, str] | None = None) -> dict[str, bool]:
    """For each toolset, whether every tool of it can be had here."""
    settings = os.environ if settings is None else settings
    return {name: not missing_tools(BUILTIN.resolve(name), settings)[1] for name in BUILTIN.names()}


def get_available_toolsets(settings: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """``{available, tools, description, requirements}`` for each toolset; ``requirements`` says what is missing."""
    settings = os.environ if settings is None else settings
    found = {}
    for name, one in BUILTIN.sets.items():
        resolved = BUILTIN.resolve(name)
        tools, dropped = missing_tools(resolved, settings)
        found[name] = {
            "available": bool(tools),
            "tools": resolved,
            "description": one.description,
            "requirements": sorted(set(dropped.values())),
        }
    return found


def check_tool_availability(
    quiet: bool = False, settings: Mapping[str, str] | None = None
) -> tuple[list[str], list[dict[str, Any]]]:
    """Toolsets of which all can be had, and for the others ``{name, tools, reasons}``."""
    settings = os.environ if settings is None else settings
    there: list[str] = []
    away: list[dict[str, Any]] = []
    for name in BUILTIN.names():
        _, dropped = missing_tools(BUILTIN.resolve(name), settings)
        if dropped:
            away.append({"name": name, "tools": list(dropped), "reasons": sorted(set(dropped.values()))})
        else:
            there.append(name)
    if away and not quiet:
        log.warning("toolsets that are not whole: %s", ", ".join(one["name"] for one in away))
    return there, away


def handle_function_call(
    name: str,
    args: Mapping[str, Any] | None,
    task_id: str | None = None,
    tool_call_id: str | None = None,
    session_id: str | None = None,
    user_task: str | None = None,
    enabled_tools: Iterable[str] | None = None,
    skip_pre_tool_call_hook: bool = False,
    *,
    context: CallContext,
    extra: Iterable[Tool] = (),
) -> str:
    """One call by name: JSON text of the result, or of ``{"error": sentence}``. Never raises for what a model wrote.

    ``context`` has the task's sandbox and settings. ``task_id``, ``tool_call_id``, ``session_id``, ``user_task`` and
    ``skip_pre_tool_call_hook`` are the original's arguments; the context knows the task, and there are no hooks.
    """
    if name in NOT_IN_ROLLOUTS:
        return json.dumps({"error": f"{name} must be handled by the agent loop."})
    tools = tools_by_name(extra)
    if enabled_tools is not None:
        enabled = set(enabled_tools)
        tools = {one: tool for one, tool in tools.items() if one in enabled}
    return answer_json(name, args or {}, tools=tools, context=context)
