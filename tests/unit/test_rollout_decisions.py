"""What the rollout API decides over time: leases that run out, environments that fall silent, a disk that is full."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from hermes_rl_mcp.contracts.rollout_api import RegisterEnv, Registration
from hermes_rl_mcp.errors import NotFoundError
from hermes_rl_mcp.rollout_api import events
from hermes_rl_mcp.rollout_api.env_status import env_status
from hermes_rl_mcp.rollout_api.groups import Group
from hermes_rl_mcp.rollout_api.journal import Journal
from hermes_rl_mcp.rollout_api.limits import Limits
from hermes_rl_mcp.rollout_api.rollouts import Rollouts, UnavailableError
from hermes_rl_mcp.rollout_api.state import State


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rollouts(clock: Clock) -> Rollouts:
    made = Rollouts(clock=clock)
    made.register(registration())
    return made


def registration(batch_size: int = 8, starting_step: int = 0) -> Registration:
    return Registration(
        wandb_group="g",
        wandb_project="p",
        batch_size=batch_size,
        max_token_len=64,
        checkpoint_dir="c",
        save_checkpoint_interval=1,
        starting_step=starting_step,
        num_steps=50,
    )


def env(group_size: int = 4, minimum: float | None = None) -> RegisterEnv:
    return RegisterEnv(max_token_length=64, weight=1.0, group_size=group_size, min_batch_allocation=minimum)


def post(rollouts: Rollouts, tag: int, size: int = 4, env_id: int | None = None) -> None:
    rollouts.submit([Group(b"%d" % tag, size, env_id)], f"{tag}")


def tags(rollouts: Rollouts, *, leased: bool = False) -> list[int] | None:
    batch = rollouts.hand_out(leased=leased)
    return None if batch is None else [int(group.raw) for group in batch.groups.values()]


def test_an_unacknowledged_batch_comes_again_only_after_the_lease_has_run_out(rollouts: Rollouts, clock: Clock) -> None:
    for tag in range(4):
        post(rollouts, tag)
    assert tags(rollouts, leased=True) == [0, 1]
    clock.now += rollouts.limits.lease_timeout_s - 1
    assert tags(rollouts, leased=True) == [2, 3]
    assert tags(rollouts, leased=True) is None
    clock.now += 1
    assert tags(rollouts, leased=True) == [0, 1]
    clock.now += rollouts.limits.lease_timeout_s  # now both have run out, the second first
    assert tags(rollouts, leased=True) == [0, 1]
    assert tags(rollouts, leased=True) == [2, 3]


def test_a_batch_whose_lease_ran_out_cannot_be_acknowledged_twice_over(rollouts: Rollouts, clock: Clock) -> None:
    for tag in range(2):
        post(rollouts, tag)
    first = rollouts.hand_out(leased=True)
    clock.now += rollouts.limits.lease_timeout_s
    second = rollouts.hand_out(leased=True)
    assert first and second
    with pytest.raises(NotFoundError):
        rollouts.acknowledge(first.batch_id)
    rollouts.acknowledge(second.batch_id)
    assert rollouts.state.step == 1


def test_writing_a_leased_batch_does_not_end_its_lease_and_a_failed_write_does(rollouts: Rollouts) -> None:
    for tag in range(2):
        post(rollouts, tag)
    batch = rollouts.hand_out(leased=True)
    assert batch
    rollouts.written(batch.batch_id)
    assert batch.batch_id in rollouts.state.out
    rollouts.not_written(batch.batch_id)
    assert tags(rollouts) == [0, 1]


def test_the_end_of_a_write_after_a_reset_changes_nothing(rollouts: Rollouts) -> None:
    post(rollouts, 1, size=8)
    batch = rollouts.hand_out(leased=False)
    assert batch
    rollouts.reset()
    rollouts.not_written(batch.batch_id)
    rollouts.written(batch.batch_id)
    assert (rollouts.state.step, rollouts.state.live_groups, rollouts.state.live_bytes) == (0, 0, 0)


def test_a_dead_environment_with_a_minimum_share_does_not_stop_the_training(rollouts: Rollouts, clock: Clock) -> None:
    rollouts.hand_out(leased=False)
    rollouts.register_env(env(minimum=0.5))
    for tag in range(2):
        post(rollouts, tag)
    assert tags(rollouts) is None
    clock.now += rollouts.limits.environment_silent_s - 1
    assert tags(rollouts) is None
    clock.now += 2
    assert rollouts.health("").environments == 0
    assert tags(rollouts) == [0, 1]


@pytest.mark.parametrize("sign_of_life", ["status", "groups", "repeated groups"])
def test_polling_and_posting_keep_an_environment_alive(rollouts: Rollouts, clock: Clock, sign_of_life: str) -> None:
    rollouts.hand_out(leased=False)
    env_id = rollouts.register_env(env()).env_id
    assert env_id is not None
    post(rollouts, 0, env_id=env_id)
    for tag in range(1, 4):
        clock.now += rollouts.limits.environment_silent_s - 1
        if sign_of_life == "status":
            env_status(rollouts, env_id)
        else:
            post(rollouts, tag if sign_of_life == "groups" else 0, env_id=env_id)
    assert list(rollouts.live()) == [env_id]


def test_the_same_body_after_the_window_is_a_new_submission(rollouts: Rollouts, clock: Clock) -> None:
    post(rollouts, 1)
    clock.now += rollouts.limits.duplicate_window_s
    post(rollouts, 1)
    assert rollouts.state.received == 1
    clock.now += 0.1
    post(rollouts, 1)
    assert rollouts.state.received == 2


def test_what_was_seen_long_ago_is_forgotten(rollouts: Rollouts, clock: Clock) -> None:
    for tag in range(100):
        post(rollouts, tag)
        clock.now += rollouts.limits.duplicate_window_s / 10
    assert len(rollouts._seen) <= 11


def test_a_refused_submission_may_be_sent_again(clock: Clock) -> None:
    rollouts = Rollouts(Limits(queue_groups=1), clock=clock)
    rollouts.register(registration(batch_size=4))
    post(rollouts, 1)
    with pytest.raises(UnavailableError):
        post(rollouts, 2)
    assert tags(rollouts) == [1]
    rollouts.written(next(iter(rollouts.state.out)))
    post(rollouts, 2)
    assert tags(rollouts) == [2]


def test_groups_that_are_enough_and_fit_no_batch_are_named_in_the_log(
    rollouts: Rollouts, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for tag in range(4):
        post(rollouts, tag, size=3)
        for _ in range(5):
            assert tags(rollouts) is None
    clock.now += rollouts.limits.stuck_warning_s
    assert tags(rollouts) is None
    warnings = [record.getMessage() for record in caplog.records if "make a batch" in record.getMessage()]
    assert len(warnings) == 2 and "groups of [3]" in warnings[0] and "exactly 8" in warnings[0]


def test_environments_registered_in_a_loop_are_bounded() -> None:
    rollouts = Rollouts(dataclasses.replace(Limits(), environments=3))
    rollouts.register(registration())
    rollouts.hand_out(leased=False)
    for _ in range(3):
        rollouts.register_env(env())
    with pytest.raises(UnavailableError):
        rollouts.register_env(env())


class FullDisk(Journal):
    """A journal whose disk can be full."""

    full = False

    def append(self, event: events.Event) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(event)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[FullDisk]:
    journal = FullDisk(tmp_path / "journal.jsonl")
    yield journal
    journal.close()


def test_a_full_disk_refuses_groups_and_batches_and_loses_none(full_disk: FullDisk) -> None:
    rollouts = Rollouts(journal=full_disk)
    rollouts.register(registration(batch_size=4))
    post(rollouts, 1)
    full_disk.full = True
    with pytest.raises(UnavailableError, match="No space left"):
        post(rollouts, 2)
    with pytest.raises(UnavailableError):
        rollouts.hand_out(leased=True)
    full_disk.full = False
    post(rollouts, 2)
    assert (tags(rollouts), tags(rollouts), tags(rollouts)) == ([1], [2], None)


def test_a_batch_that_was_written_counts_even_if_the_disk_is_full(full_disk: FullDisk) -> None:
    rollouts = Rollouts(journal=full_disk)
    rollouts.register(registration(batch_size=4))
    post(rollouts, 1)
    batch = rollouts.hand_out(leased=False)
    assert batch
    full_disk.full = True
    rollouts.written(batch.batch_id)
    assert rollouts.state.live_groups == 0


class Life(RuleBasedStateMachine):
    """Any order of calls: no group is lost or doubled, and a snapshot makes the same state again."""

    batches = Bundle("batches")

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.rollouts = Rollouts(clock=self.clock)
        self.sent = 0
        self.finished: list[int] = []

    @rule(size=st.integers(1, 8), env_id=st.sampled_from([None, 0, 1]))
    def submit(self, size: int, env_id: int | None) -> None:
        post(self.rollouts, self.sent, size, env_id)
        self.sent += 1

    @rule(starting_step=st.integers(0, 2))
    def register(self, starting_step: int) -> None:
        self.rollouts.register(registration(starting_step=starting_step))

    @rule(minimum=st.sampled_from([None, 0.5]))
    def register_env(self, minimum: float | None) -> None:
        self.rollouts.register_env(env(minimum=minimum))

    @rule(target=batches, leased=st.booleans())
    def hand_out(self, leased: bool) -> str:
        if self.rollouts.state.registration is None:
            return "none"
        batch = self.rollouts.hand_out(leased=leased)
        if batch is None:
            return "none"
        assert sum(group.size for group in batch.groups.values()) == 8
        return batch.batch_id

    @rule(batch_id=consumes(batches))
    def finish(self, batch_id: str) -> None:
        batch = self.rollouts.state.out.get(batch_id)
        if batch is None:
            return
        if batch.leased:
            self.rollouts.acknowledge(batch_id)
        else:
            self.rollouts.written(batch_id)
        self.finished += [int(group.raw) for group in batch.groups.values()]

    @rule(batch_id=batches)
    def lose(self, batch_id: str) -> None:
        self.rollouts.not_written(batch_id)

    @rule()
    def wait(self) -> None:
        self.clock.now += 400

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        state = self.rollouts.state
        places = [state.queue, *state.buffers.values(), *(batch.groups for batch in state.out.values())]
        stored = [int(group.raw) for place in places for group in place.values()]
        assert sorted(stored + self.finished) == list(range(self.sent))
        assert state.live_groups == len(stored)
        assert state.live_bytes == sum(len(group.raw) for place in places for group in place.values())

    @invariant()
    def a_snapshot_makes_the_same_state(self) -> None:
        state, again = self.rollouts.state, State()
        for event in state.snapshot():
            again.apply(event)
        for name in (field.name for field in dataclasses.fields(State)):
            if name not in ("latest", "buffers"):
                assert getattr(again, name) == getattr(state, name), name
        assert list(again.queue) == list(state.queue)
        assert [b for b in again.buffers.values() if b] == [b for b in state.buffers.values() if b]


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
