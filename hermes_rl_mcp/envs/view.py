"""A page to read scored groups by. Sampled text is untrusted: everything is escaped and nothing on the page runs."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from hermes_rl_mcp.contracts.rollout_api import ScoredData, SequenceNotes

_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "section{border-top:2px solid #ccc;margin-top:2rem}details{margin:.4rem 0}summary{cursor:pointer}"
    "pre{white-space:pre-wrap;background:#f5f5f5;padding:.6rem;border-radius:4px}"
    "@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}pre{background:#262626}}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(title: str, groups: Sequence[ScoredData]) -> str:
    """One section per group, one fold per sequence."""
    name = html.escape(title)
    body = "".join(_group(number, group) for number, group in enumerate(groups, 1))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><style>{_STYLE}</style></head>'
        f"<body><h1>{name}</h1><p>{len(groups)} groups</p>{body}</body></html>\n"
    )


def _group(number: int, group: ScoredData) -> str:
    mean = sum(group.scores) / len(group.scores)
    messages = group.messages or [[] for _ in group.scores]
    shared = _shared_start(messages)
    asked = "".join(_message(message) for message in messages[0][:shared]) if messages else ""
    folds = "".join(_sequence(group, index, messages[index][shared:]) for index in range(len(group.scores)))
    return f"<section><h2>Group {number}: mean score {mean:.3f}</h2>{asked}{folds}</section>"


def _shared_start(messages: Sequence[Sequence[dict[str, Any]]]) -> int:
    """How many messages at the beginning all sequences have in common."""
    count = 0
    while all(len(one) > count + 1 and one[count] == messages[0][count] for one in messages) and messages:
        count += 1
    return count


def _sequence(group: ScoredData, index: int, messages: Sequence[dict[str, Any]]) -> str:
    notes = SequenceNotes.model_validate((group.overrides or [{}] * len(group.scores))[index])
    facts = [f"score {group.scores[index]:.3f}", *(f"{name} {value:g}" for name, value in notes.reward_parts.items())]
    facts += [f"{len(group.tokens[index])} tokens", f"ended by {notes.finish_reason or 'unknown'}"]
    shown = "".join(_message(message) for message in messages)
    return f"<details><summary>{html.escape(', '.join(facts))}</summary>{shown}</details>"


def _message(message: dict[str, Any]) -> str:
    """Role and content; what else there is (calls of tools, say) as JSON."""
    rest = {key: value for key, value in message.items() if key not in ("role", "content") and value}
    content = message.get("content")
    parts = [content if isinstance(content, str) else _json(content)] if content is not None else []
    parts += [_json(rest)] if rest else []
    shown = "".join(f"<pre>{html.escape(part)}</pre>" for part in parts)
    return f"<b>{html.escape(str(message.get('role')))}</b>{shown}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1, default=str)
