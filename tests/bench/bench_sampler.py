"""The sampler against transformers' ``generate`` on the same model, adapter and work: 200-token prompts, temperature 1.

Eight independent requests at once against one after another; a group of eight; 64 requests of 20 to 200 new tokens, of
which ``generate`` keeps the finished ones in its batch; and how soon after an optimizer step the new version samples.
End-of-sequence tokens end nothing on either side, so both do equal work.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models import smollm2
from peft import LoraConfig, get_peft_model
from report import Report, cores, interleaved, progress
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from hermes_rl_mcp.contracts.config import TrainerConfig
from trainer.backends.base import Datum, SampleRequest, SampleResult
from trainer.backends.local.backend import LocalBackend
from trainer.backends.local.model import LoadedModel, load
from trainer.backends.training import AdamParams, LossSettings
from trainer.models.materialise import materialise

PROMPT, NEW, RANK = 200, 64, 16
LENGTHS = [20 + round(at * 180 / 63) for at in range(64)]
"""Of the 64 requests, in an order that mixes long and short."""
_ADAPTER_STD = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="eight, group, lengths, publish")
    arguments = parser.parse_args()
    torch.set_num_threads(cores())
    report = Report()
    folder, what = smollm2()
    benches = {"eight": eight, "group": group, "lengths": lengths}
    wanted = [name for name in benches if not arguments.only or name in arguments.only]
    if wanted:
        pair = Pair(folder)
        for name in wanted:
            benches[name](report, pair, arguments.rounds, what)
        pair.close()
    if not arguments.only or "publish" in arguments.only:
        publish(report, folder, what)
        publish(report, materialise("builtin:tiny", folder.parent / "tiny", progress), "builtin:tiny")
    return report.exit_code


class Pair:
    """The same weights twice: in our backend, and in a plain transformers model with a plain peft adapter."""

    def __init__(self, folder: Path) -> None:
        self.model = replace(_loaded(folder), eos_ids=frozenset())
        self.backend = LocalBackend(self.model, TrainerConfig(sampler_max_rows=64))
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.plain = get_peft_model(
            base, LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        ).eval()
        theirs = {name: one for name, one in self.plain.named_parameters() if "lora_" in name}
        with torch.no_grad():
            for name, one in self.model.peft.named_parameters():
                if "lora_" in name:
                    theirs[name].copy_(one)
        self._turn = 0

    def prompts(self, count: int) -> list[list[int]]:
        """New ones at each call: nothing that was computed before is of use."""
        self._turn += 1
        generator = torch.Generator().manual_seed(self._turn)
        ids = torch.randint(100, self.model.head.vocabulary, (count, PROMPT), generator=generator)
        return [list(map(int, row)) for row in ids.tolist()]

    def ours(self, asked: Sequence[tuple[list[int], int, int]]) -> float:
        """Seconds for all of ``(prompt, completions, new tokens)``, asked at once."""
        began = time.perf_counter()
        futures = [self.backend.submit(SampleRequest(tuple(ids), n=count, max_tokens=new)) for ids, count, new in asked]
        results = [future.result() for future in futures]
        seconds = time.perf_counter() - began
        assert all(
            len(one.token_ids) == new
            for result, (_, _, new) in zip(results, asked, strict=True)
            for one in result.completions
        )
        return seconds

    def generate(self, prompts: list[list[int]], new: int, count: int = 1, lengths: Sequence[int] = ()) -> float:
        """Seconds of one call; with ``lengths`` row i is finished after so many tokens."""
        ids = torch.tensor(prompts)
        criteria = [_RowLengths(lengths)] if lengths else []
        began = time.perf_counter()
        with torch.inference_mode():
            out = self.plain.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=count,
                max_new_tokens=new,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList(criteria),
            )
        seconds = time.perf_counter() - began
        assert out.shape == (len(prompts) * count, PROMPT + new)
        return seconds

    def close(self) -> None:
        self.backend.close()


class _RowLengths(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, lengths: Sequence[int]) -> None:
        self._ends = torch.tensor(lengths) + PROMPT

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self._ends <= input_ids.shape[1]


def eight(report: Report, pair: Pair, rounds: int, what: str) -> None:
    seconds = interleaved(
        {
            "ours": lambda: pair.ours([(ids, 1, NEW) for ids in pair.prompts(8)]),
            "generate": lambda: sum(pair.generate([ids], NEW) for ids in pair.prompts(8)),
            "ours, one by one": lambda: sum(pair.ours([(ids, 1, NEW)]) for ids in pair.prompts(8)),
        },
        rounds,
        label="eight",
    )
    speed = _speeds(seconds, 8 * NEW)
    note = f"8 independent requests at once; {what}"
    report.compare(
        "sampler_concurrent", speed["ours"], speed["generate"], "tok/s", ">= 4", f"{note}; theirs one by one"
    )
    report.compare(
        "sampler_concurrent_ours",
        speed["ours"],
        speed["ours, one by one"],
        "tok/s",
        None,
        f"{note}; theirs: ours one by one",
    )


def group(report: Report, pair: Pair, rounds: int, what: str) -> None:
    seconds = interleaved(
        {
            "ours": lambda: pair.ours([(pair.prompts(1)[0], 8, NEW)]),
            "generate": lambda: pair.generate(pair.prompts(1), NEW, count=8),
        },
        rounds,
        label="group",
    )
    speed = _speeds(seconds, 8 * NEW)
    report.compare(
        "sampler_group", speed["ours"], speed["generate"], "tok/s", ">= 1.4", f"8 completions of one prompt; {what}"
    )


def lengths(report: Report, pair: Pair, rounds: int, what: str) -> None:
    mixed = [LENGTHS[at * 37 % 64] for at in range(64)]
    seconds = interleaved(
        {
            "ours": lambda: pair.ours([(ids, 1, new) for ids, new in zip(pair.prompts(64), mixed, strict=True)]),
            "generate": lambda: pair.generate(pair.prompts(64), max(mixed), lengths=mixed),
        },
        rounds,
        label="lengths",
    )
    speed = _speeds(seconds, sum(mixed))
    report.compare(
        "sampler_lengths",
        speed["ours"],
        speed["generate"],
        "tok/s",
        ">= 1.5",
        f"64 requests of 20 to 200 new tokens; {what}",
    )


def publish(report: Report, folder: Path, what: str) -> None:
    """From the end of the optimizer step to the first token of the new version, for a request that waits already; and
    how much of it is not the pass that computes this token, which an idle sampler needs as well."""
    backend = LocalBackend(_loaded(folder), TrainerConfig(sampler_max_rows=8))
    ids = (40, 41, 42, 43)
    firsts: list[float] = []
    idle: list[float] = []
    try:
        for _ in range(9):
            before = backend.submit(SampleRequest(ids, n=2, max_tokens=4)).result()
            began = time.perf_counter()
            _first_token(backend, ids)(began, idle)
            backend.forward_backward(_data(ids, before), LossSettings())
            waiting = _first_token(backend, ids)
            backend.optim_step(AdamParams(learning_rate=1e-5))
            stepped = time.perf_counter()
            version = backend.publish()
            assert waiting(stepped, firsts) == version == before.policy_version + 1
    finally:
        backend.close()
    own = [first - alone for first, alone in zip(firsts, idle, strict=True)]
    note = f"optimizer step's end to the first token of the new version, {what}"
    report.within("sampler_publish", own, "ms", "<= 50", f"{note}; less that token's own pass")
    report.within("sampler_publish_first_token", firsts, "ms", None, note)


def _first_token(backend: LocalBackend, ids: tuple[int, ...]) -> Callable[[float, list[float]], int]:
    """Asks for one token. The answer waits for it, notes the milliseconds since a moment, and returns its version."""
    drawn: list[float] = []
    future = backend.submit(SampleRequest(ids, max_tokens=1), lambda *token: drawn.append(time.perf_counter()))

    def wait(since: float, noted: list[float]) -> int:
        version = future.result().policy_version
        noted.append((drawn[0] - since) * 1e3)
        return version

    return wait


def _data(ids: tuple[int, ...], sampled: SampleResult) -> list[Datum]:
    return [
        Datum.of(
            0,
            [*ids, *one.token_ids],
            [False] * len(ids) + [True] * len(one.token_ids),
            [0.0] * len(ids) + one.logprobs,
            [0.0] * len(ids) + [sign] * len(one.token_ids),
            1.0,
        )
        for one, sign in zip(sampled.completions, (1.0, -1.0), strict=True)
    ]


def _loaded(folder: Path) -> LoadedModel:
    model = load(folder, device=torch.device("cpu"), rank=RANK, alpha=32.0, seed=0, progress=progress)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.peft.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _ADAPTER_STD)
    return model


def _speeds(seconds: dict[str, list[float]], tokens: int) -> dict[str, list[float]]:
    return {name: [tokens / one for one in values] for name, values in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
