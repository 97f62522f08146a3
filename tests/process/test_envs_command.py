"""``hermes-rl envs``: the templates work and are tested, and a check says of a whole environment what is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from env_rig import END_ID, TINY, Sampler, child_environ, serving

from hermes_rl_mcp.cli.envs_check import locate
from hermes_rl_mcp.cli.envs_new import Wanted, write
from hermes_rl_mcp.errors import EnvironmentFileError, HermesRLError, InvalidValueError
from hermes_rl_mcp.paths import Home, bundled_environments, install_root

TIMEOUT_S = 110
SAMPLE = bundled_environments() / "gsm8k_sample"


def hermes_rl(environ: dict[str, str], *args: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", "envs", *args]
    return subprocess.run(
        command,
        env=child_environ(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture
def unpacked(environ: dict[str, str]) -> dict[str, str]:
    """A home in which the tiny model has been used before."""
    shutil.copytree(TINY, Home.from_environ(environ).model_dir("builtin:tiny"))
    return environ


def wanted(name: str, folder: Path, **more: str) -> Wanted:
    given = {"dataset": None, "question": None, "answer": None, "kind": "single", **more}
    return Wanted(name=name, folder=str(folder), **given)  # type: ignore[arg-type]


def test_the_list_is_the_same_with_and_without_its_name(environ: dict[str, str]) -> None:
    lists = [hermes_rl(environ, *words) for words in (("--json",), ("list", "--json"))]
    assert [done.returncode for done in lists] == [0, 0]
    assert lists[0].stdout == lists[1].stdout
    assert {"arithmetic", "gsm8k"} <= {one["name"] for one in json.loads(lists[0].stdout)["environments"]}


def test_every_template_is_a_working_environment_whose_test_passes(environ: dict[str, str], tmp_path: Path) -> None:
    made = [
        write(environ, wanted("sums_of_mine", tmp_path)),
        write(environ, wanted("calls_of_mine", tmp_path, kind="tools")),
        write(environ, wanted("words_of_mine", tmp_path, dataset=str(SAMPLE))),
    ]
    assert "asks question, right is answer" in made[2].found
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(one.test) for one in made)]
    done = subprocess.run(
        command,
        env={**child_environ(environ), "PYTHONPATH": str(install_root())},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout


def test_a_data_set_that_comes_along_is_read_from_where_it_lies(environ: dict[str, str], tmp_path: Path) -> None:
    made = write(environ, wanted("school", tmp_path, dataset="gsm8k_sample"))
    assert str(SAMPLE) in made.environment.read_text()


def test_what_cannot_be_written_leaves_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test_taken.py").write_text("mine")
    data = tmp_path / "data.jsonl"
    data.write_text('{"first": "a", "second": "b"}\n')
    for given, words in (
        (wanted("Not-a-name", tmp_path), "cannot be the name"),
        (wanted("json", tmp_path), "module of Python"),
        (wanted("arithmetic", tmp_path), "already the name of"),
        (wanted("taken", tmp_path), "already there"),
        (wanted("fine", tmp_path, dataset=str(data)), "Which column is the question"),
        (wanted("fine", tmp_path, dataset=str(data), question="third"), "no column 'third'"),
        (wanted("fine", tmp_path, question="first"), "columns of --dataset"),
        (wanted("fine", tmp_path, dataset=str(tmp_path / "gone.jsonl")), "no file or folder"),
    ):
        with pytest.raises(InvalidValueError, match=words) as caught:
            write(environ, given)
        assert caught.value.hint
    with pytest.raises(HermesRLError):
        write(environ, wanted("fine", tmp_path, dataset="nowhere.jsonl"))
    assert [path.name for path in tmp_path.glob("*.py")] == ["test_taken.py"]


@pytest.mark.slow
def test_a_check_tells_what_the_group_showed_and_what_another_process_got(
    unpacked: dict[str, str], tmp_path: Path
) -> None:
    environ = unpacked
    file = write(environ, wanted("sums_checked", tmp_path)).environment
    answers = Sampler(answer=lambda prompt, index: [*str(index).encode(), END_ID])
    with serving(answers) as sampler:
        arguments = ["--endpoint", f"{sampler.url}/v1", "--server-type", "vllm", "--set", "group_size=16"]
        done = hermes_rl(environ, "check", str(file), "--json", *arguments)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["ok"], done.stdout + done.stderr
    verdicts = [(one["name"], one["verdict"]) for one in found["findings"]]
    assert all(verdict == "ok" for _, verdict in verdicts), found
    text = {one["name"]: one["found"] for one in found["findings"]}
    assert text["held-out items"] == "the same in another process"
    assert "2 different scores of 16" in text["reward spread"]
    assert "38 of" in text["alignment"]
    assert len(answers.requests) == 2, "one group, and one held-out item"


@pytest.mark.slow
def test_what_is_wrong_is_told_with_its_line_and_exit_code_1(unpacked: dict[str, str], tmp_path: Path) -> None:
    environ = unpacked
    file = write(environ, wanted("sums_wrong", tmp_path)).environment
    text = file.read_text()
    line = next(number for number, one in enumerate(text.splitlines(), 1) if "form =" in one)
    wrong = text.replace("form = completion", "form = complete")
    wrong = wrong.replace("return [(left", "return sorted([(left")
    wrong = wrong.replace("right))][:count]", "right))], key=lambda one: hash(str(one)))[:count]")
    file.write_text(wrong)
    with serving(Sampler()) as sampler:
        arguments = ["--endpoint", f"{sampler.url}/v1", "--server-type", "vllm"]
        done = hermes_rl(environ, "check", f"{file}:SumsWrongEnv", *arguments)
    assert done.returncode == 1
    assert "another process gets other held-out items" in done.stdout
    assert "problem  group" in done.stdout and f"{file}:{line}" in done.stdout and "'complete'" in done.stdout


def test_a_field_that_is_refused_is_told_with_class_and_line(environ: dict[str, str], tmp_path: Path) -> None:
    file = write(environ, wanted("sums_set", tmp_path)).environment
    line = next(number for number, one in enumerate(file.read_text().splitlines(), 1) if "largest: int" in one)
    done = hermes_rl(environ, "check", str(file), "--set", "largest=100", "--set", "nonsense=1")
    assert done.returncode == 1
    assert f"{file}:{line}" in done.stdout and "SumsSetEnvConfig.largest" in done.stdout
    assert "Unknown field 'nonsense'" in done.stdout


@pytest.mark.slow
def test_a_class_that_source_text_does_not_give_is_told_at_once(tmp_path: Path) -> None:
    base = "from hermes_rl_mcp.envs import BaseEnv\n"
    for name, text, asked, words in (
        ("broken.py", "class Broken(BaseEnv:\n    pass\n", "", "line 1"),
        ("none.py", "x = 1\n", "", "defines no environment"),
        ("two.py", f"{base}class A(BaseEnv):\n    name = 'a'\nclass B(BaseEnv):\n    name = 'b'\n", "", "several"),
        ("two.py", "", ":C", "Those it has: A, B"),
        ("_hidden.py", f"{base}class A(BaseEnv):\n    name = 'h'\n", "", "name begins with _"),
    ):
        file = tmp_path / name
        if text:
            file.write_text(text)
        with pytest.raises(EnvironmentFileError, match=words) as caught:
            locate(f"{file}{asked}")
        assert str(file) in str(caught.value)
    assert locate(f"{tmp_path / 'two.py'}:B").name == "b"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["single", "tools", "dataset"])
def test_without_an_endpoint_the_model_that_comes_with_it_answers(
    environ: dict[str, str], tmp_path: Path, kind: str
) -> None:
    more = {"dataset": str(SAMPLE)} if kind == "dataset" else {"kind": kind}
    file = write(environ, wanted("checked_here", tmp_path, **more)).environment
    done = hermes_rl(environ, "check", str(file), timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "builtin:tiny at http://127.0.0.1" in done.stdout and "It can train" in done.stdout
    bare = hermes_rl(environ, "check", str(file), "--no-sample", timeout_s=500)
    assert bare.returncode == 0 and "skipped  sampling" in bare.stdout
