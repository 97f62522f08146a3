"""What a backend must do for the loop, numpy in and out: no torch here, so the loop and its tests stay light.

Invariant: a policy version names exactly one set of adapter weights, and every sampled completion names the version
that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hermes_rl_mcp.contracts.sampling_api import FinishReason
from trainer.backends.training import AdamParams, ForwardBackward, LossSettings, OptimStep

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One sequence to train on. Every array has the length T of the whole sequence and is aligned with ``tokens_T``;
    the shift by one position happens once, where the backend pairs a source with its target. ``Datum.of`` makes one."""

    group: int
    """Sequences of one group may share their prompt's computation."""
    tokens_T: Ids
    trainable_T: Flags
    """False at index 0: nothing predicts the first token."""
    sampler_logprobs_T: Floats
    """Nats, at ``temperature``; 0.0 where not trainable or missing."""
    advantages_T: Floats
    """0.0 where not trainable."""
    temperature: float
    missing_T: Flags
    """Trainable tokens without a usable sampler logprob; they count as sampled by the current policy."""
    reference_logprobs_T: Floats | None = None
    """The reference policy's, nats, finite wherever trainable. None: the base model is the reference."""
    distill_ids_TK: Ids | None = None
    """Candidates for the token at each position, from a teacher; -1 where there is none."""
    distill_logprobs_TK: Floats | None = None
    """The teacher's logprobs of them, nats; 0.0 where there is none."""

    @classmethod
    def of(
        cls,
        group: int,
        tokens_T: ArrayLike,
        trainable_T: ArrayLike,
        sampler_logprobs_T: ArrayLike,
        advantages_T: ArrayLike,
        temperature: float,
        *,
        missing_T: ArrayLike | None = None,
        reference_logprobs_T: ArrayLike | None = None,
        distill_ids_TK: ArrayLike | None = None,
        distill_logprobs_TK: ArrayLike | None = None,
    ) -> Datum:
        """From anything numpy takes. Raises ValueError where lengths differ."""
        tokens = np.asarray(tokens_T, np.int64)
        missing = np.zeros(len(tokens), np.bool_) if missing_T is None else np.asarray(missing_T, np.bool_)
        datum = cls(
            group,
            tokens,
            np.asarray(trainable_T, np.bool_),
            np.asarray(sampler_logprobs_T, np.float32),
            np.asarray(advantages_T, np.float32),
            temperature,
            missing,
            None if reference_logprobs_T is None else np.asarray(reference_logprobs_T, np.float32),
            None if distill_ids_TK is None else np.asarray(distill_ids_TK, np.int64),
            None if distill_logprobs_TK is None else np.asarray(distill_logprobs_TK, np.float32),
        )
        for name in ("trainable_T", "sampler_logprobs_T", "advantages_T", "missing_T", "reference_logprobs_T"):
            array = getattr(datum, name)
            if array is not None and array.shape != tokens.shape:
                raise ValueError(f"{name} has shape {array.shape}, tokens_T {tokens.shape}")
        return datum


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One prompt and how to continue it ``n`` times."""

    prompt_ids: tuple[int, ...]
    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Beside the model's own end-of-sequence ids."""
    seed: int | None = None
    adapter: bool = True
    """False: the base model alone."""
    evaluation: bool = False


OnToken = Callable[[int, int, float], None]
"""``(index, token_id, logprob)``, on the compute thread, after each token of the request's ``index``-th completion."""


@dataclass(slots=True)
class Completion:
    """Token ids exactly as sampled, the end-of-sequence or stop tokens included, and one finite logprob for each."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    policy_version: int = 0
    """The one that sampled all of it."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    completions: list[Completion]
    policy_version: int
    """Smallest version that sampled one of the completions; each completion has a single one."""


@dataclass(frozen=True, slots=True)
class PositionScore:
    """Logprob of one given token, and the ``top`` most likely ones at its position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class ScoreResult:
    positions: list[PositionScore | None]
    """None for the first token."""
    policy_version: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start; they only rise."""

    sampled_tokens: int = 0
    sample_s: float = 0.0
    forward_passes: int = 0
    prefill_passes: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed."""
    reused_tokens: int = 0
    """Prompt tokens that had been computed before."""
    requests: int = 0
    """Requests answered."""
    most_rows: int = 0
    """Largest number of completions decoded in one pass."""
    most_requests: int = 0
    """Largest number of requests that shared one pass."""


class Sampler(Protocol):
    """What the HTTP surface needs. Futures resolve on the compute thread; cancelling one drops what it stands for,
    completions under way included."""

    @property
    def context_length(self) -> int: ...
    @property
    def policy_version(self) -> int: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def activity(self) -> int:
        """Rises with every decoding round, micro-batch and job: standing still means idle or hung."""
        ...

    @property
    def open_requests(self) -> int:
        """Sampling requests that are not answered yet."""
        ...

    @property
    def vocabulary_size(self) -> int: ...
    def encode(self, text: str) -> list[int]:
        """Raises InvalidValueError for half a surrogate pair, which JSON can carry."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...
    def render_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """Raises InvalidValueError when the chat template refuses the messages."""
        ...

    def submit(self, request: SampleRequest, on_token: OnToken | None = None) -> Future[SampleResult]: ...
    def score(
        self, ids: Sequence[int], temperature: float, top: int = 0, *, adapter: bool = True
    ) -> Future[ScoreResult]: ...


class Backend(Sampler, Protocol):
    """What the loop needs beside sampling."""

    @property
    def base_sha256(self) -> str: ...
    @property
    def failure(self) -> Exception | None:
        """Why no more can be sampled, ever; None while all is well."""
        ...

    @property
    def plain_rows(self) -> str:
        """Why each sequence is trained in a row of its own, which is slower; empty where prompts are shared."""
        ...

    def peak_gpu_bytes(self) -> int | None:
        """Largest GPU memory so far; None on a CPU."""
        ...

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: LossSettings,
        stopping: Callable[[], bool] = ...,
        progress: Callable[[int, int], None] = ...,
    ) -> ForwardBackward:
        """Add the gradient of ``data`` (each with a trained token) to what has gathered since the last ``optim_step``.

        Means and sums of the loss are over this call's data. ``progress(i, n)`` is called on the compute thread before
        the i-th of n micro-batches. Nothing is sampled from here to ``publish``.
        Raises NonFiniteError or StepAbandonedError; all gathered gradients are gone then and sampling goes on.
        """
        ...

    def optim_step(self, adam: AdamParams) -> OptimStep:
        """One step along the gathered gradient, which is gone then. Raises NonFiniteError with the weights untouched;
        sampling goes on then."""
        ...

    def publish(self) -> int:
        """Give the weights a new version, which whatever is sampled from now on comes from. Returns it."""
        ...

    def adapter_max_abs(self) -> float:
        """Largest absolute value in the adapter's B matrices."""
        ...

    def greedy(self, prompt_ids: Sequence[int], max_tokens: int, *, adapter: bool) -> list[int]:
        """The likeliest tokens, with the live adapter or with the base alone."""
        ...

    def export(self, folder: Path, metadata: dict[str, str]) -> None:
        """The adapter as a PEFT folder, with ``metadata`` as its notes."""
        ...

    def save(self, folder: Path) -> None:
        """What training needs beside the exported adapter to go on exactly: optimizer and random state."""
        ...

    def load(self, adapter: Path, folder: Path, policy_version: int) -> None:
        """What ``export`` and ``save`` wrote. Raises PreflightError for an adapter of another base."""
        ...

    def close(self) -> None: ...


class SamplerUnavailableError(RuntimeError):
    """The sampler is shutting down."""
