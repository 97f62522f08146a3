"""``python -P -m trainer.serve --model NAME [--adapter DIR]`` or ``--run RUN_DIR``: the sampling endpoint alone.

Invariant: same wire and same sampler as in a run; nothing is written to disk except a built-in model's files.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
from pathlib import Path
from typing import NamedTuple

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.loopback import is_loopback, port_number
from hermes_rl_mcp.paths import Home
from trainer import weights
from trainer.process import prepare
from trainer.stopping import StopSignal

_log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT (exit 0; 143 at once while the model is still being fetched or loaded); 1 with a
    sentence on standard error if it cannot."""
    options = _parse(arguments)
    environ = prepare()
    lifeline.watch(environ)
    stop = StopSignal()
    stop.install()
    try:
        _serve(options, Home.from_environ(environ), stop)
    except HermesRLError as error:
        _log.error("%s", error)
        return 1
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.serve", description="Serve a model for sampling.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="builtin:tiny, builtin:smollm2-135m, a Hub id or a folder")
    what.add_argument("--run", type=Path, help="a run's directory: its base model and its adapter")
    parser.add_argument("--step", type=int, default=None, help="of the run; its last checkpoint without it")
    parser.add_argument("--adapter", type=Path, default=None, help="PEFT adapter folder")
    parser.add_argument("--any-model-name", action="store_true", help="requests may name any model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--allow-remote", action="store_true", help="let --host be another address than loopback")
    parser.add_argument("--port", type=port_number, default=8001)
    parser.add_argument("--listen-fd", type=int, default=None, help="descriptor of a bound socket to serve on")
    parser.add_argument("--nonce", default="", help="answered on /health")
    parser.add_argument("--path-prefix", default="", help="first path component of all addresses")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--torch-threads", type=int, default=0, help="0 = all cores")
    parser.add_argument("--max-rows", type=int, default=64, help="completions decoded together")
    options = parser.parse_args(arguments)
    if not options.allow_remote and not is_loopback(options.host):
        parser.error(
            f"{options.host} is not a loopback address: anybody in the network could use this machine. "
            "Add --allow-remote if that is what you want."
        )
    return options


class _What(NamedTuple):
    """What is served: a base model as it is named in requests and as it is loaded, and an adapter with its name."""

    model: str
    base: str
    path: str
    adapter: Path | None
    adapter_name: str


def _what(options: argparse.Namespace, home: Home) -> _What:
    if options.run is not None:
        found = weights.find(options.run, options.step)
        run = found.config.run
        return _What(found.base_name, run.base_model, run.model_path, found.adapter, found.run_id)
    asked: str = options.model
    path = str(home.model_dir(asked)) if asked.startswith("builtin:") else asked
    name = Path(asked).absolute().name if Path(asked).is_dir() else asked
    adapter: Path | None = options.adapter
    return _What(name, asked, path, adapter, adapter.absolute().name if adapter else "")


def _serve(options: argparse.Namespace, home: Home, stop: StopSignal) -> None:
    from trainer.backends.local.backend import LocalBackend
    from trainer.http_server import HttpServer, listener
    from trainer.models.materialise import materialise
    from trainer.sampling_app import create_app
    from trainer.service import SamplingService, Served

    what = _what(options, home)
    served = [Served(what.model, adapter=False)]
    if what.adapter is not None:
        served.insert(0, Served(what.adapter_name, adapter=True))
    service = SamplingService(
        nonce=options.nonce or secrets.token_hex(8),
        model=what.model,
        served=() if options.any_model_name else served,
    )
    app = create_app(service, path_prefix=options.path_prefix, any_host=not is_loopback(options.host))
    server = HttpServer(app, listener(options.host, options.port, options.listen_fd))
    try:
        folder = materialise(what.base, what.path, service.phase)
        config = TrainerConfig(
            device=options.device, torch_threads=options.torch_threads, sampler_max_rows=options.max_rows
        )
        backend = LocalBackend.open(folder, config, service.phase, adapter=what.adapter)
        stop.gracefully()
        service.loaded(backend)
        service.ready("serving")
        _log.info("serving %s on port %d", what.model, server.port)
        stop.event.wait()
        backend.close()
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
