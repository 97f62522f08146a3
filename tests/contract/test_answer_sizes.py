"""However much there is, an answer is under 8,000 tokens, and says where to go on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from full_run import full_run
from mcp_rig import Tools, environment_file, in_memory

from hermes_rl_mcp.contracts.results import InferenceStep, InferenceTestConfig, ModelTest, TestInference
from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.operations.inference_records import TestPaths, TestState
from hermes_rl_mcp.paths import Home

MOST = 8_000
GROUPS = 16
RUN, OTHER, TEST = "0123abcd", "0123abce", "0badcafe"
WORDS = "A long story about 1234567 things, \x1b[31mred\x1b[0m and \u202e hidden. " * 60
EVERYTHING = ["metrics", "rollouts", "log", "checkpoints", "diagnosis", "events", "config"]

_PIECE = re.compile(r"[A-Za-z]+|\d{1,3}|[^\sA-Za-z\d]+|\s+")


def tokens(text: str) -> int:
    """No fewer than a tokenizer of today's models makes: words in pieces of five letters, digits by three, signs by
    two, and each run of blanks that is not a single space."""
    count = 0
    for piece in _PIECE.findall(text):
        if piece[0].isalpha():
            count += -(-len(piece) // 5)
        elif piece[0].isdigit():
            count += 1
        elif piece.isspace():
            count += piece != " "
        else:
            count += -(-len(piece) // 2)
    return count


@pytest.fixture
def crowded(environ: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    """An environment with very many fields, many long runs, a test of many models; flags of the server for it."""
    fields = "\n".join(
        f'            field_{i}: int = {i}\n            """{"Meaning of it. " * 12}"""' for i in range(150)
    )
    environment_file(
        tmp_path / "envs",
        f"\n        class Wide(OwnConfig):\n{fields}\n\n        Own.env_config_cls = Wide\n"
        "        Own.config_init = classmethod(lambda cls: (Wide(group_size=4, batch_size=8), [APIServerConfig()]))\n",
    )
    for i in range(60):
        (tmp_path / "envs" / f"many_{i}.py").write_text(
            f"from hermes_rl_mcp.envs import BaseEnv\n\nclass Many{i}(BaseEnv):\n"
            f'    """{"Poses problems. " * 20}"""\n\n'
            f'    name = "many_{i}"\n'
        )
        (tmp_path / "envs" / f"broken_{i}.py").write_text("def broken(:\n")
    failed = {"status": RunStatus.FAILED, "error": WORDS, "text": WORDS}
    full_run(environ, RUN, steps=300, **failed)
    full_run(environ, OTHER, steps=300, **failed, env={"total_steps": 3, "group_size": 2, "batch_size": 4, "p": WORDS})
    Home.from_environ(environ).log("env", OTHER).write_text("\x1b\u202e\x07" * 20_000)
    for number in range(60):
        full_run(environ, f"{number:08x}", steps=1, **failed)
    steps = [InferenceStep(step=i, completions=64, correct=3, scores=[1 / 3] * 64) for i in range(GROUPS)]
    one = ModelTest(
        model="m", name="m", scale="", output_file="o", log_file="l", steps=steps, error=WORDS, stderr=WORDS
    )
    size = InferenceTestConfig(num_steps=GROUPS, group_size=64, rollouts_per_model=1, total_rollouts=8)
    result = TestInference(
        status="failed",
        test_id=TEST,
        environment="own",
        environment_file="f",
        test_config=size,
        models_tested=[one] * 8,
    )
    paths = TestPaths(Home.from_environ(environ).inference_tests / TEST)
    paths.dir.mkdir(parents=True)
    paths.state.write_text(TestState(result=result).model_dump_json())
    return {"env_dirs": [str(tmp_path / "envs")]}


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("rl_list_environments", {}),
    ("rl_list_environments", {"source": "gsm8k"}),
    ("rl_select_environment", {"name": "own"}),
    ("rl_get_current_config", {}),
    ("rl_edit_config", {"field": "wandb_project", "value": "long " * 50}),
    ("rl_list_runs", {}),
    ("rl_list_runs", {"compare": [RUN, OTHER]}),
    ("rl_check_status", {"run_id": RUN}),
    ("rl_check_status", {"run_id": RUN, "include": EVERYTHING}),
    *(("rl_check_status", {"run_id": RUN, "include": [name], "limit": 100_000}) for name in EVERYTHING),
    ("rl_check_status", {"run_id": OTHER, "include": ["log"], "process": "env", "limit": 100_000}),
    ("rl_get_results", {"run_id": RUN}),
    ("rl_get_results", {"run_id": RUN, "max_points": 500, "include": EVERYTHING}),
    ("rl_stop_training", {"run_id": RUN}),
    ("rl_test_inference", {"test_id": TEST}),
    ("rl_start_training", {"dry_run": True}),
]


@pytest.mark.anyio
async def test_no_answer_is_longer_than_a_model_can_take(environ: dict[str, str], crowded: dict[str, Any]) -> None:
    async with in_memory(environ, **crowded) as call:
        for tool, arguments in CALLS:
            answer = await call.raw(tool, arguments)
            said = answer.content[0].text  # type: ignore[union-attr]
            data = json.dumps(answer.structured_content, ensure_ascii=False)
            what = f"{tool} {arguments} is_error={answer.is_error}"
            assert tokens(said) < MOST, what
            assert tokens(data) < MOST, what
            if tool != "rl_start_training":  # what it takes to start such a run is not the point here
                assert not answer.is_error, (what, said)
                assert answer.structured_content is not None
                assert {"truncated", "next_offset"} <= set(answer.structured_content), what


@pytest.mark.anyio
async def test_pages_lead_to_every_environment_field_run_and_group(
    environ: dict[str, str], crowded: dict[str, Any]
) -> None:
    async with in_memory(environ, **crowded) as call:
        environments = await _all(call, "rl_list_environments", "environments")
        assert len({row["name"] for row in environments}) == len(environments) >= 63
        assert await _all(call, "rl_list_environments", "environments", limit=40) == environments
        await call("rl_select_environment", name="own")
        fields = [*await _all(call, "rl_get_current_config", "configurable_fields")]
        fields += await _all(call, "rl_get_current_config", "locked_fields")
        assert len({row["name"] for row in fields}) == len(fields) == (await call("rl_get_current_config"))["count"]
        assert [
            row["name"] for row in (await call("rl_get_current_config", text="FIELD_149"))["configurable_fields"]
        ] == ["field_149"]
        runs = await _all(call, "rl_list_runs", "runs")
        assert len({row["run_id"] for row in runs}) == len(runs) == 62
        groups: list[int] = []
        offset: int | None = 0
        while offset is not None:
            answer = await call("rl_test_inference", test_id=TEST, offset=offset)
            groups += [step["step"] for step in answer["models_tested"][7]["steps"]]
            offset = answer["next_offset"]
        assert groups == list(range(GROUPS))


@pytest.mark.anyio
async def test_a_source_comes_whole_page_by_page(environ: dict[str, str], tmp_path: Path) -> None:
    path = environment_file(tmp_path / "envs", "".join(f"# line {i} é\n" for i in range(4_000)))
    text, offset = "", 0
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        while True:
            page = (await call("rl_list_environments", source="own", offset=offset))["source"]
            text += page["text"]
            assert page["truncated"] is (page["next_offset"] is not None)
            if page["next_offset"] is None:
                break
            assert text.endswith("\n"), "a page ends with a line"
            offset = page["next_offset"]
        assert text == path.read_text()
        available = (await call.error("rl_list_environments", source="nope"))["available"]
        assert available == sorted(available) and {"arithmetic", "own"} <= set(available)


async def _all(call: Tools, tool: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    offset: int | None = 0
    while offset is not None:
        answer = await call(tool, offset=offset, **arguments)
        found += answer[key]
        assert answer["truncated"] is (answer["next_offset"] is not None) or tool == "rl_list_environments"
        offset = answer["next_offset"]
    return found
