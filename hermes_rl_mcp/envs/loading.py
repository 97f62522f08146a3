"""Loads an environment class out of a file. The file's name on disk decides, never the current folder.

The module is registered under its own stem, so that a user's file can import its siblings and they it.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from pydantic import BaseModel, ValidationError

from hermes_rl_mcp.envs.base import BaseEnv
from hermes_rl_mcp.envs.community.adapter import CommunityEnv, adapt, is_community
from hermes_rl_mcp.envs.community.source import community_source, prepare
from hermes_rl_mcp.envs.config import APIServerConfig, BaseEnvConfig
from hermes_rl_mcp.envs.hook_rules import place
from hermes_rl_mcp.envs.places import place_of_field
from hermes_rl_mcp.envs.saying import found_wrong
from hermes_rl_mcp.errors import EnvironmentFileError


def load_environment(spec: str) -> type[BaseEnv]:
    """``FILE`` or ``FILE:Class``. What importing the file raises comes through as it is."""
    path_text, class_name = spec, ""
    if ":" in spec and not Path(spec).is_file():
        path_text, _, class_name = spec.rpartition(":")
    path = Path(path_text).expanduser().absolute()
    if not path.is_file():
        raise EnvironmentFileError(f"There is no environment file {path}.", hint="Give FILE.py or FILE.py:ClassName.")
    module = _import(path)
    if not class_name:
        return _only_environment(module, path)
    chosen = getattr(module, class_name, None)
    if inspect.isclass(chosen) and is_community(chosen):
        return adapt(chosen)
    if not (inspect.isclass(chosen) and issubclass(chosen, BaseEnv)):
        found = "no such class" if chosen is None else "not a subclass of hermes_rl_mcp.envs.BaseEnv"
        raise EnvironmentFileError(
            f"{path} has no environment class '{class_name}': {found}.",
            hint="Environments written for Atropos need its library. Run: hermes-rl install-atropos"
            if chosen is not None
            else f"Classes it defines: {', '.join(_environments(module)) or 'none'}.",
        )
    return chosen


def defaults_of(environment: type[BaseEnv]) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
    """What ``config_init`` gives; a single server config (some of Atropos' environments) counts as a list of one."""
    where = place(environment, "config_init")
    try:
        given: Any = environment.config_init()
    except ValidationError as error:
        raise _bad_default(environment, error) from error
    if inspect.iscoroutine(given):
        given.close()
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise EnvironmentFileError(f"{where} must return two things: config, [server]; found {type(given).__name__}.")
    config, servers = given[0], list(given[1]) if isinstance(given[1], list | tuple) else [given[1]]
    for one, kind in ((config, BaseEnvConfig), *((server, APIServerConfig) for server in servers)):
        if not isinstance(one, BaseModel if issubclass(environment, CommunityEnv) else kind):
            raise EnvironmentFileError(
                f"{where} gives {type(one).__name__} where a {kind.__name__} belongs.",
                hint="It ends with: return MyConfig(...), [APIServerConfig(...)]",
            )
    try:  # defaults in a class are not judged when it is made
        type(config).model_validate({name: getattr(config, name) for name in type(config).model_fields})
    except ValidationError as error:
        raise _bad_default(environment, error) from error
    return config, servers


def _bad_default(environment: type[BaseEnv], error: ValidationError) -> EnvironmentFileError:
    """With the line of the field, where it is known."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    file = str(getattr(sys.modules.get(environment.__module__), "__file__", None) or "")
    declared = place_of_field(Path(file), name.split(".")[0]) if file and name else ""
    return EnvironmentFileError(
        f"{place(environment, 'config_init')} makes a {error.title} that is not valid: {name}{': ' if name else ''}"
        f"{found_wrong(first)}{f' ({declared})' if declared else ''}.",
        hint="Correct the default there.",
    )


class _FromSource(SourceFileLoader):
    """What is on disk now. Python's cache compares seconds and size, so it would run the text before a quick edit."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import(path: Path) -> ModuleType:
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that a sibling cannot shadow a library
    name = path.stem
    if source := community_source(path):
        name = prepare(path, source)
    if name in sys.modules or name in sys.stdlib_module_names:
        name = f"{name}_environment"  # a file called json.py must not become the json of everybody
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    if spec is None or spec.loader is None:
        raise EnvironmentFileError(f"{path} is not a Python file.", hint="Give FILE.py or FILE.py:ClassName.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _environments(module: ModuleType) -> dict[str, type[BaseEnv]]:
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, BaseEnv) and value.__module__ == module.__name__
    }


def _only_environment(module: ModuleType, path: Path) -> type[BaseEnv]:
    found = _environments(module)
    # A file may hold intermediate classes; the one nothing else in it derives from is meant.
    leaves = {n: c for n, c in found.items() if not any(o is not c and issubclass(o, c) for o in found.values())}
    if len(leaves) != 1:
        raise EnvironmentFileError(
            f"{path} defines {len(leaves)} environments: {', '.join(leaves) or 'none'}.",
            hint="Name one: FILE.py:ClassName." if leaves else "Derive a class from hermes_rl_mcp.envs.BaseEnv.",
        )
    return next(iter(leaves.values()))
