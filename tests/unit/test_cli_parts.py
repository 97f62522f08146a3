"""The pure parts of the command line: text for terminals, the reward curve, the demo's settings, log reading."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import JsonValue

from hermes_rl_mcp.cli import curve, demo_settings
from hermes_rl_mcp.cli.demo_settings import DemoOptions
from hermes_rl_mcp.cli.logs import LogFile, follow, lines
from hermes_rl_mcp.cli.text import number, printable
from hermes_rl_mcp.errors import HermesRLError, InvalidValueError
from hermes_rl_mcp.files import trim_log
from hermes_rl_mcp.quantities import duration


def _rows(values: list[float | None]) -> list[tuple[int, dict[str, JsonValue]]]:
    return [(step, {"reward/mean": value, "reward/std": 0.1}) for step, value in enumerate(values, 1)]


def test_text_of_a_model_cannot_move_the_cursor_or_hide_itself() -> None:
    assert printable("a\x1b[2Jb\rc\u202ed\u200be") == "a·[2Jb·c·d·e"
    assert printable("line\n\tnext é 日") == "line\n\tnext é 日"


def test_long_text_is_cut_at_its_limit() -> None:
    assert printable("x" * 10, 10) == "x" * 10
    assert printable("x" * 11, 10) == "x" * 9 + "…"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7_620, "2 h 07 min"), (-3, "0 s")],
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0"), (0.0, "0.000"), (0.12345, "0.123"), (1e-5, "1.00e-05"), ("a\x1b", "a·")]
)
def test_metrics_are_shown_short(value: object, text: str) -> None:
    assert number(value) == text


def test_curve_shows_first_and_last_step_and_the_range_of_values() -> None:
    drawing = curve.draw(_rows([0.25, None, 0.5, 1.0]))
    assert "reward/mean" in drawing
    ticks = drawing.splitlines()[-2].split()
    assert (ticks[0], ticks[-1]) == ("1", "4")
    assert "1.0" in drawing
    assert "\x1b" not in drawing


def test_there_is_no_curve_of_less_than_two_values() -> None:
    assert curve.draw(_rows([0.5])) == ""
    assert curve.draw(_rows([None, None])) == ""
    assert curve.draw([]) == ""


def test_reward_parts_are_means_of_the_first_and_last_five_steps() -> None:
    rows: list[tuple[int, dict[str, JsonValue]]] = [
        (step, {"reward/mean": 0.0, "reward/std": 0.0, "reward/format": float(step)}) for step in range(1, 11)
    ]
    assert curve.reward_parts(rows) == [curve.Part("format", 3.0, 8.0)]


def test_first_and_last_steps_of_a_short_run_do_not_overlap() -> None:
    rows: list[tuple[int, dict[str, JsonValue]]] = [(step, {"reward/mean": float(step)}) for step in range(1, 6)]
    assert curve.ends(rows) == 2
    assert curve.mean_reward(rows) == curve.Part("mean", 1.5, 4.5)
    assert curve.ends(rows[:1]) == 1


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("learning_rate=5e-4", ("learning_rate", 5e-4)),
        ("seed=7", ("seed", 7)),
        ("use_wandb=true", ("use_wandb", True)),
        ("data_dir=/a=b", ("data_dir", "/a=b")),
        ("name=", ("name", "")),
    ],
)
def test_set_takes_json_values_and_plain_text(item: str, expected: tuple[str, JsonValue]) -> None:
    assert demo_settings.parse_set(item) == expected


@pytest.mark.parametrize("item", ["learning_rate", "=3", " = 3"])
def test_set_without_field_and_value_is_refused_with_an_example(item: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        demo_settings.parse_set(item)
    assert "--set learning_rate" in caught.value.hint


def test_command_line_wins_over_the_table_and_set_wins_over_both() -> None:
    options = DemoOptions("gsm8k", "builtin:smollm2-135m", steps=3, group_size=2, sets={"group_size": 16, "seed": 1})
    values = demo_settings.edits(options, "gsm8k", ["data_dir"])
    assert next(iter(values)) == "model_name"
    assert values["total_steps"] == 3
    assert values["group_size"] == 16
    assert values["max_token_length"] == 112  # the table's
    assert values["seed"] == 1


def test_data_folder_goes_to_the_field_the_environment_has() -> None:
    options = DemoOptions("gsm8k", "m", data_dir="/data")
    assert demo_settings.edits(options, "gsm8k", ["seed", "data_dir"])["data_dir"] == "/data"
    with pytest.raises(InvalidValueError, match="no field for a data folder"):
        demo_settings.edits(options, "arithmetic", ["seed"])


def test_every_row_of_the_demo_table_forms_whole_groups() -> None:
    for settings in demo_settings.TABLE.values():
        group, batch = settings.get("group_size"), settings.get("batch_size")
        if isinstance(group, int) and isinstance(batch, int):
            assert batch % group == 0


def test_log_tail_gives_the_last_whole_lines_and_news_goes_on_behind_them(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_bytes(b"".join(b"line %d\n" % i for i in range(20_000)) + b"half")
    log = LogFile("trainer", path)
    assert log.tail(2) == ["line 19998", "line 19999"]
    assert log.news() == []
    with path.open("ab") as file:
        file.write(b" done\n\x1b[31mred\n")
    assert log.news() == ["half done", "·[31mred"]


def test_following_ends_when_the_run_has_ended_and_everything_was_read(tmp_path: Path) -> None:
    path = tmp_path / "env.log"
    path.write_text("one\n")
    answers = iter([False, True])

    def ended() -> bool:
        path.write_text(path.read_text() + "more\n")
        return next(answers)

    log = LogFile("env", path)
    assert list(lines([log], 5)) == ["one"]
    assert list(follow([log], ended)) == ["more", "more"]


def test_a_log_that_does_not_exist_yet_is_empty(tmp_path: Path) -> None:
    log = LogFile("api", tmp_path / "api.log")
    assert log.tail(5) == []
    assert log.news() == []


def test_a_log_that_was_cut_is_followed_from_its_new_beginning(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_text("x" * 5000 + "\n")
    log = LogFile("trainer", path)
    log.tail(1)
    assert trim_log(path, max_bytes=1000, keep_bytes=100)
    with path.open("a") as file:
        file.write("after the cut\n")
    assert log.news() == ["after the cut"]


def test_each_state_of_a_progress_bar_is_a_line_and_a_line_end_of_two_characters_is_one(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_bytes(b"one\r\n\n 10%\r 20%\r 30%")
    log = LogFile("trainer", path)
    assert log.tail(9) == ["one", "", " 10%", " 20%"]
    with path.open("ab") as file:
        file.write(b"\r")
    assert log.news() == [], "that may be half a line end"
    with path.open("ab") as file:
        file.write(b"\nlast\n")
    assert log.news() == [" 30%", "last"]


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_log_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "env.log")
    log = LogFile("env", tmp_path / "env.log")
    with pytest.raises(HermesRLError, match="not a regular file"):
        log.tail(5)
    with pytest.raises(HermesRLError, match="not a regular file"):
        log.news()


def test_the_end_of_a_log_without_line_ends_costs_no_more_than_any_other(tmp_path: Path) -> None:
    path = tmp_path / "env.log"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    assert len("".join(LogFile("env", path).tail(40))) <= 2**20


def test_an_endless_line_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "api.log"
    path.write_bytes(b"x" * 1_500_000)
    log = LogFile("api", path)
    assert sum(len(line) for _ in range(2) for line in log.news()) >= 1_000_000
