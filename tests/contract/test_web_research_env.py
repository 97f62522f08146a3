"""web-research with a scripted policy: real search over its pages, real HTTP, the reward and its metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from env_rig import END_ID, TINY, Sampler, serving
from pydantic import ValidationError

from environments.web_research_env import CORPUS, WebResearchConfig, WebResearchEnv
from environments.web_research_judge import read_verdict
from environments.web_research_world import Page, Question, make_world
from hermes_rl_mcp.envs import APIServerConfig
from hermes_rl_mcp.envs.base import EvalReport
from hermes_rl_mcp.envs.trajectory import ScoredDataItem
from hermes_rl_mcp.errors import InvalidValueError, PreflightError
from tests.tool_parts import page_server

WORLD = make_world()
PAGES = {page.url: page for page in WORLD.pages}
QUESTION = next(one for one in WORLD.questions if one.kind == "two_pages")


def _said(prompt: list[int]) -> str:
    return bytes(one for one in prompt if one < 256).decode(errors="replace")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def researcher(question: Question) -> Callable[[list[int], int], list[int]]:
    """Searches, opens the pages, and answers with what a page says; the answer holds the pages' addresses."""

    def answer(prompt: list[int], index: int) -> list[int]:
        text = _said(prompt)
        if text.count("<tool_response>") == 0:
            reply = call("web_search", query=question.text)
        elif text.count("<tool_response>") == 1:
            reply = call("web_extract", urls=list(question.sources))
        else:
            assert PAGES[question.sources[-1]].text in text
            reply = f"It was {question.answer}, see {' and '.join(question.sources)}"
        return [*reply.encode(), END_ID]

    return answer


def made(sampler: Sampler, **fields: Any) -> WebResearchEnv:
    config, _ = WebResearchEnv.config_init()
    values = {**config.model_dump(), "tokenizer_name": str(TINY), "group_size": 2, **fields}
    return WebResearchEnv(
        WebResearchConfig(**values), [APIServerConfig(base_url=f"{sampler.url}/v1", server_type="vllm")]
    )


async def ended(env: WebResearchEnv) -> None:
    await env.cleanup()
    await env.server.close()


def _parts(item: ScoredDataItem) -> dict[str, float]:
    notes = item["overrides"]
    assert notes is not None
    return dict(notes["reward_parts"])


def _item(question: Question) -> dict[str, str]:
    return {"question": question.text, "answer": question.answer}


@pytest.mark.anyio
async def test_looking_up_is_worth_all_and_guessing_little_and_evaluation_leaves_the_training_metrics_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", "never-asked")
    lines: list[dict[str, float]] = []
    with serving(Sampler(researcher(QUESTION))) as sampler:
        env = made(sampler)
        env.on_metrics(lambda metrics: lines.append(dict(metrics)))
        await env.setup()
        group, _ = await env.collect_trajectories(_item(QUESTION))
        sampler.answer = lambda prompt, index: [*b"I think 7.", END_ID]
        guess, _ = await env.collect_trajectories(_item(QUESTION))
        report = await env.evaluate()
        await env.wandb_log({"train/other": 3.0})
        await ended(env)
    assert isinstance(group, dict) and isinstance(guess, dict)
    assert group["scores"] == [1.0, 1.0] and guess["scores"] == [pytest.approx(0.2)] * 2
    everything = {"correct": 1.0, "correctness": 1.0, "tool_usage": 1.0, "efficiency": 1.0, "diversity": 1.0}
    assert group["overrides"] is not None and group["overrides"][0]["reward_parts"] == everything
    assert lines[0] == pytest.approx(
        {
            "train/other": 3.0,
            "train/mean_reward": 0.6,
            "train/mean_correctness": 0.5,
            "train/mean_tool_usage": 0.5,
            "train/mean_efficiency": 1.0,
            "train/mean_diversity": 0.5,
            "train/correct_rate": 0.5,
            "train/tool_usage_rate": 0.5,
            "train/total_rollouts": 4.0,
            "train/turns": 2.0,
            "train/tool_calls": 1.0,
            "train/finished_naturally": 1.0,
            "train/tool_errors_count": 0.0,
            "train/call_parse_errors": 0.0,
        }
    )
    assert isinstance(report, EvalReport)
    wanted = {"eval/mean_correctness": 0.0, "eval/tool_usage_rate": 0.0, "eval/mean_tool_calls": 0.0}
    assert {**report.metrics, **wanted} == report.metrics
    assert report.metrics["eval/mean_reward"] == pytest.approx(0.2)
    held_out = {row["question"] for row in env.held_out_rows}
    assert 5 <= report.metrics["eval/n_items"] == min(20, len(held_out))
    assert not held_out & {row["question"] for row in env.rows}


@pytest.mark.anyio
async def test_every_call_costs_and_an_answer_that_never_came_gets_nothing_for_economy() -> None:
    calls = iter(range(100))

    def busy(prompt: list[int], index: int) -> list[int]:
        number = next(calls)
        said = call("web_search", query=f"nothing {number}") * 4 if number < 3 else QUESTION.answer
        return [*said.encode(), END_ID]

    with serving(Sampler(busy)) as sampler:
        env = made(sampler, max_agent_turns=4, diversity_bonus=0.0)
        await env.setup()
        item, _ = await env.collect_trajectory(_item(QUESTION))
        assert item is not None
        twelve = _parts(item)
        sampler.answer = lambda prompt, index: [*call("web_search", query="x").encode(), END_ID]
        item, _ = await env.collect_trajectory(_item(QUESTION))
        await ended(env)
    assert (twelve["efficiency"], twelve["correctness"]) == (pytest.approx(1 - 0.12 * 7), 1.0)
    assert item is not None and item["scores"] == 0.0
    assert _parts(item)["efficiency"] == 0.0


@pytest.mark.anyio
async def test_another_model_judges_and_where_it_gives_no_verdict_the_words_decide() -> None:
    replies = [
        (200, {"choices": [{"message": {"content": 'Fair. {"score": 0.75}'}}]}),
        (500, {}),
        (200, {"choices": 1}),
    ]
    with serving(Sampler(lambda prompt, index: [*QUESTION.answer.encode(), END_ID])) as sampler:
        found = []
        for status, body in replies:
            answers = {"/v1/chat/completions": (status, "application/json", json.dumps(body).encode())}
            with page_server(answers) as (url, asked):
                env = made(sampler, judge_base_url=f"{url}/v1", judge_model="judge", judge_api_key="key-1")
                await env.setup()
                item, _ = await env.collect_trajectory(_item(QUESTION))
                await ended(env)
                assert item is not None
                found.append(_parts(item)["correctness"])
                sent = json.loads(asked[-1].body)
                assert (sent["model"], sent["temperature"]) == ("judge", 0)
                assert asked[-1].headers["authorization"] == "Bearer key-1"
                assert QUESTION.text in sent["messages"][1]["content"]
        with pytest.raises(InvalidValueError, match="model that is trained"):
            made(sampler, judge_base_url=f"{sampler.url}/v1")
    assert found == [0.75, 1.0, 1.0]


def test_a_verdict_is_the_last_number_given_as_one() -> None:
    assert read_verdict('{"score": 0} no: {"score": 2}') == 1.0
    for text in ("0.5", '{"score": true}', '{"score": "1"}', '{"score": NaN}', ""):
        with pytest.raises(ValueError, match="found"):
            read_verdict(text)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"corpus": "/no/such/file.jsonl"}, "no file"),
        ({"eval_split_ratio": 0.6}, "eval_split_ratio"),
        ({"correctness_weight": 0, "tool_usage_weight": 0, "efficiency_weight": 0}, "above 0"),
    ],
    ids=["no-corpus", "held-out", "weights"],
)
def test_settings_that_do_not_fit_are_errors(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        WebResearchConfig(**fields)


@pytest.mark.anyio
async def test_questions_that_the_pages_cannot_answer_are_refused_before_the_first_one() -> None:
    env = made(Sampler(url="http://127.0.0.1:9"), dataset_name="google/frames-benchmark")
    with pytest.raises(PreflightError, match="invented pages") as caught:
        await env.setup()
    assert "operator" in str(caught.value)
    await ended(env)


@pytest.mark.anyio
async def test_questions_and_pages_of_ones_own_take_the_place_of_the_invented_ones(tmp_path: Path) -> None:
    page = {"url": "https://a.example/", "title": "Answers", "text": "The answer to everything is 42."}
    (tmp_path / "pages.jsonl").write_text(json.dumps(page))
    rows = [{"Prompt": f"What is the answer to {n}?", "Answer": "42"} for n in range(30)]
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with serving(Sampler()) as sampler:
        fields = {"dataset_name": str(tmp_path / "questions.jsonl"), "corpus": str(tmp_path / "pages.jsonl")}
        env = made(sampler, **fields)
        await env.setup()
        first = await env.get_next_item()
        assert len(env.rows) + len(env.held_out_rows) == 30
        sampler.answer = lambda prompt, index: [
            *(b"42" if "tool_response" in _said(prompt) else call("web_search", query="answer").encode()),
            END_ID,
        ]
        item, _ = await env.collect_trajectory(first)
        await ended(env)
    assert item is not None and "The answer to everything" in str(item["messages"])
    assert env.settings()["HERMES_RL_SEARCH_CORPUS"] == str(tmp_path / "pages.jsonl")
    assert made(sampler, search="operator").settings().get("HERMES_RL_SEARCH_BACKEND") is None


def test_what_comes_along_is_the_invented_world() -> None:
    rows = [json.loads(line) for line in CORPUS.read_text().splitlines()]
    assert [Page(**row) for row in rows] == WORLD.pages
