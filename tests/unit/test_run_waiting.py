"""Which process waits for what: the sentence, the culprit, and for how long nothing has moved."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_rl_mcp.contracts.rollout_api import HealthReply
from hermes_rl_mcp.contracts.sampling_api import SamplingHealth
from hermes_rl_mcp.contracts.vitals import EnvState
from hermes_rl_mcp.runs.watch.vitals import Stillness
from hermes_rl_mcp.runs.watch.waiting import Look, waiting


def api(**changes: Any) -> HealthReply:
    counts = {"environments": 1, "current_step": 4, "queue_size": 0, "groups_received": 9, "groups_rejected": 0}
    flags = {"trainer_registered": True, "trainer_started": True}
    return HealthReply.model_validate({"status": "ok", "nonce": "n", **flags, **counts, **changes})


def trainer(**changes: Any) -> SamplingHealth:
    values = {"status": "ok", "phase": "training", "nonce": "n", "trainer_initialized": True, "model": "m"}
    return SamplingHealth.model_validate({**values, "policy_version": 4, "step": 4, **changes})


def look(**changes: Any) -> Look:
    values: dict[str, Any] = {"api": api(), "trainer": trainer(), "env": None, "states": {}, "groups_per_batch": 4}
    return Look(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "culprit", "words"),
    [
        ({"states": {"trainer": "stopped"}, "trainer": None}, "trainer", "the trainer is stopped (SIGSTOP)"),
        ({"states": {"env": "tracing-stop"}}, "env", "the environment is held by a debugger"),
        ({"trainer": None}, "trainer", "the trainer does not answer"),
        ({"api": None, "trainer": None}, "api", "the rollout API does not answer"),
        (
            {"trainer": None, "states": {"trainer": "disk-sleep"}},
            "trainer",
            "the trainer does not answer and is blocked in the kernel (disk?)",
        ),
        (
            {
                "trainer": trainer(phase="evaluating", open_requests=2),
                "env": EnvState(time="t", evaluating="base: 3 of 40 answers"),
            },
            "env",
            "training is complete; base and adapter answer held-out items (base: 3 of 40 answers)",
        ),
        (
            {"trainer": trainer(phase="evaluating"), "still_s": {"activity": 40.0}},
            "env",
            "training is complete; base and adapter answer held-out items (not begun, no token decoded for 40 s)",
        ),
        ({"api": api(batches_out=1)}, "trainer", "the trainer trains a batch, step 5"),
        (
            {"api": api(batches_out=1), "still_s": {"activity": 310.4}},
            "trainer",
            "the trainer has had a batch for step 5, but has done nothing for 310 s (training)",
        ),
        (
            {"trainer": trainer(open_requests=4), "still_s": {"activity": 310.0}},
            "trainer",
            "the environment waits for the sampler: 4 requests open, no token decoded for 310 s",
        ),
        (
            {"trainer": trainer(open_requests=1)},
            "trainer",
            "the environment waits for the sampler: 1 request open",
        ),
        (
            {"api": api(queue_size=4)},
            "trainer",
            "a batch is ready (4 groups queued), but the trainer does not take it (training)",
        ),
        (
            {"still_s": {"groups_received": 320.0}},
            "env",
            "the trainer waits for a batch: 0 of 4 groups queued, the environment has sent nothing for 320 s and has "
            "no request open at the sampler",
        ),
        (
            {"env": EnvState(time="t", running=2), "api": api(queue_size=3)},
            "env",
            "the trainer waits for a batch: 3 of 4 groups queued, the environment sends groups and has no request open "
            "at the sampler; it is making 2 groups",
        ),
        (
            {"env": EnvState(time="t", unusable_in_a_row=7, first_error="judge said 401")},
            "env",
            "the trainer waits for a batch: 0 of 4 groups queued, the environment sends groups and has no request open "
            "at the sampler; its last 7 groups could not be used",
        ),
        (
            {"api": api(environments=0)},
            "env",
            "the trainer waits for a batch: 0 of 4 groups queued, and no environment is registered",
        ),
        (
            {"env_done": True},
            "env",
            "the trainer waits for a batch: 0 of 4 groups queued, and the environment has ended",
        ),
    ],
)
def test_the_sentence_names_who_waits_for_what(changes: dict[str, Any], culprit: str, words: str) -> None:
    assert waiting(look(**changes)) == (words, culprit)


def test_a_stopped_process_is_named_before_what_the_others_wait_for() -> None:
    seen = look(states={"trainer": "stopped"}, trainer=None, api=api(environments=0))
    assert waiting(seen).words == "the trainer is stopped (SIGSTOP)"


def test_stillness_is_counted_until_any_figure_changes_and_by_figure() -> None:
    still = Stillness(gap_s=100)
    assert still.see({"step": 1, "groups": 5}, 1000.0) == 0
    assert still.see({"step": 1, "groups": 5}, 1010.0) == 10
    assert still.see({"step": 1, "groups": 6}, 1020.0) == 0
    assert still.still_s == {"step": 20, "groups": 0}
    assert still.see({"step": 1, "groups": 6}, 1025.0) == 5


def test_a_missing_answer_neither_moves_nor_forgets() -> None:
    still = Stillness(gap_s=100)
    still.see({"groups": 5, "step": 1}, 0.0)
    assert still.see({"groups": None, "step": 1}, 10.0) == 10
    assert still.see({"groups": 5, "step": 1}, 20.0) == 20, "the same figure again is no movement"
    assert still.see({"groups": 0, "step": 1}, 21.0) == 0, "a lower one is"


def test_fi_31_fi_32_a_pause_of_the_onlooker_itself_is_no_stillness_of_the_run() -> None:
    still = Stillness(gap_s=11)
    still.see({"step": 1}, 0.0)
    assert still.see({"step": 1}, 3600.0) == 11, "the machine slept, or we were stopped"
    assert still.see({"step": 1}, 3500.0) == 11, "a clock that goes back takes nothing away"
