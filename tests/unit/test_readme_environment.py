"""The environment of the README, out of the README: short, and it works with what is said of it."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_rl_mcp.envs import BaseEnv
from hermes_rl_mcp.envs.loading import load_environment
from hermes_rl_mcp.envs.testing import make, one_group, run_now
from hermes_rl_mcp.paths import install_root

README = (install_root() / "README.md").read_text(encoding="utf-8")


def blocks(section: str) -> list[str]:
    """The Python of a section."""
    text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


TUTORIAL, HELD_OUT, POSITION, TEST, _ = blocks("Your own environment")
[WITH_TOOLS] = blocks("Environments with tools")
CALL = '<tool_call>{"name": "terminal", "arguments": {"command": "echo blue > note"}}</tool_call>'


@pytest.fixture
def digits(tmp_path: Path) -> Iterator[type[BaseEnv]]:
    """The class with all that the section adds to it, in the file that it names."""
    file = tmp_path / "digits.py"
    file.write_text(TUTORIAL + "\n" + "\n".join(textwrap.indent(one, "    ") for one in (HELD_OUT, POSITION)))
    yield load_environment(str(file))
    sys.modules.pop("digits", None)


def test_the_tutorial_has_at_most_twenty_lines_of_code() -> None:
    lines = [line for line in TUTORIAL.splitlines() if line.strip()]
    assert len(lines) <= 20


def test_its_own_test_passes_and_can_fail(digits: type[BaseEnv]) -> None:
    names: dict[str, object] = {}
    exec(compile(TEST, "README.md", "exec"), names)
    test = names["test_even_digits_are_worth_more"]
    assert callable(test)
    test()
    assert one_group(digits, ["135", "248"], item=4)["scores"] == [0.0, 3 / 12]


def test_its_held_out_items_and_its_position_are_as_told(digits: type[BaseEnv], tmp_path: Path) -> None:
    async def used() -> tuple[set[int], list[int]]:
        env = await make(digits)
        env.checkpoint_dir = tmp_path / "saved"
        env.at = 7  # type: ignore[attr-defined]
        env.save_checkpoint(3)
        return {await env.get_next_item() for _ in range(50)}, list(await env.get_eval_items(30) or [])

    trained, held_out = run_now(used())
    assert len(held_out) == 30 and not trained & set(held_out)
    assert '"at": 7' in (tmp_path / "saved" / "step-3.json").read_text()


def test_the_one_with_tools_looks_into_the_sandbox_of_its_rollout(tmp_path: Path) -> None:
    assert len([line for line in WITH_TOOLS.splitlines() if line.strip()]) <= 20
    file = tmp_path / "notes.py"
    file.write_text(WITH_TOOLS)
    notes = load_environment(str(file))
    try:
        for item, score in (("blue", 1.0), ("red", 0.0)):
            more = {"enabled_toolsets": ["terminal"], "group_size": 1}
            assert one_group(notes, [CALL, "It is written."], item=item, **more)["scores"] == [score]
    finally:
        sys.modules.pop("notes", None)


def test_every_link_of_the_table_of_contents_leads_to_a_section() -> None:
    heads = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in re.sub(r"```.*?```", "", README, flags=re.DOTALL).splitlines()
        if line.startswith("#")
    }
    links = set(re.findall(r"\]\(#([^)]+)\)", README))
    assert len(links) > 20 and links <= heads
