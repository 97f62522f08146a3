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
    logprob_start_len: int = Field(-1, ge=-1)
    """sglang's: score the input too, from this place on. -1 = not at all."""
    top_logprobs_num: int = Field(0, ge=0)
    """sglang's: and the likeliest tokens at each of these places."""
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
    input_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    """The same of the input from ``logprob_start_len`` on; null where nothing is asked. The first place's logprob is
    null, as sglang has it."""
    input_top_logprobs: list[list[tuple[float, int, str | None]] | None] | None = None
    """Of each of these places the likeliest tokens; the first place has none."""
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
    """Smallest of ``policy_versions``."""
    policy_versions: list[int] = Field(default_factory=list)
    """Of each completion: where not all began at once, a step may lie between them."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False
    """One more chunk at the end, without choices, that counts the tokens."""


class CompletionRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]]
    """Text or token ids, one prompt or several."""
    max_tokens: int = Field(100, ge=1)
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    stop: Stop = None
    n: int = Field(1, ge=1, le=1024)
    seed: int | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    """0: of the sampled tokens; more: also of so many likeliest ones."""
    stream: bool = False
    stream_options: StreamOptions | None = None


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
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool = False
    stream_options: StreamOptions | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    """Four lists of one length, by token. ``text_offset`` counts characters of the completion's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None = None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: FinishReason | None
    """Null only in a stream, until the choice's last chunk."""
    logprobs: CompletionLogprobs | None = None


class CompletionReply(BaseModel):
    """Also each chunk of a stream, where ``usage`` comes only in the last one and ``policy_version`` at the end."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None
    policy_version: int | None
    """Smallest that sampled one of the choices."""


class LikelyToken(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None
    """UTF-8 of ``token``; null for a token that is only a part of a character."""


class ChatTokenLogprob(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class ChatReplyMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ChatReplyMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class ChatReply(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    policy_version: int
    """Smallest that sampled one of the choices."""


class ChatDelta(BaseModel):
    """What a chunk adds; fields without news are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(BaseModel):
    """One event of a streamed chat completion. ``policy_version`` comes with the finish reasons."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    policy_version: int | None = None


class ServedModel(BaseModel):
    """One line of ``GET /v1/models``."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: Literal["hermes-rl"] = "hermes-rl"
    parent: str | None = None
    """Of an adapter: the model it is on."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ServedModel]


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
