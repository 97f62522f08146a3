"""Drawing a token: the right distribution, the full softmax's logprob, and seeds that know no neighbours."""

from __future__ import annotations

import pytest
import torch

from trainer.backends.local.sampling import SamplingError, choose, uniforms


def _logits(rows: int, vocabulary: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(3)) * 2


def test_every_token_comes_as_often_as_its_probability() -> None:
    logits_V = _logits(1)[0]
    count = 40_000
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, logprobs = choose(logits_V.expand(count, -1).clone(), [0.7] * count, [1.0] * count, grid)
    wanted_V = torch.softmax(logits_V / 0.7, 0)
    seen_V = torch.bincount(torch.tensor(tokens), minlength=50) / count
    assert float((seen_V - wanted_V).abs().max()) < 1e-4
    assert torch.tensor(logprobs).exp() == pytest.approx(wanted_V[tokens].tolist(), rel=1e-5)


def test_top_p_draws_from_the_nucleus_and_reports_the_full_softmax() -> None:
    logits_V = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    count = 1000
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, logprobs = choose(logits_V.expand(count, -1).clone(), [1.0] * count, [0.7] * count, grid)
    assert set(tokens) == {0, 1}
    assert tokens.count(0) == pytest.approx(count * 0.5 / 0.8, abs=1)
    assert logprobs[tokens.index(1)] == pytest.approx(logits_V[1].item(), abs=1e-6)


def test_rows_of_every_kind_share_a_batch() -> None:
    logits_BV = _logits(3)
    tokens, logprobs = choose(
        logits_BV.clone(), [0.0, 1.0, 2.0], [1.0, 1e-6, 1.0], torch.tensor([0.99, 0.99, 0.0], dtype=torch.float64)
    )
    assert tokens == [int(logits_BV[0].argmax()), int(logits_BV[1].argmax()), 0]
    wanted = [torch.log_softmax(logits_BV[row] / t, 0)[tokens[row]].item() for row, t in enumerate([1.0, 1.0, 2.0])]
    assert logprobs == pytest.approx(wanted, abs=1e-5)


def test_a_row_with_its_own_generator_draws_the_same_whatever_shares_its_batch() -> None:
    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    alone = uniforms([seeded()], torch.Generator().manual_seed(0))
    beside = uniforms([None, seeded(), None], torch.Generator().manual_seed(1))
    assert alone[0] == beside[1]
    own = seeded()
    uniforms([own, None], torch.Generator())
    assert uniforms([own], torch.Generator())[0] != alone[0], "each token takes a new number"


def test_the_common_generator_is_used_in_order_by_the_others_alone() -> None:
    plain = uniforms([None, None], torch.Generator().manual_seed(9))
    mixed = uniforms([None, torch.Generator(), None], torch.Generator().manual_seed(9))
    assert plain.tolist() == [mixed[0].item(), mixed[2].item()]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(temperature: float) -> None:
    with pytest.raises(SamplingError):
        choose(torch.full((2, 5), float("nan")), [temperature] * 2, [1.0] * 2, torch.zeros(2, dtype=torch.float64))
