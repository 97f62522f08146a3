"""One optimizer step on the adapter.

Invariants: the number of trained tokens is known before the first pass, so the gradient does not depend on how the
batch is cut; only positions that predict a trained token reach the output head; weights change only if loss and
gradient are finite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.backends.base import Datum, NonFiniteError, StepAbandonedError
from trainer.backends.local.model import LoadedModel
from trainer.backends.local.rows import PADDING, PROMPT, TrainRow, build_rows, micro_batches

_OPTIMIZER_FILE = "optimizer.safetensors"


def _silent(number: int, of: int) -> None:
    """For callers that show no progress."""


class Learner:
    """The adapter's parameters, their Adam state and the loss. Use from the compute thread."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        betas: tuple[float, float],
        eps: float,
        clip_norm: float,
        reduction: Literal["token_mean", "token_sum"],
        micro_batch_tokens: int,
        share_prompts: bool = True,
    ) -> None:
        self._model = model
        self._clip_norm = clip_norm
        self._reduction = reduction
        self._micro_batch_tokens = micro_batch_tokens
        self._share_prompts = share_prompts and model.free_masks
        self._named = {name: p for name, p in model.peft.named_parameters() if p.requires_grad}
        self._parameters = list(self._named.values())
        self._b_matrices = [p for name, p in self._named.items() if "lora_B" in name]
        self.optimizer = torch.optim.Adam(self._parameters, lr=0.0, betas=betas, eps=eps, fused=True)

    def accumulate(
        self, data: Sequence[Datum], stopping: Callable[[], bool], progress: Callable[[int, int], None] = _silent
    ) -> tuple[float, float]:
        """Leave the gradient of the whole step in the parameters. Returns loss and mean trainer logprob."""
        rows = build_rows(
            data,
            share_prompts=self._share_prompts,
            hidden=self._model.hidden,
            max_tokens=self._micro_batch_tokens,
        )
        trained = sum(len(row.targets_M) for row in rows)
        scale = 1.0 / trained if self._reduction == "token_mean" else 1.0
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum = logprob_sum = 0.0
        batches = list(micro_batches(rows, self._micro_batch_tokens))
        for number, batch in enumerate(batches, 1):
            if stopping():
                raise StepAbandonedError
            progress(number, len(batches))
            logprobs_M = self.logprobs(batch)
            sampler_M = _flat([row.sampler_logprobs_M for row in batch], logprobs_M)
            advantages_M = _flat([row.advantages_M for row in batch], logprobs_M)
            loss = -(torch.exp(logprobs_M - sampler_M) * advantages_M).sum() * scale
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
            logprob_sum += float(logprobs_M.detach().sum())
        return loss_sum, logprob_sum / trained

    def step(
        self,
        data: Sequence[Datum],
        learning_rate: float,
        stopping: Callable[[], bool],
        progress: Callable[[int, int], None] = _silent,
    ) -> tuple[float, ...]:
        """Returns loss, gradient norm, adapter_max_abs, mean trainer logprob, seconds."""
        start = time.perf_counter()
        try:
            loss, logprob_mean = self.accumulate(data, stopping, progress)
            limit = self._clip_norm if self._clip_norm > 0 else math.inf
            norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise NonFiniteError(f"loss {loss}, gradient norm {norm}")
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return loss, norm, self.adapter_max_abs(), logprob_mean, time.perf_counter() - start

    def logprobs(self, batch: Sequence[TrainRow]) -> Tensor:
        """Trainer logprobs of all trained tokens of the rows, in order, fp32 [M], with gradient."""
        model, device = self._model, self._model.device
        length = max(map(len, batch))
        ids_BR = torch.tensor([row.tokens_R + [0] * (length - len(row)) for row in batch], device=device)
        positions_BR = torch.tensor([row.positions_R + [0] * (length - len(row)) for row in batch], device=device)
        hidden_BRH = model.hidden_states(ids_BR, mask=self._mask(batch, length), positions_BT=positions_BR)
        sources = [at * length + source for at, row in enumerate(batch) for source in row.sources_M]
        hidden_MH = hidden_BRH.flatten(0, 1).index_select(0, torch.tensor(sources, device=device))
        targets_M = torch.tensor([target for row in batch for target in row.targets_M], device=device)
        temperatures_M = _flat([row.temperatures_M for row in batch], hidden_MH.float())
        return model.head.selected_logprobs(hidden_MH, targets_M, temperatures_M)

    def adapter_max_abs(self) -> float:
        with torch.no_grad():
            return max(float(p.abs().max()) for p in self._b_matrices)

    def save(self, folder: Path) -> None:
        """Adam's moments and step counts, by parameter name."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}|{key}"] = value.detach().cpu().contiguous()
        save_file(tensors, folder / _OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        self.optimizer.state.clear()
        for full, value in load_file(folder / _OPTIMIZER_FILE).items():
            name, key = full.rsplit("|", 1)
            parameter = self._named[name]
            device = "cpu" if key == "step" and parameter.device.type == "cpu" else parameter.device
            self.optimizer.state[parameter][key] = value.to(device)

    def _mask(self, batch: Sequence[TrainRow], length: int) -> Tensor:
        device = self._model.device
        branches = [row.branches_R + [PADDING] * (length - len(row)) for row in batch]
        branches_BR = torch.tensor(branches, device=device)
        if not self._model.free_masks:
            return (branches_BR != PADDING).long()
        index = torch.arange(length, device=device)
        keys_B1R, queries_BR1 = branches_BR[:, None, :], branches_BR[:, :, None]
        allowed = (index[None, None, :] <= index[None, :, None]) & ((keys_B1R == PROMPT) | (keys_B1R == queries_BR1))
        dtype = self._model.dtype
        mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def _flat(lists: Sequence[list[float]], like: Tensor) -> Tensor:
    return torch.tensor([value for one in lists for value in one], dtype=torch.float32, device=like.device)
