"""What the scan finds in source text, and what it says about the rest."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from hermes_rl_mcp.catalog import scan as scan_module
from hermes_rl_mcp.catalog.scan import find, scan
from hermes_rl_mcp.contracts.environments import EnvironmentInfo
from hermes_rl_mcp.errors import UnknownEnvironmentError
from hermes_rl_mcp.paths import bundled_environments


def write(folder: Path, name: str, source: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


def names(folder: Path) -> set[str]:
    return {info.name for info in scan(None, [folder]).environments}


def only(folder: Path) -> EnvironmentInfo:
    [info] = scan(None, [folder]).environments
    return info


@pytest.mark.parametrize(
    ("imports", "base"),
    [
        ("from hermes_rl_mcp.envs import BaseEnv", "BaseEnv"),
        ("from hermes_rl_mcp.envs.base import BaseEnv as Parent", "Parent"),
        ("import hermes_rl_mcp.envs", "hermes_rl_mcp.envs.BaseEnv"),
        ("import hermes_rl_mcp.envs.base as b", "b.BaseEnv"),
        ("from hermes_rl_mcp.envs import BaseEnv", "BaseEnv[int]"),
        ("from unknown.place import BaseEnv", "BaseEnv"),
        ("from other import Mixin\nfrom hermes_rl_mcp.envs import BaseEnv", "Mixin, BaseEnv"),
    ],
)
def test_a_class_that_descends_from_base_env_is_found_however_it_is_imported(
    tmp_path: Path, imports: str, base: str
) -> None:
    write(tmp_path, "a.py", f"{imports}\nclass A({base}):\n    '''Adds.\n\n    More.'''\n    name = 'adder'\n")
    info = only(tmp_path)
    assert (info.name, info.class_name, info.description, info.stem) == ("adder", "A", "Adds.", "a")
    assert info.base == "hermes_rl_mcp"


def test_an_annotated_name_counts_and_without_one_the_file_stem_is_the_name(tmp_path: Path) -> None:
    write(tmp_path, "one.py", "from e import BaseEnv\nclass A(BaseEnv):\n    name: str = 'annotated'\n")
    write(tmp_path, "two.py", "from e import BaseEnv\nclass A(BaseEnv):\n    other = 1\n")
    assert names(tmp_path) == {"annotated", "two"}


def test_an_atropos_environment_says_that_it_needs_atroposlib(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "from atroposlib.envs.base import BaseEnv\nclass A(BaseEnv):\n    name = 'x'\n")
    assert only(tmp_path).base == "atroposlib"


def test_indirect_subclasses_are_found_across_files_and_folders_and_their_bare_base_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "common.py", "from hermes_rl_mcp.envs import BaseEnv\nclass Common(BaseEnv):\n    pass\n")
    write(tmp_path, "middle.py", "import common\nclass Middle(common.Common):\n    name = 'middle'\n")
    write(tmp_path, "deep/leaf.py", "from ..middle import Middle\nclass Leaf(Middle):\n    name = 'leaf'\n")
    write(tmp_path, "deep/far.py", "from environments.common import Common\nclass Far(Common):\n    name = 'far'\n")
    assert names(tmp_path) == {"middle", "leaf", "far"}


def test_classes_that_only_look_like_environments_are_not_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.py",
        """
        class BaseEnv: ...
        class Config: name = "config"
        class Reader(Config): name = "reader"
        class Loop(Loop): name = "loop"
        def inner():
            class Hidden(BaseEnv): name = "hidden"
        """,
    )
    assert names(tmp_path) == set()


def test_private_files_caches_and_hidden_folders_are_skipped(tmp_path: Path) -> None:
    source = "from e import BaseEnv\nclass A(BaseEnv):\n    name = 'x'\n"
    for place in ("_a.py", "__pycache__/a.py", "_private/a.py", ".hidden/a.py"):
        write(tmp_path, place, source)
    assert names(tmp_path) == set()


def test_files_that_cannot_be_read_are_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "broken.py", "class A(:\n")
    (tmp_path / "binary.py").write_bytes(b"a = '\x00'\n")
    (tmp_path / "latin.py").write_bytes(b"a = '\xe9'\n")
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    write(tmp_path, "good.py", "from e import BaseEnv\nclass A(BaseEnv):\n    name = 'good'\n    odd = '\\d'\n")
    monkeypatch.setattr(scan_module, "MAX_FILE_BYTES", 500)
    write(tmp_path, "huge.py", "#" * 501)
    result = scan(None, [tmp_path, tmp_path / "absent"])
    assert [info.name for info in result.environments] == ["good"]
    reasons = {Path(problem.file_path).name: problem.reason for problem in result.problems}
    assert set(reasons) == {"broken.py", "binary.py", "latin.py", "pipe.py", "gone.py", "huge.py", "absent"}
    assert "line 1" in reasons["broken.py"]
    assert "500 bytes" in reasons["huge.py"]
    assert "not a folder" in reasons["absent"]


def test_sec_11_links_that_leave_the_folder_are_reported_and_not_followed(tmp_path: Path) -> None:
    outside = write(
        tmp_path / "outside", "secret.py", "from e import BaseEnv\nclass A(BaseEnv):\n    name = 'secret'\n"
    )
    inside = tmp_path / "inside"
    write(inside, "a.py", "from e import BaseEnv\nclass A(BaseEnv):\n    name = 'a'\n")
    (inside / "link.py").symlink_to(outside)
    (inside / "folder").symlink_to(tmp_path / "outside")
    result = scan(None, [inside])
    assert [info.name for info in result.environments] == ["a"]
    assert [Path(problem.file_path).name for problem in result.problems] == ["link.py"]


def test_sec_15_nothing_in_a_scanned_file_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    write(tmp_path, "a.py", f"open({str(mark)!r}, 'w')\nfrom e import BaseEnv\nclass A(BaseEnv):\n    name = 'a'\n")
    assert names(tmp_path) == {"a"}
    assert not mark.exists()


def test_a_user_environment_wins_a_clash_of_names_and_the_clash_is_reported(tmp_path: Path) -> None:
    source = "from e import BaseEnv\nclass A(BaseEnv):\n    name = 'same'\n"
    bundled, user = write(tmp_path / "bundled", "a.py", source), write(tmp_path / "user", "a.py", source)
    result = scan(bundled.parent, [user.parent])
    assert [(info.file_path, info.source) for info in result.environments] == [(str(user), "user")]
    [problem] = result.problems
    assert problem.file_path == str(bundled)
    assert str(user) in problem.reason


def test_of_several_environments_with_one_name_each_can_be_selected_and_the_first_keeps_it(tmp_path: Path) -> None:
    source = "from e import BaseEnv\nclass A(BaseEnv):\n    name = 'same'\n"
    for place in ("a.py", "b.py", "c/b.py", "d.py"):
        write(tmp_path, place, source)
    write(tmp_path, "d.py", source + "class B(A):\n    name = 'same'\n")
    bundled = write(tmp_path / "bundled_ones", "other.py", source).parent
    (user := tmp_path / "user").mkdir()
    for place in ("a.py", "b.py", "c", "d.py"):
        (tmp_path / place).rename(user / place)
    result = scan(bundled, [user])
    found = {info.name: (Path(info.file_path).relative_to(tmp_path), info.class_name) for info in result.environments}
    assert found == {
        "same": (Path("user/a.py"), "A"),
        "b": (Path("user/b.py"), "A"),
        "c.b": (Path("user/c/b.py"), "A"),
        "d": (Path("user/d.py"), "A"),
        "d.B": (Path("user/d.py"), "B"),
        "other": (Path("bundled_ones/other.py"), "A"),
    }
    assert all(find(result.environments, name).name == name for name in found)
    assert len(result.problems) == 5
    assert any("listed as 'c.b'" in problem.reason for problem in result.problems)


def test_name_and_file_stem_both_select_and_an_unknown_name_tells_what_there_is(tmp_path: Path) -> None:
    write(tmp_path, "gsm8k_tinker.py", "from e import BaseEnv\nclass A(BaseEnv):\n    name = 'gsm8k'\n")
    found = scan(None, [tmp_path]).environments
    assert find(found, "gsm8k") == find(found, "gsm8k_tinker")
    with pytest.raises(UnknownEnvironmentError) as error:
        find(found, "gsm")
    assert error.value.payload["available"] == ["gsm8k"]


def test_the_bundled_environments_are_found_without_problems() -> None:
    result = scan(bundled_environments(), [])
    assert {"arithmetic", "gsm8k"} <= {info.name for info in result.environments}
    assert result.problems == []


def test_a_link_to_itself_and_a_name_that_is_no_text_hide_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, "good.py", "from hermes_rl_mcp.envs import BaseEnv\nclass Good(BaseEnv): name = 'good'\n")
    (tmp_path / "self.py").symlink_to("self.py")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff.py")).write_text("")
    found = scan(None, [tmp_path])
    assert [info.name for info in found.environments] == ["good"]
    reasons = {Path(problem.file_path).name: problem.reason for problem in found.problems}
    assert reasons == {"self.py": "not a regular file", "odd\\xff.py": "its path is not valid UTF-8; rename it"}
    found.model_dump_json()


def test_names_and_descriptions_can_always_be_sent(tmp_path: Path) -> None:
    source = """
    from hermes_rl_mcp.envs import BaseEnv
    class Odd(BaseEnv):
        "half \\ud800 a pair"
        name = "two\\nlines"
    """
    write(tmp_path, "odd.py", source)
    assert only(tmp_path).name == "odd"
    assert only(tmp_path).description == "'half \\ud800 a pair'"


def test_an_empty_reason_of_the_parser_gets_a_name(tmp_path: Path) -> None:
    write(tmp_path, "deep.py", "x = " + "-" * 100_000 + "1")
    [problem] = scan(None, [tmp_path]).problems
    assert problem.reason.startswith("not valid Python: ")
    assert problem.reason != "not valid Python: "
