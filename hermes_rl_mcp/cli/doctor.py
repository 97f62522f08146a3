"""``hermes-rl doctor``: can this machine train, and if not, what to do.

Each check looks at one thing, within a bound, and changes nothing that stays: no run is closed, no process ended, no
environment imported. What belongs to a server is looked at as a server would see it, with ``$HERMES_HOME/.env``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hermes_rl_mcp.cli import findings_home, findings_machine, findings_surroundings, findings_tools
from hermes_rl_mcp.cli.findings import Finding
from hermes_rl_mcp.errors import HermesRLError, InvalidValueError
from hermes_rl_mcp.operations.settings import effective_environ, load_settings
from hermes_rl_mcp.paths import Home, claims_dir


def findings(environ: Mapping[str, str], say: Callable[[str], None]) -> Iterator[Finding]:
    """All findings in the order in which a person would ask. ``say`` is told before a check that takes seconds."""
    home = Home.from_environ(environ)
    try:
        effective: Mapping[str, str] = effective_environ(home, environ)
    except InvalidValueError as error:
        yield Finding(".env", "problem", error.message, error.hint)
        effective = environ
    yield from findings_machine.python()
    yield from findings_machine.packages()
    yield from findings_machine.atropos(effective)
    yield from findings_machine.floors()
    say("asking torch")
    yield from findings_machine.torch(effective)
    yield from findings_machine.gpu(effective)
    yield findings_machine.memory()
    yield findings_machine.disk(home.root)
    yield from findings_home.folders(home, claims_dir(environ))
    yield from findings_home.runs(home)
    yield from findings_home.leftovers(home)
    yield from findings_home.ports(home)
    yield from findings_home.models(home.models)
    yield from findings_surroundings.keys(home.env_file, effective)
    yield from findings_surroundings.variables(home.env_file, environ, effective)
    yield from _settings(environ)
    yield from findings_tools.toolsets(effective)
    yield findings_tools.containers(effective)
    say("asking the hub")
    yield findings_surroundings.hub(effective)
    yield findings_surroundings.client()


def _settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The operator's settings, and the environments that a server with them would offer."""
    try:
        settings = load_settings(environ).settings
    except HermesRLError as error:
        yield Finding("settings", "problem", error.message, error.hint)
        return
    yield Finding("settings", "ok", f"profile {settings.profile.name}; selection and edits in {settings.session}.json")
    yield from findings_surroundings.environments(settings.env_dirs)
