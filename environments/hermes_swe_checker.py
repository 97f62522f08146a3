"""Tests against a solution, as a program of its own: ``python -I -B checker.py`` in a sandbox, its job on stdin.

The solution runs in a second process (``checker.py serve FOLDER READ_FD WRITE_FD``), which never sees the tests: they
reach it as calls with plain values, and plain values come back. Invariant: what is compared are builtins of this
process, so no object, no early exit, no patched builtin and no print of the solution makes a test pass; the verdict
carries the job's mark, which the solution's process is not told.

Standard library only, Python 3.8 or later: it runs in the sandbox's own Python.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, BinaryIO, TextIO

MOST_FAILURE_CHARS = 500
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_PR_SET_DUMPABLE = 4
_ENDS_A_LOOP = (StopIteration, StopAsyncIteration)


class RemoteError(Exception):
    """The solution raised something that is no builtin exception, or its process has ended."""


def pack(value: Any, keep: Callable[[Any], int] | None = None) -> Any:
    """JSON for a builtin value; for any other, a number by which ``keep`` knows it. Raises TypeError without that."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, (int, str)):
        return _plain(value)
    if isinstance(value, (float, complex, bytes)):
        return {"t": "value", "v": repr(_plain(value))}
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return {"t": name, "v": [pack(one, keep) for one in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"t": "dict", "v": [[pack(key, keep), pack(one, keep)] for key, one in dict.items(value)]}
    if isinstance(value, (range, types.GeneratorType, map, filter, zip)):
        return {"t": "iterator", "v": [pack(one, keep) for one in value]}
    if keep is None:
        raise TypeError(f"{type(value).__name__} is no plain value")
    return {"t": "object", "v": keep(value), "name": type(value).__name__}


def unpack(value: Any, found: Callable[[int, str], Any]) -> Any:
    if not isinstance(value, dict):
        return value
    kind, held = value["t"], value["v"]
    if kind == "value":
        return _VALUES[held] if held in _VALUES else ast.literal_eval(held)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](unpack(one, found) for one in held)
    if kind == "dict":
        return {unpack(key, found): unpack(one, found) for key, one in held}
    if kind == "iterator":
        return iter([unpack(one, found) for one in held])
    return found(int(held), str(value["name"]))


_VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def _plain(value: Any) -> Any:
    """Of a subclass, what it is as the builtin."""
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    return bytes.__add__(value, b"") if isinstance(value, bytes) else complex.__add__(value, 0j)


# The solution's process.


class Server:
    """Answers calls with the solution's functions. One JSON object a line both ways."""

    def __init__(self, folder: str, asked: BinaryIO, answered: BinaryIO) -> None:
        self._folder = folder
        self._asked, self._answered = asked, answered
        self._objects: list[Any] = []

    def serve(self) -> None:
        sys.path.insert(0, self._folder)
        try:
            where = importlib.util.spec_from_file_location("solution", os.path.join(self._folder, "solution.py"))
            assert where is not None and where.loader is not None
            module = sys.modules["solution"] = importlib.util.module_from_spec(where)
            where.loader.exec_module(module)
        except BaseException as error:  # noqa: BLE001 - also SystemExit: nothing of the solution ends this
            self._say({"raised": _said(error)})
            return
        self._objects.append(module)
        self._say({"value": None})
        for line in self._asked:
            self._say(self._answer(json.loads(line)))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            value: Any = getattr(self._objects[request["of"]], request["name"])
            if request["do"] == "call":
                value = value(*(self._in(one) for one in request["args"]), **self._in(request["kwargs"]))
            elif callable(value):
                return {"callable": True}
            return {"value": pack(value, self._keep)}
        except BaseException as error:  # noqa: BLE001 - the solution's own; the test may expect it
            return {"raised": _said(error)}

    def _in(self, value: Any) -> Any:
        return unpack(value, lambda number, _: self._objects[number])

    def _keep(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _say(self, answer: dict[str, Any]) -> None:
        self._answered.write(json.dumps(answer).encode() + b"\n")
        self._answered.flush()


def _said(error: BaseException) -> list[str]:
    kinds = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
    return [kinds[0], f"{type(error).__name__}: {error}"[:MOST_FAILURE_CHARS]]


# The tests' process.


class Solution:
    """The other process, seen from the tests."""

    def __init__(self, folder: str) -> None:
        folder = os.path.abspath(folder)
        (read, told), (asked, write) = os.pipe(), os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", os.path.abspath(__file__), "serve", folder, str(asked), str(told)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(asked, told),
            cwd=folder,
        )
        os.close(told)
        os.close(asked)
        self._answers, self._asks = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self.was_tested = False
        """Whether anything of it was called, or read and no function."""

    def load(self) -> None:
        """Until solution.py was imported. Raises what it raises."""
        self._value(self._answers.readline())

    def ask(self, do: str, of: int, name: str, args: Any = (), kwargs: Any = None) -> Any:
        packed = [_outgoing(one) for one in args]
        request = {"do": do, "of": of, "name": name, "args": packed, "kwargs": _outgoing(kwargs or {})}
        try:
            self._asks.write(json.dumps(request).encode() + b"\n")
            self._asks.flush()
        except OSError:
            raise RemoteError("the solution's process has ended") from None
        value = self._value(self._answers.readline(), is_test=do == "call")
        self.was_tested |= value is not Function
        return value

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _value(self, line: bytes, *, is_test: bool = False) -> Any:
        self.was_tested |= is_test
        if not line:
            raise RemoteError("the solution's process has ended")
        answer = json.loads(line)
        if "raised" in answer:
            kind, said = answer["raised"]
            error = getattr(builtins, str(kind), None)
            # StopIteration would end a test's own loop, and what was not looked at would count as right
            if isinstance(error, type) and issubclass(error, Exception) and not issubclass(error, _ENDS_A_LOOP):
                raise error(str(said))
            raise RemoteError(str(said))
        if answer.get("callable"):
            return Function
        return unpack(answer["value"], lambda number, name: Remote(self, number, name))


class Function:
    """Something of the solution that is called."""

    def __init__(self, solution: Solution, of: int, name: str) -> None:
        self._solution, self._of, self.__name__ = solution, of, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._solution.ask("call", self._of, self.__name__, args, kwargs)


class Remote:
    """An object of the solution: its methods can be called and its plain attributes read; it equals itself alone."""

    def __init__(self, solution: Solution, number: int, name: str) -> None:
        self.__dict__.update(_solution=solution, _number=number, _name=name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self._solution.ask("get", self._number, name)
        return Function(self._solution, self._number, name) if found is Function else found

    def __repr__(self) -> str:
        return f"<{self._name} of the solution>"


def _outgoing(value: Any) -> Any:
    if isinstance(value, Remote):
        return {"t": "object", "v": value.__dict__["_number"], "name": value.__dict__["_name"]}
    return pack(value)


def check(job: dict[str, str]) -> str:
    """Runs the tests; why they do not pass, empty if they do. Tests are statements, functions ``test_...``,
    classes of them, and HumanEval's ``check(candidate)``; names that they neither define nor import are the solution's.
    Tests that use nothing of the solution pass nothing."""
    tree = ast.parse(job["tests"])
    solution = Solution(job["folder"])
    try:
        solution.load()
        module = _module(solution)
        space: dict[str, Any] = {"__name__": "tests"}
        names = _free(tree) | ({job["entry_point"]} if job["entry_point"] else set())
        space.update({name: getattr(module, name) for name in names if name.isidentifier()})
        sys.modules["solution"] = module
        exec(compile(tree, "tests", "exec"), space)
        for name, value in list(space.items()):
            if name.startswith("test_") and isinstance(value, types.FunctionType):
                _run(value)
            elif isinstance(value, type) and value.__module__ == "tests":
                _run_class(name, value)
        if isinstance(space.get("check"), types.FunctionType) and not _calls_check(tree):
            space["check"](getattr(module, job["entry_point"]))
        if not solution.was_tested:
            return "the tests never use the solution"
    except BaseException as error:  # noqa: BLE001 - whatever it is, the tests do not pass
        trace = traceback.extract_tb(error.__traceback__)
        where = [one.lineno for one in trace if one.filename == "tests" and one.lineno]
        line = job["tests"].splitlines()[where[-1] - 1].strip() if where else ""
        return f"{type(error).__name__}: {str(error) or line}"[:MOST_FAILURE_CHARS]
    finally:
        solution.end()
    return ""


def _run(test: Callable[[], Any]) -> None:
    found = test()
    if isinstance(found, types.GeneratorType):
        for _ in found:
            pass
    elif isinstance(found, types.CoroutineType):
        import asyncio  # few tests need it, and it takes longer than most of them

        asyncio.run(found)


def _run_class(name: str, kind: type) -> None:
    """Tests in a class: unittest's and pytest's. Raises what fails."""
    import unittest  # as above

    if issubclass(kind, unittest.TestCase):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
        for _, trace in (*result.failures, *result.errors):
            raise AssertionError(trace.strip().splitlines()[-1].partition("AssertionError: ")[2] or trace[-200:])
    elif name.startswith("Test"):
        for method in (one for one in dir(kind) if one.startswith("test_")):
            _run(getattr(kind(), method))


def _module(solution: Solution) -> types.ModuleType:
    module = types.ModuleType("solution")

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            found = solution.ask("get", 0, name)
        except AttributeError as error:
            raise NameError(f"solution.py has no {name}") from error
        return Function(solution, 0, name) if found is Function else found

    module.__getattr__ = find  # type: ignore[method-assign]
    return module


def _free(tree: ast.Module) -> set[str]:
    """Names that are read and nowhere bound."""
    read: set[str] = set()
    bound = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound


def _calls_check(tree: ast.Module) -> bool:
    calls = (one for part in tree.body if isinstance(part, ast.Expr) for one in [part.value])
    return any(isinstance(one, ast.Call) and getattr(one.func, "id", "") == "check" for one in calls)


def _hide() -> None:
    """The solution's process is not to read this one's memory or input."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def main(arguments: list[str], job: TextIO, verdict: TextIO) -> None:
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)  # a right answer may be a long number
    if arguments[:1] == ["serve"]:
        folder, read, write = arguments[1], int(arguments[2]), int(arguments[3])
        Server(folder, os.fdopen(read, "rb"), os.fdopen(write, "wb")).serve()
        return
    told = json.loads(job.read())
    _hide()
    failure = check(told)
    verdict.write(json.dumps({"mark": told["mark"], "failure": failure}) + "\n")
    verdict.flush()


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin, sys.stdout)
