"""Figures, examples and verdicts of an inference test, from the scored groups on disk.

Every figure comes from groups that were really scored: what an environment or an endpoint does not say stays None.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from hermes_rl_mcp.agent.transcript import readable, text_of
from hermes_rl_mcp.contracts.results import Example, InferenceStep, InferenceSummary, ModelTest, Verdict
from hermes_rl_mcp.contracts.rollout_api import ScoredData, SequenceNotes
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.operations.inference_records import TestRequest

_MAX_GROUPS_BYTES = 256 * 2**20
"""100 groups of 64 long completions are a tenth of it."""
_EXAMPLE_CHARS = 3_000
"""Of all examples of a test, prompts and completions together."""
_TRUNCATED = 0.5
_UNPARSED = 0.9


def read_groups(path: Path) -> list[ScoredData]:
    """Whole lines only. A line that is not a scored group is an error: it would falsify the figures."""
    try:
        data = read_file(path, _MAX_GROUPS_BYTES)
    except FileNotFoundError:
        return []
    groups = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        if not line.strip():
            continue
        try:
            groups.append(ScoredData.model_validate(json.loads(line)))
        except (ValueError, ValidationError) as error:
            raise ValueError(f"line {number} of {path} is not a scored group: {error}") from error
    return groups


def with_groups(request: TestRequest, test: ModelTest, groups: Sequence[ScoredData]) -> ModelTest:
    """``test`` with the figures of its groups."""
    notes = [notes_of(group) for group in groups]
    steps = [_step(number, group, notes[number - 1]) for number, group in enumerate(groups, 1)]
    every = [note for of_group in notes for note in of_group]
    scores = [score for group in groups for score in group.scores]
    total, correct = len(scores), sum(step.correct for step in steps)
    with_correct = sum(step.correct > 0 for step in steps)
    ends = [note.finish_reason == "length" for note in every if note.finish_reason is not None]
    failures = [failed for note in every if (failed := _parse_failed(note)) is not None]
    parts: dict[str, list[float]] = {}
    for note in every:
        for part, value in note.reward_parts.items():
            parts.setdefault(part, []).append(value)
    return test.model_copy(
        update={
            "steps": steps,
            "steps_tested": len(steps),
            "total_completions": total,
            "correct_completions": correct,
            "accuracy": round(correct / total, 3) if total else 0.0,
            "steps_with_correct": with_correct,
            "step_success_rate": round(with_correct / len(steps), 3) if steps else 0.0,
            "reward_parts": {part: round(statistics.fmean(values), 4) for part, values in parts.items()},
            "truncation_ratio": round(sum(ends) / len(ends), 3) if ends else None,
            "reward_mean": round(statistics.fmean(scores), 4) if scores else None,
            "reward_std": round(statistics.pstdev(scores), 4) if scores else None,
            "reward_min": min(scores, default=None),
            "reward_max": max(scores, default=None),
            "zero_variance_groups": sum(len(set(group.scores)) < 2 for group in groups),
            "parse_failures": sum(failures) if failures else None,
            "examples": _examples(request, test.model, groups),
        }
    )


def with_usage(test: ModelTest, output: Path, host: str) -> ModelTest:
    """``test`` with what the endpoint said of tokens and cost. Damaged or absent: nothing is known."""
    try:
        said: Any = json.loads(read_file(output.with_suffix(".usage.json")))
        known = {name: said[name] for name in ("prompt_tokens", "completion_tokens", "cost_usd") if name in said}
        behind = [name for name in said.get("providers", []) if isinstance(name, str)]
        return ModelTest.model_validate(
            {**test.model_dump(), **known, "provider": f"{host} ({', '.join(behind[:5])})" if behind else host}
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return test


def notes_of(group: ScoredData) -> list[SequenceNotes]:
    """One for each sequence, empty where the environment left none."""
    notes = [SequenceNotes.model_validate(entry) for entry in group.overrides or []][: len(group.scores)]
    return notes + [SequenceNotes()] * (len(group.scores) - len(notes))


def verdict(request: TestRequest, test: ModelTest) -> Verdict:
    """Whether training could learn from what this model did."""
    against, aside = _problems(request, test)
    if against:
        return Verdict(ready=False, reasons=against)
    spread = f"{test.steps_tested - test.zero_variance_groups} of {test.steps_tested} groups have unequal scores"
    return Verdict(ready=True, reasons=[f"All groups were scored, and {spread}: there is something to learn.", *aside])


def overall(request: TestRequest, tests: Sequence[ModelTest]) -> Verdict | None:
    """The verdict on the model to be trained, if it was tested, else on the best, saying so."""
    judged = [test for test in tests if test.verdict is not None]
    for test in judged:
        if test.model == request.trained_model and test.verdict is not None:
            return test.verdict
    best = max(judged, key=lambda test: (test.verdict is not None and test.verdict.ready, test.accuracy), default=None)
    if best is None or best.verdict is None:
        return None
    aside = f"This is {best.model}; the model to be trained, {request.trained_model}, was not tested."
    return Verdict(ready=best.verdict.ready, reasons=[*best.verdict.reasons, aside])


def summarise(request: TestRequest, tests: Sequence[ModelTest], folder: Path) -> InferenceSummary:
    """The environment works if all groups that were asked for came back scored, at full size, for one model."""
    ran = [test for test in tests if test.steps_tested]
    whole = [test for test in tests if _whole(request, test)]
    best = max(ran, key=lambda test: test.accuracy, default=None)
    return InferenceSummary(
        steps_requested=request.num_steps,
        models_tested=len(tests),
        models_succeeded=len(whole),
        best_model=best.model if best else None,
        avg_accuracy=round(sum(test.accuracy for test in ran) / len(ran), 3) if ran else 0.0,
        environment_working=bool(whole),
        output_directory=str(folder),
    )


def _whole(request: TestRequest, test: ModelTest) -> bool:
    full = [step for step in test.steps if step.completions == request.group_size]
    return test.error is None and len(full) >= request.num_steps


def _problems(request: TestRequest, test: ModelTest) -> tuple[list[str], list[str]]:
    """What speaks against training, and what is worth knowing."""
    against: list[str] = []
    aside: list[str] = []
    if test.error is not None:
        against.append(f"The test did not get through: {test.error}")
    elif not _whole(request, test):
        against.append(f"Not all {request.num_steps} groups of {request.group_size} were scored.")
    truncated = test.truncation_ratio or 0.0
    if truncated:
        text = f"{truncated:.0%} of the answers were cut off at the length limit: raise max_token_length."
        (against if truncated >= _TRUNCATED and test.accuracy < _TRUNCATED else aside).append(text)
    if test.parse_failures:
        share = test.parse_failures / test.total_completions
        text = f"{test.parse_failures} of {test.total_completions} answers were not of the form that is asked for."
        (against if share >= _UNPARSED else aside).append(text)
    equal = test.zero_variance_groups
    if test.steps_tested and equal == test.steps_tested:
        why = {0.0: "none is right", 1.0: "all are right"}.get(test.accuracy, "within each group")
        against.append(f"All scores are equal in every group ({why}): nothing can be learned from them.")
    elif equal:
        aside.append(f"{equal} of {test.steps_tested} groups have equal scores and teach nothing.")
    return against, aside


def _step(number: int, group: ScoredData, notes: Sequence[SequenceNotes]) -> InferenceStep:
    pairs = list(zip(group.scores, notes, strict=True))
    return InferenceStep(
        step=number,
        completions=len(pairs),
        correct=sum(note.reward_parts.get("correct", score) > 0 for score, note in pairs),
        scores=[round(score, 6) for score in group.scores],
        truncated=sum(note.finish_reason == "length" for note in notes),
    )


def _parse_failed(note: SequenceNotes) -> bool | None:
    """What the environment said, else its part for the form of the answer, which by habit is named ``format``."""
    if note.parse_failed is not None:
        return note.parse_failed
    return note.reward_parts["format"] <= 0 if "format" in note.reward_parts else None


def _examples(request: TestRequest, model: str, groups: Sequence[ScoredData]) -> list[Example]:
    """The best, the worst and one that is drawn by the test's own seed, so that it does not change with each look."""
    rows = [(i, j) for i, group in enumerate(groups) for j in range(min(len(group.messages or []), len(group.scores)))]
    if not rows:
        return []

    def score(row: tuple[int, int]) -> float:
        return groups[row[0]].scores[row[1]]

    drawn = random.Random(f"{request.test_id} {model}").random()
    chars = _EXAMPLE_CHARS // (6 * len(request.models))
    kinds: list[tuple[Literal["best", "worst", "random"], tuple[int, int]]] = [
        ("best", max(rows, key=score)),
        ("worst", min(rows, key=score)),
        ("random", rows[int(drawn * len(rows))]),
    ]
    return [_example(kind, groups[row[0]], row, chars) for kind, row in kinds]


def _example(kind: Literal["best", "worst", "random"], group: ScoredData, row: tuple[int, int], chars: int) -> Example:
    prompt, completion = _asked_and_said((group.messages or [])[row[1]])
    return Example(
        kind=kind,
        step=row[0] + 1,
        score=round(group.scores[row[1]], 6),
        prompt=_cut(prompt, chars),
        completion=_cut(completion, chars),
    )


def _asked_and_said(messages: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """The last question and its answer. With tools: the task, and all that followed."""
    texts = [text_of(message.get("content")) for message in messages]
    if any(message.get("role") == "tool" for message in messages):
        first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
        return texts[first - 1] if first else "", readable(messages[first:])
    return texts[-2] if len(texts) > 1 else "", texts[-1] if texts else ""


def _cut(text: str, chars: int) -> str:
    """Its beginning and its end: the end of an answer is what is scored."""
    if len(text) <= chars:
        return text
    return f"{text[: chars // 2]} … {text[-(chars // 2) :]}"
