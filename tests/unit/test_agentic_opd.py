"""Hindsight for an agent's turns: tests that decide, hints by rules and by a judge, and where a teacher's words go."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from env_rig import END_ID, TINY, Sampler, say, serving
from pydantic import ValidationError

from environments.agentic_opd_checks import BROKEN, FAILED, MISSING, PASSED, check
from environments.agentic_opd_env import AgenticOPDConfig, AgenticOPDEnv
from environments.agentic_opd_hints import Bounds, best_hint, judge_messages, parse_vote, rule_hint, turns_of
from environments.agentic_opd_tasks import built_in, split
from hermes_rl_mcp.agent.context import ToolContext
from hermes_rl_mcp.agent.sandbox.factory import task_sandbox
from hermes_rl_mcp.agent.toolbox import select_tools
from hermes_rl_mcp.contracts.rollout_api import MASKED
from hermes_rl_mcp.envs import APIServerConfig, EvalReport
from hermes_rl_mcp.envs.distillation import Teaching, candidates, with_hint
from hermes_rl_mcp.envs.groups import checked
from hermes_rl_mcp.envs.scoring import TokenScore
from hermes_rl_mcp.envs.tokenizer import Renderer, load_tokenizer
from hermes_rl_mcp.paths import bundled_environments

TASK = {"task": "Write f(x): x plus 1.", "test_code": "assert f(1) == 2\nassert f(-1) == 0"}
RIGHT = {
    "running_total": "def running_total(n):\n    s = 0\n    return [s := s + x for x in n]",
    "is_palindrome": "def is_palindrome(t):\n    t = [c.lower() for c in t if c.isalnum()]\n    return t == t[::-1]",
    "word_counts": "from collections import Counter\ndef word_counts(t): return dict(Counter(t.lower().split()))",
    "flatten": "def flatten(v):\n    return [y for x in v for y in flatten(x)] if isinstance(v, list) else [v]",
    "roman": "def roman(n):\n    out = ''\n    for v, s in zip([1000,900,500,400,100,90,50,40,10,9,5,4,1], "
    "'M CM D CD C XC L XL X IX V IV I'.split()):\n        out += s * (n // v); n %= v\n    return out",
    "balanced": "def balanced(t):\n    s = []\n    for c in t:\n        if c in '([{': s.append(c)\n"
    "        elif c in ')]}' and (not s or s.pop() + c not in ('()', '[]', '{}')): return False\n    return not s",
    "merge_intervals": "def merge_intervals(v):\n    out = []\n    for a, b in sorted(v):\n"
    "        if out and a <= out[-1][1]: out[-1] = (out[-1][0], max(b, out[-1][1]))\n"
    "        else: out.append((a, b))\n    return out",
    "run_length": "from itertools import groupby\ndef run_length(t):\n"
    "    return ''.join(c + str(len(list(g))) for c, g in groupby(t))",
    "primes_below": "def primes_below(n):\n    s = [True] * n\n    return [i for i in range(2, n) if s[i] and not "
    "s.__setitem__(slice(i*i, n, i), [False] * len(range(i*i, n, i)))]",
    "transpose": "def transpose(r): return [list(x) for x in zip(*r)]",
    "group_anagrams": "def group_anagrams(w):\n    d = {}\n    for x in sorted(w): "
    "d.setdefault(''.join(sorted(x)), []).append(x)\n    return sorted(d.values())",
    "evaluate_postfix": "def evaluate_postfix(t):\n    s = []\n    for w in t.split():\n"
    "        s.append(int(w) if w not in '+-*' else (lambda b, a: a+b if w == '+' else a-b if w == '-' else a*b)"
    "(s.pop(), s.pop()))\n    return s[0]",
}


@pytest.fixture(scope="module")
def ctx() -> Iterator[ToolContext]:
    context = ToolContext("opd", task_sandbox("local", "opd"), select_tools(["terminal", "file"]).toolbox)
    yield context
    context.cleanup()


def test_every_built_in_task_can_be_solved_and_some_are_held_out() -> None:
    tasks = built_in()
    assert len(tasks) >= 8 and {one["name"] for one in tasks} == set(RIGHT)
    train, held_out = split(tasks, 0.15)
    assert (len(train), len(held_out)) == (10, 2) and [*train, *held_out] == tasks
    for task in tasks:
        space: dict[str, Any] = {}
        exec(RIGHT[task["name"]], space)
        exec(task["test_code"], space)


@pytest.mark.parametrize(
    ("program", "correctness", "message"),
    [
        (None, MISSING, "no solution.py"),
        ("def f(x): return x + 1", PASSED, ""),
        ("def f(x): return abs(x) + 1", FAILED, "This does not hold: assert f(-1) == 0"),
        ("def f(x): return x +", BROKEN, "SyntaxError"),
        ("f = None", BROKEN, "TypeError"),
        ("print('all tests passed')\nimport os\nos._exit(0)", BROKEN, "has ended"),
        ("import sys\nsys.exit(0)", BROKEN, "SystemExit"),
        ("open('test_solution.py', 'w').write('')\ndef f(x): return 2", FAILED, "f(-1)"),
        ("class A(int):\n    def __eq__(self, other): return True\ndef f(x): return A(7)", FAILED, "f(1)"),
    ],
    ids=["missing", "right", "wrong", "syntax", "no-function", "ends-itself", "exits", "own-tests", "own-equality"],
)
def test_only_the_tests_decide(ctx: ToolContext, program: str | None, correctness: float, message: str) -> None:
    ctx.terminal("rm -f solution.py")
    if program is not None:
        ctx.write_file("solution.py", program)
        ctx.write_file("test_solution.py", "print('passed')")
        ctx.write_file("ast.py", "raise SystemExit(0)")
    verdict = check(ctx, str(TASK["test_code"]), 60)
    assert (verdict.correctness, message in verdict.message) == (correctness, True), verdict


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[HINT_START] use a dict [HINT_END] so \\boxed{1}", (True, "use a dict")),
        ("\\boxed{-1} or rather [HINT_START]a[HINT_END][HINT_START]b[HINT_END] \\boxed{ +1 }", (True, "b")),
        ("[HINT_START]use a dict[HINT_END] \\boxed{-1}", (False, "use a dict")),
        ("<think>[HINT_START]x[HINT_END]\\boxed{1}</think>\\boxed{-1}", (False, "")),
        ("<think>[HINT_START]x[HINT_END]\\boxed{1}", (False, "")),
        ("[HINT_START]never ended \\boxed{1}", (True, "")),
        ("\\boxed{2} [HINT_START]a[HINT_END]", (False, "a")),
        ("", (False, "")),
    ],
    ids=range(8),
)
def test_a_vote_is_its_last_box_and_its_last_hint(text: str, expected: tuple[bool, str]) -> None:
    assert parse_vote(text) == expected


def test_the_longest_hint_within_bounds_that_a_judge_stands_by_counts() -> None:
    votes = [f"[HINT_START]{'x' * n}[HINT_END]\\boxed{{{sign}}}" for n, sign in ((11, 1), (20, 1), (30, -1), (90, 1))]
    assert best_hint(votes, Bounds(10, 50)) == "x" * 20
    assert best_hint(votes, Bounds(90, 91)) is None
    assert best_hint([], Bounds(0, 50)) is None


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": json.dumps(arguments)}}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Write f."},
    {"role": "assistant", "content": "", "tool_calls": [_call("write_file", path="solution.py", content="def f")]},
    {"role": "tool", "content": '{"bytes_written": 5}'},
    {"role": "assistant", "content": "Running.", "tool_calls": [_call("terminal", command="pytest")]},
    {"role": "tool", "content": '{"output": "...\\nSyntaxError: bad", "exit_code": 1, "error": null}'},
    {"role": "assistant", "content": "Fine."},
]


def test_rules_hint_at_failing_calls_and_at_what_the_tests_found_in_what_a_turn_wrote() -> None:
    wrong = turns_of(CONVERSATION, "f is broken.", "solution.py")
    hints = [rule_hint(turn, "f is broken.") for turn in wrong]
    assert [bool(hint and "f is broken." in hint) for hint in hints] == [True, False, True]
    assert hints[1] is not None and "ends with 1, SyntaxError: bad." in hints[1]
    fine = turns_of(CONVERSATION[:1] + CONVERSATION[5:], "", "solution.py")
    assert [rule_hint(turn, "") for turn in fine] == [None]


def test_a_judge_sees_both_ends_of_what_came_of_a_turn() -> None:
    turns = turns_of([*CONVERSATION[:2], {"role": "tool", "content": "A" * 5000 + "B"}], "It fails.", "solution.py")
    [turn] = turns
    asked = judge_messages("Write f.", turn, 400)[1]["content"]
    assert "A" * 200 in asked and "AB\nThe tests of the task, run at the end: It fails." in asked and len(asked) < 700


def test_a_hint_goes_to_the_end_of_the_last_message_and_no_other_token_changes() -> None:
    renderer = Renderer(load_tokenizer(str(TINY)))
    context = renderer.encode(renderer.prompt([{"role": "user", "content": "3+5="}]))
    hinted = with_hint(renderer, context, " (8)")
    assert hinted == renderer.encode(renderer.prompt([{"role": "user", "content": "3+5= (8)"}]))
    assert with_hint(renderer, context[:-1], " (8)") is None


def test_candidates_lie_on_the_tokens_they_are_of_and_hold_the_given_one() -> None:
    top = [(7, -0.5), (8, -1.5), (9, -2.5)]
    assert candidates(TokenScore(5, -6.123456, top), 3) == [(7, -0.5), (8, -1.5), (5, -6.12346)]
    assert candidates(TokenScore(8, -1.5, top), 2) == top[:2]
    assert candidates(TokenScore(5, -6.0, []), 1) == [(5, -6.0)]
    teaching = Teaching(4)
    assert teaching.put_into({"tokens": [1]}) == {"tokens": [1]}
    teaching.place(2, [TokenScore(8, -1.5, top)], 1)
    assert teaching.put_into({})["distill_token_ids"] == [[], [], [8], []]
    for start in (-1, 4):
        with pytest.raises(ValueError, match="do not fit 4 tokens"):
            teaching.place(start, [TokenScore(8, -1.5, top)], 1)


def _policy(prompt: list[int], index: int) -> list[int]:
    """Writes a wrong solution, then stops."""
    if b"bytes_written" in bytes(one for one in prompt if one < 256):
        return [*b"done", END_ID]
    call = {"name": "write_file", "arguments": {"path": "solution.py", "content": "def f(x): return 2"}}
    return [*f"<tool_call>{json.dumps(call)}</tool_call>".encode(), END_ID]


async def _group(sampler: Sampler, **fields: Any) -> tuple[Mapping[str, Any], dict[str, float]]:
    seen: dict[str, float] = {}
    config = AgenticOPDConfig(
        **{"tokenizer_name": str(TINY), "group_size": 2, "enabled_toolsets": ["terminal", "file"], **fields}
    )
    env = AgenticOPDEnv(config, [APIServerConfig(base_url=f"{sampler.url}/v1", server_type="vllm")])
    env.on_metrics(seen.update)
    try:
        await env.setup()
        group, _ = await env.collect_trajectories(TASK)
        await env.wandb_log({})
    finally:
        await env.cleanup()
        await env.server.close()
    assert isinstance(group, dict)
    return group, seen


@pytest.mark.anyio
async def test_a_teacher_that_read_a_hint_speaks_on_exactly_the_tokens_that_the_policy_wrote() -> None:
    with serving(Sampler(_policy)) as sampler:
        group, seen = await _group(sampler, distill_topk=2)
        asked = [one for one in sampler.requests if "prompt_logprobs" in one]
    data = checked(group, group_size=2)
    assert data.distill_token_ids is not None and data.distill_logprobs is not None
    for index, tokens_T in enumerate(data.tokens):
        for at, (token, mask) in enumerate(zip(tokens_T, data.masks[index], strict=True)):
            wanted = [token, (token + 1) % 256] if mask != MASKED else []
            assert data.distill_token_ids[index][at] == wanted
            assert len(data.distill_logprobs[index][at]) == len(wanted)
        # Correctness 0.2; two turns are few; a file was written and nothing run.
        assert data.scores[index] == pytest.approx(0.7 * 0.2 + 0.15 * 1.0 + 0.15 * 0.3)
    assert len(asked) == 4 and all(one["prompt_logprobs"] == 2 for one in asked)
    texts = [bytes(one for one in request["prompt"]["prompt_token_ids"] if one < 256).decode() for request in asked]
    assert all("[Hint: In the end the tests say: This does not hold: assert f(-1) == 0" in text for text in texts)
    assert sorted(text.endswith("done") for text in texts) == [False, False, True, True]
    sampled = bytes(one for one in data.tokens[0] if one < 256).decode()
    assert "[Hint" not in sampled
    assert (seen["opd/hint_rate"], seen["opd/total_hints"], seen["opd/mean_turns_scored"]) == (1.0, 4.0, 2.0)


@pytest.mark.anyio
async def test_another_model_may_judge_and_without_hints_or_when_switched_off_there_is_no_teacher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the operator's")
    says = "[HINT_START]Mind numbers below 0.[HINT_END] \\boxed{1}"
    with serving(Sampler(_policy)) as sampler, serving(Sampler(say(says))) as judge:
        judging = {"judge": "model", "judge_base_url": f"{judge.url}/v1", "group_size": 1, "teacher": "base"}
        group, seen = await _group(sampler, **judging)
        assert group["distill_token_ids"] and seen["opd/total_hints"] == 2.0
        assert [one["n"] for one in judge.requests] == [3, 3]
        assert TASK["task"] in judge.requests[0]["messages"][1]["content"]
        assert judge.requests[0]["headers"]["authorization"] == "Bearer none", "not a key of the operator's"
        scored = [one for one in sampler.requests if "prompt_logprobs" in one]
        assert [one["adapter"] for one in scored] == [False, False]
        judge.answer = say("Nothing to add. \\boxed{-1}")
        group, seen = await _group(sampler, **judging)
        assert group.get("distill_token_ids") is None and seen["opd/total_hints"] == 0.0
        judge.statuses += [400] * 2
        group, seen = await _group(sampler, **judging)
        assert group.get("distill_token_ids") is None and seen["opd/judge_failures"] == 2.0
        before = len(judge.requests)
        group, seen = await _group(sampler, **judging, opd_enabled=False)
        assert group.get("distill_token_ids") is None and len(judge.requests) == before
        assert not any(name.startswith("opd/") for name in seen)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"judge": "endpoint"}, "'rules' or 'model'"),
        ({"hint_max_chars": 200}, "greater than or equal to 201"),
        ({"correctness_weight": 0}, "greater than 0"),
        ({"distill_topk": 0}, "greater than or equal to 1"),
    ],
    ids=["judge", "bounds", "weights", "topk"],
)
def test_settings_that_cannot_be_are_refused_with_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AgenticOPDConfig(**fields)


@pytest.mark.anyio
async def test_evaluation_asks_held_out_tasks_alone_and_needs_no_teacher(tmp_path: Path) -> None:
    rows = [{"prompt": f"Write f{n}.", "check": f"assert f{n}() == {n}"} for n in range(30)]
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"dataset_name": str(data), "prompt_field": "prompt", "test_field": "check", "eval_size": 2}
    with serving(Sampler(say("no"))) as sampler:
        config = AgenticOPDConfig(tokenizer_name=str(TINY), enabled_toolsets=[], **fields)
        env = AgenticOPDEnv(config, [APIServerConfig(base_url=f"{sampler.url}/v1", server_type="vllm")])
        await env.setup()
        trained = {row["task"] for row in env.rows}
        report = await env.evaluate()
        await env.cleanup()
        await env.server.close()
    assert isinstance(report, EvalReport)
    assert len(report.samples) == 2 and not trained & {one["item"]["task"] for one in report.samples}
    assert (report.metrics["eval/pass_rate"], report.metrics["eval/mean_correctness"]) == (0.0, 0.0)
    assert report.metrics["eval/mean_reward"] == 0.0, "who does nothing is not efficient"
    assert not any("prompt_logprobs" in one for one in sampler.requests)


@pytest.mark.anyio
async def test_the_trained_models_base_judges_where_no_other_model_is_named() -> None:
    def both(prompt: list[int], index: int) -> list[int]:
        is_judging = b"# What came of it" in bytes(one for one in prompt if one < 256)
        return (
            say(f"[HINT_START]{'x' * (20 + index)}[HINT_END]\\boxed{{1}}")([], 0) if is_judging else _policy(prompt, 0)
        )

    with serving(Sampler(both)) as sampler:
        group, seen = await _group(sampler, judge="model", group_size=1)
        judging = [one for one in sampler.requests if one.get("n") == 3]
        scored = [one for one in sampler.requests if "prompt_logprobs" in one]
    assert [one["adapter"] for one in judging] == [False, False] and seen["opd/total_hints"] == 2.0
    assert all("adapter" not in one for one in scored) and group["distill_token_ids"]
    hinted = bytes(one for one in scored[0]["prompt"]["prompt_token_ids"] if one < 256).decode()
    assert f"[Hint: {'x' * 22}]" in hinted


def test_the_opd_file_of_settings_says_what_the_environment_begins_with() -> None:
    document = yaml.safe_load((bundled_environments() / "agentic_opd_env.yaml").read_text())
    config, servers = AgenticOPDEnv.config_init()
    assert AgenticOPDConfig.model_validate({**config.model_dump(), **document["env"]}) == config
    assert [APIServerConfig(**one) for one in document["openai"]] == servers
