"""The lean LoRA layers give peft's numbers, in every state that peft knows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from tiny_llama import build_tiny_llama
from trainer_parts import load_model

from trainer.backends.local import adapter_files, lora


class Two(torch.nn.Module):
    """A layer with bias and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(12, 20)
        self.second = torch.nn.Linear(20, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def _pair(dtype: torch.dtype = torch.float32, **config: Any) -> tuple[Any, Any]:
    """The same adapted model twice: peft's, and ours."""
    torch.manual_seed(3)
    wanted = {"r": 4, "lora_alpha": 6, "target_modules": ["first", "second"], "init_lora_weights": False, **config}
    theirs = get_peft_model(Two().to(dtype), LoraConfig(**wanted)).eval()
    ours = copy.deepcopy(theirs)
    lora.install(ours)
    return theirs, ours


def _gradients(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    (model(x).float() ** 2).sum().backward()
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def _gradientless(model: Any, x: torch.Tensor) -> torch.Tensor:
    """By the path that training takes."""
    y: torch.Tensor = model(x.clone().requires_grad_()).detach()
    return y


def _close(one: torch.Tensor, other: torch.Tensor, bound: float) -> bool:
    assert one.dtype == other.dtype and one.shape == other.shape
    return float((one.double() - other.double()).norm()) <= bound * float(one.double().norm())


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12), (1, 1, 12)], ids=str)
def test_values_and_gradients_are_those_of_peft(dtype: torch.dtype, bound: float, shape: tuple[int, ...]) -> None:
    theirs, ours = _pair(dtype)
    x = torch.randn(shape, dtype=dtype)
    expected, got = _gradients(theirs, x), _gradients(ours, x)
    assert expected.keys() == got.keys() and len(got) == 5
    assert all(_close(expected[name], got[name], bound) for name in expected)
    with torch.inference_mode():
        assert _close(theirs(x), ours(x), bound)


def test_the_gradient_is_exact_in_double_precision() -> None:
    _, ours = _pair(torch.float64)
    for module in ours.modules():
        if isinstance(module, PeftLinear):
            module.lora_A.to(torch.float64)
            module.lora_B.to(torch.float64)
    adapter = [p for p in ours.parameters() if p.requires_grad]
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *_: ours(x), (x, *adapter))


def test_a_switched_off_adapter_leaves_the_base() -> None:
    theirs, ours = _pair()
    x = torch.randn(3, 12)
    with ours.disable_adapter():
        assert torch.equal(
            ours(x), theirs.get_base_model().second.base_layer(torch.tanh(theirs.get_base_model().first.base_layer(x)))
        )
    assert torch.allclose(ours(x), theirs(x))


def test_rows_without_the_adapter_are_the_base_beside_rows_with_it() -> None:
    _, ours = _pair()
    switch = next(module._lean.switch for module in ours.modules() if isinstance(module, lora.LeanLinear))
    x = torch.randn(3, 2, 12)
    with torch.inference_mode():
        with_adapter = ours(x)
        with ours.disable_adapter():
            without = ours(x)
        with lora.only_rows(switch, [True, False, True], x):
            mixed = ours(x)
        assert torch.allclose(mixed[1], without[1], atol=1e-6)
        assert not torch.allclose(with_adapter[1], without[1], atol=1e-4)
        assert torch.equal(mixed[[0, 2]], with_adapter[[0, 2]])
        assert torch.equal(ours(x), with_adapter)


def test_a_parameter_that_was_given_other_memory_counts_all_the_same() -> None:
    _, ours = _pair()
    x = torch.randn(3, 12)
    with torch.inference_mode():
        before = ours(x)
    first = next(module for module in ours.modules() if isinstance(module, lora.LeanLinear))
    a = first.lora_A["default"].weight
    a.data = a.data * 2
    with torch.no_grad():
        doubled = ours(x)
    with torch.inference_mode():
        assert torch.allclose(ours(x), doubled) and not torch.allclose(ours(x), before, atol=1e-4)


def test_a_change_in_place_counts_at_once() -> None:
    _, ours = _pair()
    x = torch.randn(3, 12)
    with torch.inference_mode():
        before = ours(x)
    expected = copy.deepcopy(ours)
    for model in (ours, expected):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(0.5)
    with torch.inference_mode():
        got = ours(x)
    assert torch.allclose(got, _gradientless(expected, x), atol=1e-5) and not torch.allclose(got, before, atol=1e-3)


def test_merging_and_unmerging_go_through_peft() -> None:
    _, ours = _pair()
    x = torch.randn(3, 12)
    expected = ours(x)
    ours.merge_adapter()
    assert torch.allclose(ours(x), expected, atol=1e-5)
    ours.unmerge_adapter()
    assert torch.allclose(ours(x), expected, atol=1e-5)


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_dropout": 0.1}, {"lora_bias": True}], ids=str)
def test_layers_of_another_kind_keep_the_forward_of_peft(config: dict[str, Any]) -> None:
    config.setdefault("target_modules", ["first"])
    theirs, ours = _pair(**config)
    assert not any(isinstance(module, lora.LeanLinear) for module in ours.modules())
    assert torch.equal(ours(torch.ones(1, 12)), theirs(torch.ones(1, 12)))


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "copy"])
def test_a_low_precision_copy_follows_every_change_of_the_adapter(optimizer: str) -> None:
    _, ours = _pair(torch.bfloat16)
    adapter = [p for p in ours.parameters() if p.requires_grad]
    assert {p.dtype for p in adapter} == {torch.float32}
    x = torch.randn(3, 12, dtype=torch.bfloat16)
    with torch.inference_mode():
        before = ours(x)
    ours(x).float().sum().backward()
    if optimizer == "copy":
        with torch.no_grad():
            for parameter in adapter:
                parameter.copy_(parameter + 0.1)
    else:
        torch.optim.Adam(adapter, lr=0.1, **{optimizer: True}).step()
    with torch.inference_mode():
        after = ours(x)
    fresh = copy.deepcopy(ours)
    for module in fresh.modules():
        if isinstance(module, lora.LeanLinear):
            module.__class__ = PeftLinear
    with torch.inference_mode():
        assert _close(fresh(x), after, 2e-2)
    assert not _close(before, after, 2e-2)


def test_files_of_a_lean_adapter_load_into_stock_peft(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = build_tiny_llama(tmp_path / "base")
    model = load_model(folder)
    lean = [module for module in model.peft.modules() if isinstance(module, lora.LeanLinear)]
    assert len(lean) == 14
    (tmp_path / "adapter").mkdir()
    adapter_files.save(model.peft, tmp_path / "adapter", {})
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    ids = torch.tensor([[5, 9, 70, 3]])
    with torch.no_grad():
        assert torch.allclose(stock(ids).logits, model.peft(ids).logits, atol=1e-5)
