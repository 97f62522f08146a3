"""From the wire's many request shapes to one ``SampleRequest``, and back to each shape's answer.

Invariants: a request that cannot be served is refused here with a sentence (InvalidValueError), before it reaches the
sampler; token ids go out exactly as sampled, text goes out without what ended it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hermes_rl_mcp.contracts.sampling_api import (
    ChatMessage,
    GenerateRequest,
    SamplingParams,
    SglangFinish,
    SglangMeta,
    SglangReply,
    Stop,
    VllmReply,
)
from hermes_rl_mcp.errors import InvalidValueError
from trainer.backends.base import Completion, Sampler, SampleRequest, SampleResult, ScoreResult

_LOWEST_TEMPERATURE = 1e-3
"""Below it dividing logits overflows, and one such row would fail every request that shares its pass."""


def sample_request(
    sampler: Sampler,
    prompt_ids: Sequence[int],
    *,
    n: int,
    max_tokens: int,
    temperature: float,
    top_p: float,
    stop: Stop,
    stop_token_ids: Sequence[int] | None = None,
    seed: int | None = None,
    adapter: bool = True,
    evaluation: bool = False,
) -> SampleRequest:
    """``max_tokens`` is cut to what the context still holds; a prompt that leaves no room is refused."""
    check_ids(sampler, prompt_ids)
    if 0.0 < temperature < _LOWEST_TEMPERATURE:
        raise InvalidValueError(
            f"temperature {temperature:g} is too close to 0.",
            hint=f"Send 0 for the likeliest tokens, or at least {_LOWEST_TEMPERATURE:g}.",
        )
    room = sampler.context_length - len(prompt_ids)
    if room < 1:
        raise InvalidValueError(
            f"The prompt has {len(prompt_ids)} tokens; the model's context holds {sampler.context_length}.",
            hint="Shorten the prompt so that at least one token can follow.",
        )
    strings, ids = split_stop(stop)
    return SampleRequest(
        prompt_ids=tuple(prompt_ids),
        n=n,
        max_tokens=min(max_tokens, room),
        temperature=temperature,
        top_p=top_p,
        stop_strings=strings,
        stop_token_ids=frozenset([*ids, *(stop_token_ids or [])]),
        seed=seed,
        adapter=adapter,
        evaluation=evaluation,
    )


def prompts(sampler: Sampler, prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """Token ids of each prompt of a completion request."""
    if isinstance(prompt, str):
        return [sampler.encode(prompt)]
    if not prompt:
        raise InvalidValueError("prompt is an empty list.", hint="Send at least one prompt.")
    ids = [one for one in prompt if isinstance(one, int)]
    if ids:
        return [ids]
    return [sampler.encode(one) if isinstance(one, str) else list(one) for one in prompt if not isinstance(one, int)]


def split_stop(stop: Stop) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop strings and stop token ids."""
    entries = [stop] if isinstance(stop, str) else (stop or [])
    strings = tuple(entry for entry in entries if isinstance(entry, str) and entry)
    return strings, tuple(entry for entry in entries if isinstance(entry, int))


def check_ids(sampler: Sampler, ids: Sequence[int]) -> None:
    if not ids:
        raise InvalidValueError("The prompt is empty.", hint="Send at least one token.")
    wrong = [one for one in ids if not 0 <= one < sampler.vocabulary_size]
    if wrong:
        raise InvalidValueError(
            f"Token id {wrong[0]} is not in the model's vocabulary of {sampler.vocabulary_size}.",
            hint="Tokenise with the tokenizer of the model that is served here.",
        )


def completion_text(sampler: Sampler, request: SampleRequest, completion: Completion) -> str:
    """Without special tokens, stop strings or a stop token."""
    ids = completion.token_ids
    if ids and ids[-1] in request.stop_token_ids:
        ids = ids[:-1]
    text = sampler.decode(ids)
    ends = [at for stop in request.stop_strings if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """Text parts of a content list are joined; other kinds of part are refused."""
    return [{**message.model_dump(exclude_unset=True), "content": _content(message)} for message in messages]


def _content(message: ChatMessage) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    parts = [part.get("text") if part.get("type") == "text" else None for part in message.content]
    if not all(isinstance(part, str) for part in parts):
        raise InvalidValueError("Only text can be part of a message.", hint="Leave out images, audio and files.")
    return "".join(str(part) for part in parts)


def is_vllm_shape(body: GenerateRequest) -> bool:
    return body.prompt is not None


def sglang_request(sampler: Sampler, body: GenerateRequest) -> SampleRequest:
    params = body.sampling_params or SamplingParams()
    if body.input_ids is not None:
        ids = body.input_ids
    elif body.text is not None:
        ids = sampler.encode(body.text)
    else:
        raise InvalidValueError(
            "/generate got no prompt.", hint="Send input_ids or text (sglang's shape), or prompt (vllm's shape)."
        )
    return sample_request(
        sampler,
        ids,
        n=params.n,
        max_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        seed=params.seed,
        adapter=body.adapter,
        evaluation=body.evaluation,
    )


def vllm_request(sampler: Sampler, body: GenerateRequest) -> SampleRequest:
    extra = (body.model_extra or {}).get("stop_token_ids")
    return sample_request(
        sampler,
        _vllm_prompt(sampler, body),
        n=body.n,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stop=body.stop,
        stop_token_ids=[one for one in extra if isinstance(one, int)] if isinstance(extra, list) else None,
        seed=body.seed,
        adapter=body.adapter,
        evaluation=body.evaluation,
    )


def _vllm_prompt(sampler: Sampler, body: GenerateRequest) -> list[int]:
    if isinstance(body.prompt, str):
        return sampler.encode(body.prompt)
    prompt = body.prompt or {}
    ids = prompt.get("prompt_token_ids")
    if isinstance(ids, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        return ids
    if isinstance(text := prompt.get("prompt"), str):
        return sampler.encode(text)
    raise InvalidValueError(
        "prompt holds neither prompt_token_ids (a list of integers) nor text.",
        hint='Send {"prompt": {"prompt_token_ids": [...]}} or {"prompt": "text"}.',
    )


def sglang_reply(
    sampler: Sampler,
    request: SampleRequest,
    completion: Completion,
    body: GenerateRequest,
    input_scores: ScoreResult | None = None,
) -> SglangReply:
    def triple(token: int, logprob: float) -> tuple[float, int, str | None]:
        return logprob, token, sampler.decode([token], skip_special=False) if body.return_text_in_logprobs else None

    meta = SglangMeta(
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=len(completion.token_ids),
        finish_reason=SglangFinish(type=completion.finish_reason),
        output_token_logprobs=[
            triple(token, logprob) for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        ],
        policy_version=completion.policy_version,
    )
    if input_scores is not None:
        scored = [one for one in input_scores.positions[body.logprob_start_len + 1 :] if one is not None]
        first = request.prompt_ids[body.logprob_start_len : body.logprob_start_len + 1]
        meta.input_token_logprobs = [
            *((None, token, None) for token in first),
            *(triple(one.token_id, one.logprob) for one in scored),
        ]
        meta.input_top_logprobs = [*(None for _ in first), *([triple(*pair) for pair in one.top] for one in scored)]
    return SglangReply(text=completion_text(sampler, request, completion), meta_info=meta)


def vllm_reply(
    sampler: Sampler, request: SampleRequest, result: SampleResult, prompt_scores: ScoreResult | None
) -> VllmReply:
    return VllmReply(
        text=[completion_text(sampler, request, one) for one in result.completions],
        prompt=sampler.decode(request.prompt_ids, skip_special=False),
        token_ids=[one.token_ids for one in result.completions],
        prompt_token_ids=list(request.prompt_ids),
        logprobs=[
            [[{str(token): logprob}] for token, logprob in zip(one.token_ids, one.logprobs, strict=True)]
            for one in result.completions
        ],
        finish_reasons=[one.finish_reason for one in result.completions],
        prompt_logprobs=_prompt_logprobs(prompt_scores) if prompt_scores else None,
        policy_version=result.policy_version,
        policy_versions=[one.policy_version for one in result.completions],
    )


def _prompt_logprobs(scores: ScoreResult) -> list[list[dict[str, float]] | None]:
    """Per position the prompt's own token first, then the likeliest ones."""
    positions: list[list[dict[str, float]] | None] = []
    for position in scores.positions:
        if position is None:
            positions.append(None)
            continue
        others = [{str(token): logprob} for token, logprob in position.top if token != position.token_id]
        positions.append([{str(position.token_id): position.logprob}, *others])
    return positions
