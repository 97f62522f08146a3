"""One line of the journal: an event as a JSON object that starts with the checksum of what follows.

Invariant: ``decode`` gives back exactly what ``encode`` got, or says that the line is damaged or of a later version.
Groups are written as the bytes they are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from hermes_rl_mcp.contracts.rollout_api import RegisterEnv, Registration
from hermes_rl_mcp.rollout_api import events
from hermes_rl_mcp.rollout_api.groups import Group

VERSION = 2
"""Rises when an earlier program would misread a journal. It stands in the first line."""

_PREFIX = b'{"crc":"%08x",'
_PREFIX_LENGTH = len(_PREFIX % 0)
_DATA = b',"data":['
_PLAIN: dict[str, Callable[..., events.Event]] = {
    "started": events.Started,
    "env_disconnected": events.EnvDisconnected,
    "returned": events.Returned,
    "written": events.Written,
    "acknowledged": events.Acknowledged,
    "forgotten": events.Forgotten,
    "reset": events.Reset,
}
"""Events whose fields are JSON values as they are."""
_KIND = {kind: name for name, kind in _PLAIN.items()}


class LaterVersionError(Exception):
    """The line is sound and says something that this program does not know. Its text says what."""


class DamagedError(Exception):
    """The line is torn or does not match its checksum."""


def head() -> bytes:
    """The first line of a journal."""
    return b"".join(_summed([_json({"kind": "journal", "version": VERSION})[1:], b"\n"]))


def encode(event: events.Event) -> list[bytes]:
    """One line, in parts so that groups need not be copied."""
    return _summed(_body(event))


def _summed(body: list[bytes]) -> list[bytes]:
    crc = 0
    for part in body:
        crc = zlib.crc32(part, crc)
    return [_PREFIX % crc, *body]


def _body(event: events.Event) -> list[bytes]:
    match event:
        case events.Submitted(digest, groups):
            table = [
                [p.seq, p.buffered, p.group.env_id, p.group.size, len(p.group.raw), p.group.begun, p.group.allowed]
                for p in groups
            ]
            head = _json({"kind": "submitted", "digest": digest, "groups": table})[1:-1]
            raws = [part for placed in groups for part in (placed.group.raw, b",")][:-1]
            return [head, _DATA, *raws, b"]}\n"]
        case events.Registered(registration, uuid, step):
            fields = {"kind": "registered", "registration": registration.model_dump(), "uuid": uuid, "step": step}
        case events.EnvRegistered(request, wandb_name):
            fields = {"kind": "env_registered", "request": request.model_dump(), "wandb_name": wandb_name}
        case events.Released(env_id, seqs):
            fields = {"kind": "released", "env_id": env_id, "seqs": seqs}
        case events.Expired(seqs):
            fields = {"kind": "expired", "seqs": seqs}
        case events.HandedOut(batch_id, leased, seqs):
            fields = {"kind": "handed_out", "batch_id": batch_id, "leased": leased, "seqs": seqs}
        case events.Kept(batch_id, step, seqs):
            fields = {"kind": "kept", "batch_id": batch_id, "step": step, "seqs": seqs}
        case events.Counted(step, next_seq, received, acknowledged):
            fields = {"kind": "counted", "step": step, "next_seq": next_seq, "received": received}
            fields["acknowledged"] = acknowledged
        case _:
            values = {name: getattr(event, name) for name in type(event).__dataclass_fields__}
            fields = {"kind": _KIND[type(event)], **values}
    return [_json(fields)[1:], b"\n"]


def decode(line: bytes) -> events.Event | None:
    """None for the head. Raises DamagedError or LaterVersionError."""
    body = line[_PREFIX_LENGTH:]
    if not line.endswith(b"\n") or line[:_PREFIX_LENGTH] != _PREFIX % zlib.crc32(body):
        raise DamagedError("a line is torn or damaged")
    if body.startswith(b'"kind":"submitted"'):
        return _submitted(body)
    fields: dict[str, Any] = json.loads(b"{" + body)
    kind = fields.pop("kind")
    try:
        return _event(kind, fields)
    except (TypeError, KeyError, ValidationError) as error:
        raise LaterVersionError(f"it has a line of the kind {kind!r} with other fields ({error})") from None


def _event(kind: str, fields: dict[str, Any]) -> events.Event | None:
    match kind:
        case "journal":
            if fields["version"] > VERSION:
                raise LaterVersionError(f"it has version {fields['version']}; this program reads up to {VERSION}")
            return None
        case "registered":
            return events.Registered(Registration(**fields.pop("registration")), **fields)
        case "env_registered":
            return events.EnvRegistered(RegisterEnv(**fields.pop("request")), **fields)
        case "released":
            return events.Released(fields["env_id"], tuple(fields["seqs"]))
        case "expired":
            return events.Expired(tuple(fields["seqs"]))
        case "handed_out":
            return events.HandedOut(fields["batch_id"], fields["leased"], tuple(fields["seqs"]))
        case "kept":
            return events.Kept(fields["batch_id"], fields["step"], tuple(fields["seqs"]))
        case "counted":
            return events.Counted(**{**fields, "acknowledged": tuple(fields["acknowledged"])})
        case _ if kind in _PLAIN:
            return _PLAIN[kind](**fields)
        case _:
            raise LaterVersionError(f"it has a line of the kind {kind!r}, which this program does not know")


def _submitted(body: bytes) -> events.Submitted:
    at = body.index(_DATA)
    head: dict[str, Any] = json.loads(b"{" + body[:at] + b"}")
    at += len(_DATA)
    groups = []
    for seq, buffered, env_id, size, length, *age in head["groups"]:  # no age in version 1
        groups.append(events.Placed(seq, Group(body[at : at + length], size, env_id, *age), buffered))
        at += length + 1
    return events.Submitted(head["digest"], tuple(groups))


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
