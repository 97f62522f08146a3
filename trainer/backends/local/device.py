"""Decides what a model runs on and how: device, precision, threads, attention backend, shared prompts.

Invariant: these are chosen here alone; elsewhere no more than a size or the order of a product depends on the device.
What cannot be had is refused with a sentence, or falls back and says so.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hermes_rl_mcp.errors import PreflightError
from trainer.backends.local import attention
from trainer.backends.local.attention import Layout
from trainer.backends.local.rows import PROMPT

if TYPE_CHECKING:
    from trainer.backends.local.model import LoadedModel

_BLOCK_COST = {"cpu": 6e5, "cuda": 2e8}
"""What one more call of an attention kernel costs, in pairs of query and key times the width of all heads. On two slow
cores 0.1 ms; a GPU computes far more pairs in the time of a call."""
_PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Of the hidden states' norm."""
_M_MMAP_THRESHOLD = -3
"""Its number in glibc's malloc.h."""
_KEPT_BLOCK_BYTES = 1 << 20
_log = logging.getLogger(__name__)


def pick_device(wanted: str) -> torch.device:
    """``auto`` is the GPU if there is one. Raises PreflightError for a GPU that is not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise PreflightError(
            "device is 'cuda', but torch sees no GPU.", hint="Set device to 'auto' or 'cpu', or install a CUDA torch."
        )
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def precision(device: torch.device) -> torch.dtype:
    """Of the base weights; the adapter is fp32 on either. On a CPU bf16 is hardly faster, and sampler and trainer would
    differ by percents."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def use_threads(wanted: int) -> None:
    """0: as many as this process may use cores."""
    torch.set_num_threads(wanted or len(os.sched_getaffinity(0)))


def give_memory_back() -> None:
    """Let each freed tensor of a mebibyte or more go back to the system at once.

    By default glibc soon keeps up to 32 MiB of any such block and cannot use it well for aligned ones: a training step
    then took 60% more memory. Costs 10% of its time. Nothing happens where there is no glibc.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BYTES)


def load_with_attention(load: Callable[[str], Any]) -> Any:
    """A model from ``load(implementation)``: sdpa, or eager for families that cap their attention scores.

    The model takes a ``layout`` if its family lets the attention function be replaced.
    """
    try:
        model, name = load("sdpa"), "sdpa"
    except ValueError as error:
        if "attn_implementation" not in str(error):
            raise
        model, name = load("eager"), "eager"
    if getattr(model, "_supports_attention_backend", False):
        attention.install(model, name)
    return model


def block_cost(model: LoadedModel) -> float:
    """What a block of attention costs beyond its work, in pairs of query and key."""
    return _BLOCK_COST[model.device.type] / model.attention_width


def why_not_shared(model: LoadedModel) -> str:
    """Why a group's prompt cannot be computed once for this model; empty if it can.

    Found by trying: hidden states of a row with a prompt and two completions must be those of two rows.
    """
    try:
        difference = _probe(model)
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, NotImplementedError) as error:
        why = f"its attention does not take the layout ({type(error).__name__}: {error})"
    else:
        if difference <= _PROBE_TOLERANCE[model.dtype]:
            return ""
        why = f"its hidden states differ by {difference:.2g} when completions share a row"
    _log.warning("each sequence is trained in a row of its own, which is slower: %s", why)
    return why


@torch.inference_mode()
def _probe(model: LoadedModel) -> float:
    """Relative difference of hidden states, the larger of those with blocks and with a dense mask."""
    prompt, answers = [1, 2, 3], [[4, 5, 6], [7, 8, 9]]
    ids = prompt + answers[0] + answers[1]
    positions, branches = [0, 1, 2, 3, 4, 5, 3, 4, 5], [PROMPT] * 3 + [0] * 3 + [1] * 3
    rows = torch.tensor([prompt + answer for answer in answers], device=model.device)
    alone = model.hidden_states(rows, mask=None, positions_BT=torch.arange(6, device=model.device).expand(2, 6))
    expected = torch.cat([alone[0], alone[1, 3:]])

    def difference(cost: float) -> float:
        layout = Layout.of([branches], [positions], device=model.device, block_cost=cost)
        got: Tensor = model.row_states(torch.tensor([ids], device=model.device), layout)[0]
        return float((got - expected).float().norm() / expected.float().norm())

    return max(difference(0.0), difference(1e9))
