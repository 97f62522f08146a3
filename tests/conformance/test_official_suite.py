"""The official conformance suite at both revisions that it freezes requirements for.

The product may fail only what needs the suite's own fixtures (``expected.*.yml``; a line too many fails as well); our
server class with these fixtures mounted passes all that is required.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from node_tools import SUITE, need_node, run_node
from served import free_port, listening, product

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
REQUIREMENTS = ("2025-11-25", "2026-07-28")


def suite(address: str, requirements: str, folder: Path, *arguments: str) -> tuple[int, str]:
    url = address.replace("127.0.0.1", "localhost") + "/mcp"
    out = ["-o", str(folder / "out")]
    done = run_node(SUITE, ["server", "--url", url, "--requirements", requirements, *out, *arguments], folder, 600)
    return done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("requirements", REQUIREMENTS)
def test_the_product_fails_only_what_needs_the_suites_own_fixtures(
    environ: dict[str, str], tmp_path: Path, requirements: str
) -> None:
    need_node()
    expected = HERE / f"expected.{requirements}.yml"
    with product(environ, tmp_path / "server.log") as address:
        code, said = suite(address, requirements, tmp_path, "--expected-failures", str(expected))
    assert code == 0, said


@pytest.mark.parametrize("requirements", REQUIREMENTS)
def test_our_server_class_passes_everything_with_the_suites_fixtures_on_it(
    environ: dict[str, str], tmp_path: Path, requirements: str
) -> None:
    need_node()
    port = free_port()
    command = [sys.executable, str(HERE / "fixture_server.py"), str(port)]
    with listening(command, port, environ, tmp_path / "server.log"):
        code, said = suite(f"http://127.0.0.1:{port}", requirements, tmp_path)
    assert code == 0, said + (tmp_path / "server.log").read_text()[-3000:]
