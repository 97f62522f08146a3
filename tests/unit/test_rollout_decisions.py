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


def registration(batch_size: int = 8, starting_step: int = 0, interval: int = 0) -> Registration:
    return Registration(
        wandb_group="g",
        wandb_project="p",
        batch_size=batch_size,
        max_token_len=64,
        checkpoint_dir="c",
        save_checkpoint_interval=interval,
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


@pytest.mark.parametrize("leased", [True, False])
def test_nothing_is_remembered_of_batches_that_are_done(rollouts: Rollouts, leased: bool) -> None:
    for tag in range(40):
        post(rollouts, tag, size=8)
        batch = rollouts.hand_out(leased=leased)
        assert batch
        rollouts.acknowledge(batch.batch_id) if leased else rollouts.written(batch.batch_id)
    assert not rollouts._handed_at and not rollouts.state.out


def test_what_was_seen_long_ago_is_forgotten(rollouts: Rollouts, clock: Clock) -> None:
    for tag in range(100):
        post(rollouts, tag)
        clock.now += rollouts.limits.duplicate_window_s / 10
    assert len(rollouts._repetitions) <= 11


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


def train(rollouts: Rollouts, count: int) -> list[list[int]]:
    """Batches as our trainer takes them: kept until a checkpoint."""
    taken = []
    for _ in range(count):
        batch = rollouts.hand_out(leased=True)
        assert batch
        rollouts.acknowledge(batch.batch_id, retain=True)
        taken.append([int(group.raw) for group in batch.groups.values()])
    return taken


def drained(rollouts: Rollouts) -> list[list[int]]:
    found = []
    while (batch := tags(rollouts, leased=True)) is not None:
        found.append(batch)
    return found


def test_a_trainer_that_goes_back_gets_its_batches_again_whole_and_in_order(rollouts: Rollouts) -> None:
    for tag, size in enumerate([5, 4, 4, 4, 3, 8, 4, 8]):
        post(rollouts, tag, size)
    taken = train(rollouts, 3)
    assert taken == [[0, 4], [1, 2], [3, 6]]
    rollouts.checkpointed(1)
    assert tags(rollouts, leased=True) == [5]  # out when the trainer dies
    rollouts.register(registration(starting_step=1))
    assert rollouts.state.step == 1
    assert drained(rollouts) == [[1, 2], [3, 6], [5], [7]]


def test_a_batch_that_comes_back_stays_the_batch_it_was(rollouts: Rollouts) -> None:
    rollouts.hand_out(leased=False)
    first = rollouts.register_env(env()).env_id
    for tag in range(3):
        post(rollouts, tag, env_id=first)
    batch = rollouts.hand_out(leased=True)
    second = rollouts.register_env(env(minimum=0.5)).env_id
    post(rollouts, 3, env_id=second)
    rollouts.register(registration())
    assert rollouts.status().queue_size == 4
    assert tags(rollouts, leased=True) == [0, 1]  # and not [0, 3], which the new share would ask for
    assert batch and tags(rollouts, leased=True) == [2, 3]


def test_batches_come_back_in_the_order_in_which_they_were_handed_out(rollouts: Rollouts) -> None:
    for tag in range(8):
        post(rollouts, tag)
    out = [rollouts.hand_out(leased=True) for _ in range(3)]
    for position in (1, 2, 0):
        batch = out[position]
        assert batch
        rollouts.not_written(batch.batch_id)
    assert drained(rollouts) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_batches_that_a_checkpoint_covers_do_not_come_again(rollouts: Rollouts) -> None:
    for tag in range(8):
        post(rollouts, tag)
    train(rollouts, 4)
    rollouts.checkpointed(3)
    rollouts.checkpointed(2)
    assert list(rollouts.state.kept) == [4] and rollouts.state.kept_bytes == 2
    rollouts.checkpointed(9)
    assert not rollouts.state.kept and rollouts.state.kept_bytes == 0


def test_a_trainer_that_does_not_go_back_sees_nothing_of_kept_batches(rollouts: Rollouts) -> None:
    for tag in range(6):
        post(rollouts, tag)
    train(rollouts, 2)
    rollouts.register(registration())  # an answer got lost; nothing was asked to be trained again
    assert rollouts.state.step == 2 and rollouts.status().queue_size == 2
    rollouts.register(registration(starting_step=2))
    assert drained(rollouts) == [[4, 5]]
    assert not rollouts.state.kept


def test_a_trainer_that_goes_back_to_the_same_step_twice_gets_the_same_batches_twice(rollouts: Rollouts) -> None:
    for tag in range(6):
        post(rollouts, tag)
    for attempt in "ab":
        rollouts.register(registration().model_copy(update={"attempt": attempt}))
        assert rollouts.state.step == 0
        train(rollouts, 2)
    rollouts.register(registration().model_copy(update={"attempt": "c"}))
    assert drained(rollouts) == [[0, 1], [2, 3], [4, 5]]


def test_when_another_run_takes_over_the_journal_the_environments_in_it_are_gone(rollouts: Rollouts) -> None:
    rollouts.hand_out(leased=True)
    rollouts.register_env(env())
    rollouts.register(registration())
    assert len(rollouts.live()) == 1
    rollouts.register(registration().model_copy(update={"checkpoint_dir": "another run's"}))
    assert not rollouts.live()


def test_another_batch_size_takes_batches_apart_and_keeps_their_groups_in_order(rollouts: Rollouts) -> None:
    for tag in range(8):
        post(rollouts, tag)
    train(rollouts, 2)
    rollouts.hand_out(leased=True)
    rollouts.register(registration(batch_size=16))
    assert drained(rollouts) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_batches_without_a_checkpoint_are_kept_for_two_intervals_and_the_loss_is_said_once(
    rollouts: Rollouts, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts.register(registration(interval=3))
    for tag in range(20):
        post(rollouts, tag)
    train(rollouts, 9)
    assert list(rollouts.state.kept) == [4, 5, 6, 7, 8, 9]
    assert len([line for line in caplog.messages if "Checkpoint more often" in line]) == 1
    rollouts.register(registration(starting_step=2))
    assert any("steps 3 to 3" in line for line in caplog.messages)
    assert drained(rollouts)[0] == [6, 7]


def test_kept_batches_are_bounded_in_bytes_and_push_nobody_back(clock: Clock) -> None:
    rollouts = Rollouts(Limits(kept_bytes=5, queue_bytes=4, queue_groups=3), clock=clock)
    rollouts.register(registration(batch_size=4))
    for tag in range(10, 20):
        post(rollouts, tag)  # each of two bytes: two are all that the queue can hold
        train(rollouts, 1)
    assert list(rollouts.state.kept) == [9, 10]
    assert rollouts.state.live_bytes == 0


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
        self.handed: dict[int, tuple[int, ...]] = {}

    @rule(size=st.integers(1, 8), env_id=st.sampled_from([None, 0, 1]))
    def submit(self, size: int, env_id: int | None) -> None:
        post(self.rollouts, self.sent, size, env_id)
        self.sent += 1

    @rule(starting_step=st.integers(0, 2))
    def register(self, starting_step: int) -> None:
        if registration(starting_step=starting_step) != self.rollouts.state.registration:
            self._forget(starting_step)
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
        together = tuple(int(group.raw) for group in batch.groups.values())
        assert all(self.handed.setdefault(tag, together) == together for tag in together)
        return batch.batch_id

    @rule(batch_id=consumes(batches), retain=st.booleans())
    def finish(self, batch_id: str, retain: bool) -> None:
        batch = self.rollouts.state.out.get(batch_id)
        if batch is None:
            return
        if batch.leased:
            self.rollouts.acknowledge(batch_id, retain=retain)
        else:
            self.rollouts.written(batch_id)
        if not (batch.leased and retain):
            self.finished += [int(group.raw) for group in batch.groups.values()]

    @rule(behind=st.integers(0, 3))
    def checkpointed(self, behind: int) -> None:
        step = self.rollouts.state.step - behind
        self._forget(step)
        self.rollouts.checkpointed(step)

    def _forget(self, step: int) -> None:
        covered = [batch for trained, batch in self.rollouts.state.kept.items() if trained <= step]
        self.finished += [int(group.raw) for batch in covered for group in batch.groups.values()]

    @rule(batch_id=batches)
    def lose(self, batch_id: str) -> None:
        self.rollouts.not_written(batch_id)

    @rule()
    def wait(self) -> None:
        self.clock.now += 400

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        state = self.rollouts.state
        batches = [*state.out.values(), *state.again]
        places = [state.queue, *state.buffers.values(), *(batch.groups for batch in batches)]
        stored = [int(group.raw) for place in places for group in place.values()]
        kept = [group.raw for batch in state.kept.values() for group in batch.groups.values()]
        assert sorted(stored + self.finished + [int(raw) for raw in kept]) == list(range(self.sent))
        assert state.kept_bytes == sum(map(len, kept))
        assert state.live_groups == len(stored)
        assert state.live_bytes == sum(len(group.raw) for place in places for group in place.values())

    @invariant()
    def a_snapshot_makes_the_same_state(self) -> None:
        state, again = self.rollouts.state, State()
        for event in state.snapshot():
            again.apply(event)
        for name in (field.name for field in dataclasses.fields(State)):
            if name not in ("latest", "buffers", "turns"):
                assert getattr(again, name) == getattr(state, name), name
        assert list(again.queue) == list(state.queue)
        assert [b for b in again.buffers.values() if b] == [b for b in state.buffers.values() if b]


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
