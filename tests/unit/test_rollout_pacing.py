"""Who may begin how many groups, which batch waits for whom, and what is too old to be trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_rollout_decisions import Clock, env, registration, tags

from hermes_rl_mcp.contracts.rollout_api import BegunGroups, EnvReport
from hermes_rl_mcp.errors import NotFoundError
from hermes_rl_mcp.rollout_api.env_status import env_status
from hermes_rl_mcp.rollout_api.groups import Group, decode_one
from hermes_rl_mcp.rollout_api.journal import Journal
from hermes_rl_mcp.rollout_api.rollouts import Rollouts

MANY = 99


class Rig:
    """A rollout API of batches of 8, whose environments make groups of 4."""

    def __init__(self, clock: Clock, journal: Journal | None = None, *, envs: int = 1) -> None:
        self.clock = clock
        self.rollouts = Rollouts(clock=clock, journal=journal)
        self.allowed: dict[int, int] = {}
        self.tag = 0
        if journal is None or not self.rollouts.state.registration:
            self.rollouts.register(registration(8))
            assert tags(self.rollouts, leased=True) is None
            for _ in range(envs):
                self.rollouts.register_env(env(4))

    def room(self, allowed: int, *begun: tuple[int, int, int, int], env_id: int = 0, wants: int = MANY) -> int:
        """What the environment is told after it reported (step, begun, given up, sent)."""
        groups = [BegunGroups(step=s, begun=b, given_up=g, sent=t) for s, b, g, t in begun]
        report = EnvReport(env_id=env_id, max_batches_offpolicy=allowed, last_step=50, groups=groups, wants=wants)
        self.rollouts.pace.report(report)
        room = env_status(self.rollouts, env_id, report).room
        assert room is not None
        if room:
            self.rollouts.pace.granted(env_id, self.rollouts.state.step, room)
        return room

    def send(self, begun: int, allowed: int, env_id: int = 0) -> None:
        self.tag += 1
        self.rollouts.submit([Group(b"%d" % self.tag, 4, env_id, begun, allowed)], f"{self.tag}")

    def take(self) -> str | None:
        """The lease of the next batch."""
        batch = self.rollouts.hand_out(leased=True)
        return batch.batch_id if batch else None


@pytest.fixture
def rig() -> Rig:
    return Rig(Clock())


def test_on_policy_there_is_room_for_one_batch_and_none_until_it_is_acknowledged(rig: Rig) -> None:
    assert rig.room(0) == 2
    assert rig.room(0, (0, 2, 0, 0)) == 0
    rig.send(0, 0)
    assert rig.room(0, (0, 2, 0, 0)) == 0, "what arrived and what is under way are counted once each"
    rig.send(0, 0)
    assert rig.room(0, (0, 2, 0, 2)) == 0
    lease = rig.take()
    assert lease is not None
    assert rig.room(0, (0, 2, 0, 2)) == 0, "in training"
    rig.rollouts.acknowledge(lease)
    assert rig.room(0, (0, 2, 0, 2)) == 2


def test_what_was_given_up_makes_room(rig: Rig) -> None:
    assert rig.room(0) == 2
    assert rig.room(0, (0, 2, 1, 0)) == 1


@pytest.mark.parametrize("allowed", [1, 3])
def test_off_policy_as_many_batches_are_under_way_as_are_allowed(rig: Rig, allowed: int) -> None:
    assert rig.room(allowed) == 2 * allowed
    for _ in range(2 * allowed):
        rig.send(0, allowed)
    assert rig.room(allowed, (0, 2 * allowed, 0, 2 * allowed)) == 0
    assert rig.take() is not None
    assert rig.room(allowed, (0, 2 * allowed, 0, 2 * allowed)) == 2


def test_no_more_is_begun_than_is_wanted_or_left(rig: Rig) -> None:
    assert rig.room(3, wants=1) == 1
    rig.rollouts.register(registration(8, starting_step=49))
    assert rig.room(3) == 2


def test_two_environments_are_not_given_the_same_room_and_the_stricter_one_counts() -> None:
    rig = Rig(Clock(), envs=2)
    first = rig.room(0, env_id=0)
    second = rig.room(3, env_id=1)
    assert first >= 1 and first + second == 2
    assert rig.room(0, (0, first, 0, 0), env_id=0) == 0


def test_a_batch_waits_for_the_group_that_would_come_too_late_without_it(rig: Rig) -> None:
    rig.room(1, (0, 3, 0, 0), wants=0)
    rig.send(0, 1)
    rig.send(0, 1)
    lease = rig.take()
    assert lease is not None
    rig.rollouts.acknowledge(lease)
    for _ in range(2):
        rig.send(1, 1)
    rig.room(1, (0, 3, 0, 2), (1, 2, 0, 2), wants=0)
    assert rig.take() is None, "the third of step 0 must be in this one"
    rig.send(0, 1)
    batch = rig.rollouts.hand_out(leased=True)
    assert batch is not None and 0 in {group.begun for group in batch.groups.values()}


def test_a_group_that_was_given_up_is_waited_for_no_longer(rig: Rig) -> None:
    rig.room(0, (0, 3, 0, 0), wants=0)
    rig.send(0, 0)
    rig.send(0, 0)
    assert rig.take() is None
    rig.room(0, (0, 3, 1, 2), wants=0)
    assert rig.take() is not None


def test_an_environment_that_falls_silent_is_waited_for_no_longer(rig: Rig) -> None:
    rig.room(0, (0, 3, 0, 0), wants=0)
    rig.send(0, 0)
    rig.send(0, 0)
    rig.clock.now += rig.rollouts.limits.environment_silent_s + 1
    assert rig.take() is not None


def test_groups_that_are_too_old_or_of_a_policy_yet_to_come_are_not_trained_on(rig: Rig) -> None:
    rig.rollouts.register(registration(8, starting_step=5))
    for begun in (3, 5, 6, 5):
        rig.send(begun, 0)
    batch = rig.rollouts.hand_out(leased=True)
    assert batch is not None and [group.begun for group in batch.groups.values()] == [5, 5]
    assert rig.rollouts.state.queue_size == 0 and rig.rollouts.state.live_bytes > 0
    rig.rollouts.acknowledge(batch.batch_id)
    assert rig.rollouts.state.live_bytes == 0


def test_groups_without_a_note_wait_as_long_as_they_like(rig: Rig) -> None:
    for tag in range(2):
        rig.rollouts.submit([Group(b"%d" % tag, 4, None)], f"x{tag}")
    rig.rollouts.state.step = 40
    assert rig.take() is not None


def test_after_a_restart_there_is_no_room_before_all_have_said_what_they_have(tmp_path: Path) -> None:
    clock = Clock()
    journal = Journal(tmp_path / "journal.jsonl")
    Rig(clock, journal, envs=2)
    journal.close()
    journal = Journal(tmp_path / "journal.jsonl")
    try:
        rig = Rig(clock, journal)
        assert rig.room(0, env_id=0) == 0
        assert rig.room(0, (0, 1, 0, 0), env_id=1, wants=0) == 0
        assert rig.room(0, env_id=0) == 1, "the other one has the rest under way"
    finally:
        journal.close()


def test_an_environment_that_said_goodbye_registers_again(rig: Rig) -> None:
    rig.rollouts.disconnect_env(0)
    with pytest.raises(NotFoundError, match="goodbye"):
        rig.room(0)


@pytest.mark.parametrize(
    ("notes", "age"),
    [
        (b'{"begun_step":7,"max_batches_offpolicy":0,"group_id":"a"}', (7, 0)),
        (b'{"begun_step":-1,"max_batches_offpolicy":0}', (None, None)),
        (b'{"begun_step":"yes"}', (None, None)),
        (b"null", (None, None)),
    ],
)
@pytest.mark.parametrize("exact", [True, False], ids=["as it came", "decoded"])
def test_the_age_of_a_group_is_read_from_its_notes_and_never_a_reason_to_refuse_it(
    notes: bytes, age: tuple[int | None, int | None], exact: bool
) -> None:
    more = b"" if exact else b',"unknown":1'
    body = b'{"tokens":[[1,2]],"masks":[[-100,2]],"scores":[1.0],"group_overrides":%s%s}' % (notes, more)
    [group] = decode_one(body)
    assert (group.begun, group.allowed) == age
