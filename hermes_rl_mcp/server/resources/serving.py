"""The resources of one server: matched, read, listed and watched by the one table of kinds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import mcp.types as t
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.shared.exceptions import MCPError

from hermes_rl_mcp.errors import HermesRLError, InvalidValueError, NotFoundError
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.server.resources.kinds import Kind, Parameters
from hermes_rl_mcp.server.resources.listing import listed
from hermes_rl_mcp.server.resources.table import KINDS
from hermes_rl_mcp.server.resources.watching import Look, look_at
from hermes_rl_mcp.untrusted import shown

log = logging.getLogger(__name__)

SCHEME = "rl://"


class Found(NamedTuple):
    """One address, understood."""

    kind: Kind
    parameters: Parameters


class Resources:
    """Keeps nothing: what there is lies on disk."""

    def __init__(self, context: Context, kinds: tuple[Kind, ...] = KINDS) -> None:
        self._context = context
        self._kinds = kinds

    def templates(self) -> list[t.ResourceTemplate]:
        return [kind.template() for kind in self._kinds]

    async def listed(self) -> list[t.Resource]:
        return await listed(self._context)

    async def read(self, uri: str) -> list[ReadResourceContents] | None:
        """None if no kind has such addresses. Errors are the SDK's: what is not there and what was asked wrongly are
        the client's to repair (-32602)."""
        with _as_resource_errors():
            found = self.find(uri)
            if found is None:
                return None
            content = await found.kind.read(self._context, found.parameters)
        meta = {**found.kind.meta, **content.meta}
        return [ReadResourceContents(content=content.body, mime_type=found.kind.mime_type, meta=meta or None)]

    def find(self, uri: str) -> Found | None:
        """Raises NotFoundError or InvalidValueError for an address that fits a template but cannot be meant."""
        for kind in self._kinds:
            if (parameters := kind.match(uri)) is not None:
                return Found(kind, parameters)
        return None

    def look_at(self, found: Found) -> Look | None:
        """How to see whether it has changed; None if it never does. Reads files: not for the event loop."""
        return look_at(self._context, found.kind, found.parameters)


@contextmanager
def _as_resource_errors() -> Iterator[None]:
    """Errors of ours in the SDK's terms. They quote names and files, so they are made harmless like answers."""
    try:
        yield
    except NotFoundError as error:
        raise ResourceNotFoundError(shown(str(error))) from error
    except InvalidValueError as error:
        raise MCPError(code=t.INVALID_PARAMS, message=shown(str(error))) from error
    except HermesRLError as error:
        raise ResourceError(shown(str(error))) from error
