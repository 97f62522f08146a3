"""What the sampling endpoint of a process knows of itself: identity, phase, and the sampler once there is one.

Invariant: status is ``ok`` only from the moment everything a client needs is there; the nonce is never withheld.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from hermes_rl_mcp.contracts.rollout_api import WandbInfoReply
from hermes_rl_mcp.contracts.sampling_api import SamplingHealth
from trainer.backends.base import Sampler

_log = logging.getLogger(__name__)


class NotReadyError(Exception):
    """No sampler yet, or no longer."""


class UnknownModelError(LookupError):
    """A request names a model that is not served here."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        super().__init__(f"The model {name[:200]!r} does not exist here. Served are: {', '.join(served)}.")


class Served(NamedTuple):
    """A name that a request can give as ``model``."""

    name: str
    adapter: bool
    """Whether the adapter is on."""


class Service(Protocol):
    """What the HTTP surface is a surface of."""

    def health(self) -> SamplingHealth: ...
    def wandb_info(self) -> WandbInfoReply: ...
    def models(self) -> Sequence[Served]:
        """The one for requests that name none comes first."""
        ...

    def model(self, name: str | None) -> Served:
        """Raises UnknownModelError."""
        ...

    def sampler(self) -> Sampler:
        """Raises NotReadyError while there is none to ask."""
        ...


class SamplingService:
    """Written by the main thread, read by the HTTP thread; every attribute is replaced as a whole."""

    def __init__(
        self,
        *,
        nonce: str,
        model: str,
        served: Sequence[Served] = (),
        wandb_group: str | None = None,
        wandb_project: str | None = None,
    ) -> None:
        """Without ``served`` there is one policy, which answers to every name: environments call it as they like."""
        self._nonce = nonce
        self._model = model
        self._served = tuple(served)
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

    def models(self) -> Sequence[Served]:
        return self._served or (Served(self._model, adapter=True),)

    def model(self, name: str | None) -> Served:
        found = self.models()
        if name is None or not self._served:
            return found[0]
        for one in found:
            if one.name == name:
                return one
        raise UnknownModelError(name, [one.name for one in found])

    def sampler(self) -> Sampler:
        if self._sampler is None:
            raise NotReadyError
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
