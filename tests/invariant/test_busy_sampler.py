"""A busy sampler's logprobs are those of each sequence computed alone, whatever its rows shared: prompts joined and
rows left while others went on, beginnings were known from before, rows without the adapter lay beside rows with it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_model_families import FAMILIES
from tiny_llama import build_tiny_llama
from trainer_parts import load_model

from trainer.backends.base import SampleRequest, SampleResult
from trainer.backends.local.decode import DecodeBatch, Row
from trainer.backends.local.engine import Engine
from trainer.backends.local.model import LoadedModel
from trainer.backends.local.prefix import LEAST_TOKENS

EQUAL = 5e-5
"""Nats, in fp32."""
SYSTEM = tuple(range(50, 50 + LEAST_TOKENS + 5))


QUICK = ("llama", "gemma3")
"""One that takes any mask, one with windows; the others are slow tests."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    config_class, fields = FAMILIES[request.param]
    folder: Path = build_tiny_llama(tmp_path_factory.mktemp(request.param), config_class=config_class, **fields)
    return load_model(folder, adapter_std=0.1)


def _engine(model: LoadedModel, **options: Any) -> Engine:
    return Engine(model, **{"max_rows": 6, "max_cache_tokens": 4000, "seed": 0, "version": lambda: 0, **options})


@torch.inference_mode()
def _alone(model: LoadedModel, request: SampleRequest, ids: Sequence[int]) -> list[float]:
    """Logprobs of a completion from one pass over its whole sequence, with peft's adapter on or off."""
    whole = torch.tensor([[*request.prompt_ids, *ids]])
    if not request.adapter:
        with model.peft.disable_adapter():
            logits = model.peft(input_ids=whole).logits[0]
    else:
        logits = model.peft(input_ids=whole).logits[0]
    logprobs = torch.log_softmax(logits.float() / (request.temperature or 1.0), -1)
    first = len(request.prompt_ids) - 1
    return [float(logprobs[first + at, token]) for at, token in enumerate(ids)]


def _worst(model: LoadedModel, asked: Sequence[tuple[SampleRequest, SampleResult]]) -> float:
    return max(
        abs(mine - theirs)
        for request, result in asked
        for one in result.completions
        for mine, theirs in zip(one.logprobs, _alone(model, request, one.token_ids), strict=True)
    )


def test_rows_that_join_leave_and_reuse_have_the_logprobs_of_sequences_alone(model: LoadedModel) -> None:
    rng = random.Random(4)
    requests = [
        SampleRequest(
            (*SYSTEM[: rng.choice([0, 3, len(SYSTEM)])], *(rng.randrange(2, 250) for _ in range(rng.randrange(1, 30)))),
            n=rng.randrange(1, 5),
            max_tokens=rng.randrange(1, 40),
            temperature=rng.choice([0.7, 1.0]),
            adapter=rng.random() < 0.7,
            evaluation=rng.random() < 0.3,
        )
        for _ in range(14)
    ]
    engine = _engine(model)
    try:
        futures = [engine.submit(request) for request in requests]
        results = [future.result(60) for future in futures]
        stats = engine.stats
    finally:
        engine.close()
    assert stats.most_rows == 6
    assert stats.most_requests > 1
    assert stats.reused_tokens >= 5 * (len(SYSTEM) - 1), "the common beginning was computed once, with and without"
    assert _worst(model, list(zip(requests, results, strict=True))) <= EQUAL


def test_a_conversation_goes_on_from_what_was_sampled(model: LoadedModel) -> None:
    """Its next prompt extends prompt and answer; only what is new is computed."""
    engine = _engine(model)
    stop = frozenset(range(2, 250, 7))
    prompt: tuple[int, ...] = SYSTEM
    asked = []
    try:
        for turn in range(4):
            before = engine.stats
            request = SampleRequest(prompt, max_tokens=40, stop_token_ids=stop, seed=turn)
            result = engine.submit(request).result(30)
            asked.append((request, result))
            [answer] = result.completions
            assert answer.finish_reason == "stop"
            computed = engine.stats.prompt_tokens - before.prompt_tokens
            assert computed == (len(prompt) if turn == 0 else 5), "the answer's last token and four new ones"
            prompt = (*prompt, *answer.token_ids, 60 + turn, 61, 62, 63)
    finally:
        engine.close()
    assert _worst(model, asked) <= EQUAL


def test_a_group_and_its_latecomers_compute_their_prompt_once(model: LoadedModel) -> None:
    engine = _engine(model)
    request = SampleRequest(SYSTEM, n=10, max_tokens=6)
    try:
        results = [future.result(30) for future in [engine.submit(request), engine.submit(request)]]
        again = engine.submit(request).result(30)
        stats = engine.stats
    finally:
        engine.close()
    passes = 1 + stats.reused_tokens // (len(SYSTEM) - 1)
    assert stats.prompt_tokens == len(SYSTEM) + passes - 1, "later passes compute the last token alone"
    assert _worst(model, [(request, result) for result in [*results, again]]) <= EQUAL


def test_memory_holds_few_columns_and_everything_still_comes(model: LoadedModel) -> None:
    """Two long rows fit at a time, nothing is kept of what was computed."""
    engine = _engine(model, max_cache_tokens=model.context_length)
    rng = random.Random(1)
    requests = [
        SampleRequest(tuple(rng.randrange(2, 250) for _ in range(60)), n=3, max_tokens=60, seed=number)
        for number in range(3)
    ]
    try:
        results = [future.result(60) for future in [engine.submit(request) for request in requests]]
        assert engine.stats.most_rows == 2
        assert engine.stats.reused_tokens == 0
    finally:
        engine.close()
    assert all(len(result.completions) == 3 for result in results)
    assert _worst(model, list(zip(requests, results, strict=True))) <= EQUAL


@torch.inference_mode()
def test_memory_follows_the_longest_row(model: LoadedModel) -> None:
    batch = DecodeBatch(replace(model, eos_ids=frozenset()), torch.Generator().manual_seed(0))
    long = Row(SampleRequest(tuple(range(50, 110))), 0, 20)
    short = Row(SampleRequest((7, 8)), 0, 200)
    batch.admit([[long]])
    batch.admit([[short]])
    widths = []
    while batch.rows:
        batch.step()
        widths.append(batch.columns)
        assert batch.columns == max((row.length for row in batch.rows), default=0)
    assert (widths[17], widths[18], widths[-2]) == (78, 21, 200)


def test_a_seeded_completion_is_the_same_alone_and_in_a_crowd(model: LoadedModel) -> None:
    request = SampleRequest(SYSTEM, n=2, max_tokens=15, seed=11)

    def sample(others: int) -> list[list[int]]:
        engine = _engine(model)
        try:
            crowd = [engine.submit(SampleRequest((9, 8, 7 + at), max_tokens=9)) for at in range(others)]
            result = engine.submit(request).result(30)
            for future in crowd:
                future.result(30)
            return [one.token_ids for one in result.completions]
        finally:
            engine.close()

    alone = sample(0)
    assert alone[0] != alone[1]
    assert sample(9) == alone
