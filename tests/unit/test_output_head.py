"""The head's logprobs, entropies and gradients are those of a log-softmax, and no large block of logits ever exists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.backends.local import head
from trainer.backends.local.head import Head

VOCABULARY, HIDDEN, ROWS, CHOSEN = 23, 5, 7, 3

SCALINGS: dict[str, dict[str, float]] = {
    "plain": {},
    "cap": {"final_logit_softcapping": 2.0},
    "multiplied": {"logit_scale": 0.5},
    "divided": {"logits_scaling": 3.0},
    "scaled-and-capped": {"logit_scale": 2.0, "final_logit_softcapping": 3.0},
}


def _head(scaling: dict[str, float], dtype: torch.dtype = torch.float64, *, bias: bool = False) -> Head:
    torch.manual_seed(0)
    linear = torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias).to(dtype).requires_grad_(False)
    linear.weight.mul_(4.0)
    config = SimpleNamespace(**scaling)
    config.get_text_config = lambda: config
    return Head(SimpleNamespace(get_output_embeddings=lambda: linear, config=config))


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, one target a row, several ids a row (one of them twice), temperatures."""
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (ROWS, CHOSEN))
    ids[0] = 5
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True),
        torch.randint(0, VOCABULARY, (ROWS,)),
        ids,
        torch.linspace(0.5, 1.5, ROWS, dtype=wide),
    )


@pytest.fixture(params=[1, 3, 100], ids=lambda rows: f"{rows}-rows-a-chunk")
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(head._CHUNK_ELEMENTS, "cpu", request.param * VOCABULARY)
    return int(request.param)


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_values_and_gradients_are_those_of_a_log_softmax(
    chunk_rows: int, scaling: dict[str, float], bias: bool
) -> None:
    own, (hidden, targets, ids, temperatures) = _head(scaling, bias=bias), _inputs()
    logprobs_MV = torch.log_softmax(own.logits(hidden) / temperatures[:, None], 1)
    logprobs, entropies = own.selected_logprobs(hidden, targets, temperatures)
    chosen = own.chosen_logprobs(hidden, ids, temperatures)
    assert torch.allclose(logprobs, logprobs_MV.gather(1, targets[:, None])[:, 0], atol=1e-12)
    assert torch.allclose(entropies, -(logprobs_MV.exp() * logprobs_MV).sum(1), atol=1e-12)
    assert torch.allclose(chosen, logprobs_MV.gather(1, ids), atol=1e-12)
    assert not entropies.requires_grad
    assert torch.autograd.gradcheck(
        lambda h: own.selected_logprobs(h, targets, temperatures)[0], hidden, fast_mode=True
    )
    assert torch.autograd.gradcheck(lambda h: own.chosen_logprobs(h, ids, temperatures), hidden, fast_mode=True)


def test_a_head_that_learns_too_keeps_its_gradient() -> None:
    """An adapter from elsewhere may adapt the head."""

    class Adapted(torch.nn.Linear):
        pass

    own, (hidden, targets, ids, temperatures) = _head({}), _inputs()
    adapted = Adapted(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
    adapted.load_state_dict(own._linear.state_dict())
    config = SimpleNamespace(get_text_config=SimpleNamespace)
    theirs = Head(SimpleNamespace(get_output_embeddings=lambda: adapted, config=config))
    for mine, other in zip(
        own.selected_logprobs(hidden, targets, temperatures),
        theirs.selected_logprobs(hidden, targets, temperatures),
        strict=True,
    ):
        assert torch.allclose(mine, other)
    theirs.chosen_logprobs(hidden, ids, temperatures).sum().backward()
    assert adapted.weight.grad is not None


def test_in_bf16_only_the_products_are_rounded() -> None:
    """Logits and all that is made of them are fp32: values equal those of the rounded logits to that precision, and the
    gradient is off by bf16's rounding alone, also for a token that is almost certain."""
    own, (hidden, targets, ids, temperatures) = _head({}, torch.bfloat16), _inputs(torch.bfloat16)
    with torch.no_grad():
        targets[0] = own.logits(hidden * 8)[0].argmax()
    sharp = (hidden.detach() * 8).requires_grad_()
    logprobs, entropies = own.selected_logprobs(sharp, targets, temperatures)
    assert logprobs.dtype == entropies.dtype == own.chosen_logprobs(sharp, ids, temperatures).dtype == torch.float32
    rounded = torch.log_softmax(own.logits(sharp.detach()).double() / temperatures[:, None], 1)
    assert torch.allclose(logprobs.double(), rounded.gather(1, targets[:, None])[:, 0], atol=1e-5)
    logprobs.sum().backward()
    assert sharp.grad is not None and sharp.grad.dtype == torch.bfloat16
    onehot = torch.nn.functional.one_hot(targets, VOCABULARY)
    expected = ((onehot - rounded.exp()) / temperatures[:, None]) @ own._linear.weight.double()
    error = (sharp.grad.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(rounded.exp().gather(1, targets[:, None])[0]) > 0.9
    assert float(error.max()) < 0.01


class _Largest(TorchDispatchMode):
    """Watches the size of every tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return made


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_no_tensor_is_larger_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch, scaling: dict[str, float]) -> None:
    monkeypatch.setitem(head._CHUNK_ELEMENTS, "cpu", 2 * VOCABULARY)
    own, (hidden, targets, ids, temperatures) = _head(scaling), _inputs()
    limit = max(2 * VOCABULARY, VOCABULARY * HIDDEN)  # the head's weight, transposed, is a tensor, too
    with _Largest() as largest:
        logprobs, _ = own.selected_logprobs(hidden, targets, temperatures)
        (logprobs.sum() + own.chosen_logprobs(hidden, ids, temperatures).sum()).backward()
    assert largest.elements <= limit < ROWS * VOCABULARY


def test_no_row_gives_no_logprob() -> None:
    own = _head({})
    none = torch.zeros(0, HIDDEN, dtype=torch.float64, requires_grad=True)
    targets, temperatures = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.float64)
    logprobs, entropies = own.selected_logprobs(none, targets, temperatures)
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert own.chosen_logprobs(none, targets[:, None].expand(0, 2), temperatures).shape == (0, 2)
