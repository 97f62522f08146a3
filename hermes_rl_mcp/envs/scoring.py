"""What an endpoint thinks of given tokens: requests and replies of the server types that can tell.

Invariant: ids in, ids out. What comes back belongs to exactly the ids that were asked about, one entry for each; an
answer about anything else is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl_mcp.errors import EndpointError, InvalidValueError

_MOST_LOGPROB = 1e-3
"""Rounding in the softmax can leave a hair above 0."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One given token, and what would have been likely in its place. Logprobs at temperature 1, nats."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """The likeliest tokens and their logprobs, likeliest first; the given one only if it is among them."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of a continuation, one entry for each of its tokens."""

    tokens: list[TokenScore]
    policy_version: int | None
    """None for servers that do not say."""


def body_for(
    server_type: str, context_ids: Sequence[int], token_ids: Sequence[int], top: int, *, adapter: bool
) -> dict[str, Any]:
    """The body of ``POST /generate``. Raises InvalidValueError for what cannot be asked."""
    if not context_ids or not token_ids or top < 0:
        raise InvalidValueError(
            f"Scoring was asked for {len(token_ids)} tokens after {len(context_ids)} of context, with top = {top}.",
            hint="Give at least one token of context and one to score; top is 0 or more.",
        )
    ids = [*context_ids, *token_ids]
    ours = {} if adapter else {"adapter": False}
    if server_type == "vllm":
        sampling = {"n": 1, "max_tokens": 1, "temperature": 0.0}
        return {"prompt": {"prompt_token_ids": ids}, "prompt_logprobs": top, **sampling, **ours}
    if server_type == "sglang":
        return {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "return_text_in_logprobs": False,
            "logprob_start_len": len(context_ids) - 1,
            "top_logprobs_num": top,
            **ours,
        }
    raise InvalidValueError(
        f"A server of type {server_type} does not tell the logprobs of given tokens.",
        hint="Use server_type vllm or sglang; the trainer's own sampler speaks both.",
    )


def parse(server_type: str, reply: Any, context_length: int, token_ids: Sequence[int], top: int) -> Scores:
    """Of a reply to ``body_for``. Raises EndpointError."""
    try:
        if server_type == "vllm":
            positions, version = _vllm(reply, context_length), reply.get("policy_version")
        else:
            positions, version = _sglang(reply, len(token_ids)), reply["meta_info"].get("policy_version")
        tokens = [_score(one, token, top) for one, token in zip(positions, token_ids, strict=True)]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise EndpointError(
            f"The sampling server's answer holds no logprobs of the given tokens: {type(error).__name__}: {error}",
            hint=f"Check that the server is of type {server_type}, and that it gives as many as top = {top} (vLLM: "
            "--max-logprobs).",
        ) from error
    return Scores(tokens, version)


def prompt_form(ids: Sequence[int], scores: Scores) -> dict[str, Any]:
    """As Atropos' ``get_logprobs`` gives it; the first token, which nothing predicts, has no candidates."""
    tops = [one.top for one in scores.tokens]
    return {
        "prompt_tokens": list(ids),
        "prompt_topk_token_ids": [[], *([token for token, _ in top] for top in tops)],
        "prompt_topk_logprobs": [[], *([logprob for _, logprob in top] for top in tops)],
    }


def _vllm(reply: Any, context_length: int) -> list[dict[int, float]]:
    """``prompt_logprobs`` is [T] or [1][T] of null, {id: logprob}, {id: {logprob, ...}} or a list of such."""
    positions = reply["prompt_logprobs"]
    if len(positions) == 1 and isinstance(positions[0], list):
        positions = positions[0]
    found = []
    for position in positions[context_length:]:
        entries = position if isinstance(position, list) else [position]
        found.append({int(token): _number(value) for entry in entries for token, value in entry.items()})
    return found


def _sglang(reply: Any, count: int) -> list[dict[int, float]]:
    """``input_token_logprobs`` is [.., T] of [logprob, id, text], ``input_top_logprobs`` [.., T][K] of the same. Where
    they begin differs between versions; they end with the input."""
    meta = reply["meta_info"]
    own = meta["input_token_logprobs"][-count:]
    tops = (meta.get("input_top_logprobs") or [None] * count)[-count:]
    return [_pairs([*(top or ()), one]) for one, top in zip(own, tops, strict=True)]


def _pairs(entries: Iterable[Sequence[Any]]) -> dict[int, float]:
    return {int(entry[1]): float(entry[0]) for entry in entries}


def _number(value: Any) -> float:
    return float(value["logprob"] if isinstance(value, dict) else value)


def _score(position: dict[int, float], token_id: int, top: int) -> TokenScore:
    if token_id not in position:
        raise ValueError(f"token {token_id} is missing")
    for logprob in position.values():
        if math.isnan(logprob) or logprob > _MOST_LOGPROB:
            raise ValueError(f"{logprob} is no logprob")
    if not math.isfinite(position[token_id]):
        raise ValueError(f"token {token_id} has the logprob {position[token_id]}")
    known = [(token, min(logprob, 0.0)) for token, logprob in position.items() if math.isfinite(logprob)]
    known.sort(key=lambda pair: -pair[1])
    return TokenScore(token_id, min(position[token_id], 0.0), known[:top])
