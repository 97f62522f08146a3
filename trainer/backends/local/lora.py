"""peft's LoRA linear layers with a lean forward and backward: y = x Wᵀ + b + scale · (x Aᵀ) Bᵀ.

Invariants: the numbers are peft's to rounding in the layer's own precision; layers stay instances of peft's class, with
its parameters, names, merging and file format; a layer in any other state than "our one adapter, on, not merged" runs
peft's own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.backends.local.products import FEW_ROWS, linear
from trainer.backends.local.recompute import Recipe, recipe_of

ADAPTER = "default"


@dataclass(slots=True)
class RowSwitch:
    """Which rows of the batch that is being computed have the adapter; one object for all layers of a model."""

    on_B1: Tensor | None = None
    """1 or 0 for each row, None for all on."""
    complete: bool = True
    """False where some layer of the adapter is of another kind and does not know of the switch."""


@dataclass(slots=True)
class _Parts:
    """What a forward needs, without the detours of module attributes. Modules and not parameters, which may be
    replaced."""

    base: torch.nn.Linear
    a: torch.nn.Linear
    b: torch.nn.Linear
    scale: float
    switch: RowSwitch
    stacked: Tensor | None = None
    """W with A below it, [O + R, I]: the memory of both, so that one product gives x Wᵀ and x Aᵀ."""

    def weights(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """W, bias, A, B as they are stored."""
        base = self.base._parameters
        a, b = self.a._parameters["weight"], self.b._parameters["weight"]
        assert base["weight"] is not None and a is not None and b is not None
        return base["weight"], base["bias"], a, b

    def stack(self) -> None:
        """Move W and A into one tensor, where they are of one kind. Both parameters stay what they are to everybody."""
        weight, _, a, _ = self.weights()
        if weight.device.type != "cpu" or weight.dtype != a.dtype:
            return
        self.stacked = torch.cat([weight.detach(), a.detach()])
        weight.data, a.data = self.stacked[: len(weight)], self.stacked[len(weight) :]

    def still_stacked(self, weight: Tensor, a: Tensor) -> bool:
        """False once somebody gave one of them other memory."""
        stacked = self.stacked
        return (
            stacked is not None
            and weight.data_ptr() == stacked.data_ptr()
            and a.data_ptr() == stacked.data_ptr() + weight.nbytes
        )


class LeanLinear(PeftLinear):  # type: ignore[misc]
    """Takes the place of peft's class on an existing layer, see ``install``."""

    _lean: _Parts

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._disable_adapters or self.merged_adapters or args or kwargs or not _is_ours(self._active_adapter):
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        parts = self._lean
        weight, bias, a, b = parts.weights()
        on_B1 = parts.switch.on_B1
        if torch.is_grad_enabled() and (x.requires_grad or a.requires_grad):
            assert on_B1 is None, "rows without the adapter are for sampling"
            y: Tensor = _LoraLinear.apply(x, weight, bias, a, b, parts.scale, recipe_of(x))  # type: ignore[no-untyped-call]
            return y
        if x.numel() <= FEW_ROWS * x.shape[-1] and parts.still_stacked(weight, a):
            return _of_few_rows(x, parts, bias, b)
        # Rounded anew each time: fused optimizers change parameters without raising their version, so no copy is safe.
        low_a, low_b = a.to(weight.dtype), b.to(weight.dtype)
        x_MI = x.reshape(-1, x.shape[-1])
        h_MR = x_MI @ low_a.t()
        if on_B1 is not None:
            h_MR.view(on_B1.shape[0], -1).mul_(on_B1)
        y_MO = linear(x_MI, weight, bias).addmm_(h_MR, low_b.t(), alpha=parts.scale)
        return y_MO.view(*x.shape[:-1], -1)


def _of_few_rows(x: Tensor, parts: _Parts, bias: Tensor | None, b: Tensor) -> Tensor:
    """With features before rows throughout, see ``products``: two products and a copy in place of three and two."""
    stacked, on_B1 = parts.stacked, parts.switch.on_B1
    assert stacked is not None
    width = b.shape[0]
    both_OM = torch.mm(stacked, x.reshape(-1, x.shape[-1]).t())
    y_OM, h_RM = both_OM[:width], both_OM[width:]
    if on_B1 is not None:
        h_RM.view(h_RM.shape[0], on_B1.shape[0], -1).mul_(on_B1)
    y_MO = y_OM.addmm_(b, h_RM, alpha=parts.scale).t().contiguous()
    if bias is not None:
        y_MO.add_(bias)
    return y_MO.view(*x.shape[:-1], -1)


class _LoraLinear(torch.autograd.Function):
    """Keeps x (or what makes it again) and x Aᵀ for the backward pass; W and b are frozen and get no gradient.

    With dy the gradient of y and dh = scale · dy B:  dx = dy W + dh A,  dA = dhᵀ x,  dB = scale · dyᵀ (x Aᵀ).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        recipe: Recipe | None,
    ) -> Tensor:
        low_a, low_b = a.to(weight.dtype), b.to(weight.dtype)
        x_MI = x.reshape(-1, x.shape[-1])
        h_MR = x_MI @ low_a.t()
        y_MO = torch.nn.functional.linear(x_MI, weight, bias).addmm_(h_MR, low_b.t(), alpha=scale)
        ctx.save_for_backward(h_MR, weight, low_a, low_b, *(recipe.kept if recipe else (x,)))
        ctx.make, ctx.shape = recipe.make if recipe else None, x.shape
        ctx.scale = scale
        ctx.dtypes = a.dtype, b.dtype
        return y_MO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h_MR, weight, low_a, low_b, *kept = ctx.saved_tensors
        needs_x, _, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        dy_MO = dy.reshape(-1, dy.shape[-1])
        dx = da = db = None
        dh_MR = (dy_MO @ low_b).mul_(ctx.scale)
        if needs_a:
            x = ctx.make(*kept) if ctx.make else kept[0]
            da = (dh_MR.t() @ x.reshape(-1, x.shape[-1])).to(ctx.dtypes[0])
        if needs_b:
            db = (dy_MO.t() @ h_MR).mul_(ctx.scale).to(ctx.dtypes[1])
        if needs_x:
            dx = (dy_MO @ weight).addmm_(dh_MR, low_a).view(ctx.shape)
        return dx, None, None, da, db, None, None


def install(peft: Any) -> RowSwitch:
    """Make every plain LoRA linear layer of ``peft`` lean. Layers of other kinds keep peft's forward.

    Call it when the adapter and the device are final.
    """
    switch = RowSwitch()
    for module in peft.modules():
        if _is_plain(module):
            module.__class__ = LeanLinear
            module._lean = _Parts(
                base=module.base_layer,
                a=module.lora_A[ADAPTER],
                b=module.lora_B[ADAPTER],
                scale=float(module.scaling[ADAPTER]),
                switch=switch,
            )
            module._lean.stack()
        elif isinstance(module, LoraLayer):
            switch.complete = False
    return switch


@contextmanager
def only_rows(switch: RowSwitch, on: list[bool], like: Tensor) -> Iterator[None]:
    """Within it, row i of each batch has the adapter iff ``on[i]``; the others get the base's numbers.

    For sampling. The device and dtype of the hidden states are those of ``like``.
    """
    assert switch.on_B1 is None
    switch.on_B1 = None if all(on) else torch.tensor(on, dtype=like.dtype, device=like.device)[:, None]
    try:
        yield
    finally:
        switch.on_B1 = None


def _is_ours(active: str | list[str]) -> bool:
    return active in (ADAPTER, [ADAPTER])


def _is_plain(module: Any) -> bool:
    return (
        type(module) is PeftLinear
        and type(module.base_layer) is torch.nn.Linear
        and list(module.lora_A) == [ADAPTER]
        and isinstance(module.lora_dropout[ADAPTER], torch.nn.Identity)
        and not module.lora_variant
        and not module.lora_bias[ADAPTER]
        and not module.fan_in_fan_out
    )
