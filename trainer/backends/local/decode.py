"""The batch of completions that is being decoded: prompts join, tokens are drawn, finished rows leave.

Invariants: a prompt is computed once per request however many completions were asked; every completion's tokens are
drawn by the policy version it was admitted under; ids are kept exactly as sampled, stop tokens included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.backends.base import Completion, SampleRequest
from trainer.backends.local.kv import KVCache
from trainer.backends.local.model import LoadedModel
from trainer.backends.local.sampling import choose

_WINDOW_EXTRA_TOKENS = 8
"""Special tokens or split characters that may lie among the tokens of a stop string."""


@dataclass(slots=True)
class Row:
    """One completion under way."""

    request: SampleRequest
    owner: int
    """Number of the request it belongs to."""
    index: int
    """Which of the request's completions it is."""
    budget: int
    """Tokens it may still have in all."""
    generator: torch.Generator | None
    completion: Completion = field(default_factory=Completion)
    done: bool = False
    reported: bool = False
    """Done and handed out; its place in the cache may still be occupied."""


class DecodeBatch:
    """Use from one thread, under ``torch.inference_mode``."""

    def __init__(self, model: LoadedModel, generator: torch.Generator) -> None:
        self._model = model
        self._generator = generator
        self.rows: list[Row] = []
        self._pads: list[int] = []
        self._cache: KVCache | None = None

    @property
    def columns(self) -> int:
        return self._cache.length if self._cache is not None else 0

    def admit(self, groups: Sequence[list[Row]]) -> list[Row]:
        """Prefill one prompt per group, draw the first token of each of its rows. Returns the rows already done."""
        prompts = [group[0].request.prompt_ids for group in groups]
        longest = max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        device = self._model.device
        ids_BT = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)])
        cache = KVCache(self._model.layers)
        hidden_BTH = self._model.hidden_states(
            ids_BT.to(device),
            mask=self._mask(pads, 0, longest),
            positions_BT=self._positions(pads, 0, longest),
            cache=cache,
        )
        logits_BV = self._model.head.logits(hidden_BTH[:, -1])
        origin = torch.tensor([at for at, group in enumerate(groups) for _ in group], device=device)
        rows = [row for group in groups for row in group]
        if len(rows) != len(groups):
            cache.take(origin)
            logits_BV = logits_BV[origin]
        self._draw(logits_BV, rows)
        self._join(rows, [pads[at] for at, group in enumerate(groups) for _ in group], cache)
        return self._sweep()

    def step(self) -> list[Row]:
        """One token for every row. Returns the rows that are done with it."""
        assert self._cache is not None
        length = self._cache.length
        ids_B1 = torch.tensor([[row.completion.token_ids[-1]] for row in self.rows], device=self._model.device)
        hidden_B1H = self._model.hidden_states(
            ids_B1,
            mask=self._mask(self._pads, length, 1),
            positions_BT=self._positions(self._pads, length, 1),
            cache=self._cache,
        )
        self._draw(self._model.head.logits(hidden_B1H[:, 0]), self.rows)
        return self._sweep()

    def drop(self, owners: set[int]) -> None:
        """Take the rows of these requests out; nobody wants them any more."""
        for row in self.rows:
            if row.owner in owners:
                row.done = row.reported = True
        self._sweep()

    def clear(self) -> None:
        self.rows, self._pads, self._cache = [], [], None

    def _draw(self, logits_BV: Tensor, rows: Sequence[Row]) -> None:
        tokens, logprobs = choose(
            logits_BV,
            [row.request.temperature for row in rows],
            [row.request.top_p for row in rows],
            [row.generator for row in rows],
            self._generator,
        )
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if row.done:
                continue
            row.completion.token_ids.append(token)
            row.completion.logprobs.append(logprob)
            self._finish(row, token)

    def _finish(self, row: Row, token: int) -> None:
        if token in self._model.eos_ids or token in row.request.stop_token_ids or self._hit_stop_string(row):
            row.completion.finish_reason = "stop"
            row.done = True
        elif len(row.completion.token_ids) >= row.budget:
            row.done = True

    def _hit_stop_string(self, row: Row) -> bool:
        stops = row.request.stop_strings
        if not stops:
            return False
        window = max(len(stop.encode()) for stop in stops) + _WINDOW_EXTRA_TOKENS
        tail = self._model.tokenizer.decode(row.completion.token_ids[-window:], skip_special_tokens=False)
        return any(stop in tail for stop in stops)

    def _join(self, rows: list[Row], pads: list[int], cache: KVCache) -> None:
        if self._cache is None:
            self.rows, self._pads, self._cache = list(rows), list(pads), cache
            return
        if len(live := self._live()) < len(self.rows):
            self._compact(live)
        old, new = self._cache.length, cache.length
        self._cache.append_rows(cache)
        self._pads = [pad + max(0, new - old) for pad in self._pads] + [pad + max(0, old - new) for pad in pads]
        self.rows = self.rows + rows

    def _sweep(self) -> list[Row]:
        """Take finished rows out. Their places in the cache are freed once they are a quarter of it."""
        finished = [row for row in self.rows if row.done and not row.reported]
        for row in finished:
            row.reported = True
        live = self._live()
        if not live:
            self.clear()
        elif len(live) <= 0.75 * len(self.rows):
            self._compact(live)
        return finished

    def _live(self) -> list[int]:
        return [at for at, row in enumerate(self.rows) if not row.done]

    def _compact(self, live: list[int]) -> None:
        assert self._cache is not None
        cut = min(self._pads[at] for at in live)
        self._cache.take(torch.tensor(live, device=self._model.device), cut)
        self.rows = [self.rows[at] for at in live]
        self._pads = [self._pads[at] - cut for at in live]

    def _positions(self, pads: Sequence[int], past: int, width: int) -> Tensor:
        columns = torch.arange(past, past + width)
        return (columns[None, :] - torch.tensor(pads)[:, None]).clamp_(min=0).to(self._model.device)

    def _mask(self, pads: Sequence[int], past: int, width: int) -> Tensor:
        """Causal, and blind to the padding on the left."""
        device = self._model.device
        keys = torch.arange(past + width, device=device)
        real_BK = keys[None, :] >= torch.tensor(pads, device=device)[:, None]
        if not self._model.free_masks:
            return real_BK.long()
        allowed = real_BK[:, None, :]
        if width > 1:
            allowed = allowed & (keys[None, past:, None] >= keys[None, None, :])
        blocked = torch.finfo(self._model.dtype).min
        mask = torch.zeros(allowed.shape, dtype=self._model.dtype, device=device)
        return mask.masked_fill_(~allowed, blocked)[:, None]
