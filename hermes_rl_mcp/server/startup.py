"""Gets the server up in the least time, because a client waits for it at every start.

Importing the SDK builds validators for several hundred message types of two protocol versions, of which a session uses
a few dozen. In this block they are built at first use instead, and no garbage is collected while so many objects are
made that all stay. Annotations that are text are compiled once, not once for each field. Together about a third of the
time from start to ``tools/list``. Whatever pydantic does not let itself be told is built at once, as ever.
"""

from __future__ import annotations

import gc
import sys
import threading
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

_DRAWS_BOXES = "rich"
"""The SDK imports it for its own log handler, httpx for its command line; a server has no use for either."""
_LATER = ("mcp", "httpx2")
"""Bring along the SDK's client, and what it fetches resources with that lie elsewhere: a server here has neither."""
_loading = threading.RLock()
HTTP_SERVER = "uvicorn"
"""The SDK's event streams import it wherever they may be served, to be told when it ends."""


@contextmanager
def quick_start() -> Iterator[None]:
    """For the duration of the block; what was set before is set again after it."""
    usual = BaseModel.model_config
    was_enabled = gc.isenabled()
    gc.disable()
    BaseModel.model_config = ConfigDict(**usual, defer_build=True)
    try:
        for package in _LATER:
            _later(package)
        with _annotations_once(), _adapters_later(), _rebuilds_later(), without(_DRAWS_BOXES):
            yield
    finally:
        BaseModel.model_config = usual
        gc.freeze()
        if was_enabled:
            gc.enable()


class _Later(ModuleType):
    """A package whose own code runs when somebody asks it for a name. Its modules can be imported without that."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__spec__ is None or self.__spec__.loader is None:
            raise AttributeError(name)
        with _loading:  # another thread that asks meanwhile waits for the whole package
            if type(self) is _Later:
                if "_runs" in self.__dict__:  # its own code asks for what it has not made yet
                    raise AttributeError(name)
                self.__dict__["_runs"] = True
                try:
                    self.__spec__.loader.exec_module(self)
                finally:
                    del self.__dict__["_runs"]
                self.__class__ = ModuleType  # type: ignore[assignment]  # a plain module from here on
            return getattr(self, name)


def _later(package: str) -> None:
    """Puts the import of a package off until a name of it is asked for."""
    if package not in sys.modules and (spec := find_spec(package)) is not None:
        put_off: Any = module_from_spec(spec)
        put_off.__class__ = _Later
        sys.modules[package] = put_off


@contextmanager
def _annotations_once() -> Iterator[None]:
    """``typing`` compiles each annotation that is text; of three thousand that are read here, 700 differ. It finds its
    ``compile`` among the built-in functions, unless there is one of its own."""
    setattr(typing, "compile", cache(compile))  # noqa: B010 - to a type checker there is no such name
    try:
        yield
    finally:
        delattr(typing, "compile")


@contextmanager
def _adapters_later() -> Iterator[None]:
    """``TypeAdapter`` takes ``defer_build`` from a model's configuration only; those of the SDK are of unions."""
    usual = TypeAdapter.__dict__.get("_defer_build")
    setattr(TypeAdapter, "_defer_build", True)  # noqa: B010 - to a type checker it is a property
    try:
        yield
    finally:
        if usual is None:
            delattr(TypeAdapter, "_defer_build")
        else:
            setattr(TypeAdapter, "_defer_build", usual)  # noqa: B010


@contextmanager
def _rebuilds_later() -> Iterator[None]:
    """``Model.model_rebuild()`` below a class asks for what first use does anyway (by a call with arguments)."""
    usual = BaseModel.__dict__["model_rebuild"]

    def rebuild(model: type[BaseModel], /, **how: Any) -> bool | None:
        built: bool | None = usual.__func__(model, **how) if how else None
        return built

    setattr(BaseModel, "model_rebuild", classmethod(rebuild))  # noqa: B010 - as above
    try:
        yield
    finally:
        setattr(BaseModel, "model_rebuild", usual)  # noqa: B010


@contextmanager
def without(package: str) -> Iterator[None]:
    """Who imports it in this block finds that it is not installed."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # the documented way to make an import fail
    try:
        yield
    finally:
        del sys.modules[package]
