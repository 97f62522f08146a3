"""The local backend: one model in this process that both samples and learns.

Invariant: the sampler reads the live adapter; publishing new weights is raising the version on the compute thread,
and nothing is sampled between the first gradient of a step and its publication.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from jinja2.exceptions import TemplateError

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.errors import InvalidValueError
from trainer.backends.base import (
    Datum,
    EngineStats,
    OnToken,
    PositionScore,
    SampleRequest,
    SampleResult,
    ScoreResult,
)
from trainer.backends.local import adapter_files
from trainer.backends.local.decode import DecodeBatch, Row
from trainer.backends.local.device import pick_device, use_threads
from trainer.backends.local.engine import Engine
from trainer.backends.local.model import LoadedModel, fetch, load
from trainer.backends.local.train import Learner
from trainer.backends.training import AdamParams, ForwardBackward, LossSettings, OptimStep, never, silent

Result = TypeVar("Result")
_RNG_FILE = "rng.json"
_CUDA_CONTEXT_BYTES = 500 * 2**20
"""What the driver takes for a process, beside torch's own memory; about."""
_CACHE_SHARE = 0.4
"""Of the memory that is free after loading, for the key-value cache."""


class LocalBackend:
    """Implements ``trainer.backends.base.Backend``."""

    def __init__(self, model: LoadedModel, config: TrainerConfig, *, version: int = 0) -> None:
        self._model = model
        self._version = version
        self._passes = 0
        """Micro-batches and greedy tokens so far; changed on the compute thread alone."""
        self._learner = Learner(
            model, micro_batch_tokens=config.micro_batch_tokens, gradient_checkpointing=config.gradient_checkpointing
        )
        self._engine = Engine(
            model,
            max_rows=config.sampler_max_rows,
            max_cache_tokens=_cache_tokens(model),
            seed=config.seed,
            version=lambda: self._version,
            cut=config.samples_in_flight == "cut",
        )

    @classmethod
    def open(
        cls, folder: Path, config: TrainerConfig, progress: Callable[[str], None], *, adapter: Path | None = None
    ) -> LocalBackend:
        """Load the base in ``folder``; with ``adapter`` that one is served, else a fresh one is trained."""
        use_threads(config.torch_threads)
        model = load(
            fetch(folder, progress),
            device=pick_device(config.device),
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            seed=config.seed,
            adapter=adapter,
            progress=progress,
        )
        notes = adapter_files.check_base(adapter, model.base_sha256) if adapter is not None else {}
        return cls(model, config, version=int(notes.get("policy_version", 0)))

    @staticmethod
    def free_memory(config: TrainerConfig) -> str:
        """``22.1 of 23.4 GiB were free``: of the device that would be taken."""
        device = pick_device(config.device)
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
        else:
            memory = psutil.virtual_memory()
            free, total = memory.available, memory.total
        return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB were free"

    @property
    def base_sha256(self) -> str:
        return self._model.base_sha256

    @property
    def context_length(self) -> int:
        return self._model.context_length

    @property
    def vocabulary_size(self) -> int:
        return self._model.head.vocabulary

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def activity(self) -> int:
        return self._engine.activity + self._passes

    @property
    def open_requests(self) -> int:
        return self._engine.open_requests

    @property
    def failure(self) -> Exception | None:
        return self._engine.failure

    @property
    def plain_rows(self) -> str:
        return self._model.plain_rows

    def peak_gpu_bytes(self) -> int | None:
        if self._model.device.type != "cuda":
            return None
        return torch.cuda.max_memory_reserved(self._model.device) + _CUDA_CONTEXT_BYTES

    def encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._model.tokenizer(text)["input_ids"]
        except TypeError as error:  # how fast tokenizers say that JSON's "\ud800" is half a character
            raise InvalidValueError("The prompt is not valid Unicode text.", hint="Send whole characters.") from error
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        text: str = self._model.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def render_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        try:
            rendered = self._model.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise InvalidValueError(
                f"The model's chat template refused the messages: {error}.",
                hint="Send roles and contents that the template knows, or use a plain prompt.",
            ) from error
        ids: list[int] = rendered["input_ids"]
        return ids

    def submit(self, request: SampleRequest, on_token: OnToken | None = None) -> Future[SampleResult]:
        return self._engine.submit(request, on_token)

    def score(
        self, ids: Sequence[int], temperature: float, top: int = 0, *, adapter: bool = True
    ) -> Future[ScoreResult]:
        return self._engine.run(lambda: self._score(list(ids), temperature, top, adapter), exclusive=False)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: LossSettings,
        stopping: Callable[[], bool] = never,
        progress: Callable[[int, int], None] = silent,
    ) -> ForwardBackward:
        def counted(number: int, of: int) -> None:
            self._passes += 1
            progress(number, of)

        return self._between_samples(lambda: self._learner.forward_backward(data, loss, stopping, counted))

    def optim_step(self, adam: AdamParams) -> OptimStep:
        return self._between_samples(lambda: self._learner.optim_step(adam))

    def publish(self) -> int:
        def publish() -> int:
            self._version += 1
            return self._version

        try:
            return self._between_samples(publish)
        finally:
            self._engine.release()

    def adapter_max_abs(self) -> float:
        return self._learner.adapter_max_abs()

    def greedy(self, prompt_ids: Sequence[int], max_tokens: int, *, adapter: bool) -> list[int]:
        return self._engine.run(lambda: self._greedy(list(prompt_ids), max_tokens, adapter), exclusive=True).result()

    def export(self, folder: Path, metadata: dict[str, str]) -> None:
        adapter_files.save(self._model.peft, folder, metadata)

    def save(self, folder: Path) -> None:
        """Without pickle."""
        self._learner.save(folder)
        (folder / _RNG_FILE).write_text(json.dumps({"sampler": self._engine.random_state()}))

    def load(self, adapter: Path, folder: Path, policy_version: int) -> None:
        def restore() -> None:
            adapter_files.check_base(adapter, self.base_sha256)
            adapter_files.restore(self._model.peft, adapter)
            self._learner.load(folder)
            self._engine.set_random_state(json.loads((folder / _RNG_FILE).read_text())["sampler"])
            self._version = policy_version

        self._engine.run(restore, exclusive=True).result()

    def close(self) -> None:
        self._engine.close()

    def _between_samples(self, job: Callable[[], Result]) -> Result:
        """Run ``job`` when no completion is under way, and begin none until ``publish`` or an error."""
        return self._engine.run(job, exclusive=True, hold=True).result()

    @torch.inference_mode()
    def _score(self, ids: list[int], temperature: float, top: int, adapter: bool) -> ScoreResult:
        model = self._model
        if not adapter:
            with model.peft.disable_adapter():
                return self._score(ids, temperature, top, True)
        positions: list[PositionScore | None] = [None]
        hidden_1TH = self._whole(ids)
        block = 256
        for start in range(0, len(ids) - 1, block):
            end = min(start + block, len(ids) - 1)
            logits_CV = model.head.logits(hidden_1TH[0, start:end]) / temperature
            logprobs_CV = torch.log_softmax(logits_CV, dim=-1)
            targets_C = torch.tensor(ids[start + 1 : end + 1], device=model.device)
            chosen = logprobs_CV.gather(1, targets_C[:, None])[:, 0].tolist()
            best = logprobs_CV.topk(min(top, model.head.vocabulary), dim=-1)
            for token, logprob, tops, values in zip(
                targets_C.tolist(), chosen, best.indices.tolist(), best.values.tolist(), strict=True
            ):
                positions.append(PositionScore(token, logprob, list(zip(tops, values, strict=True))))
        return ScoreResult(positions, self._version)

    @torch.inference_mode()
    def _greedy(self, ids: list[int], max_tokens: int, adapter: bool) -> list[int]:
        model = self._model
        if not adapter:
            with model.peft.disable_adapter():
                return self._greedy(ids, max_tokens, True)
        request = SampleRequest(tuple(ids), temperature=0.0)
        row = Row(request, 0, min(max_tokens, model.context_length - len(ids)))
        batch = DecodeBatch(model, torch.Generator())
        batch.admit([[row]])
        while not row.done:
            self._passes += 1
            batch.step()
        return row.completion.token_ids

    def _whole(self, ids: list[int]) -> torch.Tensor:
        device = self._model.device
        return self._model.hidden_states(
            torch.tensor([ids], device=device),
            mask=None,
            positions_BT=torch.arange(len(ids), device=device)[None],
        )


def _cache_tokens(model: LoadedModel) -> int:
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = psutil.virtual_memory().available
    return max(model.context_length, int(free * _CACHE_SHARE) // model.kv_bytes_per_token)
