"""What the sampling endpoint of a process knows of itself: identity, phase, and the sampler once there is one.

Invariant: status is ``ok`` only from the moment everything a client needs is there; the nonce is never withheld.
"""

from __future__ import annotations

import logging
from typing import Literal

from hermes_rl_mcp.contracts.rollout_api import WandbInfoReply
from hermes_rl_mcp.contracts.sampling_api import SamplingHealth
from trainer.backends.base import Sampler

_log = logging.getLogger(__name__)


class SamplingService:
    """Written by the main thread, read by the HTTP thread; every attribute is replaced as a whole."""

    def __init__(
        self, *, nonce: str, model: str, wandb_group: str | None = None, wandb_project: str | None = None
    ) -> None:
        self._nonce = nonce
        self._model = model
        self._wandb = WandbInfoReply(group=wandb_group, project=wandb_project)
        self._sampler: Sampler | None = None
        self._status: Literal["starting", "ok", "failed"] = "starting"
        self._phase = "starting"
        self._step = 0
        self._phases = 0

    def health(self) -> SamplingHealth:
        sampler = self._sampler
        return SamplingHealth(
            status=self._status,
            phase=self._phase,
            nonce=self._nonce,
            trainer_initialized=sampler is not None,
            model=self._model,
            policy_version=sampler.policy_version if sampler else 0,
            step=self._step,
            activity=self._phases + (sampler.activity if sampler else 0),
            open_requests=sampler.open_requests if sampler else 0,
        )

    def wandb_info(self) -> WandbInfoReply:
        return self._wandb

    def sampler(self) -> Sampler | None:
        return self._sampler

    def phase(self, text: str) -> None:
        """What the process is doing now, in words."""
        if text != self._phase:
            _log.info("%s", text)
            self._phase = text
            self._phases += 1

    def loaded(self, sampler: Sampler) -> None:
        """Requests are answered from now on."""
        self._sampler = sampler

    def ready(self, phase: str) -> None:
        self.phase(phase)
        self._status = "ok"

    def failed(self, reason: str) -> None:
        self._status, self._phase = "failed", reason

    def at_step(self, step: int) -> None:
        self._step = step
