"""Whole layers computed again in the backward pass, on a family that drops out in the layer itself."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, OPTConfig

from trainer.backends.local import recompute

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_no_dropout_comes_alive_and_the_gradient_is_the_plain_one() -> None:
    model = AutoModelForCausalLM.from_config(OPTConfig(**SHAPE, dropout=0.5)).eval()
    ids = torch.arange(2, 12)[None]

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model.lm_head(hidden).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    hidden = plain = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    expected = gradient()
    with recompute.whole_layers(model.get_decoder()):
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(hidden, plain)
    assert torch.allclose(gradient(), expected, rtol=1e-5, atol=1e-5)
