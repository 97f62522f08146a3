"""Whether an export is what was trained: stock transformers (and peft) load it from disk and must give the trainer's
logprobs.

Invariant: the figures come from the files that were written, not from what was in memory before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.records import ExportCheck
from hermes_rl_mcp.errors import HermesRLError
from trainer.backends.local.backend import LocalBackend

_TOLERANCES = {torch.float32: (1e-3, 5e-5), torch.bfloat16: (0.5, 0.05), torch.float16: (0.1, 0.01)}
"""Largest and mean difference of a logprob, nats. In fp32 only the order of sums differs; in the 16-bit types each
weight is rounded, too: 2^-9 and 2^-12 of it."""
_MEASURABLE = 1e-5
"""Mean change of a logprob, nats, below which fp32 tells nothing about an adapter."""
_MAX_TOKENS = 192
"""Of one probe text."""
_CHAT = [{"role": "user", "content": "2+3="}]

Progress = Callable[[str], None]


class ExportError(HermesRLError):
    """What was written is not what was trained."""


class LostInRoundingError(ExportError):
    """The type is too coarse for what was learned."""


@dataclass(frozen=True)
class Reference:
    """What the trainer itself computes on the probe texts, with the adapter and without."""

    texts: list[str]
    longest: int
    """Tokens of a text that count."""
    ids: list[list[int]]
    chat: list[int] | None
    """A question by the chat template, if there is one."""
    trained: list[float]
    base: list[float]
    adapter_max_abs: float
    base_sha256: str


def reference(base: Path, adapter: Path, texts: Sequence[str], threads: int, progress: Progress) -> Reference:
    """Runs the trainer's own sampler on a CPU; ``threads`` = 0 takes all cores. Raises PreflightError for an adapter of
    other base weights."""
    backend = LocalBackend.open(base, TrainerConfig(device="cpu", torch_threads=threads), progress, adapter=adapter)
    try:
        longest = min(_MAX_TOKENS, backend.context_length)
        ids = _ids(backend.encode, texts, longest)
        scores = [[backend.score(one, 1.0, adapter=on).result() for one in ids] for on in (True, False)]
        trained, plain = (
            [position.logprob for score in some for position in score.positions if position] for some in scores
        )
        return Reference(
            texts=list(texts),
            longest=longest,
            ids=ids,
            chat=_rendered(backend),
            trained=trained,
            base=plain,
            adapter_max_abs=backend.adapter_max_abs(),
            base_sha256=backend.base_sha256,
        )
    finally:
        backend.close()
        del backend
        gc.collect()


def check(found: Reference, model: Any, tokenizer: Any, dtype: torch.dtype) -> ExportCheck:
    """Raises ExportError if tokens or logprobs are not the trainer's, or what was learned is not in them."""
    ids = _ids(lambda text: list(tokenizer(text)["input_ids"]), found.texts, found.longest)
    if ids != found.ids or _template(tokenizer) != found.chat:
        raise ExportError(
            "The exported tokenizer or chat template gives other tokens than the trainer's.",
            hint="This is a fault of the export; please report it with the model's name.",
        )
    exported = [logprob for one in found.ids for logprob in _logprobs(model, one)]
    errors = [abs(one - two) for one, two in zip(exported, found.trained, strict=True)]
    moves = [abs(one - two) for one, two in zip(exported, found.base, strict=True)]
    learned = [abs(one - two) for one, two in zip(found.trained, found.base, strict=True)]
    largest, mean = _TOLERANCES[dtype]
    figures = ExportCheck(
        tokens=len(errors),
        error_max=max(errors),
        error_mean=sum(errors) / len(errors),
        tolerance_max=largest,
        tolerance_mean=mean,
        moved_max=max(moves),
        moved_mean=sum(moves) / len(moves),
        adapter_max_abs=found.adapter_max_abs,
    )
    _judge(figures, sum(learned) / len(learned), dtype)
    return figures


def load_merged(folder: Path) -> Any:
    """As anybody would; 16-bit weights are computed with in fp32, so that only their rounding counts."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()


def load_adapter(base: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(load_merged(base), adapter).eval()


def load_gguf(file: Path) -> Any:
    """By transformers, which turns every weight back into fp32. Raises whatever it raises for what it does not know."""
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
    ).eval()


def load_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _judge(figures: ExportCheck, learned_mean: float, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    advice = "Nothing was written." + ("" if dtype is torch.float32 else " Add --dtype float32, which rounds nothing.")
    if not (figures.error_max <= figures.tolerance_max and figures.error_mean <= figures.tolerance_mean):  # NaN fails
        raise ExportError(
            f"The export does not reproduce the trainer: its logprobs differ by {figures.error_mean:.2g} on average "
            f"and {figures.error_max:.2g} at most, where {name} explains {figures.tolerance_mean:g} and "
            f"{figures.tolerance_max:g}.",
            hint=advice,
        )
    if learned_mean > _MEASURABLE and figures.error_mean > learned_mean / 2:
        raise LostInRoundingError(
            f"What was learned is lost in {name}: the adapter moves logprobs by {learned_mean:.2g} on average, and "
            f"rounding its weights by {figures.error_mean:.2g}.",
            hint=advice,
        )
    if learned_mean > _MEASURABLE and figures.moved_max == 0:
        raise ExportError("The export is the base model: the adapter is not in it.", hint=advice)


def _ids(encode: Callable[[str], list[int]], texts: Sequence[str], longest: int) -> list[list[int]]:
    """One token alone has nothing to be predicted from."""
    return [ids for text in texts if len(ids := encode(text)[:longest]) > 1]


@torch.inference_mode()
def _logprobs(model: Any, ids: list[int]) -> list[float]:
    logits_TV = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    chosen_T = torch.log_softmax(logits_TV, dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    values: list[float] = chosen_T.tolist()
    return values


def _rendered(backend: LocalBackend) -> list[int] | None:
    try:
        return backend.render_chat([dict(one) for one in _CHAT], None)
    except HermesRLError:  # a base model without a chat template
        return None


def _template(tokenizer: Any) -> list[int] | None:
    if not tokenizer.chat_template:
        return None
    rendered = tokenizer.apply_chat_template(_CHAT, add_generation_prompt=True, tokenize=True, return_dict=True)
    ids: list[int] = rendered["input_ids"]
    return ids
