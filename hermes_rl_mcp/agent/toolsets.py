"""Named sets of tools: what they hold, how they include each other, and the older names they go by.

Invariant: a registry never changes; a custom set makes a new registry.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hermes_rl_mcp.errors import InvalidValueError

ALL = ("all", "*")

WEB = ("web_search", "web_extract")
TERMINAL = ("terminal", "process")
FILE = ("read_file", "write_file", "patch", "search_files")
BROWSER = (
    *("browser_navigate", "browser_snapshot", "browser_click", "browser_type", "browser_scroll", "browser_back"),
    *("browser_press", "browser_get_images", "browser_vision", "browser_console", "browser_cdp", "browser_dialog"),
)
RL = (
    *("rl_list_environments", "rl_select_environment", "rl_get_current_config", "rl_edit_config", "rl_start_training"),
    *("rl_check_status", "rl_stop_training", "rl_get_results", "rl_list_runs", "rl_test_inference"),
)


@dataclass(frozen=True)
class Toolset:
    """Tools of its own and those of the sets that it includes."""

    name: str
    description: str
    tools: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"description": self.description, "tools": list(self.tools), "includes": list(self.includes)}


@dataclass(frozen=True)
class Toolsets:
    """A registry of sets, with aliases for older names."""

    sets: Mapping[str, Toolset]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Toolset | None:
        return self.sets.get(self.aliases.get(name, name))

    def names(self) -> list[str]:
        return list(self.sets)

    def is_known(self, name: str) -> bool:
        return name in ALL or self.get(name) is not None

    def resolve(self, name: str) -> list[str]:
        """Tool names, each once, includes followed; a circle of includes ends. Unknown names give none."""
        found: dict[str, None] = {}
        waiting, seen = (list(self.sets) if name in ALL else [name]), set()
        while waiting:
            one = self.get(waiting.pop(0))
            if one is None or one.name in seen:
                continue
            seen.add(one.name)
            found.update(dict.fromkeys(one.tools))
            waiting += one.includes
        return list(found)

    def require(self, names: Iterable[str]) -> None:
        """Raises InvalidValueError for the first name that is no set."""
        for name in names:
            if not self.is_known(name):
                near = difflib.get_close_matches(name, [*self.sets, *self.aliases], n=1)
                raise InvalidValueError(
                    f"There is no toolset {name[:80]!r}{f'; did you mean {near[0]!r}?' if near else '.'}",
                    hint=f"Toolsets: {', '.join(self.sets)}, and 'all'.",
                    details={"available": list(self.sets)},
                )

    def added(self, toolset: Toolset) -> Toolsets:
        """A registry with ``toolset`` as well. Raises InvalidValueError if the name is taken or an include unknown."""
        if self.is_known(toolset.name):
            raise InvalidValueError(f"There is a toolset {toolset.name!r} already.", hint="Choose another name.")
        self.require(name for name in toolset.includes if name != toolset.name)
        return Toolsets(MappingProxyType({**self.sets, toolset.name: toolset}), self.aliases)


_SETS = (
    Toolset("web", "Search the web and read pages", WEB),
    Toolset("search", "Search the web without reading pages", ("web_search",)),
    Toolset("browser", "A browser that is seen and steered", BROWSER, ("search",)),
    Toolset("vision", "Look at pictures", ("vision_analyze",)),
    Toolset("image_gen", "Make pictures", ("image_generate",)),
    Toolset("terminal", "Run commands, also in the background", TERMINAL),
    Toolset("file", "Read, write, change and search files", FILE),
    Toolset("todo", "A list of things to do", ("todo",)),
    Toolset("rl", "The ten training tools; served over MCP by hermes-rl-mcp", RL),
    Toolset("debugging", "Find and mend faults", (), ("terminal", "web", "file")),
    Toolset("safe", "No commands and no files", (), ("web", "vision", "image_gen")),
)
BUILTIN = Toolsets(
    MappingProxyType({one.name: one for one in _SETS}),
    MappingProxyType(
        {
            **{f"{name}_tools": name for name in ("web", "terminal", "vision", "browser", "file", "rl", "todo")},
            "image_tools": "image_gen",
        }
    ),
)


def get_toolset(name: str, toolsets: Toolsets = BUILTIN) -> dict[str, Any] | None:
    """``{description, tools, includes}``, None if there is none of that name."""
    found = toolsets.get(name)
    return found.as_dict() if found else None


def resolve_toolset(name: str, visited: set[str] | None = None, toolsets: Toolsets = BUILTIN) -> list[str]:
    """Names of its tools, includes followed; ``all`` or ``*`` = every tool. Sets in ``visited`` count as done."""
    if visited and name in visited:
        return []
    return toolsets.resolve(name)


def resolve_multiple_toolsets(names: Iterable[str], toolsets: Toolsets = BUILTIN) -> list[str]:
    """Names of all their tools, each once."""
    return list(dict.fromkeys(tool for name in names for tool in toolsets.resolve(name)))


def get_all_toolsets(toolsets: Toolsets = BUILTIN) -> dict[str, dict[str, Any]]:
    return {name: one.as_dict() for name, one in toolsets.sets.items()}


def get_toolset_names(toolsets: Toolsets = BUILTIN) -> list[str]:
    return toolsets.names()


def validate_toolset(name: str, toolsets: Toolsets = BUILTIN) -> bool:
    return toolsets.is_known(name)


def create_custom_toolset(
    name: str,
    description: str,
    tools: Sequence[str] | None = None,
    includes: Sequence[str] | None = None,
    toolsets: Toolsets = BUILTIN,
) -> Toolsets:
    """A registry that also has this set; hand it to the functions here. Raises InvalidValueError."""
    return toolsets.added(Toolset(name, description, tuple(tools or ()), tuple(includes or ())))


def get_toolset_info(name: str, toolsets: Toolsets = BUILTIN) -> dict[str, Any] | None:
    """``{name, description, direct_tools, includes, resolved_tools, tool_count, is_composite}`` or None."""
    found = toolsets.get(name)
    if found is None:
        return None
    resolved = toolsets.resolve(name)
    return {
        "name": found.name,
        "description": found.description,
        "direct_tools": list(found.tools),
        "includes": list(found.includes),
        "resolved_tools": resolved,
        "tool_count": len(resolved),
        "is_composite": bool(found.includes),
    }
