"""Reward for meaning: how near the embeddings of answer and gold are.

They come from an endpoint that speaks OpenAI's ``/embeddings``, or from sentence-transformers (extra ``rewards``).
Invariant: texts leave this machine only for the address that was given.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl_mcp.envs.rewards.base import Answer, said
from hermes_rl_mcp.errors import EndpointError, MissingExtraError

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(eq=False)
class Semantic:
    """Cosine of the two embeddings; 0 where it is negative. 1 for the same text."""

    model: str = DEFAULT_MODEL
    """Name for the endpoint, or a Hub id or folder for sentence-transformers."""
    base_url: str = ""
    """Ends in /v1. Empty = sentence-transformers in this process."""
    api_key: str = ""
    """Bearer token for the endpoint."""
    timeout_s: float = 60.0
    """Of one question to the endpoint."""

    def __post_init__(self) -> None:
        self._encoder: Any = None
        self._lock = threading.Lock()

    async def __call__(self, answer: Answer, gold: str) -> float:
        """Raises EndpointError, or MissingExtraError without an endpoint and without the extra."""
        texts = [said(answer).strip(), gold.strip()]
        if texts[0] == texts[1]:
            return 1.0
        left, right = await (self._asked(texts) if self.base_url else asyncio.to_thread(self._computed, texts))
        return max(0.0, cosine(left, right))

    async def _asked(self, texts: list[str]) -> list[list[float]]:
        import httpx

        url = f"{self.base_url.rstrip('/')}/embeddings"
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            async with httpx.AsyncClient(timeout=self.timeout_s) as http:
                reply = await http.post(url, json={"model": self.model, "input": texts}, headers=headers)
        except httpx.HTTPError as error:
            raise EndpointError(
                f"The embedding endpoint {url} did not answer: {type(error).__name__}.", hint="Check base_url."
            ) from error
        if reply.status_code != 200:
            raise EndpointError(
                f"The embedding endpoint {url} answered {reply.status_code}: {reply.text[:200]}",
                hint="Check base_url, model and api_key.",
            )
        try:
            rows = sorted(reply.json()["data"], key=lambda row: row["index"])
            found = [[float(value) for value in row["embedding"]] for row in rows]
        except (ValueError, KeyError, TypeError) as error:
            raise EndpointError(
                f"The embedding endpoint {url} answered something else than embeddings.", hint="Check base_url."
            ) from error
        if len(found) != len(texts) or len(found[0]) != len(found[1]):
            raise EndpointError(
                f"The embedding endpoint {url} gave no two embeddings of one size.", hint="Check model."
            )
        return found

    def _computed(self, texts: list[str]) -> list[list[float]]:
        with self._lock:
            if self._encoder is None:
                self._encoder = _loaded(self.model)
            return [[float(value) for value in row] for row in self._encoder.encode(texts)]


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    """Of the angle between two vectors of one size; 0 where one of them is zero."""
    size = math.hypot(*left) * math.hypot(*right)
    return sum(one * other for one, other in zip(left, right, strict=True)) / size if size else 0.0


def _loaded(model: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingExtraError("Semantic similarity without an embedding endpoint (base_url)", "rewards") from error
    return SentenceTransformer(model)
