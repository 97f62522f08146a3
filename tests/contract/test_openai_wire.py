"""The OpenAI shapes as the ``openai`` client sees them: whole and streamed, over real HTTP on a real (tiny) model."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, serving, settings, until

from trainer.backends.local.backend import LocalBackend
from trainer.backends.local.model import LoadedModel
from trainer.service import Served

BASE, ADAPTER = "tiny-llama", "0badcafe"
QUESTION = [{"role": "user", "content": "2+3="}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(build_tiny_llama(tmp_path_factory.mktemp("model"), context_length=256))


@pytest.fixture(scope="module")
def backend(model: LoadedModel) -> Iterator[LocalBackend]:
    backend = LocalBackend(model, settings(sampler_max_rows=16))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def http(backend: LocalBackend) -> Iterator[httpx.Client]:
    with serving(backend, served=[Served(ADAPTER, adapter=True), Served(BASE, adapter=False)]) as client:
        yield client


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0, timeout=30) as client:
        yield client


def near(logprobs: list[float]) -> Any:
    """Kept keys and values of a prompt differ from computed ones in the last digits."""
    return pytest.approx(logprobs, abs=1e-5)


def test_both_models_are_listed_and_the_adapter_names_its_base(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [one.id for one in client.models.list()] == [ADAPTER, BASE]
    assert client.models.retrieve(BASE).id == BASE
    assert [one["parent"] for one in http.get("/v1/models").json()["data"]] == [BASE, None]


def test_the_model_of_a_request_chooses_adapter_or_base(client: openai.OpenAI, backend: LocalBackend) -> None:
    prompt = backend.render_chat(QUESTION, None)
    answers = {}
    for name, adapter in ((ADAPTER, True), (BASE, False)):
        reply = client.chat.completions.create(model=name, messages=QUESTION, temperature=0, max_tokens=12)
        assert reply.model == name
        answers[name] = reply.choices[0].message.content
        assert answers[name] == backend.decode(backend.greedy(prompt, 12, adapter=adapter))
    assert answers[ADAPTER] != answers[BASE]


def test_a_model_that_is_not_served_is_a_404_that_names_those_that_are(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    assert ADAPTER in str(caught.value) and BASE in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4o", prompt="x", stream=True)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_streamed_chats_add_up_to_the_whole_reply(client: openai.OpenAI) -> None:
    asked = {"model": ADAPTER, "messages": QUESTION, "n": 3, "seed": 5, "max_tokens": 24, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    texts, tokens, ends, roles = [""] * 3, [[], [], []], [None] * 3, [None] * 3
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        assert chunk.id == chunks[0].id and chunk.model == ADAPTER and chunk.usage is None
        for choice in chunk.choices:
            assert ends[choice.index] is None, "nothing comes behind the finish reason"
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] = roles[choice.index] or choice.delta.role
            ends[choice.index] = choice.finish_reason
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert roles == ["assistant"] * 3
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert ends == [choice.finish_reason for choice in whole.choices]
    for streamed, choice in zip(tokens, whole.choices, strict=True):
        assert [one.token for one in streamed] == [one.token for one in choice.logprobs.content]
        assert [one.logprob for one in streamed] == near([one.logprob for one in choice.logprobs.content])
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


def test_streamed_completions_add_up_to_the_whole_reply_over_several_prompts(client: openai.OpenAI) -> None:
    asked = {"model": BASE, "prompt": ["ab", "c"], "n": 2, "seed": 3, "max_tokens": 16, "logprobs": 0}
    whole = client.completions.create(**asked)
    texts, logprobs, offsets = [""] * 4, [[], [], [], []], [[], [], [], []]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs
            offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert logprobs == [near(choice.logprobs.token_logprobs) for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert len(set(texts)) == 4


def test_a_stop_string_ends_a_stream_and_no_part_of_it_is_sent(client: openai.OpenAI, backend: LocalBackend) -> None:
    asked = {"model": ADAPTER, "prompt": "2+3=", "temperature": 0, "max_tokens": 30}
    free = client.completions.create(**asked).choices[0].text
    stop = free[4:7]
    texts, ends = [], []
    for chunk in client.completions.create(**asked, stop=stop, stream=True):
        texts += [choice.text for choice in chunk.choices]
        ends += [choice.finish_reason for choice in chunk.choices]
    assert "".join(texts) == free[: free.index(stop)]
    assert ends[-1] == "stop"


def test_prompts_may_be_token_ids(client: openai.OpenAI, backend: LocalBackend) -> None:
    ids = backend.encode("2+3=")
    asked = {"model": ADAPTER, "temperature": 0, "max_tokens": 8}
    by_text, by_ids, by_lists = (
        client.completions.create(prompt=prompt, **asked) for prompt in ("2+3=", ids, [ids, ids])
    )
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert [choice.text for choice in by_lists.choices] == [by_text.choices[0].text] * 2


@pytest.mark.parametrize("name", [ADAPTER, BASE])
def test_the_likeliest_tokens_come_with_the_model_that_sampled(client: openai.OpenAI, name: str) -> None:
    asked = {"model": name, "temperature": 0, "max_tokens": 6}
    chat = client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=3, **asked)
    for one in chat.choices[0].logprobs.content:
        assert len(one.top_logprobs) == 3
        assert (one.top_logprobs[0].token, one.token) == (one.token, one.token), "greedy takes the likeliest"
        assert one.top_logprobs[0].logprob == pytest.approx(one.logprob, abs=1e-4)
    plain = client.completions.create(prompt="2+3=", logprobs=2, **asked).choices[0].logprobs
    for token, logprob, top in zip(plain.tokens, plain.token_logprobs, plain.top_logprobs, strict=True):
        assert top[token] == max(top.values()) == pytest.approx(logprob, abs=1e-4)


def test_events_are_json_lines_that_end_with_done_and_carry_the_policy_version(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "max_tokens": 4, "stream": True}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "role" not in chunks[-1]["choices"][0]["delta"], "fields without news are left out"
    assert [chunk["policy_version"] for chunk in chunks] == [None] * (len(chunks) - 1) + [0]


def test_a_sampler_that_ends_says_so_in_the_stream(model: LoadedModel) -> None:
    backend = LocalBackend(model, settings())
    with serving(backend) as http:
        started = threading.Event()
        backend._engine.run(lambda: started.wait(30), exclusive=False)
        with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0) as client:
            stream = client.completions.create(model="any", prompt="x", stream=True)
            closing = threading.Thread(target=backend.close)
            closing.start()
            until(lambda: backend._engine._closed)
            started.set()
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
            closing.join()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_goes_away_ends_what_is_being_sampled_for_it(model: LoadedModel, stream: bool) -> None:
    backend = LocalBackend(model, settings())
    body = json.dumps({"prompt": "x", "n": 4, "max_tokens": 250, "stream": stream, "temperature": 100.0}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    slow = threading.Event()
    try:
        with serving(backend) as http:
            with socket.create_connection(("127.0.0.1", http.base_url.port)) as client:
                client.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                until(lambda: backend.stats.sampled_tokens > 0)
                backend._engine.run(
                    lambda: slow.wait(30), exclusive=False
                )  # so that it cannot finish before it is ended
            until(lambda: backend.open_requests == 0)
            slow.set()
            until(lambda: not backend._engine._batch.rows)
    finally:
        slow.set()
        backend.close()
    assert backend.stats.requests == 0, "it was answered all the same"
    assert backend.stats.sampled_tokens < 4 * 250
