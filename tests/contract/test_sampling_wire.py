"""The wire of port 8001 over real HTTP on a real (tiny) model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from tiny_llama import build_tiny_llama
from trainer_parts import NONCE, load_model, serving, settings, until

from hermes_rl_mcp.contracts.sampling_api import (
    ChatReply,
    CompletionReply,
    LogprobsReply,
    SamplingHealth,
    SglangReply,
    VllmReply,
)
from trainer.backends.base import SampleRequest
from trainer.backends.local.backend import LocalBackend
from trainer.backends.local.model import LoadedModel
from trainer.guard import MAX_BODY_BYTES

PROMPT = "2+3="
EOS = 1
CONTEXT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(build_tiny_llama(tmp_path_factory.mktemp("model"), context_length=CONTEXT))


@pytest.fixture(scope="module")
def backend(model: LoadedModel) -> Iterator[LocalBackend]:
    backend = LocalBackend(model, settings(sampler_max_rows=16))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def client(backend: LocalBackend) -> Iterator[httpx.Client]:
    with serving(backend) as client:
        yield client


@pytest.fixture(scope="module")
def ids(backend: LocalBackend) -> list[int]:
    return backend.encode(PROMPT)


def _sglang(client: httpx.Client, ids: list[int], **params: Any) -> list[SglangReply]:
    reply = client.post("/generate", json={"input_ids": ids, "sampling_params": params, "return_logprob": True})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    return [SglangReply.model_validate(one) for one in (found if isinstance(found, list) else [found])]


def _tokens(reply: SglangReply) -> list[int]:
    return [token for _, token, _ in reply.meta_info.output_token_logprobs]


def _sentence(reply: httpx.Response, status: int) -> str:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    return str(reply.json()["error"]["message"])


def test_health_says_who_it_is_and_which_policy_it_has(client: httpx.Client) -> None:
    health = SamplingHealth.model_validate(client.get("/health").json())
    assert (health.status, health.nonce, health.trainer_initialized, health.model) == ("ok", NONCE, True, "tiny-llama")


def test_models_and_wandb_info_have_the_original_shapes(client: httpx.Client) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny-llama"
    assert client.get("/wandb_info").json() == {"group": "g", "project": "p"}


def test_sglang_shape_of_one_completion_is_an_object(client: httpx.Client, ids: list[int]) -> None:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 5, "timeout": 3, "n": 1, "stop": []}}
    found = client.post("/generate", json=body).json()
    reply = SglangReply.model_validate(found)
    assert reply.meta_info.prompt_tokens == len(ids)
    assert reply.meta_info.completion_tokens == len(reply.meta_info.output_token_logprobs)
    assert all(text is None for _, _, text in reply.meta_info.output_token_logprobs)
    assert found["meta_info"]["finish_reason"] in ({"type": "stop"}, {"type": "length"})


def test_sglang_shape_of_several_completions_is_a_list_of_different_ones(client: httpx.Client, ids: list[int]) -> None:
    replies = _sglang(client, ids, n=6, max_new_tokens=8)
    assert len(replies) == 6
    assert len({tuple(_tokens(reply)) for reply in replies}) > 1


def test_logprobs_are_finite_and_never_positive(client: httpx.Client, ids: list[int]) -> None:
    for reply in _sglang(client, ids, n=8, max_new_tokens=30, temperature=1.5):
        assert all(-100.0 < logprob <= 0.0 for logprob, _, _ in reply.meta_info.output_token_logprobs)


def test_text_in_logprobs_comes_when_asked_for(client: httpx.Client, ids: list[int]) -> None:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 3}, "return_text_in_logprobs": True}
    triples = client.post("/generate", json=body).json()["meta_info"]["output_token_logprobs"]
    assert all(isinstance(text, str) for _, _, text in triples)


def test_sglang_shape_scores_the_input_from_the_place_that_is_named(
    client: httpx.Client, backend: LocalBackend, ids: list[int]
) -> None:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    assert client.post("/generate", json=body).json()["meta_info"]["input_token_logprobs"] is None
    asked = {**body, "logprob_start_len": 1, "top_logprobs_num": 3}
    meta = SglangReply.model_validate(client.post("/generate", json=asked).json()).meta_info
    scores = [one for one in backend.score(ids, 1.0, 3).result().positions[2:] if one]
    assert meta.input_token_logprobs is not None and meta.input_top_logprobs is not None
    assert meta.input_token_logprobs[0] == (None, ids[1], None) and meta.input_top_logprobs[0] is None
    assert [token for _, token, _ in meta.input_token_logprobs[1:]] == ids[2:]
    assert [one for one, _, _ in meta.input_token_logprobs[1:]] == pytest.approx([one.logprob for one in scores])
    tops = [[token for _, token, _ in one or []] for one in meta.input_top_logprobs[1:]]
    assert tops == [[token for token, _ in one.top] for one in scores]


def test_vllm_shape_gives_the_sampled_token_first_and_true_finish_reasons(client: httpx.Client, ids: list[int]) -> None:
    body = {"prompt": {"prompt_token_ids": ids}, "logprobs": 0, "n": 3, "max_tokens": 6, "temperature": 1.0}
    reply = VllmReply.model_validate(client.post("/generate", json=body).json())
    assert reply.prompt_token_ids == ids
    assert len(reply.text) == len(reply.finish_reasons) == len(reply.logprobs) == 3
    for tokens, positions, reason in zip(reply.token_ids, reply.logprobs, reply.finish_reasons, strict=True):
        assert [int(next(iter(position[0]))) for position in positions] == tokens
        assert reason == ("stop" if tokens[-1] == EOS else "length")


def test_vllm_shape_takes_text_and_gives_prompt_logprobs(client: httpx.Client, ids: list[int]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 2}
    reply = VllmReply.model_validate(client.post("/generate", json=body).json())
    assert reply.prompt_token_ids == ids
    assert reply.prompt_logprobs is not None and reply.prompt_logprobs[0] is None
    for token, position in zip(ids[1:], reply.prompt_logprobs[1:], strict=True):
        assert position is not None and next(iter(position[0])) == str(token)
        assert 2 <= len(position) <= 3


def test_prompt_logprobs_are_those_of_the_policy_that_is_asked(
    client: httpx.Client, backend: LocalBackend, ids: list[int]
) -> None:
    for adapter in (True, False):
        body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0, "adapter": adapter}
        reply = VllmReply.model_validate(client.post("/generate", json=body).json())
        scores = backend.score(ids, 1.0, adapter=adapter).result().positions[1:]
        told = [next(iter(position[0].values())) for position in (reply.prompt_logprobs or [])[1:] if position]
        assert told == pytest.approx([one.logprob for one in scores if one])


def test_greedy_answers_are_the_models_likeliest_tokens(
    model: LoadedModel, client: httpx.Client, ids: list[int]
) -> None:
    sequence = list(ids)
    with torch.inference_mode():
        for _ in range(12):
            sequence.append(int(model.peft(input_ids=torch.tensor([sequence])).logits[0, -1].argmax()))
            if sequence[-1] == EOS:
                break
    for reply in _sglang(client, ids, n=2, temperature=0.0, max_new_tokens=12):
        assert _tokens(reply) == sequence[len(ids) :]


def test_end_of_sequence_is_in_the_ids_with_its_logprob_and_not_in_the_text(
    client: httpx.Client, backend: LocalBackend, ids: list[int]
) -> None:
    ended = [r for r in _sglang(client, ids, n=16, max_new_tokens=200) if r.meta_info.finish_reason.type == "stop"]
    assert ended
    for reply in ended:
        tokens = _tokens(reply)
        assert tokens.index(EOS) == len(tokens) - 1
        assert reply.text == backend.decode(tokens[:-1])


def test_running_out_of_tokens_is_called_length(client: httpx.Client, ids: list[int]) -> None:
    for reply in _sglang(client, ids, n=8, max_new_tokens=2):
        assert reply.meta_info.finish_reason.type == ("stop" if _tokens(reply)[-1] == EOS else "length")
        assert len(_tokens(reply)) <= 2


def test_a_stop_string_ends_the_completion_and_its_tokens_stay(
    client: httpx.Client, backend: LocalBackend, ids: list[int]
) -> None:
    [free] = _sglang(client, ids, temperature=0.0, max_new_tokens=20)
    stop = backend.decode(_tokens(free)[3:5])
    [reply] = _sglang(client, ids, temperature=0.0, max_new_tokens=20, stop=[stop])
    assert reply.meta_info.finish_reason.type == "stop"
    assert _tokens(reply) == _tokens(free)[: len(_tokens(reply))]
    assert stop in backend.decode(_tokens(reply))
    assert stop not in backend.decode(_tokens(reply)[:-1])
    assert stop not in reply.text


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
def test_a_stop_token_id_ends_the_completion_and_stays(client: httpx.Client, ids: list[int], field: str) -> None:
    [free] = _sglang(client, ids, temperature=0.0, max_new_tokens=20)
    stop = _tokens(free)[4]
    [reply] = _sglang(client, ids, temperature=0.0, max_new_tokens=20, **{field: [stop]})
    first = _tokens(free).index(stop)
    assert _tokens(reply) == _tokens(free)[: first + 1]
    assert reply.meta_info.finish_reason.type == "stop"


def test_a_seed_gives_the_same_completions_whatever_else_is_in_the_batch(client: httpx.Client, ids: list[int]) -> None:
    alone = [_tokens(reply) for reply in _sglang(client, ids, n=2, max_new_tokens=12, seed=7)]
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(_sglang, client, [*ids, 40 + at], n=3, max_new_tokens=30) for at in range(3)]
        again = pool.submit(_sglang, client, ids, n=2, max_new_tokens=12, seed=7)
        crowded = [_tokens(reply) for reply in again.result()]
        for other in others:
            other.result()
    assert crowded == alone
    assert alone[0] != alone[1]
    assert [_tokens(r) for r in _sglang(client, ids, n=2, max_new_tokens=12, seed=8)] != alone


def test_top_p_restricts_what_is_drawn_but_not_what_is_reported(client: httpx.Client, ids: list[int]) -> None:
    [greedy] = _sglang(client, ids, temperature=0.0, max_new_tokens=1)
    replies = _sglang(client, ids, n=16, top_p=0.001, max_new_tokens=1)
    assert {_tokens(reply)[0] for reply in replies} == {_tokens(greedy)[0]}
    logprob = greedy.meta_info.output_token_logprobs[0][0]
    assert logprob < -0.01
    assert replies[0].meta_info.output_token_logprobs[0][0] == pytest.approx(logprob, abs=1e-5)


def test_more_completions_than_rows_all_come(client: httpx.Client, ids: list[int]) -> None:
    assert len(_sglang(client, ids, n=40, max_new_tokens=4)) == 40


def test_concurrent_requests_share_passes_and_get_their_own_answers(model: LoadedModel) -> None:
    backend = LocalBackend(model, settings(sampler_max_rows=64))
    prompts = [backend.encode(f"{number}+{number}={'x' * number}") for number in range(8)]
    try:
        with serving(backend) as client:
            alone = [_tokens(_sglang(client, ids, temperature=0.0, max_new_tokens=30)[0]) for ids in prompts]
            before = backend.stats
            hold = threading.Event()
            backend._engine.run(hold.wait, exclusive=False)
            with ThreadPoolExecutor(8) as pool:
                waiting = [
                    pool.submit(_sglang, client, ids, temperature=0.0, max_new_tokens=30, n=2) for ids in prompts
                ]
                until(lambda: backend.open_requests == 8)
                hold.set()
                together = [[_tokens(reply) for reply in future.result()] for future in waiting]
            after = backend.stats
    finally:
        backend.close()
    assert together == [[tokens, tokens] for tokens in alone]
    assert (after.most_rows, after.most_requests) == (16, 8)
    assert after.prefill_passes - before.prefill_passes == 1
    assert after.forward_passes - before.forward_passes <= 30


def test_a_request_joins_a_batch_that_is_already_running(model: LoadedModel) -> None:
    backend = LocalBackend(model, settings(sampler_max_rows=64))
    ids = backend.encode("a prompt that is long enough to need padding on the other one")
    try:
        with serving(backend) as client, ThreadPoolExecutor(1) as pool:
            [alone] = _sglang(client, [65], temperature=0.0, max_new_tokens=20)
            [other] = _sglang(client, ids, temperature=0.0, max_new_tokens=150)
            start = backend.stats.forward_passes
            running = pool.submit(_sglang, client, ids, temperature=0.0, max_new_tokens=150)
            until(lambda: backend.stats.forward_passes >= start + 3)
            [joined] = _sglang(client, [65], temperature=0.0, max_new_tokens=20)
            assert _tokens(running.result()[0]) == _tokens(other)
    finally:
        backend.close()
    assert _tokens(joined) == _tokens(alone)
    assert backend.stats.most_requests == 2


def test_completions_answer_each_prompt_of_a_list(client: httpx.Client) -> None:
    body = {"model": "any", "prompt": ["a", "bc"], "n": 2, "max_tokens": 4, "temperature": 0.7}
    reply = CompletionReply.model_validate(client.post("/v1/completions", json=body).json())
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.usage.prompt_tokens == 3
    assert reply.usage.total_tokens == 3 + reply.usage.completion_tokens


def test_chat_renders_the_template_and_honours_n(client: httpx.Client, backend: LocalBackend) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "2+3="}]}]
    body = {"messages": messages, "n": 3, "max_tokens": 4, "timeout": 5}
    reply = ChatReply.model_validate(client.post("/v1/chat/completions", json=body).json())
    assert len(reply.choices) == 3
    assert reply.usage.prompt_tokens == len(backend.render_chat([{"role": "user", "content": "2+3="}], None))


def test_chat_without_a_limit_stops_at_the_context(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 1.5}
    reply = ChatReply.model_validate(client.post("/v1/chat/completions", json=body).json())
    assert reply.usage.total_tokens <= CONTEXT


def test_logprobs_of_text_and_of_ids_are_the_same(client: httpx.Client, ids: list[int]) -> None:
    by_text = LogprobsReply.model_validate(client.post("/logprobs", json={"text": PROMPT}).json())
    by_ids = LogprobsReply.model_validate(
        client.post("/logprobs", json={"input_ids": ids, "text": "ignored", "return_text": True}).json()
    )
    assert by_text.num_tokens == len(ids)
    assert [one.logprob for one in by_text.logprobs] == [one.logprob for one in by_ids.logprobs]
    assert "".join(one.token or "" for one in by_ids.logprobs) == PROMPT


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/generate", {}, "no prompt"),
        ("/generate", {"input_ids": []}, "empty"),
        ("/generate", {"input_ids": [5, 100000]}, "vocabulary"),
        ("/generate", {"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ("/generate", {"input_ids": [5], "sampling_params": {"temperature": 1e-40}}, "too close to 0"),
        ("/generate", {"input_ids": [5], "sampling_params": {"n": 0}}, "sampling_params.n"),
        ("/generate", {"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p"),
        ("/generate", {"input_ids": [5] * CONTEXT}, "context"),
        ("/generate", {"prompt": {"prompt_token_ids": "x"}}, "prompt_token_ids"),
        ("/generate", {"input_ids": "abc"}, "input_ids"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": [], "max_tokens": 1}, "empty"),
        ("/v1/completions", {"prompt": "x", "stream": True, "logprobs": 3}, "streamed"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ("/logprobs", {}, "empty"),
        ("/logprobs", {"input_ids": [5] * (CONTEXT + 1)}, "context"),
    ],
)
def test_bad_input_gets_a_400_with_a_sentence(client: httpx.Client, path: str, body: dict[str, Any], word: str) -> None:
    assert word in _sentence(client.post(path, json=body), 400)


def test_a_body_that_is_not_json_gets_a_400(client: httpx.Client) -> None:
    _sentence(client.post("/generate", content=b"{", headers={"Content-Type": "application/json"}), 400)


def test_half_a_character_in_a_prompt_gets_a_400(client: httpx.Client) -> None:
    body = b'{"prompt": "\\ud800", "max_tokens": 1}'
    answer = client.post("/generate", content=body, headers={"Content-Type": "application/json"})
    assert "Unicode" in _sentence(answer, 400)


def test_a_chat_template_that_refuses_gets_a_400(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": "no list"}
    _sentence(client.post("/v1/chat/completions", json=body), 400)


def test_a_prompt_that_leaves_one_token_is_answered_with_length(client: httpx.Client) -> None:
    [reply] = _sglang(client, [50] * (CONTEXT - 1), max_new_tokens=99)
    assert len(_tokens(reply)) == 1


def test_health_counts_work_and_the_requests_that_are_open(client: httpx.Client, backend: LocalBackend) -> None:
    def health() -> SamplingHealth:
        return SamplingHealth.model_validate(client.get("/health").json())

    before = health()
    assert before.open_requests == 0
    held = threading.Event()
    job = backend._engine.run(lambda: held.wait(30), exclusive=False)  # the compute thread is busy elsewhere
    waiting = backend.submit(SampleRequest((40, 41), max_tokens=4))
    assert health().open_requests == 1
    held.set()
    waiting.result(30)
    assert job.result(30)
    until(lambda: health().open_requests == 0)
    assert health().activity > before.activity + 1, "the job, and each decoding round"
    cancelled = threading.Event()
    job = backend._engine.run(lambda: cancelled.wait(30), exclusive=False)
    given_up = backend.submit(SampleRequest((40, 41), max_tokens=4))
    assert given_up.cancel()
    assert health().open_requests == 0
    cancelled.set()
    assert job.result(30)


def test_while_the_model_loads_everything_but_health_gets_503(backend: LocalBackend) -> None:
    with serving(backend, ready=False) as client:
        health = SamplingHealth.model_validate(client.get("/health").json())
        assert (health.status, health.nonce, health.trainer_initialized) == ("starting", NONCE, False)
        for path, body in [
            ("/generate", {"input_ids": [5]}),
            ("/logprobs", {"input_ids": [5]}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ]:
            reply = client.post(path, json=body)
            assert "not ready" in _sentence(reply, 503)
            assert reply.headers["retry-after"] == "1"


def test_a_closed_sampler_answers_503(model: LoadedModel) -> None:
    backend = LocalBackend(model, settings())
    with serving(backend) as client:
        backend.close()
        _sentence(client.post("/generate", json={"input_ids": [5]}), 503)


@pytest.mark.parametrize("header", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "same-origin"}])
def test_sec_06_requests_of_web_pages_are_refused(client: httpx.Client, header: dict[str, str]) -> None:
    _sentence(client.get("/health", headers=header), 403)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8001", "127.0.0.1.evil.example", ""])
def test_sec_06_other_host_names_are_refused(client: httpx.Client, host: str) -> None:
    _sentence(client.get("/health", headers={"Host": host}), 403)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8001"])
def test_loopback_host_names_are_taken(client: httpx.Client, host: str) -> None:
    assert client.get("/health", headers={"Host": host}).status_code == 200


def test_sec_07_only_paths_below_the_secret_prefix_exist(backend: LocalBackend) -> None:
    with serving(backend, path_prefix="s3cret") as client:
        assert client.get("/s3cret/health").json()["nonce"] == NONCE
        assert client.get("/s3cret/v1/models").status_code == 200
        for path in ("/health", "/s3crethealth", "/s3cre/health", "/S3CRET/health", "/"):
            message = _sentence(client.get(path), 404)
            assert NONCE not in message and "s3cret" not in message


def test_unknown_paths_and_methods_get_an_error_in_the_same_shape(client: httpx.Client) -> None:
    _sentence(client.get("/nothing"), 404)
    _sentence(client.get("/generate"), 405)


def test_sec_08_a_body_over_the_cap_is_refused(client: httpx.Client) -> None:
    _sentence(client.post("/generate", content=b"x" * (MAX_BODY_BYTES + 1)), 413)

    def chunks() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // (1 << 20) + 1):
            yield b" " * (1 << 20)

    _sentence(client.post("/generate", content=chunks(), headers={"Content-Type": "application/json"}), 413)


def test_a_client_that_goes_away_takes_its_waiting_request_along(model: LoadedModel) -> None:
    backend = LocalBackend(model, settings())
    hold = threading.Event()
    try:
        with serving(backend) as client:
            backend._engine.run(hold.wait, exclusive=False)
            with pytest.raises(httpx.ReadTimeout):
                client.post("/generate", json={"input_ids": [5]}, timeout=0.3)
            until(lambda: backend.open_requests == 0)
            hold.set()
            _sglang(client, [5], max_new_tokens=1)
    finally:
        hold.set()
        backend.close()
    assert backend.stats.requests == 1


def test_health_answers_while_the_compute_thread_is_busy(backend: LocalBackend, client: httpx.Client) -> None:
    hold = threading.Event()
    held = backend._engine.run(hold.wait, exclusive=True)
    try:
        assert client.get("/health", timeout=5).json()["status"] == "ok"
        assert not held.done()
    finally:
        hold.set()
