"""What an inference test makes of scored groups: figures, and whether to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.contracts.environments import EnvironmentInfo
from hermes_rl_mcp.contracts.rollout_api import ScoredData
from hermes_rl_mcp.contracts.settings import InferenceEndpoint
from hermes_rl_mcp.operations.inference_figures import verdict, with_groups
from hermes_rl_mcp.operations.inference_records import TestRequest, initial_state
from hermes_rl_mcp.operations.settings import load_settings


def request(model: str = "builtin:tiny") -> TestRequest:
    info = EnvironmentInfo(name="e", stem="e", class_name="E", file_path="/e.py", description="")
    endpoint = InferenceEndpoint(base_url="https://vendor.example/v1", model_name="m")
    return TestRequest(
        test_id="0123abcd",
        info=info,
        models=[model],
        num_steps=1,
        group_size=2,
        env={},
        endpoint=endpoint,
        model_timeout_s=1.0,
        created_at="",
    )


def group(scores: list[float], **notes: Any) -> ScoredData:
    said = [[{"role": "user", "content": "ask"}, {"role": "assistant", "content": str(score)}] for score in scores]
    return ScoredData(tokens=[[1]] * 2, masks=[[1]] * 2, scores=scores, messages=said, overrides=[notes] * len(scores))


@pytest.mark.parametrize(
    ("scores", "notes", "ready", "says"),
    [
        ([0.0, 1.0], {}, True, "1 of 1 groups have unequal scores"),
        ([0.0, 0.0], {}, False, "none is right"),
        ([1.0, 1.0], {}, False, "all are right"),
        ([0.0, 1e-9], {"finish_reason": "length", "reward_parts": {"correct": 0.0}}, False, "max_token_length"),
        ([0.0, 1.0], {"parse_failed": True}, False, "not of the form"),
        ([0.0, 1.0], {"reward_parts": {"format": 0.0}}, False, "not of the form"),
        ([1.0], {}, False, "Not all 1 groups of 2"),
    ],
    ids=["mixed", "all-wrong", "all-right", "cut-off", "unparsed", "bad-format", "too-small"],
)
def test_the_verdict_says_why(scores: list[float], notes: dict[str, Any], ready: bool, says: str) -> None:
    asked = request()
    test = with_groups(asked, initial_state(asked, Path("/x")).result.models_tested[0], [group(scores, **notes)])
    found = verdict(asked, test)
    assert found.ready is ready
    assert says in " ".join(found.reasons)


def test_examples_show_the_best_and_the_worst_and_unknown_figures_stay_unknown() -> None:
    asked = request()
    test = with_groups(asked, initial_state(asked, Path("/x")).result.models_tested[0], [group([0.25, 0.75])])
    best, worst, drawn = test.examples
    assert (best.completion, worst.completion) == ("0.75", "0.25")
    assert drawn.completion in ("0.25", "0.75")
    assert (test.reward_min, test.reward_max, test.reward_mean, test.reward_std) == (0.25, 0.75, 0.5, 0.25)
    assert (test.truncation_ratio, test.parse_failures, test.cost_usd) == (None, None, None)


def test_hosts_outside_are_named_and_builtin_models_go_to_none() -> None:
    assert initial_state(request(), Path("/x")).result.sends_to == []
    [sent] = initial_state(request("vendor/m"), Path("/x")).result.sends_to
    assert sent.startswith("vendor.example: ")


def test_openrouter_is_used_when_its_key_is_there_and_nothing_else_was_said(tmp_path: Path) -> None:
    given = {"HERMES_HOME": str(tmp_path), "OPENROUTER_API_KEY": "hidden-key"}
    endpoint = load_settings(given).settings.inference
    assert endpoint is not None
    assert endpoint.base_url == "https://openrouter.ai/api/v1"
    assert endpoint.api_key_variable == "OPENROUTER_API_KEY"
    assert [endpoint.model_name, *endpoint.further_models] == [
        "qwen/qwen3-8b",
        "z-ai/glm-4.7-flash",
        "minimax/minimax-m2.7",
    ]
    own = {"HERMES_RL_INFERENCE_BASE_URL": "http://127.0.0.1:1/v1", "HERMES_RL_INFERENCE_MODEL": "a, b"}
    chosen = load_settings({**given, **own}).settings.inference
    assert chosen is not None
    assert (chosen.model_name, chosen.further_models, chosen.api_key_variable) == ("a", ["b"], "OPENAI_API_KEY")
    assert load_settings({**given, "HERMES_RL_INFERENCE_BASE_URL": "local"}).settings.inference is None
