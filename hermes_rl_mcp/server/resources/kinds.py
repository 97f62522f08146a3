"""What a kind of resource is: a template of addresses, and how one that fits it is read.

What an environment, a model or a log wrote is data, not instructions: such a kind says so in its description and in
the ``_meta`` of everything read from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import mcp.types as t
from mcp.server.mcpserver.resources.templates import DEFAULT_RESOURCE_SECURITY, ResourceSecurity
from mcp.shared.uri_template import UriTemplate

from hermes_rl_mcp.contracts.results import NOTICE
from hermes_rl_mcp.errors import InvalidValueError, NotFoundError
from hermes_rl_mcp.operations.context import Context

YAML, JSON, PYTHON, TEXT, PNG = "application/yaml", "application/json", "text/x-python", "text/plain", "image/png"
WINDOW = "hermes-rl/window"
"""Key in ``_meta``: which part of the whole this is, and where the next one begins."""
_UNTRUSTED = "hermes-rl/untrusted"

Parameters = Mapping[str, str]


class Content(NamedTuple):
    """What was read; ``meta`` is what cannot be said inside of a plain text."""

    body: str | bytes
    meta: Mapping[str, Any] = {}


Reader = Callable[[Context, Parameters], Awaitable[Content]]


@dataclass(frozen=True)
class Kind:
    """One template, its description for clients, and its reader."""

    name: str
    uri_template: str
    title: str
    description: str
    mime_type: str
    read: Reader
    untrusted: bool = False
    """Wholly or in part written by a model, an environment or a program."""
    pause_s: float = 1.0
    """Least time between two notes that it has changed. Who follows it may read it at each."""
    accepted: str = ""
    """A wider template: addresses that are understood as well."""
    security: ResourceSecurity = field(default=DEFAULT_RESOURCE_SECURITY)

    @cached_property
    def parsed(self) -> UriTemplate:
        return UriTemplate.parse(self.uri_template)

    @cached_property
    def _accepted(self) -> UriTemplate:
        return UriTemplate.parse(self.accepted or self.uri_template)

    @property
    def meta(self) -> dict[str, Any]:
        return {_UNTRUSTED: NOTICE} if self.untrusted else {}

    def uri(self, **parameters: str) -> str:
        """The address of one."""
        return self.parsed.expand(parameters)

    def match(self, uri: str) -> dict[str, str] | None:
        """Parameters of an address that fits. Raises NotFoundError for one that leads elsewhere, InvalidValueError for
        a query that nobody would read."""
        found = self._accepted.match(uri)
        if found is None:
            return None
        if failed := self.security.validate(found):
            raise NotFoundError(f"'{failed}' is no name in {self.uri_template}.", hint="resources/list has the names.")
        known = self.parsed.query_variable_names
        asked = {name for name, _ in parse_qsl(uri.partition("?")[2], keep_blank_values=True)}
        if unknown := sorted(asked - known):
            offered = f"There are: {', '.join(sorted(known))}." if known else "This resource has none."
            raise InvalidValueError(f"Unknown in the query: {', '.join(unknown)[:200]}.", hint=offered)
        return {name: str(value) for name, value in found.items()}

    def template(self) -> t.ResourceTemplate:
        """As it is listed."""
        return t.ResourceTemplate(
            uri_template=self.uri_template,
            name=self.name,
            title=self.title,
            description=self.description,
            mime_type=self.mime_type,
        )
