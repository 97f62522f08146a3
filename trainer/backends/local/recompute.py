"""Less kept for the backward pass: RMSNorm and gated MLP whose cheap parts are made again, and whole layers likewise.

Invariants: the values are those of the family's own layers, bit for bit: a layer is replaced only where a probe has
shown it. A tensor that carries a ``Recipe`` may be dropped by whoever would keep it, and made again from the recipe.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a tensor again from others that are kept anyway."""

    make: Callable[..., Tensor]
    kept: tuple[Tensor, ...]


def recipe_of(x: Tensor) -> Recipe | None:
    return getattr(x, "recipe", None)


def _llama(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = weight * (x.float() * rstd).to(x.dtype)
    return y


def _gemma(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = ((x.float() * rstd) * (1.0 + weight.float())).type_as(x)
    return y


def install(model: Any) -> int:
    """Replace the forward of every layer that the probe allows; how many there were."""
    count = 0
    for module in model.modules():
        forward = _norm_of(module) or _mlp_of(module)
        if forward is not None:
            module.forward = types.MethodType(forward, module)
            count += 1
    return count


@contextmanager
def whole_layers(body: Any) -> Iterator[None]:
    """Within it, decoder layers of ``body`` keep their input alone and are computed again in the backward pass.

    Nothing is set to training for it: some families drop out in the layer itself.
    """
    layers = [module for module in body.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class has its own


def _norm_of(module: Any) -> Callable[[Any, Tensor], Tensor] | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1 or not eps:
        return None
    original = module.forward
    probe = torch.linspace(-3.0, 5.0, 4 * len(weight), device=weight.device, dtype=weight.dtype).view(4, -1)
    for make, scale in ((_llama, _plain), (_gemma, _one_plus)):

        def forward(self: Any, x: Tensor, make: Any = make, scale: Any = scale) -> Tensor:
            if not (torch.is_grad_enabled() and x.requires_grad) or self.weight.requires_grad:
                plain: Tensor = original(x)
                return plain
            y: Any
            y, rstd = _Norm.apply(x, self.weight, eps, make, scale)  # type: ignore[no-untyped-call]
            y.recipe = Recipe(make, (x.detach(), rstd, self.weight))
            normed: Tensor = y
            return normed

        with torch.no_grad():
            same = torch.equal(make(probe, _rstd(probe, eps), weight), original(probe))
        if same:
            return forward
    return None


def _mlp_of(module: Any) -> Callable[[Any, Tensor], Tensor] | None:
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return None
    original = module.forward
    weight = module.gate_proj.weight
    probe = torch.linspace(-1.0, 2.0, 2 * weight.shape[1], device=weight.device, dtype=weight.dtype).view(2, -1)

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not (torch.is_grad_enabled() and gate.requires_grad):
            plain: Tensor = self.down_proj(self.act_fn(gate) * up)
            return plain
        y = _Gated.apply(gate, up, self.act_fn)  # type: ignore[no-untyped-call]
        act_fn = self.act_fn
        y.recipe = Recipe(lambda gate, up: act_fn(gate) * up, (gate.detach(), up.detach()))
        down: Tensor = self.down_proj(y)
        return down

    with torch.no_grad():
        same = torch.equal(forward(module, probe), original(probe))
    return forward if same else None


def _rstd(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


def _plain(weight: Tensor) -> Tensor:
    return weight


def _one_plus(weight: Tensor) -> Tensor:
    return 1.0 + weight.float()


class _Norm(torch.autograd.Function):
    """y = w x r with r = 1 / sqrt(mean(x²) + eps); keeps x and r. With g = w dy: dx = r (g - x r mean(g x r))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, make: Any, scale: Any) -> tuple[Tensor, Tensor]:
        rstd = _rstd(x, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.scale = scale
        ctx.mark_non_differentiable(rstd)
        return make(x, rstd, weight), rstd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight = ctx.saved_tensors
        g = dy.float() * ctx.scale(weight)
        unit = x.float() * rstd
        mean = (g * unit).mean(-1, keepdim=True)
        dx = g.sub_(unit.mul_(mean)).mul_(rstd)
        return dx.to(x.dtype), None, None, None, None


class _Gated(torch.autograd.Function):
    """act(gate) · up; keeps gate and up, whose own layers made them and keep nothing."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act_fn: Any) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act_fn = act_fn
        y: Tensor = act_fn(gate) * up
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            active = ctx.act_fn(leaf)
        (d_gate,) = torch.autograd.grad(active, leaf, dy * up)
        return d_gate, active.detach() * dy, None
