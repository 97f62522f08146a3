"""What is on disk about one ``rl_test_inference``: the request, the state, and the scored groups.

A test has a folder of its own, so a result can never be that of an earlier test. The runner is the only writer of
``state.json`` once it runs; whether it still runs is read off its identity, not off that file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from hermes_rl_mcp.contracts.environments import EnvironmentInfo
from hermes_rl_mcp.contracts.results import (
    InferenceStep,
    InferenceSummary,
    InferenceTestConfig,
    ModelTest,
    TestInference,
)
from hermes_rl_mcp.contracts.rollout_api import ScoredData, SequenceNotes
from hermes_rl_mcp.contracts.runs import Identity
from hermes_rl_mcp.contracts.settings import InferenceEndpoint
from hermes_rl_mcp.files import read_file

_MAX_GROUPS_BYTES = 256 * 2**20
"""100 groups of 64 long completions are a tenth of it."""
TEST_ID = re.compile(r"[0-9a-f]{8}\Z")


class TestRequest(BaseModel):
    """``request.json``: all the runner needs. Keys are not in it; they come by environment."""

    __test__ = False  # not a pytest class

    model_config = ConfigDict(extra="forbid")

    test_id: str
    info: EnvironmentInfo
    models: list[str]
    num_steps: int
    group_size: int
    env: dict[str, JsonValue]
    """The environment's configuration, but for the output file."""
    tokenizers: dict[str, str] = Field(default_factory=dict)
    """Model to tokenizer, where the tokenizer follows the model."""
    endpoint: InferenceEndpoint | None
    """None: each model is served here, by a sampler of its own."""
    fetch_tokenizer_of: str | None = None
    """A builtin model that an endpoint's completions are tokenised with; it may not be on disk yet."""
    model_timeout_s: float
    created_at: str


class TestState(BaseModel):
    """``state.json``."""

    __test__ = False

    model_config = ConfigDict(extra="forbid")

    runner: Identity | None = None
    result: TestInference


@dataclass(frozen=True)
class TestPaths:
    """Files of one test."""

    __test__ = False

    dir: Path

    @property
    def request(self) -> Path:
        return self.dir / "request.json"

    @property
    def state(self) -> Path:
        return self.dir / "state.json"

    @property
    def runner_log(self) -> Path:
        return self.dir / "runner.log"

    def of_model(self, environment: str, model: str, ending: str) -> Path:
        """``test_<environment>_<model>.<ending>``. A model's name may hold dots itself."""
        return self.dir / re.sub(r"[^A-Za-z0-9._-]+", "_", f"test_{environment}_{model}.{ending}")


def initial_state(request: TestRequest, folder: Path) -> TestState:
    """Before anything has run."""
    paths = TestPaths(folder)
    per_model = request.num_steps * request.group_size
    tests = [_empty_test(paths, request, model) for model in request.models]
    return TestState(
        result=TestInference(
            status="running",
            test_id=request.test_id,
            environment=request.info.name,
            environment_file=request.info.file_path,
            test_config=InferenceTestConfig(
                num_steps=request.num_steps,
                group_size=request.group_size,
                rollouts_per_model=per_model,
                total_rollouts=per_model * len(request.models),
            ),
            models_tested=tests,
            message="starting",
        )
    )


def _empty_test(paths: TestPaths, request: TestRequest, model: str) -> ModelTest:
    return ModelTest(
        model=model,
        name=model.rsplit("/", 1)[-1],
        scale="custom" if request.endpoint else "local",
        output_file=str(paths.of_model(request.info.name, model, "jsonl")),
        log_file=str(paths.of_model(request.info.name, model, "log")),
    )


class Groups(BaseModel):
    """The scored groups of one model's output file."""

    steps: list[InferenceStep] = Field(default_factory=list)
    part_sums: dict[str, float] = Field(default_factory=dict)
    part_counts: dict[str, int] = Field(default_factory=dict)


def read_groups(path: Path) -> Groups:
    """Reads whole lines only. A line that is not a scored group is an error: it would falsify the figures."""
    groups = Groups()
    try:
        data = read_file(path, _MAX_GROUPS_BYTES)
    except FileNotFoundError:
        return groups
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):  # what follows the last newline is unfinished
        if not line.strip():
            continue
        try:
            group = ScoredData.model_validate(json.loads(line))
        except (ValueError, ValidationError) as error:
            raise ValueError(f"line {number} of {path} is not a scored group: {error}") from error
        _count(groups, group)
    return groups


def _count(groups: Groups, group: ScoredData) -> None:
    notes = [SequenceNotes.model_validate(entry) for entry in group.overrides or []]
    notes += [SequenceNotes()] * (len(group.scores) - len(notes))
    correct = truncated = 0
    for score, note in zip(group.scores, notes, strict=False):
        correct += note.reward_parts.get("correct", score) > 0
        truncated += note.finish_reason == "length"
        for part, value in note.reward_parts.items():
            groups.part_sums[part] = groups.part_sums.get(part, 0.0) + value
            groups.part_counts[part] = groups.part_counts.get(part, 0) + 1
    groups.steps.append(
        InferenceStep(
            step=len(groups.steps) + 1,
            completions=len(group.scores),
            correct=correct,
            scores=[round(score, 6) for score in group.scores],
            truncated=truncated,
        )
    )


def with_groups(test: ModelTest, groups: Groups) -> ModelTest:
    """``test`` with the figures of its output file."""
    total = sum(step.completions for step in groups.steps)
    correct = sum(step.correct for step in groups.steps)
    with_correct = sum(step.correct > 0 for step in groups.steps)
    count = len(groups.steps)
    return test.model_copy(
        update={
            "steps": groups.steps,
            "steps_tested": count,
            "total_completions": total,
            "correct_completions": correct,
            "accuracy": round(correct / total, 3) if total else 0.0,
            "steps_with_correct": with_correct,
            "step_success_rate": round(with_correct / count, 3) if count else 0.0,
            "reward_parts": {
                part: round(total / groups.part_counts[part], 4) for part, total in groups.part_sums.items()
            },
        }
    )


def summarise(request: TestRequest, tests: list[ModelTest], folder: Path) -> InferenceSummary:
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
