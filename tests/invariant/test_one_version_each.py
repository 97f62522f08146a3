"""Each completion comes from one policy version, whatever changes weights meanwhile; real threads, the real engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, until

from trainer.backends.base import SampleRequest, SamplerUnavailableError
from trainer.backends.local.engine import Engine
from trainer.backends.local.model import LoadedModel

PROMPT = (70, 71, 72)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(build_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture
def version() -> list[int]:
    return [0]


@pytest.fixture
def engine(model: LoadedModel, version: list[int]) -> Iterator[Engine]:
    engine = Engine(model, max_rows=8, max_cache_tokens=10_000, seed=0, version=lambda: version[0])
    yield engine
    engine.close()


def test_a_job_that_holds_keeps_samples_and_scores_out_until_it_is_released(engine: Engine, version: list[int]) -> None:
    engine.run(lambda: None, exclusive=True, hold=True).result(10)
    sample = engine.submit(SampleRequest(PROMPT, max_tokens=2))
    score = engine.run(lambda: version[0], exclusive=False)
    engine.run(lambda: version.__setitem__(0, 1), exclusive=True).result(10)  # a second job of the same hold
    assert not sample.done()
    assert not score.done()
    engine.release()
    assert sample.result(10).policy_version == 1
    assert score.result(10) == 1


def test_a_job_that_raises_ends_the_hold(engine: Engine) -> None:
    engine.run(lambda: None, exclusive=True, hold=True).result(10)
    sample = engine.submit(SampleRequest(PROMPT, max_tokens=2))
    with pytest.raises(ZeroDivisionError):
        engine.run(lambda: 1 // 0, exclusive=True, hold=True).result(10)
    assert sample.result(10).completions


def test_a_closed_engine_fails_what_waits_for_a_release(engine: Engine) -> None:
    engine.run(lambda: None, exclusive=True, hold=True).result(10)
    sample = engine.submit(SampleRequest(PROMPT, max_tokens=2))
    engine.close()
    with pytest.raises(SamplerUnavailableError):
        sample.result(10)


def test_a_hold_waits_for_the_rows_under_way(engine: Engine, version: list[int]) -> None:
    sample = engine.submit(SampleRequest(PROMPT, n=4, max_tokens=200))
    until(lambda: engine.stats.sampled_tokens > 0)
    engine.run(lambda: version.__setitem__(0, 7), exclusive=True, hold=True).result(20)
    assert sample.done()
    assert sample.result().policy_version == 0
    assert all(len(one.token_ids) <= 200 for one in sample.result().completions)
