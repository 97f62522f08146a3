"""The arithmetic environment's problems and scores."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from environments.arithmetic import (
    MAKERS,
    ArithmeticConfig,
    ArithmeticEnv,
    Problem,
    draw,
    evaluation_problems,
    grade,
    is_held_out,
)
from hermes_rl_mcp.envs import Completion
from hermes_rl_mcp.envs.loading import defaults_of
from trainer.models.make_tiny import sums

LEVELS = sorted(MAKERS)


@pytest.mark.parametrize("difficulty", LEVELS)
def test_the_same_seed_gives_the_same_problems_and_another_seed_others(difficulty: int) -> None:
    def problems(seed: int) -> list[Problem]:
        rng = random.Random(seed)
        return [draw(rng, difficulty) for _ in range(50)]

    assert problems(7) == problems(7)
    assert problems(7) != problems(8)


@pytest.mark.parametrize("difficulty", LEVELS)
def test_no_training_problem_is_an_evaluation_problem_whatever_the_seed(difficulty: int) -> None:
    kept = set(evaluation_problems(difficulty, 200))
    rng = random.Random(difficulty)
    trained = {draw(rng, difficulty) for _ in range(1000)}
    assert not kept & trained
    assert all(is_held_out(problem) for problem in kept)
    assert not any(is_held_out(problem) for problem in trained)


@pytest.mark.parametrize("difficulty", LEVELS)
def test_evaluation_problems_are_distinct_and_always_the_same(difficulty: int) -> None:
    problems = evaluation_problems(difficulty, 40)
    assert len({problem.text for problem in problems}) == len(problems)
    assert problems == evaluation_problems(difficulty, 40)
    assert len(problems) == (10 if difficulty == 1 else 40)


@pytest.mark.parametrize("difficulty", LEVELS)
def test_every_answer_is_what_the_problem_says(difficulty: int) -> None:
    rng = random.Random(0)
    for _ in range(300):
        problem = draw(rng, difficulty)
        assert eval(problem.text.rstrip("=")) == problem.answer


def test_level_one_is_what_the_tiny_model_was_taught() -> None:
    taught = set(sums())
    rng = random.Random(0)
    drawn = [draw(rng, 1) for _ in range(500)] + evaluation_problems(1, 100)
    assert {(problem.text, problem.answer) for problem in drawn} <= taught


@pytest.mark.parametrize(
    ("text", "finish_reason", "score", "correct", "form"),
    [
        ("8", "stop", 1, 1, 1),
        ("8", None, 1, 1, 1),
        ("9", "stop", 0, 0, 1),
        ("It is 8", "stop", 0, 1, 0),
        ("3+5=8", "stop", 0, 1, 0),
        ("The answer is 8.", "stop", 0, 1, 0),
        ("8 or 9", "stop", 0, 0, 0),
        ("9, no, 8", "stop", 0, 1, 0),
        ("8", "length", 0, 1, 0),
        (" 8", "stop", 0, 1, 0),
        ("8\n", "stop", 0, 1, 0),
        ("08", "stop", 0, 1, 0),
        ("+8", "stop", 0, 1, 0),
        ("-8", "stop", 0, 0, 1),
        ("8.5", "stop", 0, 0, 0),
        ("88", "stop", 0, 0, 1),
        ("x8", "stop", 0, 0, 0),
        ("٨", "stop", 0, 0, 0),
        ("eight", "stop", 0, 0, 0),
        pytest.param("8" * 5000, "length", 0, 0, 0, id="thousands of digits"),
        ("", "stop", 0, 0, 0),
    ],
)
def test_only_the_bare_right_number_scores(
    text: str, finish_reason: str | None, score: float, correct: float, form: float
) -> None:
    found = grade(Problem("3+5=", 8), text, finish_reason)
    assert (found.value, found.parts) == (score, {"correct": correct, "format": form})


@pytest.mark.parametrize("text", ["-4", "0"])
def test_negative_numbers_and_zero_have_a_bare_form(text: str) -> None:
    assert grade(Problem("?", int(text)), text, "stop").value == 1.0


def test_minus_zero_is_not_a_bare_number() -> None:
    assert grade(Problem("3-3=", 0), "-0", "stop").parts == {"correct": 1.0, "format": 0.0}


@given(answer=st.integers(-999, 999), text=st.text(st.sampled_from("-+0123456789 .\nIt is"), max_size=12))
def test_the_score_is_one_for_exactly_the_number_and_else_zero(answer: int, text: str) -> None:
    assert grade(Problem("?", answer), text, "stop").value == float(text == str(answer))


def test_the_answer_itself_always_scores_however_large() -> None:
    for answer in (-10_000, -1, 0, 1, 10, 123_456):
        assert grade(Problem("?", answer), str(answer), "stop").value == 1.0


def test_the_defaults_form_whole_batches_and_leave_room_for_the_longest_taught_answer() -> None:
    config, servers = defaults_of(ArithmeticEnv)
    assert config.batch_size % config.group_size == 0
    assert config.max_token_length >= len(b"It is 18") + 1
    assert servers[0].server_type == "vllm"
    assert ArithmeticEnv.trainer_defaults == {"learning_rate": 1e-3, "lora_rank": 16, "lora_alpha": 32.0}


def test_a_difficulty_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 5"):
        ArithmeticConfig(difficulty=6)


@pytest.mark.anyio
async def test_mixed_problems_are_of_every_level_and_go_on_in_their_order(tmp_path: Path) -> None:
    def environment() -> ArithmeticEnv:
        made = ArithmeticEnv(ArithmeticConfig(difficulty=1, mixed_up_to=4), [])
        made.checkpoint_dir = tmp_path
        return made

    first = environment()
    await first.setup()
    drawn = [await first.get_next_item() for _ in range(200)]
    assert sum("*" in problem.text for problem in drawn) > 25
    assert sum(len(problem.text) == len("1+2=") for problem in drawn) > 25
    first.save_checkpoint(1)
    expected = [await first.get_next_item() for _ in range(10)]
    resumed = environment()
    resumed.curr_step = 1
    await resumed.setup()
    resumed.load_checkpoint()
    assert [await resumed.get_next_item() for _ in range(10)] == expected

    held_out = await first.get_eval_items(100)
    assert len(held_out) == len(set(held_out)) > 80
    assert all(is_held_out(problem) for problem in held_out)
    assert sum("*" in problem.text for problem in held_out) == 25


def test_mixed_levels_must_rise() -> None:
    with pytest.raises(ValidationError, match="lies below difficulty = 3"):
        ArithmeticConfig(difficulty=3, mixed_up_to=2)


@pytest.mark.anyio
async def test_the_order_of_problems_goes_on_where_an_interrupted_run_was(tmp_path: Path) -> None:
    def environment() -> ArithmeticEnv:
        made = ArithmeticEnv(ArithmeticConfig(seed=3), [])
        made.checkpoint_dir = tmp_path
        return made

    first = environment()
    await first.setup()
    for _ in range(5):
        await first.get_next_item()
    first.save_checkpoint(2)
    expected = [await first.get_next_item() for _ in range(10)]
    first.save_checkpoint(4)

    resumed = environment()
    resumed.curr_step = 3  # stopped between two intervals
    await resumed.setup()
    resumed.load_checkpoint()
    assert [await resumed.get_next_item() for _ in range(10)] == expected


def test_an_instruction_comes_before_the_problem_and_is_left_out_by_default() -> None:
    problem = Problem("3+5=", 8)
    plain = ArithmeticEnv(ArithmeticConfig(), [])
    asked = ArithmeticEnv(ArithmeticConfig(instruction="Answer with the number only."), [])
    assert plain.get_messages(problem) == [{"role": "user", "content": "3+5="}]
    assert asked.get_messages(problem) == [{"role": "user", "content": "Answer with the number only. 3+5="}]


def test_an_answer_is_scored_with_the_reason_it_ended() -> None:
    environment = ArithmeticEnv(ArithmeticConfig(), [])
    cut = Completion(text="8", token_ids=[56], logprobs=[-0.1], finish_reason="length")
    assert environment.score_answer(Problem("3+5=", 8), cut).value == 0.0
