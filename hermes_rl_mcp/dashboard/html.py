"""Makes HTML and SVG. Invariant: a string that did not come out of ``el`` is escaped, hidden characters included."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

from hermes_rl_mcp.untrusted import HIDDEN

_VOID = {"meta", "link", "input", "br", "hr", "img"}


class Safe(str):
    """Markup of ours, to be sent as it is."""

    __slots__ = ()


Node: TypeAlias = "str | int | float | Iterable[Node] | None"
"""What may stand inside an element; None is nothing."""
Attribute: TypeAlias = str | int | float | bool | None


def el(tag: str, *children: Node, **attributes: Attribute) -> Safe:
    """One element. ``class_`` is ``class``, ``stroke_width`` is ``stroke-width``. An attribute that is None or False is
    left out, one that is True has no value."""
    opening = f"<{tag}{''.join(_attribute(name, value) for name, value in attributes.items())}>"
    return Safe(opening) if tag in _VOID else Safe(f"{opening}{joined(children)}</{tag}>")


def joined(nodes: Iterable[Node]) -> Safe:
    """Nodes one after another."""
    return Safe("".join(map(_rendered, nodes)))


def escaped(text: str) -> Safe:
    """Text as it may stand in an element or an attribute. Characters that nobody sees are written as escapes."""
    return Safe(html.escape(HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)))


def _rendered(node: Node) -> str:
    if node is None:
        return ""
    if isinstance(node, Safe):
        return node
    if isinstance(node, str):
        return escaped(node)
    if isinstance(node, int | float):
        return str(node)
    return joined(node)


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'
