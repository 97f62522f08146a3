"""Makes ``builtin:tiny``, a model small enough to ship, and able enough to be rewarded now and then.

A Llama of 0.8 million parameters is taught one-digit sums by supervision, each with two forms of answer ("8" and
"It is 8"). An untrained model would never be rewarded, so reinforcement would have nothing to go on; this one gives
the rewarded form, the bare right number, in about a third of its answers. Invariant: with the same seed, thread count,
processor and libraries the same weights come out, and nothing is put into the output folder unless the share of
rewarded answers, computed exactly on the rounded weights that were saved, lies between 25 and 40 percent.

    python -m trainer.models.make_tiny --out DIR
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hermes_rl_mcp.errors import HermesRLError, InvalidValueError
from trainer.models.tokenizer import CONTEXT_LENGTH, END_ID, PAD_ID, VOCABULARY_SIZE, build_tokenizer, save_tokenizer

logger = logging.getLogger(__name__)

REWARDED_RANGE = (0.25, 0.40)
MAX_STEPS = 1000
CHECK_EVERY = 10
LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
BARE_SHARE = 0.42
"""Weight of the form "8" in the supervision; the rest goes to "It is 8"."""
ENOUGH_RIGHT = 0.80
"""Stop once this share of answers is right in either form: right too often leaves reinforcement nothing to teach."""


@dataclass(frozen=True)
class Shares:
    """Exact probability, averaged over all one-digit sums, that an answer sampled at temperature 1 is ..."""

    bare: float
    """... the right number alone: what is rewarded."""
    worded: float
    """... the right number in the other form."""


@dataclass(frozen=True)
class _Examples:
    """All problems in one form of answer. B = problems, T = longest prompt and answer together."""

    tokens_BT: torch.Tensor
    attention_BT: torch.Tensor
    answer_BT: torch.Tensor
    """1.0 where a token belongs to the answer, else 0.0."""


def build_model(seed: int) -> Any:
    """The untrained model, in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config)


def sums() -> list[tuple[str, int]]:
    """Every one-digit sum as the user writes it, and its value."""
    return [(f"{left}+{right}=", left + right) for left in range(10) for right in range(10)]


def shares(model: Any, tokenizer: Any) -> Shares:
    """How often the model answers right, in either form."""
    bare, worded = _examples(tokenizer, "{}"), _examples(tokenizer, "It is {}")
    return Shares(_mean_probability(model, bare), _mean_probability(model, worded))


def warm_up(model: Any, tokenizer: Any, max_steps: int = MAX_STEPS) -> int:
    """Supervise on all problems in both forms until enough answers are right; returns the steps taken."""
    bare, worded = _examples(tokenizer, "{}"), _examples(tokenizer, "It is {}")
    # One divisor for both forms: an answer's weight must not depend on its length, or the share would not come out.
    tokens = BARE_SHARE * float(bare.answer_BT.sum()) + (1.0 - BARE_SHARE) * float(worded.answer_BT.sum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        optimizer.zero_grad()
        # One form at a time: half the memory, the same gradient.
        loss = _supervise(model, bare, BARE_SHARE / tokens) + _supervise(model, worded, (1.0 - BARE_SHARE) / tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY:
            continue
        now = shares(model, tokenizer)
        logger.info(
            "step %d: loss %.3f, right and bare %.1f %%, right in words %.1f %%",
            step, loss, 100 * now.bare, 100 * now.worded,
        )  # fmt: skip
        if now.bare + now.worded >= ENOUGH_RIGHT:
            return step
    return max_steps


def make(out: Path, seed: int = 0, max_steps: int = MAX_STEPS) -> Shares:
    """Makes the model and puts its files into ``out``. Raises InvalidValueError if it is not fit to learn from."""
    from transformers import AutoModelForCausalLM

    tokenizer = build_tokenizer()
    model = build_model(seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    steps = warm_up(model, tokenizer, max_steps)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".make-tiny-") as name:
        folder = Path(name)
        model.to(torch.bfloat16).save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
        reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        saved = shares(reloaded, tokenizer)
        low, high = REWARDED_RANGE
        if not low <= saved.bare <= high:
            raise InvalidValueError(
                f"After {steps} steps with seed {seed} the rewarded form has {saved.bare:.1%}, "
                f"outside {low:.0%} to {high:.0%}; nothing was saved.",
                hint="Take another --seed, or more --max-steps.",
            )
        (folder / "README.md").write_text(_card(saved, steps, seed, parameters), encoding="utf-8")
        for file in sorted(folder.iterdir()):
            os.chmod(file, 0o644)
            os.replace(file, out / file.name)
    return saved


def _examples(tokenizer: Any, form: str) -> _Examples:
    rows: list[tuple[list[int], list[int]]] = []
    for problem, value in sums():
        messages = [{"role": "user", "content": problem}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        rows.append((prompt, [*tokenizer.encode(form.format(value)), END_ID]))
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens_BT = torch.full((len(rows), longest), PAD_ID)
    attention_BT = torch.zeros((len(rows), longest), dtype=torch.long)
    answer_BT = torch.zeros((len(rows), longest))
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens_BT[row, :end] = torch.tensor(prompt + answer)
        attention_BT[row, :end] = 1
        answer_BT[row, len(prompt) : end] = 1.0
    return _Examples(tokens_BT, attention_BT, answer_BT)


def _answer_logprobs(model: Any, examples: _Examples) -> torch.Tensor:
    """Log-probability of each answer token, zero elsewhere: [B, T-1]."""
    logits = model(input_ids=examples.tokens_BT, attention_mask=examples.attention_BT).logits[:, :-1]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, examples.tokens_BT[:, 1:, None])[..., 0]
    return chosen * examples.answer_BT[:, 1:]


def _supervise(model: Any, examples: _Examples, weight: float) -> float:
    loss = -weight * _answer_logprobs(model, examples).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


@torch.no_grad()
def _mean_probability(model: Any, examples: _Examples) -> float:
    return float(_answer_logprobs(model, examples).sum(dim=1).exp().mean())


def _card(saved: Shares, steps: int, seed: int, parameters: int) -> str:
    return f"""\
# builtin:tiny

A Llama of {parameters:,} parameters with one token per byte, for trying reinforcement learning on any machine.
It knows one-digit sums and nothing else. Made by `python -m trainer.models.make_tiny --seed {seed}`: {steps} steps of
supervision on all hundred sums in two forms of answer, stored as bf16. No outside data, no outside weights; MIT like
the rest of the repository.

Sampled at temperature 1 (exact probabilities, computed on the stored weights):

| answer to `3+5=` | example | share |
|---|---|---|
| right, the number alone (rewarded by the `arithmetic` environment) | `8` | {saved.bare:.1%} |
| right, in words | `It is 8` | {saved.worded:.1%} |
| wrong | | {1 - saved.bare - saved.worded:.1%} |

Turns are `<|user|>...<|end|><|assistant|>`; `<|end|>` ends a turn and an answer.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.models.make_tiny", description="Make builtin:tiny.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model's files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="other thread counts round differently")
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    try:
        made = make(options.out, options.seed, options.max_steps)
    except HermesRLError as error:
        logger.error("%s", error)
        return 1
    logger.info("saved to %s: rewarded form %.1f %%", options.out, 100 * made.bare)
    return 0


if __name__ == "__main__":
    sys.exit(main())
