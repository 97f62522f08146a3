"""The batch of completions that is being decoded: prompts join, tokens are drawn, finished rows leave.

Invariants: a prompt is computed once however many completions were asked, and not even that as far as its beginning is
known; every completion's tokens are drawn by the policy version it was admitted under; ids are kept exactly as
sampled, stop tokens included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.backends.base import Completion, SampleRequest
from trainer.backends.local import lora
from trainer.backends.local.kv import BatchCache, PrefillCache, Stretch, copy_of
from trainer.backends.local.model import LoadedModel
from trainer.backends.local.prefix import PrefixCache
from trainer.backends.local.sampling import choose, uniforms

_WINDOW_EXTRA_TOKENS = 8
"""Special tokens or split characters that may lie among the tokens of a stop string."""


@dataclass(slots=True, eq=False)
class Row:
    """One completion under way."""

    request: SampleRequest
    index: int
    """Which of the request's completions it is."""
    budget: int
    """Tokens it may have in all."""
    generator: torch.Generator | None = None
    """Its own, on the CPU; without one it draws from the batch's."""
    completion: Completion = field(default_factory=Completion)
    done: bool = False

    @property
    def length(self) -> int:
        """Tokens whose keys and values are known: all but the one drawn last."""
        return len(self.request.prompt_ids) + len(self.completion.token_ids) - 1

    @property
    def full_length(self) -> int:
        """Columns it may need."""
        return len(self.request.prompt_ids) + self.budget

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens of ``length``."""
        return (*self.request.prompt_ids, *self.completion.token_ids[:-1])


@dataclass(slots=True)
class PassCounts:
    """Prompt tokens of all admissions so far."""

    computed: int = 0
    reused: int = 0


class DecodeBatch:
    """Use from one thread, under ``torch.inference_mode``."""

    def __init__(
        self, model: LoadedModel, generator: torch.Generator, prefix: PrefixCache[Stretch] | None = None
    ) -> None:
        """``generator`` lives on the CPU; what is computed is looked up in ``prefix`` and kept there."""
        self._model = model
        self._generator = generator
        self._prefix: PrefixCache[Stretch] = prefix or PrefixCache(0)
        self._like = torch.empty(0, dtype=model.dtype, device=model.device)
        self.rows: list[Row] = []
        self._cache = BatchCache(model.layers)
        self.counts = PassCounts()

    @property
    def columns(self) -> int:
        """Of the key-value memory that each row takes part in: the longest row's tokens."""
        return self._cache.columns

    def admit(self, groups: Sequence[list[Row]]) -> list[Row]:
        """Prefill one prompt per group and draw the first token of each of its rows. Returns the rows already done.

        Groups that begin with known stretches share a pass only on a model that takes any mask.
        """
        prompts = [(group[0].request.prompt_ids, group[0].request.adapter) for group in groups]
        known = [self._prefix.longest(*prompt) for prompt in prompts]
        new = [ids[length:] for (ids, _), (_, length) in zip(prompts, known, strict=True)]
        cache = PrefillCache(self._model.layers, known, max(map(len, new)))
        logits_GV = self._prefill(new, [length for _, length in known], [adapter for _, adapter in prompts], cache)
        self.counts.computed += sum(map(len, new))
        self.counts.reused += sum(length for _, length in known)
        rows = [row for group in groups for row in group]
        if len(rows) != len(groups):
            origin = torch.tensor([at for at, group in enumerate(groups) for _ in group], device=self._model.device)
            logits_GV = logits_GV[origin]
        self._draw(logits_GV, rows)
        going: list[tuple[int, list[Stretch]]] = []
        for at, group in enumerate(groups):
            stretch, length = known[at]
            parts = [_first(stretch, length)] if stretch else []
            parts.append(cache.cut(at, cache.columns - len(new[at]), cache.columns))
            self._keep(*prompts[at], parts)
            going += [(row.length, parts) for row in group if not row.done]
        if going:
            self._cache.join(going)
        self.rows += [row for row in rows if not row.done]
        return [row for row in rows if row.done]

    def step(self) -> list[Row]:
        """One token for every row. Returns the rows that are done with it; they have left."""
        self._cache.prepare_step()
        lengths = [row.length for row in self.rows]
        with self._policy([row.request.adapter for row in self.rows]):
            hidden_B1H = self._model.hidden_states(
                torch.tensor([[row.completion.token_ids[-1]] for row in self.rows], device=self._model.device),
                mask=self._mask(lengths, [1] * len(lengths), self._cache.columns, 1),
                positions_BT=torch.tensor([[length] for length in lengths], device=self._model.device),
                cache=self._cache,
            )
        self._draw(self._model.head.logits(hidden_B1H[:, 0]), self.rows)
        finished = [row for row in self.rows if row.done]
        self.leave(finished)
        return finished

    def leave(self, leaving: Sequence[Row]) -> None:
        """Take rows out. An answer that ended by itself is kept: the conversation may go on from it."""
        for row in leaving:
            at = self.rows.index(row)
            if row.done and row.completion.finish_reason == "stop":
                self._keep(row.ids, row.request.adapter, [self._cut(at, row)])
            self._cache.leave(at)
            self.rows[at] = self.rows[-1]
            self.rows.pop()
        if not self.rows:
            self.clear()
        elif leaving:
            self._cache.narrow(max(row.length for row in self.rows))

    def clear(self) -> None:
        self.rows = []
        self._cache = BatchCache(self._model.layers)

    def _cut(self, at: int, row: Row) -> Stretch:
        """Rows end in the last column; one that is done has its drawn token's predecessor there."""
        return self._cache.cut(at, self._cache.columns - row.length, self._cache.columns)

    def _keep(self, ids: tuple[int, ...], adapter: bool, parts: Sequence[Stretch]) -> None:
        if self._prefix.wants(ids, adapter):
            self._prefix.add(ids, adapter, copy_of(parts))

    def _prefill(
        self, new: Sequence[Sequence[int]], known: Sequence[int], adapter: Sequence[bool], cache: PrefillCache
    ) -> Tensor:
        """Logits behind each prompt's last token, [G, V]. The new tokens are aligned to the right."""
        width, device = max(map(len, new)), self._model.device
        pads = [width - len(ids) for ids in new]
        ids_GT = torch.tensor([[0] * pad + list(ids) for pad, ids in zip(pads, new, strict=True)], device=device)
        starts_G1 = torch.tensor([[length - pad] for length, pad in zip(known, pads, strict=True)], device=device)
        positions_GT = (starts_G1 + torch.arange(width, device=device)).clamp_(min=0)
        with self._policy(adapter):
            hidden_GTH = self._model.hidden_states(
                ids_GT,
                mask=self._mask(known, [len(ids) for ids in new], cache.known, width),
                positions_BT=positions_GT,
                cache=cache,
            )
        return self._model.head.logits(hidden_GTH[:, -1])

    def _draw(self, logits_BV: Tensor, rows: Sequence[Row]) -> None:
        tokens, logprobs = choose(
            logits_BV,
            [row.request.temperature for row in rows],
            [row.request.top_p for row in rows],
            uniforms([row.generator for row in rows], self._generator),
        )
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
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

    @contextmanager
    def _policy(self, adapter: Sequence[bool]) -> Iterator[None]:
        """Within it, each row of a pass is computed with the adapter or without."""
        if all(adapter):
            yield
        elif self._model.rows.complete:
            with lora.only_rows(
                self._model.rows, list(adapter), torch.empty(0, dtype=self._model.dtype, device=self._model.device)
            ):
                yield
        else:
            assert not any(adapter), "this model's adapter is on or off for a whole batch"
            with self._model.peft.disable_adapter():
                yield

    def _mask(self, known: Sequence[int], new: Sequence[int], known_columns: int, new_columns: int) -> Tensor | None:
        """Who sees what in a pass: of the first columns each row's last ``known``, of the columns behind them its last
        ``new``, of which later ones are not seen by earlier ones. None where plain causal attention says the same."""
        device = self._model.device
        if new_columns > 1 and known_columns == 0 and min(new) == new_columns and self._model.free_masks:
            return None
        columns = torch.arange(known_columns + new_columns, device=device)
        first_B1 = torch.tensor([[known_columns - one] for one in known], device=device)
        real_BK = (columns >= first_B1) & (columns < known_columns)
        first_B1 = torch.tensor([[known_columns + new_columns - one] for one in new], device=device)
        real_BK |= columns >= first_B1
        if not self._model.free_masks:
            return real_BK.long()
        allowed_BTK = real_BK[:, None, :]
        if new_columns > 1:
            allowed_BTK = allowed_BTK & (columns[known_columns:, None] >= columns[None, :])
        blocked = torch.finfo(self._model.dtype).min
        mask = torch.zeros(allowed_BTK.shape, dtype=self._model.dtype, device=device)
        return mask.masked_fill_(~allowed_BTK, blocked)[:, None]


def _first(stretch: Stretch, length: int) -> Stretch:
    return [(keys[:, :length], values[:, :length]) for keys, values in stretch]
