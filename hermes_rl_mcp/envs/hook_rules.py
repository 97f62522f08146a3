"""What a command needs of an environment class, and what a hook's result must look like: said with file, class, hook.

Invariant: a class that a command cannot use is refused before its ``setup``, and nothing of the class is called for it.
An intermediate class and one that only evaluates are fine until a command needs more of them.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, NoneType
from typing import Any, TypeVar

from hermes_rl_mcp.envs.groups import MissingScoreError
from hermes_rl_mcp.envs.saying import shown
from hermes_rl_mcp.errors import EnvironmentFileError

F = TypeVar("F", bound=Callable[..., Any])

_MUST, _DEFAULT = "__must_define__", "__default_hook__"
_ASYNC = {
    **{"setup": 0, "load_dataset": 0, "get_next_item": 0, "collect_trajectory": 1, "collect_trajectories": 1},
    **{"evaluate": 0, "get_eval_items": 1, "evaluate_item": 1, "cleanup": 0, "wandb_log": 1},
    **{"postprocess_histories": 1, "add_rollouts_for_wandb": 2, "create_rollout_table": 1},
}
"""Hooks that are awaited, and how many arguments they are given besides ``self``."""
_PLAIN = {"get_messages": 1, "save_checkpoint": 1, "load_checkpoint": 0, "item_key": 1}
_EITHER = {"score_answer": 2}
_SDK = str(Path(__file__).parent)
_OURS = ("hermes_rl_mcp.", "builtins", "abc")
"""Modules whose classes are not the user's."""
_NAME = re.compile(r"[^\s./\\\0-\x1f][^/\\\0-\x1f]{0,199}")
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


def known_hooks(environment: type) -> dict[str, dict[str, int]]:
    """For ``async``, ``plain`` and ``either`` the names of hooks and how many arguments they are given besides
    ``self``; also those that a base class of the environment names in its ``hook_arguments``."""
    more = getattr(environment, "hook_arguments", {})
    ours = {"async": _ASYNC, "plain": _PLAIN, "either": _EITHER}
    return {kind: {**hooks, **more.get(kind, {})} for kind, hooks in ours.items()}


def own_hooks(environment: type) -> list[str]:
    """The hooks that are the user's."""
    users = [vars(one) for one in environment.__mro__ if not one.__module__.startswith(_OURS)]
    names = [name for hooks in known_hooks(environment).values() for name in hooks]
    return [name for name in names if any(name in one for one in users)]


def check_hooks(environment: type, command: str) -> None:
    """Raises HookError if ``command`` (serve, process, evaluate, describe, ...) cannot use the class."""
    _check_attributes(environment)
    for kind, hooks in known_hooks(environment).items():
        for name, arguments in hooks.items():
            if hasattr(environment, name):
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
    own = {name for one in environment.__mro__ if not one.__module__.startswith(_OURS) for name in vars(one)}
    for name in missing:
        if close := difflib.get_close_matches(name, own - set(missing), n=1):
            hint = f"Is {close[0]} meant to be {name}? {hint}"
    return HookError(f"{place(environment)} does not define {', '.join(missing)}.", hint=hint)


def place(environment: type, hook: str = "") -> str:
    """``FILE: class NAME``, or ``FILE:LINE: NAME.hook`` with the line of the hook where that is known."""
    function = inspect.unwrap(getattr(environment, hook)) if hook else None
    code = getattr(function, "__code__", None)
    if code is not None and not code.co_filename.startswith(_SDK):
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
            f"None; found {shown(scored)}.",
            hint="trajectory.item(score) makes one.",
        )
    return scored, more


def groups_of(environment: type, result: Any, hook: str = "collect_trajectories") -> tuple[list[Any] | None, list[Any]]:
    """What ``collect_trajectories`` gave, as a list of groups or None, and further items."""
    groups, more = _pair(environment, hook, result)
    found = groups if isinstance(groups, list) or groups is None else [groups]
    for group in found or []:
        if not isinstance(group, Mapping):
            raise HookError(
                f"{place(environment, hook)} must give a ScoredDataGroup, a list of them or None; found "
                f"{shown(group)}.",
                hint="hermes_rl_mcp.envs.trajectory.group_of(items) makes one.",
            )
    return found, more


def messages_of(environment: type, result: Any) -> list[dict[str, Any]]:
    """What ``get_messages`` gave."""
    good = isinstance(result, list | tuple) and result
    if not good or not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in result):
        raise HookError(
            f"{place(environment, 'get_messages')} must give a list of messages; found {shown(result)}.", hint=_MESSAGES
        )
    for number, one in enumerate(result):
        content = one.get("content")
        if isinstance(content, str):
            wrong = "half of a surrogate pair, which is no text" if _is_broken(content) else ""
        else:
            wrong = "" if isinstance(content, list) or (content is None and "tool_calls" in one) else shown(content)
        if wrong:
            raise HookError(
                f"{place(environment, 'get_messages')} must give text as the content of each message; found {wrong} in "
                f"message {number}.",
                hint=_MESSAGES,
            )
    return list(result)


def prompt_of(environment: type, result: Any) -> str:
    """What ``format_prompt`` gave."""
    if not isinstance(result, str) or _is_broken(result):
        raise HookError(
            f"{place(environment, 'format_prompt')} must give the user's message as text; found {shown(result)}.",
            hint='End it with: return f"..."',
        )
    return result


_MESSAGES = 'For example [{"role": "user", "content": "3+5="}].'


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def score_of(environment: type, value: Any, parts: Any, hook: str = "score_answer") -> tuple[float, dict[str, float]]:
    """A score and its named parts as finite numbers; whatever counts as a number is fine. Raises MissingScoreError."""
    number = _number(value)
    if number is None:
        raise MissingScoreError(f"{place(environment, hook)} gave {shown(value)}, which is no finite number")
    if not isinstance(parts, Mapping):
        raise MissingScoreError(f"{place(environment, hook)} must give the parts by name; found {shown(parts)}")
    found = {str(name): _number(part) for name, part in parts.items()}
    for name, part in found.items():
        if part is None:
            raise MissingScoreError(
                f"{place(environment, hook)} gave {shown(parts.get(name))} for the part {name!r}, which is no finite "
                "number"
            )
    return number, {name: part for name, part in found.items() if part is not None}


def _number(value: Any) -> float | None:
    """What is a finite number, or counts as one (numpy's, torch's, text of one)."""
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 - user code: an object of its own may raise anything
        return None
    return number if math.isfinite(number) else None


def metrics_of(environment: type, result: Any) -> dict[str, float]:
    """Metrics that ``evaluate`` gave: names to numbers, or None. NaN is a number here."""
    if result is None:
        return {}
    if not isinstance(result, Mapping):
        raise HookError(
            f"{place(environment, 'evaluate')} must give an EvalReport, a mapping of metrics or None; found "
            f"{shown(result)}.",
            hint='For example {"eval/percent_correct": 0.5}.',
        )
    found: dict[str, float] = {}
    for name, value in result.items():
        try:
            found[str(name)] = float(value)
        except Exception as error:
            # User code: an object of its own may raise anything.
            raise HookError(
                f"{place(environment, 'evaluate')} gave {shown(value)} for the metric {name!r}, which is no number.",
                hint="Metrics are numbers; what is said of single items belongs into EvalReport.samples.",
            ) from error
    return found


def samples_of(environment: type, samples: Any) -> list[dict[str, Any]]:
    """Samples that ``evaluate`` gave: one mapping each."""
    if not isinstance(samples, list | tuple) or not all(isinstance(one, Mapping) for one in samples):
        wrong = next((one for one in samples if not isinstance(one, Mapping)), samples) if samples else samples
        raise HookError(
            f"{place(environment, 'evaluate')} must give samples as a list of mappings; found {shown(wrong)}.",
            hint='For example EvalReport(metrics, [{"question": "3+5=", "answer": "8", "score": 1.0}]).',
        )
    return [dict(one) for one in samples]


def _check_attributes(environment: type) -> None:
    """Those of the class that are no hooks."""
    if getattr(environment, "inner_class", None) is not None:
        return  # written for Atropos, which asks nothing of them
    if isinstance(inspect.getattr_static(environment, "config_init"), FunctionType):
        raise HookError(
            f"{place(environment, 'config_init')} is called on the class.", hint="Put @classmethod above it."
        )
    name, tokens = getattr(environment, "name", None), getattr(environment, "typical_tokens", None)
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise HookError(
            f"{place(environment)} has name = {shown(name)}.",
            hint="A name is a line of text that can name a file: no slashes, no dot in front. None = the file's name.",
        )
    if tokens is not None and not (_is_pair(tokens) and all(isinstance(one, int) and one > 0 for one in tokens)):
        raise HookError(
            f"{place(environment)} has typical_tokens = {shown(tokens)}.",
            hint="Two whole numbers, of a prompt and of an answer: typical_tokens = (100, 400).",
        )
    defaults = getattr(environment, "trainer_defaults", {})
    try:
        dumped = json.dumps(defaults, allow_nan=False)
    except (TypeError, ValueError):
        dumped = ""
    if not isinstance(defaults, Mapping) or not dumped or not all(isinstance(one, str) for one in defaults):
        raise HookError(
            f"{place(environment)} has trainer_defaults = {shown(defaults)}.",
            hint='Names of fields and plain values: trainer_defaults = {"learning_rate": 1e-3}.',
        )


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _pair(environment: type, hook: str, result: Any) -> tuple[Any, list[Any]]:
    if not (_is_pair(result) and isinstance(result[1], list | tuple | NoneType)):
        raise HookError(
            f"{place(environment, hook)} must return two things, what it made and a list of further items; found "
            f"{shown(result)}.",
            hint="End it with: return made, []",
        )
    return result[0], list(result[1] or [])


def _check_callable(environment: type, name: str, arguments: int, kind: str) -> None:
    function = inspect.getattr_static(environment, name)
    if not callable(getattr(environment, name)):
        raise HookError(
            f"{place(environment)} has {name} = {shown(getattr(environment, name))}, where a function belongs.",
            hint=f"Write: {'async ' if kind == 'async' else ''}def {name}.",
        )
    if isinstance(function, staticmethod | classmethod):
        raise HookError(
            f"{place(environment, name)} is called on the environment object.",
            hint=f"Leave out @{type(function).__name__}, and begin its arguments with self.",
        )
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
        given = ("no argument", "one argument", "two arguments", "three arguments")[arguments]
        raise HookError(
            f"{place(environment, name)} is called with {given} besides self: {error}.", hint="Correct its arguments."
        ) from error
