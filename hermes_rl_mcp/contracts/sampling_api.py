"""The wire of port 8001: what Atropos environments (server types vllm, sglang, openai) and people ask of the sampler.

Every answer also carries ``policy_version``; clients of the original wire ignore it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]
Stop = str | list[str] | list[int] | None
EVALUATING = "evaluating"
"""``SamplingHealth.phase`` of a trainer that has completed and stays up for the evaluation at the end."""
Temperature = Annotated[float, Field(ge=0.0, le=100.0)]


class SamplingHealth(BaseModel):
    """``GET /health``. Not ready until ``status`` is ``ok``; ``phase`` says in words what it is doing."""

    status: Literal["starting", "ok", "failed"]
    phase: str
    nonce: str
    trainer_initialized: bool
    model: str
    policy_version: int
    step: int
    activity: int = 0
    """Rises with every piece of work: decoding rounds, micro-batches trained, phases. Standing still = idle or hung."""
    open_requests: int = 0
    """Sampling requests that wait or are being decoded."""


class SamplingParams(BaseModel):
    """sglang's names; unknown keys are ignored because environments pass stray ones."""

    model_config = ConfigDict(extra="ignore")

    n: int = Field(1, ge=1, le=1024)
    max_new_tokens: int = Field(256, ge=1)
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None


class GenerateRequest(BaseModel):
    """``POST /generate`` as sglang (``input_ids``, ``sampling_params``) and as vllm (``prompt``, ``n``, ...) has it."""

    model_config = ConfigDict(extra="allow")

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: SamplingParams | None = None
    return_logprob: bool = True
    return_text_in_logprobs: bool = False
    prompt: dict[str, Any] | str | None = None
    n: int = Field(1, ge=1, le=1024)
    max_tokens: int = Field(256, ge=1)
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    stop: Stop = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    adapter: bool = True
    """Ours: False samples from the base model, the adapter switched off; the answer's ``policy_version`` is 0 then."""
    evaluation: bool = False
    """Ours: an evaluation's request; it gets its share of a busy sampler, never all of it."""


class SglangFinish(BaseModel):
    type: FinishReason


class SglangMeta(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    finish_reason: SglangFinish
    output_token_logprobs: list[tuple[float, int, str | None]]
    """[logprob in nats, token id, text or null]; includes the EOS token when it was sampled."""
    policy_version: int


class SglangReply(BaseModel):
    """One object for n = 1, a list of them otherwise."""

    text: str
    meta_info: SglangMeta


class VllmReply(BaseModel):
    text: list[str]
    prompt: str | None = None
    token_ids: list[list[int]]
    prompt_token_ids: list[int]
    logprobs: list[list[list[dict[str, float]]]]
    """[n][T][1] {"<token id>": logprob}."""
    finish_reasons: list[FinishReason]
    prompt_logprobs: list[list[dict[str, float]] | None] | None = None
    policy_version: int


class CompletionRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str | list[str]
    max_tokens: int = Field(100, ge=1)
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    stop: Stop = None
    n: int = Field(1, ge=1, le=1024)
    seed: int | None = None
    stream: bool = False


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    stop: Stop = None
    n: int = Field(1, ge=1, le=1024)
    seed: int | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool = False


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: FinishReason


class CompletionReply(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    policy_version: int


class ChatReplyMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ChatReplyMessage
    finish_reason: FinishReason


class ChatReply(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    policy_version: int


class LogprobsRequest(BaseModel):
    """``POST /logprobs``; ``input_ids`` win over ``text``."""

    model_config = ConfigDict(extra="ignore")

    input_ids: list[int] | None = None
    text: str | None = None
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    return_text: bool = False


class TokenLogprob(BaseModel):
    token_id: int
    logprob: float | None
    """Null for the first token, which nothing predicts."""
    token: str | None = None


class LogprobsReply(BaseModel):
    logprobs: list[TokenLogprob]
    num_tokens: int
    policy_version: int
