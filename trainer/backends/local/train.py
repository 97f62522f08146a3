"""Gradients and optimizer steps on the adapter.

Invariants: what divides the loss is known before the first pass, and a sequence is whole within its micro-batch, so the
gradient does not depend on how the batch is cut; only positions that predict a trained token reach the output head;
weights change only if loss and gradient are finite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.backends.base import Datum
from trainer.backends.local import losses, recompute
from trainer.backends.local.attention import Layout
from trainer.backends.local.device import block_cost
from trainer.backends.local.model import LoadedModel
from trainer.backends.local.rows import PADDING, RowCosts, TokenArrays, TrainRow, build_rows, micro_batches
from trainer.backends.training import (
    AdamParams,
    ForwardBackward,
    LossSettings,
    NonFiniteError,
    OptimStep,
    StepAbandonedError,
    never,
    silent,
)

_OPTIMIZER_FILE = "optimizer.safetensors"


class Learner:
    """The adapter's parameters, their gradients and Adam state. Use from the compute thread."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        micro_batch_tokens: int,
        share_prompts: bool = True,
        gradient_checkpointing: bool = False,
    ) -> None:
        self._model = model
        self._micro_batch_tokens = micro_batch_tokens
        self._checkpointing = gradient_checkpointing
        self._share_prompts = share_prompts and not model.plain_rows
        self._named = {name: p for name, p in model.peft.named_parameters() if p.requires_grad}
        self._parameters = list(self._named.values())
        self._b_matrices = [p for name, p in self._named.items() if "lora_B" in name]
        self.optimizer = torch.optim.Adam(self._parameters, lr=0.0, fused=True)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: LossSettings,
        stopping: Callable[[], bool] = never,
        progress: Callable[[int, int], None] = silent,
    ) -> ForwardBackward:
        """See ``trainer.backends.base.Backend``."""
        start = time.perf_counter()
        try:
            sums = self._accumulate(data, loss, stopping, progress)
            if not math.isfinite(sums.read("loss")):
                raise NonFiniteError(f"loss {sums.read('loss')}")
        except BaseException:
            self.drop_gradients()
            raise
        tokens = sum(int(datum.trainable_T.sum()) for datum in data)
        return ForwardBackward(
            loss=sums.read("loss"),
            tokens=tokens,
            logprob_mean=sums.mean("logprob", "known"),
            seconds=time.perf_counter() - start,
            entropy=sums.read("entropy") / tokens,
            clip_fraction=sums.read("clipped") / tokens,
            ratio_mean=sums.mean("ratio", "known"),
            ratio_max=sums.read("ratio_max") if sums.read("known") else None,
            mismatch_kl=sums.mean("mismatch", "known"),
            kl_reference=sums.mean("kl_reference", "referenced"),
            distill_kl=sums.mean("distill", "taught"),
        )

    def optim_step(self, adam: AdamParams) -> OptimStep:
        """See ``trainer.backends.base.Backend``."""
        start = time.perf_counter()
        try:
            limit = adam.grad_clip_norm if adam.grad_clip_norm > 0 else math.inf
            norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
            if not math.isfinite(norm):
                raise NonFiniteError(f"gradient norm {norm}")
            for group in self.optimizer.param_groups:
                group.update(lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps)
            self.optimizer.step()
        finally:
            self.drop_gradients()
        return OptimStep(norm, self.adapter_max_abs(), time.perf_counter() - start)

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def logprobs(self, batch: Sequence[TrainRow]) -> Tensor:
        """Trainer logprobs of all trained tokens of the rows, in order, fp32 [M], with gradient."""
        return self._logprobs(self._hidden(batch), TokenArrays.of(batch))[0]

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

    def _accumulate(
        self,
        data: Sequence[Datum],
        settings: LossSettings,
        stopping: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> _Sums:
        costs = RowCosts(self._model.hidden, self._micro_batch_tokens, block_cost(self._model))
        rows = build_rows(data, share_prompts=self._share_prompts, costs=costs)
        if not rows:
            raise ValueError("no sequence has a token to train on")
        lengths_S = [int(datum.trainable_T.sum()) for datum in data]
        weights_S = losses.sequence_weights(lengths_S, settings.reduction, settings.max_token_length)
        sums = _Sums()
        batches = micro_batches(rows, self._micro_batch_tokens)
        for number, batch in enumerate(batches, 1):
            if stopping():
                raise StepAbandonedError
            progress(number, len(batches))
            arrays = TokenArrays.of(batch)
            _check_whole(arrays, lengths_S)
            loss = self._loss(batch, arrays, weights_S, settings, sums)
            loss.backward()  # type: ignore[no-untyped-call]
        return sums

    def _loss(
        self,
        batch: Sequence[TrainRow],
        arrays: TokenArrays,
        weights_S: NDArray[np.float64],
        settings: LossSettings,
        sums: _Sums,
    ) -> Tensor:
        """What the micro-batch adds to the step's loss; see ``trainer.backends.local.losses`` for the formulas."""
        reference_M = self._reference(batch, arrays) if settings.kl_coef else None
        with recompute.whole_layers(self._model.body) if self._checkpointing else nullcontext():
            hidden_MH = self._hidden(batch)
        logprobs_M, entropies_M = self._logprobs(hidden_MH, arrays)
        old_M = logprobs_M.detach()
        known_M = ~self._tensor(arrays.missing_M)
        sampler_M = torch.where(known_M, self._tensor(arrays.sampler_logprobs_M), old_M)
        advantages_M = self._tensor(arrays.advantages_M)
        if reference_M is not None and settings.kl_in == "advantage":
            advantages_M = advantages_M - settings.kl_coef * losses.kl(old_M, reference_M, settings.kl_estimator)
        tokens = losses.Tokens(
            logprobs_M, sampler_M, advantages_M, self._tensor(arrays.sequences_M), sequences=len(weights_S)
        )
        terms = losses.policy_terms(tokens, settings)
        loss_M = terms.loss_M
        if reference_M is not None and settings.kl_in == "loss":
            loss_M = loss_M + settings.kl_coef * losses.kl(logprobs_M, reference_M, settings.kl_estimator)
        if settings.distill_coef and (arrays.distill_ids_MK >= 0).any():
            loss_M = loss_M + settings.distill_coef * self._distillation(hidden_MH, arrays, sums)
        weights_M = self._tensor(weights_S[arrays.sequences_M].astype(np.float32))
        loss = (loss_M * weights_M).sum()
        sums.add(loss=loss, clipped=terms.clipped_M, entropy=entropies_M)
        sums.compare(old_M, sampler_M, known_M)
        if reference_M is not None:
            sums.add(kl_reference=losses.kl(old_M, reference_M, "k3"), referenced=torch.ones_like(old_M))
        return loss

    def _distillation(self, hidden_MH: Tensor, arrays: TokenArrays, sums: _Sums) -> Tensor:
        ids_MK = self._tensor(arrays.distill_ids_MK)
        present_MK = ids_MK >= 0
        ones_M = torch.ones(len(ids_MK), device=ids_MK.device)
        chosen_MK = self._model.head.chosen_logprobs(hidden_MH, ids_MK.clamp(min=0), ones_M)
        terms_M = losses.distillation(chosen_MK, self._tensor(arrays.distill_logprobs_MK), present_MK)
        sums.add(distill=terms_M, taught=present_MK.any(dim=1))
        return terms_M

    def _reference(self, batch: Sequence[TrainRow], arrays: TokenArrays) -> Tensor:
        """The reference policy's logprobs, [M]: those that came with a sequence, else the base model's."""
        given_M = self._tensor(arrays.reference_logprobs_M)
        unknown = np.isnan(arrays.reference_logprobs_M)
        if not unknown.any():
            return given_M
        with torch.no_grad(), self._model.peft.disable_adapter():
            base_M, _ = self._logprobs(self._hidden(batch), arrays)
        return torch.where(self._tensor(unknown), base_M, given_M)

    def _hidden(self, batch: Sequence[TrainRow]) -> Tensor:
        """Hidden states that predict the rows' trained tokens, [M, H]."""
        model, device = self._model, self._model.device
        length = max(map(len, batch))
        ids_BR = torch.tensor([row.tokens_R + [0] * (length - len(row)) for row in batch], device=device)
        positions = [row.positions_R + [0] * (length - len(row)) for row in batch]
        branches = [row.branches_R + [PADDING] * (length - len(row)) for row in batch]
        if model.plain_rows:
            real_BR = torch.tensor(branches, device=device) != PADDING
            hidden_BRH = model.hidden_states(
                ids_BR, mask=real_BR.long(), positions_BT=torch.tensor(positions, device=device)
            )
        else:
            layout = Layout.of(branches, positions, device=device, block_cost=block_cost(model))
            hidden_BRH = model.row_states(ids_BR, layout)
        sources = [at * length + source for at, row in enumerate(batch) for source in row.sources_M]
        return hidden_BRH.flatten(0, 1).index_select(0, torch.tensor(sources, device=device))

    def _logprobs(self, hidden_MH: Tensor, arrays: TokenArrays) -> tuple[Tensor, Tensor]:
        """And entropies, which carry no gradient."""
        targets_M, temperatures_M = self._tensor(arrays.targets_M), self._tensor(arrays.temperatures_M)
        return self._model.head.selected_logprobs(hidden_MH, targets_M, temperatures_M)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)


def _check_whole(arrays: TokenArrays, lengths_S: Sequence[int]) -> None:
    """gspo and weights of whole sequences would be silently wrong for half of one."""
    here_S = np.bincount(arrays.sequences_M, minlength=len(lengths_S))
    assert ((here_S == 0) | (here_S == lengths_S)).all(), "a sequence was split over micro-batches"


class _Sums:
    """Sums over the tokens of a step. They stay on the device until they are read: reading one waits for a GPU."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            total = value.detach().sum(dtype=torch.float64)
            self._totals[name] = self._totals[name] + total if name in self._totals else total

    def compare(self, trainer_M: Tensor, sampler_M: Tensor, known_M: Tensor) -> None:
        """Of tokens whose sampler logprob is known, before any cap."""
        ratio_M = torch.exp(trainer_M - sampler_M).where(known_M, 0.0)
        mismatch_M = losses.kl(sampler_M, trainer_M, "k3").where(known_M, 0.0)
        self.add(logprob=trainer_M.where(known_M, 0.0), ratio=ratio_M, mismatch=mismatch_M, known=known_M)
        largest = ratio_M.amax().double()
        self._totals["ratio_max"] = torch.maximum(largest, self._totals.get("ratio_max", largest))

    def read(self, name: str) -> float:
        return float(self._totals[name]) if name in self._totals else 0.0

    def mean(self, name: str, count: str) -> float | None:
        number = self.read(count)
        return self.read(name) / number if number else None
