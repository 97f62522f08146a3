"""``hermes-rl envs check``: an environment looked at part by part, each finding shown as it is made.

The environment's own code runs only in child processes, two of them, so that what differs from process to process is
seen. Invariant: a part that cannot be looked at here is said to be skipped, never to be fine.
"""

from __future__ import annotations

import importlib.util
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx
import typer
import yaml
from pydantic import JsonValue, ValidationError

from hermes_rl_mcp.catalog.scan import scan
from hermes_rl_mcp.cli.demo_settings import parse_set
from hermes_rl_mcp.cli.programs import running, started
from hermes_rl_mcp.cli.text import printable
from hermes_rl_mcp.contracts.env_checks import CheckFinding
from hermes_rl_mcp.contracts.environments import EnvironmentInfo, ValidationReply
from hermes_rl_mcp.envs.places import place_of_field
from hermes_rl_mcp.errors import EnvironmentFileError, HermesRLError
from hermes_rl_mcp.files import read_tail
from hermes_rl_mcp.interpreters import environment_program
from hermes_rl_mcp.loopback import bound_socket
from hermes_rl_mcp.operations.children import helper_environ
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.redact import SECRET_PREFIX, redact_text, secret_values
from hermes_rl_mcp.runs.configuration.checks import check_value, problems
from hermes_rl_mcp.runs.configuration.resolve import Resolution, resolve
from hermes_rl_mcp.runs.request import BUILTIN, env_values, model_path

_POLL_S = 0.1
_TAIL_BYTES = 4096
_S = {True: "s", False: ""}
_HASH_SEEDS = ("1", "2")
"""Of the two processes: what rests on the order of a set differs between them."""


class Wanted(NamedTuple):
    """The command line."""

    file: str
    endpoint: str | None
    model: str | None
    server_type: str
    key_variable: str
    sets: tuple[str, ...]
    sample: bool
    timeout_s: float


class _Server(NamedTuple):
    """Where answers come from."""

    base_url: str
    model: str
    server_type: str
    api_key: str


def findings(at: Context, wanted: Wanted) -> Iterator[CheckFinding]:
    """All findings, in the order in which they are made. What cannot work for want of an earlier part is left out."""
    try:
        info = locate(wanted.file)
        yield CheckFinding(name="file", verdict="ok", found=f"{info.class_name}, environment '{info.name}'")
        schema = anyio.run(at.describer.describe, info)
        edits = dict(parse_set(item) for item in wanted.sets)
        if wanted.model:
            edits["model_name"] = wanted.model
        resolution = resolve(schema, at.settings.profile, edits)
    except EnvironmentFileError as error:
        fix = error.hint if error.hint and "rl_" not in error.hint else "Correct the file, then check it again."
        yield CheckFinding(name="load", verdict="problem", found=error.message, fix=fix)
        return
    except HermesRLError as error:
        yield _problem("load", error)
        return
    yield CheckFinding(name="load", verdict="ok", found=f"{schema.config_class}, {len(schema.fields)} fields")
    bad = list(_configuration(at, info, resolution, wanted))
    yield from bad
    if any(finding.verdict == "problem" for finding in bad):
        return
    yield from _parts(at, info, resolution, wanted)


def locate(spec: str) -> EnvironmentInfo:
    """The class that ``FILE`` or ``FILE:CLASS`` means, by its source text. Raises EnvironmentFileError."""
    text, class_name = spec, ""
    if ":" in spec and not Path(spec).is_file():
        text, _, class_name = spec.rpartition(":")
    file = Path(text).expanduser().absolute()
    if not file.is_file():
        raise EnvironmentFileError(f"There is no file {file}.", hint="Give FILE.py or FILE.py:CLASS.")
    found = scan(None, [file.parent])
    here = [info for info in found.environments if info.file_path == str(file)]
    chosen = [info for info in here if class_name in ("", info.class_name)]
    if len(chosen) == 1:
        return chosen[0]
    if len(chosen) > 1:
        names = ", ".join(info.class_name for info in chosen)
        raise EnvironmentFileError(f"{file} has several environments: {names}.", hint=f"Name one: {file.name}:CLASS.")
    for problem in found.problems:
        if problem.file_path == str(file):
            raise EnvironmentFileError(f"{file} cannot be read as an environment: {problem.reason}.")
    if file.name.startswith(("_", ".")):
        raise EnvironmentFileError(f"{file} is not looked at: its name begins with {file.name[0]}.", hint="Rename it.")
    if class_name:
        known = ", ".join(info.class_name for info in here) or "none"
        raise EnvironmentFileError(f"{file} has no environment class {class_name}.", hint=f"Those it has: {known}.")
    raise EnvironmentFileError(
        f"{file} defines no environment.", hint="Derive a class from hermes_rl_mcp.envs.BaseEnv in it."
    )


def show(finding: CheckFinding) -> None:
    typer.echo(f"{finding.verdict:<8} {finding.name:<16} {printable(finding.found)}")
    if finding.verdict == "ok":
        return
    for line in (finding.where, finding.fix):
        if line:
            typer.echo(f"{'':<25} {printable(line)}")


def summary(found: Sequence[CheckFinding]) -> str:
    counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in ("problem", "warning", "skipped")}
    said = [
        f"{count} {verdict}{'s' * (count > 1 and verdict != 'skipped')}" for verdict, count in counts.items() if count
    ]
    if counts["problem"]:
        return f"{', '.join(said)}: it cannot train as it is."
    return f"It can train{'; ' + ', '.join(said) if said else ''}."


def _configuration(
    at: Context, info: EnvironmentInfo, resolution: Resolution, wanted: Wanted
) -> Iterator[CheckFinding]:
    """Each field by the environment's own class and by the profile; then whether they fit each other."""
    for name, value in resolution.edits.items():
        try:
            resolution.editable(name)
            check_value(resolution, name, value)
        except HermesRLError as error:
            yield _problem(f"field {name}", error)
    values = {name: value for name, value in resolution.edits.items() if name in _own(resolution)}
    reply = anyio.run(at.describer.validate, info, values) if values else ValidationReply(ok=True)
    for name, text in reply.errors.items():
        where = place_of_field(Path(info.file_path), name)
        found = f"{resolution.schema.config_class}.{name}: {text}"
        fix = "Correct its value."
        if "valid list" in text or "valid dictionary" in text:
            fix = f"Write it as JSON, such as {name}=" + ('["a", "b"]' if "valid list" in text else '{"key": "value"}')
        yield CheckFinding(name=f"field {name}", verdict="problem", found=found, fix=fix, where=where)
    for problem in problems(resolution):
        yield CheckFinding(
            name="configuration",
            verdict="warning",
            found=f"A run with these defaults cannot start: {problem}",
            fix="Correct config_init, or set the field before a start.",
        )


def _own(resolution: Resolution) -> set[str]:
    return {field.name for field in resolution.schema.fields}


def _parts(at: Context, info: EnvironmentInfo, resolution: Resolution, wanted: Wanted) -> Iterator[CheckFinding]:
    with tempfile.TemporaryDirectory(prefix="hermes-rl-check-") as text, ExitStack() as open_parts:
        folder = Path(text)
        part = _Part(at, info, resolution, wanted, folder)
        absent = _absent(info)
        if absent:
            yield CheckFinding(name="environment", verdict="skipped", found=absent, fix=_TRAIN)
            return
        yield from _fetch_tokenizer(at, resolution, folder)
        fingerprint = None
        failed = False
        for finding in part.run(_HASH_SEEDS[0], None, None, sample=False):
            failed = failed or finding.verdict == "problem"
            fingerprint = finding.fingerprint or fingerprint
            yield finding
        if failed:
            return
        server = None
        if not wanted.sample:
            yield CheckFinding(name="sampling", verdict="skipped", found="no group was asked for (--no-sample)")
        elif wanted.endpoint:
            server = _Server(wanted.endpoint, resolution.model_name, wanted.server_type, f"${wanted.key_variable}")
        else:
            try:
                server = open_parts.enter_context(_local(at, resolution.model_name, folder, wanted.timeout_s))
            except HermesRLError as error:
                yield _problem("local model", error)
                return
        if server is not None:
            yield CheckFinding(name="sampling", verdict="ok", found=f"{server.model} at {server.base_url}")
        yield from part.run(_HASH_SEEDS[1], fingerprint, server, sample=server is not None)


_TRAIN = "Install it: pip install 'hermes-rl-mcp[train]'"


def _absent(info: EnvironmentInfo) -> str:
    """What is missing here to run environments at all; empty if nothing is."""
    if info.base == "atroposlib" or importlib.util.find_spec("transformers"):
        return ""
    return "the packages that load a tokenizer and a model are not installed, so only the source was looked at"


def _fetch_tokenizer(at: Context, resolution: Resolution, folder: Path) -> Iterator[CheckFinding]:
    """Of a model that comes with this package; it may not have been unpacked yet."""
    name = resolution.model_name
    if not name.startswith(BUILTIN) or (at.home.model_dir(name) / "tokenizer.json").is_file():
        return
    log = folder / "models.log"
    with log.open("wb") as output, started(at, "trainer.models", [name], output=output) as program:
        code = program.wait()
    if code:
        said = _last_line(at, log)
        yield CheckFinding(name="tokenizer", verdict="problem", found=f"{name} cannot be had: {said}", fix=_TRAIN)


@contextmanager
def _local(at: Context, model: str, folder: Path, timeout_s: float) -> Iterator[_Server]:
    """A sampler of its own for this check, on a port that no stranger can have taken."""
    if importlib.util.find_spec("torch") is None:
        raise HermesRLError("The local model needs packages that are not installed.", hint=f"{_TRAIN}; or --endpoint.")
    nonce, log = secrets.token_hex(16), folder / "sampler.log"
    typer.echo(f"... loading {model}", err=True)
    with bound_socket("127.0.0.1", 0) as listener, log.open("wb") as output:
        arguments = ["--model", model, "--listen-fd", str(listener.fileno()), "--nonce", nonce, "--any-model-name"]
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with started(at, "trainer.serve", arguments, (listener.fileno(),), output=output) as program:
            deadline = time.monotonic() + timeout_s
            while not _healthy(address, nonce):
                if program.interrupted:
                    raise KeyboardInterrupt
                if not program.running():
                    raise HermesRLError(f"The sampler of {model} ended: {_last_line(at, log)}", hint="See --endpoint.")
                if time.monotonic() > deadline:
                    raise HermesRLError(f"{model} was not loaded within {timeout_s:g} s.", hint="Raise --timeout.")
                time.sleep(_POLL_S)
            yield _Server(f"{address}/v1", model, "vllm", "x")


def _healthy(address: str, nonce: str) -> bool:
    try:
        health = httpx.get(f"{address}/health", timeout=5.0, trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return False
    return isinstance(health, dict) and health.get("nonce") == nonce and health.get("status") == "ok"


class _Part(NamedTuple):
    """Runs the environment's program and reads its findings as they come."""

    at: Context
    info: EnvironmentInfo
    resolution: Resolution
    wanted: Wanted
    folder: Path

    def run(
        self, hash_seed: str, fingerprint: str | None, server: _Server | None, *, sample: bool
    ) -> Iterator[CheckFinding]:
        output, log, config = (self.folder / f"{hash_seed}{ending}" for ending in (".jsonl", ".log", ".yaml"))
        config.write_text(yaml.safe_dump(self._config(server), sort_keys=False), encoding="utf-8")
        output.touch()
        command = environment_program(self.info.base, self.at.operator.environ)
        command += [f"{self.info.file_path}:{self.info.class_name}", "check"]
        command += ["--config", str(config), "--output", str(output), "--sample", str(sample).lower()]
        command += ["--fingerprint", fingerprint] if fingerprint else []
        longest = self.resolution.fields["max_token_trainer_length"].value
        command += ["--longest", str(longest)] if self.info.base != "atroposlib" else []
        done = 0
        with log.open("wb") as said, running(command, self._environ(hash_seed), output=said) as program:
            deadline = time.monotonic() + self.wanted.timeout_s
            going_on = True
            while going_on:
                going_on = program.running() and time.monotonic() < deadline
                found = list(_read(output))
                yield from found[done:]
                done = len(found)
                if going_on:
                    time.sleep(_POLL_S)
            late, interrupted = program.running(), program.interrupted
        if interrupted:
            raise KeyboardInterrupt
        if late:
            text = f"it was not done after {self.wanted.timeout_s:g} s, behind what stands above."
            yield CheckFinding(name="time", verdict="problem", found=text, fix="Raise --timeout, or find what hangs.")
        elif code := program.wait():
            text = f"the environment's process ended with code {code}: {_last_line(self.at, log)}"
            yield CheckFinding(name="process", verdict="problem", found=text, fix="Correct what it says.")

    def _config(self, server: _Server | None) -> dict[str, JsonValue]:
        """What a run would get, but for the places of a run."""
        values = env_values(self.resolution, self.at.home, f"check_{self.info.name}")
        changes: Mapping[str, JsonValue] = {
            "use_wandb": False,
            "include_messages": True,
            "ensure_scores_are_not_same": False,
            "tokenizer_name": values.get("tokenizer_name") or model_path(self.at.home, self.resolution.model_name),
        }
        env = values | {name: value for name, value in changes.items() if name in self.resolution.fields}
        entry = server or _Server("http://127.0.0.1:9/v1", self.resolution.model_name, "vllm", "x")
        return {
            "env": env,
            "openai": [
                {
                    "model_name": entry.model,
                    "base_url": entry.base_url,
                    "server_type": entry.server_type,
                    "api_key": entry.api_key,
                    "health_check": False,
                }
            ],
        }

    def _environ(self, hash_seed: str) -> dict[str, str]:
        given = self.at.operator.environ
        environ = helper_environ(self.at.home, given)
        mine = {name: value for name, value in given.items() if name.startswith(SECRET_PREFIX)}
        key = self.wanted.key_variable
        return {**environ, **mine, key: given.get(key) or "x", "PYTHONHASHSEED": hash_seed}


def _read(output: Path) -> Iterator[CheckFinding]:
    """Whole lines only: the last one may still be written."""
    data = output.read_text(encoding="utf-8")
    for line in data[: data.rfind("\n") + 1].splitlines():
        try:
            yield CheckFinding.model_validate_json(line)
        except ValidationError:
            yield CheckFinding(name="process", verdict="problem", found=f"it wrote {line[:200]!r}", fix="")


def _last_line(at: Context, log: Path) -> str:
    lines = [line.strip() for line in read_tail(log, _TAIL_BYTES).splitlines() if line.strip()]
    return redact_text(lines[-1], secret_values(at.operator.environ))[:500] if lines else "it said nothing"


def _problem(name: str, error: HermesRLError) -> CheckFinding:
    return CheckFinding(name=name, verdict="problem", found=error.message, fix=error.hint or "Correct it.")
