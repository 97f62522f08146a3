"""Each completion comes from one policy version, whatever changes weights meanwhile; real threads, the real engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, settings, until

from hermes_rl_mcp.errors import InvalidValueError
from trainer.backends.base import SampleRequest, SampleResult, SamplerUnavailableError
from trainer.backends.local.backend import LocalBackend
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
    engine = _engine(model, version)
    yield engine
    engine.close()


def _engine(model: LoadedModel, version: list[int], **options: bool) -> Engine:
    return Engine(model, max_rows=8, max_cache_tokens=10_000, seed=0, version=lambda: version[0], **options)


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


def test_completions_under_way_are_cut_by_policy_before_the_weights_change(
    model: LoadedModel, version: list[int]
) -> None:
    engine = _engine(model, version, cut=True)
    try:
        sample = engine.submit(SampleRequest(PROMPT, n=3, max_tokens=240, stop_token_ids=frozenset()))
        evaluation = engine.submit(SampleRequest(PROMPT, max_tokens=60, evaluation=True, seed=1))
        until(lambda: engine.stats.sampled_tokens > 8)
        late = engine.submit(SampleRequest(PROMPT, n=8, max_tokens=240))
        engine.run(lambda: version.__setitem__(0, 1), exclusive=True, hold=True).result(20)
        assert evaluation.done(), "an evaluation's answer is not cut, the job waits for it"
        assert _ids(evaluation.result()) == _ids(_alone(model, SampleRequest(PROMPT, max_tokens=60, seed=1)))
        assert sample.done()
        assert all(one.policy_version == 0 for one in sample.result().completions)
        assert all(one.token_ids and len(one.token_ids) == len(one.logprobs) for one in sample.result().completions)
        ends = {(one.finish_reason, len(one.token_ids) < 240) for one in sample.result().completions}
        assert ends <= {("length", True), ("stop", True)}
        engine.release()
        versions = {one.policy_version for one in late.result(20).completions}
        assert 1 in versions
        assert late.result().policy_version == min(versions)
    finally:
        engine.close()


def test_without_that_policy_they_finish_first(engine: Engine, version: list[int], model: LoadedModel) -> None:
    request = SampleRequest(PROMPT, max_tokens=120, seed=3)
    sample = engine.submit(request)
    until(lambda: engine.stats.sampled_tokens > 0)
    engine.run(lambda: version.__setitem__(0, 1), exclusive=True, hold=True).result(20)
    assert _ids(sample.result(0)) == _ids(_alone(model, request))


def test_samples_of_many_threads_all_name_one_version_while_it_changes(engine: Engine, version: list[int]) -> None:
    results: list[SampleResult] = []
    ended = threading.Event()

    def client(number: int) -> None:
        while not ended.is_set():
            request = SampleRequest((70 + number, 71), n=3, max_tokens=12, evaluation=number % 2 == 0)
            results.append(engine.submit(request).result(20))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    seen: list[tuple[int, int]] = []
    for change in range(1, 6):
        # A result of one version alone before the next: on a slow machine every result in between may straddle two.
        until(lambda change=change: any(result.policy_version == change - 1 for result in list(results)))
        engine.run(lambda: None, exclusive=True, hold=True).result(20)
        before = engine.stats.sampled_tokens
        engine.run(lambda change=change: version.__setitem__(0, change), exclusive=True).result(20)
        seen.append((before, engine.stats.sampled_tokens))
        engine.release()
    ended.set()
    for thread in threads:
        thread.join(20)
    assert all(before == after for before, after in seen), "nothing was drawn during a hold"
    for result in results:
        versions = {one.policy_version for one in result.completions}
        assert result.policy_version == min(versions)
        assert versions <= set(range(6))
    assert {result.policy_version for result in results} >= {0, 1, 2, 3, 4}


def test_what_was_computed_before_a_change_of_weights_is_not_used_after_it(model: LoadedModel) -> None:
    backend = LocalBackend(model, settings())
    request = SampleRequest(tuple(range(60, 100)), temperature=0.0, max_tokens=8)
    base = SampleRequest(request.prompt_ids, temperature=0.0, max_tokens=8, adapter=False)
    try:
        before, base_before = backend.submit(request).result(20), backend.submit(base).result(20)
        saved = {name: p.detach().clone() for name, p in model.peft.named_parameters() if "lora_B" in name}

        def change() -> None:
            with torch.no_grad():
                for name, parameter in model.peft.named_parameters():
                    if name in saved:
                        parameter.copy_(saved[name].flip(0) * 3)

        backend._engine.run(change, exclusive=True).result(20)  # under the same version, as a restored run has it
        known = backend.stats.reused_tokens
        after, base_after = backend.submit(request).result(20), backend.submit(base).result(20)
        assert backend.stats.reused_tokens == known + 39, "the base's beginning alone is still good"
        assert _logprobs(base_after) == pytest.approx(_logprobs(base_before), abs=1e-5)
        assert _logprobs(after) != pytest.approx(_logprobs(before), abs=1e-2)
        assert _logprobs(after) == pytest.approx(_logprobs(_alone(model, request)), abs=1e-5)
    finally:
        with torch.no_grad():
            for name, parameter in model.peft.named_parameters():
                if name in saved:
                    parameter.copy_(saved[name])
        backend.close()


def test_a_cancelled_request_leaves_at_once_and_its_places_are_taken(engine: Engine) -> None:
    given_up = engine.submit(SampleRequest(PROMPT, n=8, max_tokens=240))
    waiting = engine.submit(SampleRequest(PROMPT, n=8, max_tokens=2))
    until(lambda: engine.stats.sampled_tokens > 8)
    hold, held = threading.Event(), threading.Event()
    engine.run(lambda: held.set() or hold.wait(20), exclusive=False)
    assert held.wait(20)
    before = engine.stats.sampled_tokens
    assert given_up.cancel()
    hold.set()
    assert len(waiting.result(20).completions) == 8
    assert engine.stats.sampled_tokens <= before + 8 * 2, "no pass drew for it any more"
    assert engine.open_requests == 0


def test_tokens_are_told_as_they_are_drawn(engine: Engine) -> None:
    told: list[tuple[int, int, float]] = []
    result = engine.submit(SampleRequest(PROMPT, n=2, max_tokens=20), lambda *token: told.append(token)).result(20)
    for index, one in enumerate(result.completions):
        assert [(token, logprob) for at, token, logprob in told if at == index] == list(
            zip(one.token_ids, one.logprobs, strict=True)
        )


def test_a_callback_that_raises_fails_its_own_request_alone(engine: Engine) -> None:
    def fails(index: int, token: int, logprob: float) -> None:
        raise ZeroDivisionError

    bad = engine.submit(SampleRequest(PROMPT, n=2, max_tokens=50), fails)
    good = engine.submit(SampleRequest(PROMPT, max_tokens=50))
    with pytest.raises(ZeroDivisionError):
        bad.result(20)
    assert good.result(20).completions


def test_a_prompt_that_could_never_fit_is_refused_at_once(engine: Engine, model: LoadedModel) -> None:
    with pytest.raises(InvalidValueError, match="no room"):
        engine.submit(SampleRequest(tuple([70] * model.context_length)))


def _alone(model: LoadedModel, request: SampleRequest) -> SampleResult:
    engine = _engine(model, [0])
    try:
        return engine.submit(request).result(20)
    finally:
        engine.close()


def _logprobs(result: SampleResult) -> list[float]:
    return result.completions[0].logprobs


def _ids(result: SampleResult) -> list[list[int]]:
    return [one.token_ids for one in result.completions]
