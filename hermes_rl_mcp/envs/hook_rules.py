"""What a command needs of an environment class, and what a hook's result must look like: said with file, class, hook.

Invariant: a class that a command cannot use is refused before its ``setup``, and nothing of the class is called for it.
An intermediate class and one that only evaluates are fine until a command needs more of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, NoneType
from typing import Any, TypeVar

from hermes_rl_mcp.errors import EnvironmentFileError

F = TypeVar("F", bound=Callable[..., Any])

_MUST, _DEFAULT = "__must_define__", "__default_hook__"
_ASYNC = {
    **{"setup": 0, "load_dataset": 0, "get_next_item": 0, "collect_trajectory": 1, "collect_trajectories": 1},
    **{"evaluate": 0, "get_eval_items": 1, "evaluate_item": 1, "cleanup": 0},
}
"""Hooks that are awaited, and how many arguments they are given besides ``self``."""
_PLAIN = {"get_messages": 1}
_EITHER = {"score_answer": 2}
_OF_DEFAULT_ROLLOUT = ("get_messages", "score_answer")


class HookError(EnvironmentFileError):
    """A hook is missing, cannot be called, or gave what it must not."""


def must_define(hook: F) -> F:
    """Marks a hook that a subclass has to write before it can train. Base classes of your own may use it, too."""
    setattr(hook, _MUST, True)
    return hook


def default_hook(hook: F) -> F:
    """Marks ``BaseEnv``'s own version of a hook, so that one of a subclass can be told from it."""
    setattr(hook, _DEFAULT, True)
    return hook


def is_own(environment: type, name: str) -> bool:
    """Whether a subclass wrote it."""
    return not getattr(getattr(environment, name), _DEFAULT, False)


def missing_hooks(environment: type) -> list[str]:
    """What has to be written before the class can make groups; abstract methods count."""
    own_rollout = is_own(environment, "collect_trajectory") or is_own(environment, "collect_trajectories")
    found = []
    for name in dir(environment):
        hook = getattr(environment, name, None)
        if getattr(hook, _MUST, False) or getattr(hook, "__isabstractmethod__", False):
            found.append(name)
    return [name for name in found if not (own_rollout and name in _OF_DEFAULT_ROLLOUT)]


def check_hooks(environment: type, command: str) -> None:
    """Raises HookError if ``command`` (serve, process, evaluate, describe, ...) cannot use the class."""
    for hooks, kind in ((_ASYNC, "async"), (_PLAIN, "plain"), (_EITHER, "either")):
        for name, arguments in hooks.items():
            _check_callable(environment, name, arguments, kind)
    if command == "evaluate" and not is_own(environment, "evaluate"):
        raise HookError(f"{place(environment)} does not define evaluate.", hint="Write evaluate(self), or use process.")
    missing = missing_hooks(environment)
    only_evaluates = is_own(environment, "evaluate") and "evaluate" not in missing
    if missing and (command in ("serve", "process") or (command == "describe" and not only_evaluates)):
        raise missing_error(environment, missing)


def missing_error(environment: type, missing: Sequence[str]) -> HookError:
    """The error that names them."""
    hint = "Write it in the class."
    if set(missing) & set(_OF_DEFAULT_ROLLOUT):
        hint = "Write get_messages(item) and score_answer(item, completion), or collect_trajectory(item) instead."
    return HookError(f"{place(environment)} does not define {', '.join(missing)}.", hint=hint)


def place(environment: type, hook: str = "") -> str:
    """``FILE: class NAME``, or ``FILE:LINE: NAME.hook`` with the line of the hook where that is known."""
    function = inspect.unwrap(getattr(environment, hook)) if hook else None
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}: {environment.__name__}.{hook}"
    try:
        file = inspect.getfile(environment)
    except (OSError, TypeError):  # made at run time, in no file
        file = environment.__module__
    return f"{file}: {environment.__name__}.{hook}" if hook else f"{file}: class {environment.__name__}"


def rollout_of(environment: type, result: Any) -> tuple[Any, list[Any]]:
    """What ``collect_trajectory`` gave: a scored item or None, and further items."""
    scored, more = _pair(environment, "collect_trajectory", result)
    if scored is not None and not (isinstance(scored, Mapping) and {"tokens", "masks", "scores"} <= set(scored)):
        raise HookError(
            f"{place(environment, 'collect_trajectory')} must give a ScoredDataItem with tokens, masks and scores, or "
            f"None; found {_short(scored)}.",
            hint="trajectory.item(score) makes one.",
        )
    return scored, more


def groups_of(environment: type, result: Any) -> tuple[list[Any] | None, list[Any]]:
    """What ``collect_trajectories`` gave, as a list of groups or None, and further items."""
    groups, more = _pair(environment, "collect_trajectories", result)
    found = groups if isinstance(groups, list) or groups is None else [groups]
    for group in found or []:
        if not isinstance(group, Mapping):
            raise HookError(
                f"{place(environment, 'collect_trajectories')} must give a ScoredDataGroup, a list of them or None; "
                f"found {_short(group)}.",
                hint="hermes_rl_mcp.envs.trajectory.group_of(items) makes one.",
            )
    return found, more


def messages_of(environment: type, result: Any) -> list[dict[str, Any]]:
    """What ``get_messages`` gave."""
    good = isinstance(result, list | tuple) and result
    if not good or not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in result):
        raise HookError(
            f"{place(environment, 'get_messages')} must give a list of messages; found {_short(result)}.",
            hint='For example [{"role": "user", "content": "3+5="}].',
        )
    return list(result)


def metrics_of(environment: type, result: Any) -> dict[str, float]:
    """What ``evaluate`` gave where it is no EvalReport: names to numbers, or None."""
    if result is None:
        return {}
    if not isinstance(result, Mapping):
        raise HookError(
            f"{place(environment, 'evaluate')} must give an EvalReport, a mapping of metrics or None; found "
            f"{_short(result)}.",
            hint='For example {"eval/percent_correct": 0.5}.',
        )
    found: dict[str, float] = {}
    for name, value in result.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise HookError(
                f"{place(environment, 'evaluate')} gave {_short(value)} for the metric {name!r}, which is no number.",
                hint="Metrics are numbers; what is said of single items belongs into EvalReport.samples.",
            ) from error
    return found


def _pair(environment: type, hook: str, result: Any) -> tuple[Any, list[Any]]:
    pair = isinstance(result, tuple | list) and len(result) == 2
    if not (pair and isinstance(result[1], list | tuple | NoneType)):
        raise HookError(
            f"{place(environment, hook)} must return two things, what it made and a list of further items; found "
            f"{_short(result)}.",
            hint="End it with: return made, []",
        )
    return result[0], list(result[1] or [])


def _check_callable(environment: type, name: str, arguments: int, kind: str) -> None:
    function = inspect.getattr_static(environment, name)
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return  # made by a decorator or bound otherwise: known only when it is called
    awaited = inspect.iscoroutinefunction(function)
    if kind == "async" and not awaited:
        raise HookError(f"{place(environment, name)} is awaited.", hint=f"Write: async def {name}, without yield.")
    if kind == "plain" and awaited:
        raise HookError(f"{place(environment, name)} is not awaited.", hint=f"Write: def {name}, without async.")
    try:
        inspect.signature(function).bind(*[None] * (arguments + 1))
    except TypeError as error:
        given = {0: "no argument", 1: "one argument", 2: "two arguments"}[arguments]
        raise HookError(
            f"{place(environment, name)} is called with {given} besides self: {error}.", hint="Correct its arguments."
        ) from error


def _short(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:80] + '...'}"
