"""Load a base model from safetensors and wrap it with a fresh, seeded LoRA adapter.

Invariants: no code of a model repository runs; dropout is 0 everywhere and the model stays in eval mode, so a forward
pass of the trainer and one of the sampler give the same logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from hermes_rl_mcp.errors import PreflightError
from trainer.backends.local import adapter_files, lora, recompute
from trainer.backends.local.attention import Layout
from trainer.backends.local.base_hash import weights_sha256
from trainer.backends.local.device import give_memory_back, load_with_attention, precision, why_not_shared
from trainer.backends.local.head import Head

_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""Weights without code, configuration and tokenizer."""


@dataclass(frozen=True)
class LoadedModel:
    """A base model, its adapter and what must be known to run it."""

    peft: Any
    body: Any
    """The decoder stack without the head; LoRA layers are inside it."""
    head: Head
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    layers: int
    hidden: int
    context_length: int
    eos_ids: frozenset[int]
    free_masks: bool
    """The model takes any 4-D attention mask: full attention in all layers."""
    base_sha256: str
    kv_bytes_per_token: int
    rows: lora.RowSwitch
    """For ``lora.only_rows``: rows of one batch with and without the adapter."""
    attention_width: int
    """Width of all query heads together."""
    plain_rows: str = ""
    """Why each sequence is trained in a row of its own; empty where completions share their prompt's row."""

    def adapter_parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.peft.parameters() if parameter.requires_grad]

    def hidden_states(self, ids_BT: Tensor, *, mask: Tensor | None, positions_BT: Tensor, cache: Any = None) -> Tensor:
        """[B, T, H]. ``mask`` is additive [B, 1, T, K], or 0/1 [B, K] where ``free_masks`` is false."""
        output = self.body(
            input_ids=ids_BT, attention_mask=mask, position_ids=positions_BT, cache=cache, use_cache=cache is not None
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def row_states(self, ids_BR: Tensor, layout: Layout) -> Tensor:
        """[B, R, H] of rows in which completions share their prompt."""
        unused = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=ids_BR.device)  # keeps families from making a mask
        output = self.body(
            input_ids=ids_BR,
            attention_mask=unused,
            position_ids=layout.positions_BR,
            use_cache=False,
            layout=layout,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


def fetch(name: Path, progress: Callable[[str], None]) -> Path:
    """The folder of a model: ``name`` itself, or where the Hub's files of that id were put."""
    if name.is_dir():
        return name
    progress(f"downloading {name} from the Hub")
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise PreflightError(
            f"The model {name} could not be had from the Hub: {error}.",
            hint="Check the name and the connection (and HF_TOKEN for a gated model), or give a local folder.",
        ) from error


def load(
    folder: Path,
    *,
    device: torch.device,
    rank: int,
    alpha: float,
    seed: int,
    adapter: Path | None = None,
    progress: Callable[[str], None],
) -> LoadedModel:
    """fp32 on a CPU, bf16 base with fp32 LoRA on a GPU. With ``adapter`` that one is loaded instead of a fresh one."""
    give_memory_back()
    progress("hashing the base weights")
    sha256 = weights_sha256(folder)
    if adapter is not None:
        adapter_files.check_base(adapter, sha256)
    progress("loading the model")
    disable_progress_bar()  # a log file is no terminal
    dtype = precision(device)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    base = _base(folder, dtype).to(device)
    progress("adding the adapter")
    if adapter is None:
        peft = _with_adapter(base, rank, alpha, seed)
    else:
        peft = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    peft.eval()
    text = base.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    recompute.install(base)
    model = LoadedModel(
        peft=peft,
        body=getattr(base, base.base_model_prefix),
        head=Head(base),
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        context_length=int(text.max_position_embeddings),
        eos_ids=_eos_ids(base, tokenizer),
        free_masks=_full_attention(text),
        base_sha256=sha256,
        kv_bytes_per_token=2 * text.num_hidden_layers * heads * width * dtype.itemsize,
        rows=lora.install(peft),
        attention_width=text.num_attention_heads * width,
    )
    progress("trying whether completions can share their prompt's row")
    return replace(model, plain_rows=why_not_shared(model))


def _base(folder: Path, dtype: torch.dtype) -> Any:
    def load_with(attention: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )

    return load_with_attention(load_with)


def _with_adapter(base: Any, rank: int, alpha: float, seed: int) -> Any:
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules="all-linear",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(base, config)


def _eos_ids(base: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for value in (base.generation_config.eos_token_id, base.config.eos_token_id, tokenizer.eos_token_id):
        if isinstance(value, int):
            ids.add(value)
        elif value:
            ids.update(int(one) for one in value)
    return frozenset(ids)


def _full_attention(text_config: Any) -> bool:
    kinds = getattr(text_config, "layer_types", None)
    if kinds:
        return all(kind == "full_attention" for kind in kinds)
    window = getattr(text_config, "sliding_window", None)
    return window is None or not getattr(text_config, "use_sliding_window", True)
