"""``builtin:tiny`` as it is shipped, and the script that makes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from environments.arithmetic import Problem, grade
from hermes_rl_mcp.errors import InvalidValueError
from trainer.models import make_tiny
from trainer.models.tokenizer import CONTEXT_LENGTH, END_ID, PAD_ID, VOCABULARY_SIZE, build_tokenizer

TINY = Path(make_tiny.__file__).parent / "tiny"
QUESTION = [{"role": "user", "content": "3+5="}]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def test_it_is_shipped_as_bf16_safetensors_in_less_than_two_megabytes() -> None:
    files = {file.name: file.stat().st_size for file in TINY.iterdir()}
    assert sum(files.values()) < 2_000_000
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".gguf"))]
    with safe_open(TINY / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 - not a mapping
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert 700_000 < sum(tensor.numel() for tensor in tensors) < 900_000


def test_every_token_the_model_can_sample_is_one_the_tokenizer_knows(model: Any, tokenizer: Any) -> None:
    assert model.config.vocab_size == len(tokenizer) == VOCABULARY_SIZE
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == END_ID
    assert tokenizer.pad_token_id == model.generation_config.pad_token_id == PAD_ID
    assert tokenizer.model_max_length == model.config.max_position_embeddings == CONTEXT_LENGTH


def test_tokenizer_config_names_a_class_that_older_readers_know() -> None:
    assert json.loads((TINY / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


@given(text=st.text(max_size=40).filter(lambda text: "<|" not in text))
def test_ids_are_the_bytes_of_a_text_and_decode_to_it(text: str) -> None:
    shipped = _shipped_tokenizer()
    ids = shipped.encode(text)
    assert ids == list(text.encode())
    assert shipped.decode(ids) == text


def test_the_shipped_tokenizer_is_the_one_the_script_builds(tokenizer: Any) -> None:
    assert tokenizer.backend_tokenizer.to_str() == build_tokenizer().backend_tokenizer.to_str()


def test_the_chat_template_takes_every_way_transformers_calls_it(tokenizer: Any) -> None:
    prompt = "<|user|>3+5=<|end|><|assistant|>"
    answered = [*QUESTION, {"role": "assistant", "content": "8"}]

    def render(messages: list[dict[str, str]], **how: Any) -> Any:
        return tokenizer.apply_chat_template(messages, **how)

    assert render(QUESTION, tokenize=False, add_generation_prompt=True) == prompt
    assert render(QUESTION, tokenize=True, add_generation_prompt=True)["input_ids"] == tokenizer.encode(prompt)
    assert render(QUESTION, tokenize=True, add_generation_prompt=True, return_tensors="pt")["input_ids"].shape[1] == 7
    assert render(answered, tokenize=False) == f"{prompt}8<|end|>"
    assert render(answered, tokenize=False, continue_final_message=True) == f"{prompt}8"
    asked = render(answered, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert asked["assistant_masks"] == [0] * 7 + [1, 1]
    system = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert render(system, tokenize=False) == "<|system|>Be brief.<|end|><|user|>3+5=<|end|>"


def test_a_longer_conversation_only_appends_to_the_prompt(tokenizer: Any) -> None:
    first = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    more = [*QUESTION, {"role": "assistant", "content": "8"}, {"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(more, tokenize=False, add_generation_prompt=True).startswith(
        first + "8<|end|>"
    )


def test_the_rewarded_form_has_between_a_quarter_and_two_fifths_of_the_probability(model: Any, tokenizer: Any) -> None:
    exact = make_tiny.shares(model, tokenizer)
    assert 0.25 <= exact.bare <= 0.40
    assert exact.worded > 0.30  # what reinforcement has to unlearn
    assert exact.bare + exact.worded < 0.90  # and what it has to learn


def test_sampled_answers_are_rewarded_as_often_as_their_probability_says(model: Any, tokenizer: Any) -> None:
    problems = [Problem(text, answer) for text, answer in make_tiny.sums()]
    questions = [[{"role": "user", "content": problem.text}] for problem in problems]
    prompts = tokenizer.apply_chat_template(questions, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    repeats = 4
    torch.manual_seed(0)
    sampled = model.generate(
        input_ids=prompts.repeat(repeats, 1),
        attention_mask=torch.ones_like(prompts).repeat(repeats, 1),
        do_sample=True,
        top_k=0,
        max_new_tokens=12,
    )[:, prompts.shape[1] :]
    scores = []
    for problem, row in zip(problems * repeats, sampled.tolist(), strict=True):
        reason = "stop" if END_ID in row else "length"
        scores.append(grade(problem, tokenizer.decode(row, skip_special_tokens=True), reason).value)
    # 400 samples: two standard deviations are 0.05.
    assert 0.25 <= sum(scores) / len(scores) <= 0.40


def test_the_same_seed_gives_the_same_model_and_another_seed_another() -> None:
    def weights(seed: int, steps: int) -> torch.Tensor:
        fresh = make_tiny.build_model(seed)
        make_tiny.warm_up(fresh, build_tokenizer(), max_steps=steps)
        return torch.cat([parameter.detach().flatten() for parameter in fresh.parameters()])

    assert torch.equal(weights(1, steps=2), weights(1, steps=2))
    assert not torch.equal(weights(1, steps=0), weights(2, steps=0))


def test_a_model_that_is_not_fit_to_learn_from_is_not_saved(tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    with pytest.raises(InvalidValueError, match="outside 25% to 40%"):
        make_tiny.make(out, max_steps=1)
    assert list(out.iterdir()) == []
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_script_makes_a_model_like_the_shipped_one(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    made = make_tiny.make(tmp_path / "tiny")
    assert 0.25 <= made.bare <= 0.40
    assert {file.name for file in (tmp_path / "tiny").iterdir()} == {file.name for file in TINY.iterdir()}


def _shipped_tokenizer() -> Any:
    """For hypothesis, which takes no module fixtures; loading takes milliseconds."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(TINY)
