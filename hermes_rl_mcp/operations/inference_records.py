"""What is on disk about one ``rl_test_inference``: the request, the state, and the scored groups.

A test has a folder of its own, so a result can never be that of an earlier test. The runner is the only writer of
``state.json`` once it runs; whether it still runs is read off its identity, not off that file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from hermes_rl_mcp.contracts.environments import EnvironmentInfo
from hermes_rl_mcp.contracts.results import (
    InferenceTestConfig,
    ModelTest,
    TestInference,
)
from hermes_rl_mcp.contracts.runs import Identity
from hermes_rl_mcp.contracts.settings import KNOWN_MODELS, InferenceEndpoint
from hermes_rl_mcp.runs.configuration.addresses import hosts_of, is_here
from hermes_rl_mcp.runs.request import BUILTIN

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
    """None: each model is served here, by a sampler of its own; those of the installation always are."""
    fetch_tokenizer_of: str | None = None
    """A builtin model that an endpoint's completions are tokenised with; it may not be on disk yet."""
    trained_model: str = ""
    """The one that a run started now would train."""
    model_timeout_s: float
    created_at: str

    def remote(self, model: str) -> InferenceEndpoint | None:
        """The endpoint that answers for this model; None: a sampler on this machine."""
        return None if model.startswith(BUILTIN) else self.endpoint

    def host(self, model: str) -> str:
        """Who is sent the prompts for this model."""
        endpoint = self.remote(model)
        return next(hosts_of(endpoint.base_url), endpoint.base_url) if endpoint else "this machine"


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
    def stop(self) -> Path:
        """There once the test shall end."""
        return self.dir / "stop"

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
            sends_to=_receivers(request),
            message="starting",
        )
    )


def _empty_test(paths: TestPaths, request: TestRequest, model: str) -> ModelTest:
    return ModelTest(
        model=model,
        name=model.rsplit("/", 1)[-1],
        scale=KNOWN_MODELS.get(model, "custom") if request.remote(model) else "local",
        provider=request.host(model),
        output_file=str(paths.of_model(request.info.name, model, "jsonl")),
        log_file=str(paths.of_model(request.info.name, model, "log")),
    )


def _receivers(request: TestRequest) -> list[str]:
    hosts = {request.host(model) for model in request.models if request.remote(model)}
    return [f"{host}: prompts of the environment, by rl_test_inference" for host in sorted(hosts) if not is_here(host)]
