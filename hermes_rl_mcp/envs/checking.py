"""``check``: does an environment do what training asks of it? Run hook by hook, each finding written as it is made.

Invariant: nothing is trained, registered or sent anywhere but to the sampling endpoint; a finding names the line where
the user's code is at fault, as far as it can be known.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from hermes_rl_mcp.contracts.env_checks import CheckFinding, CheckVerdict
from hermes_rl_mcp.contracts.rollout_api import ScoredData
from hermes_rl_mcp.envs import check_agent
from hermes_rl_mcp.envs.alike import plain
from hermes_rl_mcp.envs.base import BaseEnv, Score
from hermes_rl_mcp.envs.check_group import TimedClient, judge_group, judge_prompt
from hermes_rl_mcp.envs.groups import REJECTED, BadGroupError, checked
from hermes_rl_mcp.envs.hook_rules import check_hooks, is_own, messages_of, own_hooks
from hermes_rl_mcp.envs.options import Flags, resolve
from hermes_rl_mcp.envs.places import place_of_class, place_of_error, place_of_hook
from hermes_rl_mcp.envs.saying import VALUE_CHARS, cut
from hermes_rl_mcp.errors import EndpointError, HermesRLError

HELD_OUT = 32
"""Held-out items asked for, and training items drawn to be compared with them."""
_RECONNECT_S = 10.0
"""A person waits: an endpoint that is not there is an answer."""


class Stop(Exception):
    """What comes next cannot be looked at."""


def check(environment: type[BaseEnv], flags: Flags, output: int) -> None:
    """The command: findings as lines of JSON to ``--output`` or standard output. Without ``--sample true`` what needs
    no model; with ``--fingerprint`` whether the held-out items are those of the process that gave it. ``--longest``:
    most tokens of a sequence that a run would train on."""
    options = resolve(environment, flags, {"use_wandb": False, "include_messages": True})
    target = os.open(flags.plain["output"], os.O_WRONLY | os.O_APPEND) if "output" in flags.plain else output

    def write(finding: CheckFinding) -> None:
        os.write(target, f"{finding.model_dump_json()}\n".encode())

    async def run() -> None:
        try:
            env = environment(options.config, options.servers, options.slurm, options.testing)
        except Exception as error:  # noqa: BLE001 - user code; what it raises is the finding
            text, where = f"{type(error).__name__}: {error}", place_of_error(error, _file_of(environment))
            write(CheckFinding(name="making it", verdict="problem", found=text, fix="Correct that line.", where=where))
            return
        env.server.reconnect_s = _RECONNECT_S
        env.trainer_max_tokens = int(flags.plain["longest"]) if "longest" in flags.plain else None
        try:
            checker = Checker(env, _file_of(environment), write)
            if "fingerprint" in flags.plain or sampling:
                await checker.with_model(flags.plain.get("fingerprint"), sampling)
            else:
                await checker.before_sampling()
        finally:
            try:
                await env.cleanup()
            finally:
                await env.server.close()

    sampling = flags.plain.get("sample", "false") == "true"
    asyncio.run(run())


class Checker:
    """One environment object. ``write`` gets each finding at once."""

    def __init__(self, env: BaseEnv, file: str, write: Callable[[CheckFinding], None]) -> None:
        self.env = env
        self._file = file
        self._write = write

    async def before_sampling(self) -> None:
        """All that needs no model."""
        try:
            self._hooks()
            await self._setup()
            item = await self._item()
            await self._tools()
            self._messages(item)
            await self._held_out(None)
            await self._no_overlap(item)
            self._position()
        except Stop:
            return

    async def with_model(self, fingerprint: str | None, sample: bool) -> None:
        """In a second process: the same held-out items again, and, with ``sample``, one group by the endpoint."""
        try:
            await self._setup(quietly=True)
            if fingerprint is not None:
                await self._held_out(fingerprint)
            absent = await asyncio.to_thread(check_agent.without_sandbox, self.env) if sample else None
            if absent:
                self._write(absent)
            elif sample:
                await self._group()
                await self._evaluate_item()
        except Stop:
            return

    # What is looked at.

    def _hooks(self) -> None:
        if _is_community(self.env):
            self._say("hooks", "ok", "those of Atropos")
            return
        try:
            check_hooks(type(self.env), "process")
        except HermesRLError as error:
            self._broken("hooks", error)
            raise Stop from error
        self._say("hooks", "ok", ", ".join(own_hooks(type(self.env))))

    async def _setup(self, quietly: bool = False) -> None:
        began = time.monotonic()
        await self._guarded("setup", self.env.setup(), "Correct it, or the field of the configuration that it names.")
        seconds = time.monotonic() - began
        try:
            await asyncio.to_thread(lambda: self.env.tokenizer)
        except HermesRLError as error:
            self._say("tokenizer", "problem", error.message, error.hint)
            raise Stop from error
        if not quietly:
            self._say("setup", "ok", f"setup() took {seconds:.1f} s")

    async def _item(self) -> Any:
        item = await self._guarded("item", self.env.get_next_item())
        where = place_of_hook(type(self.env), "get_next_item")
        if item is None:
            self._say(
                "item",
                "problem",
                "get_next_item() gave None, which means: nothing at the moment.",
                "Return an item. Data that ends is gone through again, as by an index modulo its length.",
                where,
            )
            raise Stop
        self._say("item", "ok", f"get_next_item() gave {cut(repr(item), VALUE_CHARS)}")
        return item

    async def _tools(self) -> None:
        if (env := check_agent.with_tools(self.env)) is None:
            return
        await self._guarded("tools", env.connect(), "Correct mcp_servers.")
        try:
            for finding in check_agent.tools(env):
                self._write(finding)
        except Exception as error:
            # User code: own_tools.
            self._broken("tools", error, where=place_of_hook(type(env), "own_tools"))
            raise Stop from error

    def _messages(self, item: Any) -> None:
        kind, agent = type(self.env), check_agent.with_tools(self.env)
        hook = "format_prompt" if agent else "get_messages"
        if _is_community(self.env) or not (agent or is_own(kind, hook)):
            self._say("messages", "skipped", "the environment asks in its own way, not through get_messages(item)")
            return
        where = place_of_hook(kind, hook)
        try:
            if agent:
                messages, text = check_agent.first_prompt(agent, item)
            else:
                messages = messages_of(kind, self.env.get_messages(item))
                text = self.env.server.renderer.prompt(messages)
        except Exception as error:
            # User code, and a chat template that may refuse what it gets.
            self._broken("messages", error, where=where)
            raise Stop from error
        self._write(judge_prompt(self.env, len(messages), len(self.env.server.renderer.encode(text)), where))

    async def _held_out(self, expected: str | None) -> None:
        items = await self._guarded("held-out items", self.env.get_eval_items(HELD_OUT))
        again = await self._guarded("held-out items", self.env.get_eval_items(HELD_OUT))
        where = place_of_hook(type(self.env), "get_eval_items")
        fixed = "Return the same items in the same order each time: sort them, and seed what is drawn by a constant."
        if items is None:
            if expected is None:
                self._say(
                    "held-out items",
                    "warning",
                    "get_eval_items(count) names none, so results will not say whether a run improved the model.",
                    "Write get_eval_items(count): items that training never asks.",
                )
            return
        first = [plain(one) for one in items]
        if first != [plain(one) for one in again or []]:
            self._say("held-out items", "problem", "two calls of get_eval_items gave different items.", fixed, where)
        elif len(set(first)) < len(first):
            text = f"{len(first) - len(set(first))} of {len(first)} held-out items are there twice."
            self._say("held-out items", "warning", text, "Give different ones.", where)
        fingerprint = sha256(json.dumps(first).encode()).hexdigest()
        if expected is None:
            text = f"{len(first)} of them, the same in two calls"
            self._write(CheckFinding(name="held-out items", verdict="ok", found=text, fingerprint=fingerprint))
        elif fingerprint == expected:
            self._say("held-out items", "ok", "the same in another process")
        else:
            text = "another process gets other held-out items, so runs could not be compared."
            fix = f"{fixed} Sets of texts, hash() and the clock differ from process to process."
            self._say("held-out items", "problem", text, fix, where)

    async def _no_overlap(self, item: Any) -> None:
        held_out = {plain(one) for one in await self.env.get_eval_items(HELD_OUT) or []}
        if not held_out:
            return
        drawn = [item]
        while len(drawn) < HELD_OUT and (one := await self._guarded("item", self.env.get_next_item())) is not None:
            drawn.append(one)
        both = sum(plain(one) in held_out for one in drawn)
        if both:
            self._say(
                "held-out items",
                "problem",
                f"{both} of {len(drawn)} training items are held-out ones: training would see what it is judged by.",
                "Leave held-out items out of get_next_item.",
                place_of_hook(type(self.env), "get_next_item"),
            )
        else:
            self._say("held-out items", "ok", f"none among {len(drawn)} training items")

    def _position(self) -> None:
        """Whether what the environment saves can be written and read again."""
        if _is_community(self.env):
            return
        with tempfile.TemporaryDirectory(prefix="hermes-rl-check-") as folder:
            self.env.checkpoint_dir = Path(folder)
            try:
                self.env.save_checkpoint(0)
                if saved := list(Path(folder).glob("step-*.json")):
                    self.env.load_checkpoint()
            except Exception as error:  # noqa: BLE001 - user code; what it raises is the finding
                self._broken("position", error, "What save_checkpoint passes on must be small and plain JSON.")
                return
            finally:
                self.env.checkpoint_dir = None
        kept = "its place in the data is saved and read again" if saved else "saves no place: a resumed run begins anew"
        self._say("position", "ok", kept)

    async def _group(self) -> None:
        env = self.env
        if not _is_community(env):
            env.server = TimedClient.like(env.server, lambda: env.tokenizer)
        client = env.server if isinstance(env.server, TimedClient) else None
        item = await self._guarded("item", env.get_next_item())
        asked = plain(item)
        warnings, faults = _Warnings(), check_agent.ToolFaults()
        began = time.monotonic()
        with warnings, faults:
            found = await self._guarded("group", self._in_time(env.groups_for(item)))
        seconds = time.monotonic() - began
        if plain(item) != asked:
            text = "the hooks changed the item: each rollout of a group, and each later one, gets another task."
            self._say("item", "problem", text, "Copy what you change: item = dict(item).", self._scorer())
        if not found:
            self._say(
                "group",
                "problem",
                "collect_trajectories gave no group.",
                "Return a group of group_size scored rollouts.",
                place_of_hook(type(env), "collect_trajectories"),
            )
            raise Stop
        data = [self._checked(group) for group in found]
        if warnings.count:
            text = f"{warnings.count} rollouts failed and were run again. The first: {warnings.first}"
            place = place_of_error(warnings.error, self._file) if warnings.error else ""
            self._say("rollouts", "warning", text, "Answers that cannot be scored should get a score, too.", place)
        if agent := check_agent.with_tools(env):
            for finding in check_agent.judge_rollouts(agent, faults.errors, self._file):
                self._write(finding)
        for group in data:
            for finding in judge_group(env, group, seconds, client, self._scorer()):
                self._write(finding)

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        limit_s = self.env.config.worker_timeout
        try:
            async with asyncio.timeout(limit_s if limit_s > 0 else None) as scope:
                return await work
        except TimeoutError as error:
            if not scope.expired():
                raise
            hint = "Find what hangs, or raise worker_timeout."
            raise HermesRLError(f"There was no group within worker_timeout = {limit_s:g} s.", hint=hint) from error

    def _scorer(self) -> str:
        """Where rollouts are scored."""
        own = own_hooks(type(self.env))
        hooks = ("compute_reward", "score_answer", "collect_trajectory", "collect_trajectories")
        return next((place_of_hook(type(self.env), hook) for hook in hooks if hook in own), "")

    def _checked(self, group: Mapping[str, Any]) -> ScoredData:
        try:
            return checked(group, group_size=self.env.config.group_size)
        except BadGroupError as error:
            scored = self._scorer() if error.reason == "no_score" else ""
            self._say(
                "alignment",
                "problem",
                f"The group could not be sent ({error.reason}): {error}.",
                "Tokens, masks and logprobs have one entry for each token; masks are -100 or the token itself.",
                scored or place_of_hook(type(self.env), "collect_trajectories"),
            )
            raise Stop from error

    async def _evaluate_item(self) -> None:
        items = await self._guarded("held-out items", self.env.get_eval_items(1))
        if not items:
            return
        found = await self._guarded("evaluation", self.env.evaluate_item(items[0]))
        score = found if isinstance(found, Score) else Score(float(found))
        self._say("evaluation", "ok", f"evaluate_item gave {score.value:g} for the first held-out item")

    # Saying it.

    async def _guarded(self, name: str, call: Any, fix: str = "Correct that line.") -> Any:
        """What the hook gives. Raises Stop after saying what it raised."""
        try:
            return await call if inspect.isawaitable(call) else call
        except Exception as error:
            # User code: whatever it raises is the finding.
            self._broken(name, error, fix)
            raise Stop from error

    def _broken(self, name: str, error: Exception, fix: str = "Correct that line.", where: str = "") -> None:
        if isinstance(error, BadGroupError) and error.reason == REJECTED:
            fix = "If the model is too weak for it, no fault: try another, a larger group_size or max_token_length."
            self._say(name, "warning", f"{error}.", fix)
            return
        if isinstance(error, HermesRLError):
            text, fix = error.message, error.hint or fix
        else:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        where = place_of_error(error, self._file) or where
        if not where and (lost := _lost(error)):
            self._say(name, "problem", text, lost.hint or "See that the endpoint answers.")
            return
        if not where and f"{self._file}:" not in text:
            where = place_of_class(type(self.env))
        self._say(name, "problem", text, fix, where)

    def _say(self, name: str, verdict: CheckVerdict, found: str, fix: str = "", where: str = "") -> None:
        self._write(CheckFinding(name=name, verdict=verdict, found=found, fix=fix, where=where))


class _Warnings(logging.Handler):
    """Counts the failed rollouts that the SDK's own collection logs and makes up for, while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0
        self.first = ""
        self.error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1
        if not self.first:
            self.first = record.getMessage()
            self.error = getattr(record, "error", None)

    def __enter__(self) -> _Warnings:
        logging.getLogger("hermes_rl_mcp.envs.base").addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("hermes_rl_mcp.envs.base").removeHandler(self)


def _lost(error: BaseException | None) -> EndpointError | None:
    """The endpoint's failure behind an error."""
    while error is not None and not isinstance(error, EndpointError):
        error = error.__cause__
    return error


def _file_of(environment: type[BaseEnv]) -> str:
    return str(getattr(sys.modules.get(environment.__module__), "__file__", None) or "")


def _is_community(env: BaseEnv) -> bool:
    """Whether it was written for Atropos; its hooks are other ones."""
    return hasattr(env, "inner_class")
