"""``python -P -m trainer.serve --model NAME [--adapter DIR]``: the sampling endpoint alone, without training.

Invariant: same wire and same sampler as in a run; nothing is written to disk except a built-in model's files.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
from pathlib import Path

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.loopback import is_loopback, port_number
from hermes_rl_mcp.paths import Home
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
    parser.add_argument("--model", required=True, help="builtin:tiny, builtin:smollm2-135m, a Hub id or a folder")
    parser.add_argument("--adapter", type=Path, default=None, help="PEFT adapter folder")
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


def _serve(options: argparse.Namespace, home: Home, stop: StopSignal) -> None:
    from trainer.backends.local.backend import LocalBackend
    from trainer.http_server import HttpServer, listener
    from trainer.models.materialise import materialise
    from trainer.sampling_app import create_app
    from trainer.service import SamplingService

    service = SamplingService(nonce=options.nonce or secrets.token_hex(8), model=options.model)
    app = create_app(service, path_prefix=options.path_prefix, any_host=not is_loopback(options.host))
    server = HttpServer(app, listener(options.host, options.port, options.listen_fd))
    try:
        model_path = str(home.model_dir(options.model)) if options.model.startswith("builtin:") else options.model
        folder = materialise(options.model, model_path, service.phase)
        config = TrainerConfig(
            device=options.device, torch_threads=options.torch_threads, sampler_max_rows=options.max_rows
        )
        backend = LocalBackend.open(folder, config, service.phase, adapter=options.adapter)
        stop.gracefully()
        service.loaded(backend)
        service.ready("serving")
        _log.info("serving %s on port %d", options.model, server.port)
        stop.event.wait()
        backend.close()
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
