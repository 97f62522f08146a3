"""GSM8K's reward: the right number in the last box, and nothing that a sampled answer can do to the parser."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import pytest

from environments.gsm8k_tinker import Gsm8kConfig, Problem, grade, last_box, load_split, parse_number
from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.paths import bundled_environments

SAMPLE = str(bundled_environments() / "gsm8k_sample")


def parts(text: str, gold: str = "1234") -> tuple[float, float]:
    score, _ = grade(text, parse_number(gold), 0.25)
    assert score.value == (1.0 if score.parts["correct"] else 0.25 * score.parts["format"])
    return score.parts["correct"], score.parts["format"]


@pytest.mark.parametrize(
    "box",
    [
        "1234",
        "1,234",
        "1{,}234",
        "1,\\!234",
        "\\$1234",
        "1234.0",
        "1234.",
        " 1234\\ ",
        "1234\\%",
        "1234 \\text{ clips}",
        "\\text{1234}",
        "{1234}",
        "\\frac{2468}{2}",
        "x = 1234",
        "(1234)",
    ],
)
def test_the_right_number_counts_however_it_is_written(box: str) -> None:
    assert parts(f"So it is \\boxed{{{box}}}.") == (1.0, 1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{1235}", (0.0, 1.0)),
        ("1234", (0.0, 0.0)),
        ("\\boxed{1234", (0.0, 0.0)),
        ("\\boxed{}", (0.0, 0.0)),
        ("\\boxed{many}", (0.0, 0.0)),
        ("\\boxed{1/0}", (0.0, 0.0)),
        ("\\boxed{\\frac{1}{0}}", (0.0, 0.0)),
        ("\\boxed{12.34}", (0.0, 1.0)),
        ("\\boxed{1234} or rather \\boxed{7}", (0.0, 1.0)),
        ("<think>\\boxed{1234}</think> seven", (0.0, 0.0)),
        ("<think>\\boxed{7}</think> \\boxed{1234}", (1.0, 1.0)),
    ],
)
def test_only_the_last_box_after_thinking_counts(text: str, expected: tuple[float, float]) -> None:
    assert parts(text) == expected


def test_nested_braces_belong_to_the_box() -> None:
    assert last_box("\\boxed{\\frac{1}{2}} \\text{x}") == "\\frac{1}{2}"


@pytest.mark.parametrize(
    "box",
    [
        "9^{9^{9^{9}}}",
        "9**9**9**9",
        "9^99999999",
        "2^{31}^{7}",
        "99999999!",
        "\\sum_{i=1}^{99999999} i",
        "\\lim_{n \\to \\infty} n",
        "(" * 200,
        "9" * 5000,
    ],
)
def test_boxes_made_to_compute_for_ever_are_no_number_and_cost_nothing(box: str) -> None:
    started = time.process_time()  # a busy machine costs none
    assert parts(f"\\boxed{{{box}}}") == (0.0, 0.0)
    assert time.process_time() - started < 5


def test_scoring_works_off_the_main_thread() -> None:
    found: list[tuple[float, float]] = []
    thread = threading.Thread(target=lambda: found.append(parts("\\boxed{1234}")))
    thread.start()
    thread.join(60)
    assert found == [(1.0, 1.0)]


def test_the_shipped_problems_load_in_one_fixed_order() -> None:
    train, test = load_split("train", SAMPLE), load_split("test", SAMPLE)
    assert (len(train), len(test)) == (150, 50)
    assert train == load_split("train", SAMPLE)
    assert not {problem.question for problem in train} & {problem.question for problem in test}
    assert all("," not in problem.gold and problem.parsed for problem in train + test)


def test_an_unreadable_gold_answer_is_skipped_and_counted_at_load_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [("a", "steps #### 1,234"), ("b", "#### not a number"), ("c", "#### 3/4")]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"question": q, "answer": a}) for q, a in rows))
    with caplog.at_level(logging.WARNING):
        problems = load_split("train", str(tmp_path))
    assert sorted(problems, key=lambda one: one.question) == [Problem("a", "1234"), Problem("c", "3/4")]
    assert "1 of 3 train problems" in caplog.text


@pytest.mark.parametrize("line", ["not json", '{"question": "only"}', "[1, 2]"])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "test.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n' + line)
    with pytest.raises(PreflightError, match=r"test\.jsonl:2"):
        load_split("test", str(tmp_path))


def test_a_relative_data_folder_is_made_absolute_and_must_have_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(SAMPLE).parent)
    assert Gsm8kConfig(data_dir="gsm8k_sample").data_dir == SAMPLE
    with pytest.raises(ValueError, match=r"has no train\.jsonl"):
        Gsm8kConfig(data_dir=str(tmp_path))
