"""Parts of the trainer as tests need them: a loaded tiny model, a real HTTP endpoint on it, groups of rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from hermes_rl_mcp.contracts.config import TrainerConfig
from trainer.backends.base import Datum
from trainer.backends.local.backend import LocalBackend
from trainer.backends.local.model import LoadedModel, load
from trainer.backends.training import AdamParams, LossSettings, StepResult, silent, train_step
from trainer.http_server import HttpServer, listener
from trainer.sampling_app import create_app
from trainer.service import SamplingService, Served

UNTIL_S = 100.0
NONCE = "nonce-of-the-tests"


def settings(**values: Any) -> TrainerConfig:
    """One thread: the suite shares two cores with the processes it starts."""
    return TrainerConfig(**{"torch_threads": 1, "lora_rank": 4, "lora_alpha": 8.0, "device": "cpu", **values})


def load_model(folder: Path, *, adapter_std: float = 0.05, seed: int = 0) -> LoadedModel:
    """With an adapter that changes something, unless ``adapter_std`` is 0."""
    torch.set_num_threads(1)
    model = load(folder, device=torch.device("cpu"), rank=4, alpha=8.0, seed=seed, progress=lambda _: None)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.peft.named_parameters():
            if "lora_B" in name and adapter_std:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * adapter_std)
    return model


def step(
    backend: LocalBackend,
    data: Sequence[Datum],
    learning_rate: float,
    loss: LossSettings = LossSettings(),
    progress: Callable[[int, int], None] = silent,
) -> StepResult:
    """One whole step of the backend, unclipped by default."""
    return train_step(backend, data, loss, AdamParams(learning_rate), progress=progress)


def until(condition: Callable[[], bool]) -> None:
    """Poll, bounded; fails with the deadline."""
    deadline = time.monotonic() + UNTIL_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def serving(
    backend: LocalBackend, *, path_prefix: str = "", ready: bool = True, served: Sequence[Served] = ()
) -> Iterator[httpx.Client]:
    """A client of the real HTTP surface on a free port."""
    service = SamplingService(nonce=NONCE, model="tiny-llama", served=served, wandb_group="g", wandb_project="p")
    if ready:
        service.loaded(backend)
        service.ready("serving")
    server = HttpServer(create_app(service, path_prefix=path_prefix), listener("127.0.0.1", 0, None))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=100.0, trust_env=False) as client:
            yield client
    finally:
        server.stop()
