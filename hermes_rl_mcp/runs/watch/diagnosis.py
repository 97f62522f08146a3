"""What is wrong with a run that still goes on, or why one that ended learned nothing: findings out of its own figures.

Pure: the same evidence gives the same flags. A figure that is absent proves nothing and raises no flag. Causes come
before their consequences, and a consequence that its cause explains in full is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

from hermes_rl_mcp.contracts.diagnosis import Flag, FlagName
from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.runs.watch.evidence import (
    Evidence,
    Line,
    Thresholds,
    at_least,
    mib,
    number,
    quoted,
    span,
    step_of,
    streak_of,
)

Severity = Literal["warning", "error"]


def diagnose(evidence: Evidence, limits: Thresholds | None = None) -> list[Flag]:
    """Worst first; within a severity a cause before what follows from it."""
    limits = limits or Thresholds()
    found: dict[FlagName, Flag] = {}
    for rule, causes in _RULES:
        # That the adapter of a run that ended does nothing is said whatever the cause.
        explained = any(cause in found for cause in causes) and not (evidence.ended and rule is _never_changed)
        flag = None if explained else rule(evidence, limits)
        if flag is not None:
            found.setdefault(flag.name, flag)
    return sorted(found.values(), key=lambda flag: flag.severity != "error")


# ---- rules


def _not_finite(evidence: Evidence, limits: Thresholds) -> Flag | None:
    """A number must be there and is null. Shown for some steps, so that whoever looks now and then sees it."""
    for line in reversed(evidence.lines[-limits.steps :]):
        missing = [name for name in _must_be_numbers(line) if number(line, name) is None]
        if not missing:
            continue
        now = line is evidence.lines[-1] or "train/adapter_max_abs" in missing
        good = evidence.last_checkpoint
        kept = f"The last good checkpoint is {good}." if good else "There is no checkpoint yet."
        return Flag(
            name="not_finite",
            severity="error" if now else "warning",
            evidence=f"step {step_of(line)}: {' and '.join(missing)} not finite (NaN or infinite). {kept}",
            advice=f"Lower {evidence.value('learning_rate')}, keep grad_clip_norm at 1.0, and start again.",
            setting="learning_rate",
            since_step=step_of(line),
        )
    return None


def _must_be_numbers(line: Line) -> list[str]:
    """Names of this line that cannot be null: the step's own, if the optimizer was asked to take it."""
    of_step = ("train/loss", "train/grad_norm") if number(line, "train/learning_rate") is not None else ()
    return [name for name in (*of_step, "train/adapter_max_abs") if name in line]


def _groups_failing(evidence: Evidence, limits: Thresholds) -> Flag | None:
    """The environment makes groups, and none can be used."""
    state = evidence.env_state
    if evidence.ended and evidence.record.status is not RunStatus.FAILED:
        return None  # what the environment did while it was being stopped
    if state is None:
        return _groups_refused(evidence, limits)
    if state.unusable_in_a_row < limits.groups:
        return None
    seen = (
        f"{state.unusable_in_a_row} groups in a row could not be used ({state.sent} sent, {state.failed} failed, "
        f"{state.dropped} dropped so far). The first error: {quoted(state.first_error, limits)}"
    )
    log = evidence.record.processes["env"].log
    if state.first_reason == "no_score":
        return Flag(
            name="rewards_missing",
            severity="error",
            evidence=f"the environment gives no scores: {seen}",
            advice=f"Its score must return a finite number for every answer. Correct it; its log is {log}.",
        )
    if state.first_reason == "too_long":
        advice = f"Lower {evidence.value('max_token_length')}, or raise {evidence.value('max_token_trainer_length')}."
        return Flag(name="groups_failing", severity="error", evidence=seen, advice=advice, setting="max_token_length")
    return Flag(
        name="groups_failing",
        severity="error",
        evidence=seen,
        advice=f"Correct the environment, its data or its keys; the traceback is in its log {log}.",
    )


def _groups_refused(evidence: Evidence, limits: Thresholds) -> Flag | None:
    """The same of an environment that tells nothing of itself, from the rollout API's count."""
    vitals = evidence.vitals
    if vitals is None or vitals.groups_received or (vitals.groups_rejected or 0) < limits.groups:
        return None
    return Flag(
        name="groups_failing",
        severity="error",
        evidence=f"the rollout API refused all {vitals.groups_rejected} groups that the environment sent",
        advice=f"Correct the environment; the reasons are in the API's log {evidence.record.processes['api'].log}.",
    )


def _rewards_missing(evidence: Evidence, limits: Thresholds) -> Flag | None:
    streak = streak_of(evidence.lines, lambda line: "reward/mean" in line and number(line, "reward/mean") is None)
    if len(streak) < limits.steps:
        return None
    return Flag(
        name="rewards_missing",
        severity="error",
        evidence=f"{span(streak)}: no rollout came with a reward (reward/mean is null)",
        advice="The environment must send one finite score per sequence; the trainer's log says what was left out: "
        f"{evidence.record.processes['trainer'].log}.",
        since_step=step_of(streak[0]),
    )


def _disk_low(evidence: Evidence, limits: Thresholds) -> Flag | None:
    each, free = evidence.checkpoint_bytes, evidence.free_bytes
    if evidence.ended or each is None or free is None:
        return None
    needed = limits.checkpoints * each + limits.reserve_bytes
    if free >= needed:
        return None
    return Flag(
        name="disk_low",
        severity="error" if free < each else "warning",
        evidence=f"{mib(free)} MiB are free; the next {limits.checkpoints} checkpoints of {mib(each)} MiB and "
        f"the logs need {mib(needed)} MiB",
        advice=f"Free some space now. For later runs: a smaller lora_rank or {evidence.value('keep_checkpoints')}.",
        setting="keep_checkpoints",
    )


def _stalled(evidence: Evidence, limits: Thresholds) -> Flag | None:
    record = evidence.record
    if evidence.ended or not record.stalled:
        return None
    waiting = evidence.vitals.waiting if evidence.vitals else ""
    return Flag(
        name="stalled",
        severity="error",
        evidence=record.stalled_reason or waiting or "nothing has moved for some time",
        advice="It is not restarted by itself. Read the log of the process that is waited for, or rl_stop_training: "
        "the trainer writes a checkpoint if it still answers.",
        since_step=step_of(evidence.lines[-1]) if evidence.lines else None,
    )


def _all_truncated(evidence: Evidence, limits: Thresholds) -> Flag | None:
    streak = streak_of(evidence.lines, lambda line: at_least(line, "rollouts/truncated_fraction", limits.truncated))
    if len(streak) < limits.steps:
        return None
    share = min(number(line, "rollouts/truncated_fraction") or 0.0 for line in streak)
    recent = streak[-limits.steps :]
    spread = [number(line, "groups/zero_variance_fraction") for line in recent]
    learns = any(value is not None and value < 1.0 for value in spread)
    complete = all(at_least(line, "rollouts/truncated_fraction", 1.0) for line in recent)
    equal = all(value == 1.0 for value in spread)
    consequence = ", and within every group all scores were equal" if equal else ""
    return Flag(
        name="all_truncated",
        severity="error" if complete and not learns else "warning",
        evidence=f"{span(streak)}: {'all' if share == 1 else f'at least {share:.0%} of'} completions ended at "
        f"{evidence.value('max_token_length')} instead of by themselves{consequence}",
        advice=f"Raise {evidence.value('max_token_length')} for the next run, or have the prompt ask for less.",
        setting="max_token_length",
        since_step=step_of(streak[0]),
    )


def _zero_variance(evidence: Evidence, limits: Thresholds) -> Flag | None:
    streak = streak_of(evidence.lines, lambda line: at_least(line, "groups/zero_variance_fraction", 1.0))
    if len(streak) < limits.steps:
        return None
    verdict, severity, advice, setting = _kind_of_equality(evidence, streak[-limits.steps :], limits)
    if evidence.record.status is RunStatus.COMPLETED and severity == "warning":
        return None  # it learned, and what it learned is enough
    after = evidence.values.get("max_steps_without_signal")
    until = f" After {after} such steps in a row the run fails." if after and not evidence.ended else ""
    reward = number(streak[-1], "reward/mean")
    mean = f", reward/mean {reward:.3g}" if reward is not None else ""
    return Flag(
        name="zero_variance",
        severity=severity,
        evidence=f"{span(streak)}: within every group all scores were equal: {verdict}{mean}.{until}",
        advice=advice,
        setting=setting,
        since_step=step_of(streak[0]),
    )


def _kind_of_equality(
    evidence: Evidence, lines: Sequence[Line], limits: Thresholds
) -> tuple[str, Severity, str, str | None]:
    """What the equal scores were, how bad that is, what to do, and the setting for it."""
    right = [number(line, "train/percent_correct") for line in lines]
    if None in right:  # an environment without such a share: a reward of 0 is no success, and one of 1 is full marks
        right = [number(line, "reward/mean") for line in lines]
    known = [value for value in right if value is not None]
    learned = bool(evidence.lines) and (number(evidence.lines[-1], "policy/version") or 0) > 0
    if known and min(known) >= limits.all_right:
        take = "Stop the run and take its adapter, or give it" if learned else "Give it"
        return "all right", "warning" if learned else "error", f"{take} harder problems.", None
    larger = f"a larger group_size than {evidence.values['group_size']}" if evidence.values.get("group_size") else ""
    if known and max(known) <= limits.all_wrong:
        advice = f"Make the problems easier, give partial credit, or try {larger or 'a larger group_size'}."
        return "all wrong", "error", advice, "group_size"
    advice = f"Give a reward that differs between answers to one problem, or try {larger or 'a larger group_size'}."
    return "the same score for every answer to one problem", "error", advice, "group_size"


def _adapter_not_moving(evidence: Evidence, limits: Thresholds) -> Flag | None:
    streak = streak_of(evidence.lines, _stood_still)
    if len(streak) < limits.adapter_steps:
        return None
    return Flag(
        name="adapter_not_moving",
        severity="error",
        evidence=f"{span(streak)}: the optimizer took each step with advantages that were not zero "
        f"(advantages/std {number(streak[-1], 'advantages/std'):.3g}), but train/adapter_max_abs is still 0",
        advice=f"Raise {evidence.value('learning_rate')}; if it is not tiny, see the trainer's log "
        f"{evidence.record.processes['trainer'].log}.",
        setting="learning_rate",
        since_step=step_of(streak[0]),
    )


def _stood_still(line: Line) -> bool:
    """An optimizer step with something to learn from, after which the adapter is all zeros."""
    taken = (number(line, "train/learning_rate") or 0.0) > 0
    return taken and (number(line, "advantages/std") or 0.0) > 0 and number(line, "train/adapter_max_abs") == 0


def _never_changed(evidence: Evidence, limits: Thresholds) -> Flag | None:
    """A run without signal ends like any other; its adapter must not be taken for a trained one."""
    lines = evidence.lines
    enough = bool(lines) if evidence.ended else len(lines) >= limits.steps
    if not enough or number(lines[-1], "policy/version") != 0:
        return None
    equal = number(lines[-1], "groups/zero_variance_fraction")
    if equal is not None and equal < 1.0:  # scores differed, and still nothing could be trained on
        advice = f"Tokens must come with the sampler's logprobs; see {evidence.record.processes['trainer'].log}."
    else:
        advice = (
            "Try rl_test_inference, a task that is solved sometimes, a larger group_size or a longer max_token_length."
        )
    return Flag(
        name="adapter_not_moving",
        severity="error",
        evidence=f"the model was never changed: policy/version is 0 after step {step_of(lines[-1])}, so the adapter "
        "does nothing; no step so far had anything to learn from",
        advice=advice,
        since_step=step_of(lines[0]),
    )


def _sampler_behind(evidence: Evidence, limits: Thresholds) -> Flag | None:
    lags = [(line, lag) for line in evidence.lines if (lag := number(line, "policy/lag")) is not None]
    if not lags or lags[-1][0] is not evidence.lines[-1]:
        return None
    allowed = evidence.values.get("max_batches_offpolicy")
    explained = float(allowed) if isinstance(allowed, int | float) else 1.0
    lag = lags[-1][1]
    recent = [value for _, value in lags[-limits.steps :]]
    grows = len(recent) == limits.steps and all(
        later - earlier >= limits.lag_growth for earlier, later in pairwise(recent)
    )
    margin = limits.lag_warning if explained else 0.0  # on-policy, any lag at all is wrong
    if lag <= explained or (lag < explained + margin and not grows):
        return None
    beyond = [line for line, value in lags if value > explained]
    return Flag(
        name="sampler_behind",
        severity="error" if lag >= explained + limits.lag_error else "warning",
        evidence=f"step {step_of(lags[-1][0])}: rollouts were sampled {lag:.3g} policy versions ago on average "
        f"(policy/lag{', growing' if grows else ''}); "
        f"{evidence.value('max_batches_offpolicy')} explains up to {explained:g}",
        advice="The sampler answers with old weights. An environment of this package keeps within the setting, however "
        "slow its rollouts are: stop the run and start it again. For one that is written for Atropos lower "
        "max_batches_offpolicy or worker_timeout.",
        setting="max_batches_offpolicy",
        since_step=step_of(beyond[0]) if beyond else None,
    )


_Rule = Callable[[Evidence, Thresholds], Flag | None]
_RULES: tuple[tuple[_Rule, tuple[FlagName, ...]], ...] = (
    (_not_finite, ()),
    (_groups_failing, ()),
    (_rewards_missing, ()),
    (_disk_low, ()),
    (_stalled, ()),
    (_all_truncated, ()),
    (_zero_variance, ("rewards_missing", "all_truncated")),
    (_sampler_behind, ()),
    (_adapter_not_moving, ()),
    (_never_changed, ("not_finite", "rewards_missing", "all_truncated", "zero_variance")),
)
"""In the order in which one causes the next; with each the flags that explain all it would say."""
