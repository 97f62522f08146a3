"""What the benches share: the line they print, what a bar means, and the memory they measure."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[1] / "bench" / "report.py"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_report", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_divides_our_median_by_theirs_and_a_missed_bar_is_the_exit_code(
    report: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = report.Report()
    assert figures.compare("time", [1.0, 9.0, 2.0], [4.0, 8.0, 1.0], "s", "<= 0.5")
    assert figures.exit_code == 0
    assert not figures.compare("speed", 30.0, 10.0, "tok/s", ">= 4", "of a tiny model")
    assert figures.within("size", 3.0, "MB", "<= 3")
    assert figures.exit_code == 1
    keys = ("bench", "ours", "theirs", "unit", "ratio", "bar", "ok")
    time, speed, size = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert time == dict(zip(keys, ("time", 2.0, 4.0, "s", 0.5, "<= 0.5", True), strict=True))
    assert speed == {
        **dict(zip(keys, ("speed", 30.0, 10.0, "tok/s", 3.0, ">= 4", False), strict=True)),
        "note": "of a tiny model",
    }
    assert size == dict(zip(keys, ("size", 3.0, None, "MB", None, "<= 3", True), strict=True))


def test_what_is_not_a_number_keeps_no_bar(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    figures = report.Report()
    assert not figures.within("broken", float("nan"), "s", "<= 1")
    assert not figures.compare("endless", 1.0, 0.0, "s", "<= 1")
    assert [json.loads(line)["ok"] for line in capsys.readouterr().out.splitlines()] == [False, False]


def test_rounds_take_turns_and_warm_ups_do_not_count(report: ModuleType) -> None:
    order: list[str] = []

    def way(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = report.interleaved({"a": lambda: way("a"), "b": lambda: way("b")}, 2, warm_ups=1)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere memory is polled")
def test_memory_that_was_taken_and_given_back_is_seen(report: ModuleType) -> None:
    size = 64 << 20
    with report.extra_memory() as memory:
        taken = bytearray(size)
        del taken
        assert 0.9 * size <= memory.so_far().extra <= 1.5 * size
