"""``run-api`` by hand, or ``python -P -m hermes_rl_mcp.rollout_api --config RUN/config.yaml --listen-fd N`` in a run.

Exit status 0 after SIGTERM or SIGINT; 1, with the reason on stderr, if it could not start.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.contracts.config import RunConfig
from hermes_rl_mcp.contracts.runs import ChildReport
from hermes_rl_mcp.errors import HermesRLError, InvalidValueError
from hermes_rl_mcp.files import now, write_atomic
from hermes_rl_mcp.loopback import port_number
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.rollout_api.app import create_app
from hermes_rl_mcp.rollout_api.journal import Journal
from hermes_rl_mcp.rollout_api.limits import MIB, Limits
from hermes_rl_mcp.rollout_api.news import News
from hermes_rl_mcp.rollout_api.rollouts import Rollouts
from hermes_rl_mcp.rollout_api.serving import adopt, listen, serve

log = logging.getLogger("hermes_rl_mcp.rollout_api")


@dataclass(frozen=True)
class Settings:
    """Who this server is. All empty when a person starts it alone."""

    nonce: str = ""
    path_prefix: str = ""
    journal: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the server has its own
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    lifeline.watch(os.environ)
    try:
        _run(arguments)
    except HermesRLError as error:
        log.error("%s", error)
        if arguments.config:
            _report(RunPaths(arguments.config.absolute().parent), error)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> None:
    settings = _settings(arguments.config, arguments.journal)
    sock = (
        listen(arguments.host, arguments.port, allow_remote=arguments.allow_remote)
        if arguments.listen_fd is None
        else adopt(arguments.listen_fd)
    )
    journal = Journal(settings.journal) if settings.journal else None
    rollouts = Rollouts(Limits(queue_bytes=arguments.queue_limit_mib * MIB), journal=journal)
    news = News()
    app = create_app(
        rollouts, nonce=settings.nonce, path_prefix=settings.path_prefix, any_host=arguments.allow_remote, news=news
    )
    try:
        asyncio.run(serve(app, sock, news.close))
    finally:
        if journal:
            journal.close()


def _settings(config: Path | None, journal: Path | None) -> Settings:
    if config is None:
        return Settings(journal=journal)
    try:
        run = RunConfig.model_validate(yaml.safe_load(config.read_text())).run
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise InvalidValueError(f"{config} cannot be used: {error}") from error
    return Settings(run.nonce, run.path_prefix, journal or RunPaths(config.absolute().parent).journal)


def _report(paths: RunPaths, error: HermesRLError) -> None:
    report = ChildReport(
        process="api",
        status="failed",
        error=error.message,
        hint=error.hint or None,
        finished_at=now(),
    )
    try:
        write_atomic(paths.report("api"), report.model_dump_json(indent=1) + "\n")
    except OSError as problem:
        log.error("The report cannot be written: %s", problem)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run-api", description="Trajectory API: environments post scored groups, a trainer takes batches."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port_number, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--allow-remote", action="store_true", help="permit a --host that others can reach")
    parser.add_argument("--listen-fd", type=int, metavar="N", help="use this inherited, bound socket instead")
    parser.add_argument("--config", type=Path, help="config.yaml of a run; its folder gets the journal")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep the queue in FILE across restarts")
    parser.add_argument(
        "--queue-limit-mib",
        type=int,
        default=Limits().queue_bytes // MIB,
        help="memory for groups (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
