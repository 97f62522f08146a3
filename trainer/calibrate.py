"""``python -P -m trainer.calibrate``: how fast this machine samples from and trains a model of a given shape.

Reads a SpeedRequest from standard input, writes a Speed to standard output. Measures one or two layers and the head
with random weights, in plain torch: no model file is needed and nothing but torch is loaded, so it takes seconds.
Invariant: the work per layer is that of the trainer's (LoRA on every matrix, additive mask, fp32 on a CPU, bf16 on a
GPU).
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.contracts.estimates import Speed, SpeedRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MEASURED_LAYERS = 2
_BUDGET_S = 0.2
"""For each of the seven measurements; at least one round is timed."""
_FLOPS_PER_ROUND = 1e10
"""A round of training larger than this is measured with fewer tokens."""
_SMALL_LAYER = 1_000_000
"""Weights. A larger layer is measured alone."""
_WIDEST = 2048
"""A layer of larger hidden size is measured this wide, and scaled by its number of weights."""
_MATRIX_OVERHEAD_S = 4e-5
"""What the layers of transformers and of the trainer spend in Python on one matrix beyond what is measured here."""
_PASS_OVERHEAD_S = 3e-3
"""Masks, positions and bookkeeping of one pass of the sampler."""
_HEAD_TOKENS = 64


def main() -> int:
    lifeline.watch(os.environ)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    request = SpeedRequest.model_validate_json(sys.stdin.read())
    began = time.perf_counter()
    import torch

    import_s = time.perf_counter() - began
    torch.set_num_threads(request.threads or len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    sys.stdout.write(_measure(request, import_s).model_dump_json() + "\n")
    return 0


def _measure(request: SpeedRequest, import_s: float) -> Speed:
    bench = _Bench(request)
    scale = bench.scale
    few, rows = max(1, request.rows // 8), request.rows
    decode_few, decode_rows = (bench.decode(count) for count in (few, rows))
    row_s = max(0.0, (decode_rows - decode_few) / (rows - few)) if rows > few else decode_rows / rows
    head_few, head_rows = (bench.draw(count) for count in (few, rows))
    head_row_s = max(0.0, (head_rows - head_few) / (rows - few)) if rows > few else head_rows / rows
    overhead_s = request.shape.layers * 7 * _MATRIX_OVERHEAD_S
    tokens = bench.train_tokens
    fixed_s = max(0.0, decode_few - few * row_s) * scale + max(0.0, head_few - few * head_row_s)
    return Speed(
        pass_s=fixed_s + overhead_s + _PASS_OVERHEAD_S,
        row_s=row_s * scale + head_row_s,
        prefill_token_s=(bench.forward() * scale + overhead_s) / tokens,
        train_token_s=(bench.train() * scale + overhead_s) / tokens,
        head_token_s=bench.head(),
        import_s=import_s,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


class _Bench:
    """Each method returns seconds: of all measured layers, or of the head."""

    def __init__(self, request: SpeedRequest) -> None:
        import torch

        self._torch = torch
        shape = request.shape
        per_layer = sum(inputs * outputs for inputs, outputs in shape.linears)
        self._layers = min(_MEASURED_LAYERS if per_layer < _SMALL_LAYER else 1, shape.layers)
        width = min(1.0, _WIDEST / shape.hidden)
        heads = max(1, round(shape.heads * width))
        kv_heads = max(1, round(shape.kv_heads * width))
        self._heads, self._kv_heads = heads - heads % kv_heads or heads, kv_heads
        self._dim, self._hidden = shape.head_dim, round(shape.hidden * width)
        self._inner = round(shape.intermediate * width)
        self._context, self._vocabulary = request.context, shape.vocabulary
        self._device = torch.device(request.device)
        self._dtype = torch.float32 if request.device == "cpu" else torch.bfloat16
        self._rank = request.lora_rank
        self._weights = [self._layer() for _ in range(self._layers)]
        self._head = self._random(self._vocabulary, shape.hidden)
        whole = per_layer * shape.layers
        measured = sum(base.numel() for layer in self._weights for base, _, _ in layer)
        self.scale = whole / measured
        self.train_tokens = max(16, min(request.train_tokens, int(_FLOPS_PER_ROUND / (6 * measured))))
        self._full_hidden = shape.hidden

    def decode(self, rows: int) -> float:
        torch = self._torch
        hidden = self._random(rows, 1, self._hidden)
        past = self._random(2, rows, self._kv_heads, self._context + 1, self._dim)
        mask = torch.zeros(rows, 1, 1, self._context + 1, dtype=self._dtype, device=self._device)
        with torch.inference_mode():
            return self._time(lambda: self._run(hidden, mask, past))

    def draw(self, rows: int) -> float:
        """The head and the choice of a token."""
        torch = self._torch
        hidden = self._random(rows, self._full_hidden)

        def draw() -> object:
            logprobs = torch.log_softmax((hidden @ self._head.T).float(), dim=-1)
            return torch.multinomial(logprobs.exp(), 1).tolist()

        with torch.inference_mode():
            return self._time(draw)

    def forward(self) -> float:
        hidden, mask = self._row()
        with self._torch.inference_mode():
            return self._time(lambda: self._run(hidden, mask, None))

    def train(self) -> float:
        hidden, mask = self._row()
        hidden.requires_grad_()

        def step() -> None:
            self._run(hidden, mask, None).float().sum().backward()  # type: ignore[no-untyped-call]

        return self._time(step)

    def head(self) -> float:
        """Per token."""
        torch = self._torch
        count = _HEAD_TOKENS
        hidden = self._random(count, self._full_hidden).requires_grad_()
        targets = torch.zeros(count, 1, dtype=torch.long, device=self._device)

        def step() -> None:
            logits = (hidden @ self._head.T).float()
            (logits.gather(1, targets)[:, 0] - torch.logsumexp(logits, dim=1)).sum().backward()

        return self._time(step) / count

    def _row(self) -> tuple[Tensor, Tensor]:
        torch, tokens = self._torch, self.train_tokens
        lowest = torch.finfo(self._dtype).min
        mask = torch.full((1, 1, tokens, tokens), lowest, dtype=self._dtype, device=self._device).triu_(1)
        return self._random(1, tokens, self._hidden), mask

    def _run(self, hidden: Tensor, mask: Tensor, past: Tensor | None) -> Tensor:
        for layer in self._weights:
            hidden = self._through(layer, hidden, mask, past)
        return hidden

    def _through(self, layer: list[_Matrix], hidden: Tensor, mask: Tensor, past: Tensor | None) -> Tensor:
        torch = self._torch
        query, key, value, out, gate, up, down = layer
        batch, length = hidden.shape[:2]
        normed = _normed(hidden)
        q = _linear(normed, query).view(batch, length, self._heads, self._dim).transpose(1, 2)
        k = _linear(normed, key).view(batch, length, self._kv_heads, self._dim).transpose(1, 2)
        v = _linear(normed, value).view(batch, length, self._kv_heads, self._dim).transpose(1, 2)
        q, k = _rotated(q), _rotated(k)
        if past is not None:
            past[0, :, :, -1:], past[1, :, :, -1:] = k, v
            k, v = past[0], past[1]
        groups = self._heads // self._kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        hidden = hidden + _linear(mixed.transpose(1, 2).reshape(batch, length, -1), out)
        normed = _normed(hidden)
        return hidden + _linear(torch.nn.functional.silu(_linear(normed, gate)) * _linear(normed, up), down)

    def _layer(self) -> list[_Matrix]:
        hidden, inner = self._hidden, self._inner
        queries, keys = self._heads * self._dim, self._kv_heads * self._dim
        sizes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        sizes += [(hidden, inner), (hidden, inner), (inner, hidden)]
        return [
            (
                self._random(outputs, inputs),
                self._random(self._rank, inputs, dtype=self._torch.float32).requires_grad_(),
                self._random(outputs, self._rank, dtype=self._torch.float32).requires_grad_(),
            )
            for inputs, outputs in sizes
        ]

    def _random(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        made = self._torch.randn(size, device=self._device) / math.sqrt(size[-1])
        return made.to(dtype or self._dtype)

    def _time(self, work: Callable[[], object]) -> float:
        """Median of as many rounds as the budget allows, after one that does not count."""
        work()
        taken: list[float] = []
        end = time.perf_counter() + _BUDGET_S
        while not taken or (time.perf_counter() < end and len(taken) < 50):
            began = time.perf_counter()
            work()
            if self._device.type == "cuda":
                self._torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        return sorted(taken)[len(taken) // 2]


_Matrix = tuple["Tensor", "Tensor", "Tensor"]
"""Frozen weights, and the two factors of the adapter."""


def _linear(x: Tensor, matrix: _Matrix) -> Tensor:
    base, down, up = matrix
    return x @ base.T + ((x.to(down.dtype) @ down.T) @ up.T).to(x.dtype)


def _normed(x: Tensor) -> Tensor:
    wide = x.float()
    scaled: Tensor = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    return scaled.to(x.dtype)


def _rotated(x: Tensor) -> Tensor:
    """The work of rotary positions, whatever the angle."""
    turned: Tensor = x * 0.8 + x.roll(x.shape[-1] // 2, dims=-1) * 0.6
    return turned


if __name__ == "__main__":
    sys.exit(main())
