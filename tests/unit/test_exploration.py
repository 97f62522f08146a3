"""Items are chosen by what is known of them: near one half first, none given up, and a restart forgets nothing."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.envs import BaseEnv, BaseEnvConfig
from hermes_rl_mcp.envs.exploration import KEPT_ITEMS, PRIOR_STRENGTH, ItemValue, item_key

GROUP = 8


class Pupil:
    """Asked items at random out of ``chances``, answers right as often as they say."""

    def __init__(self, chances: dict[str, float], seed: int = 1) -> None:
        self.chances = chances
        self.rng = random.Random(seed)

    async def draw(self) -> str:
        return self.rng.choice(list(self.chances))

    def answers(self, item: str) -> list[float]:
        return [float(self.rng.random() < self.chances[item]) for _ in range(GROUP)]


async def groups(model: ItemValue, pupil: Pupil, count: int) -> list[tuple[str, list[float]]]:
    made = []
    for _ in range(count):
        item = await model.pick(pupil.draw)
        scores = pupil.answers(item)
        model.observe(item, scores)
        made.append((item, scores))
    return made


def flat_share(made: list[tuple[str, list[float]]]) -> float:
    """Of groups without any difference."""
    return sum(len(set(scores)) == 1 for _, scores in made) / len(made)


MOSTLY_HOPELESS = {f"mixed {i}": 0.5 for i in range(40)} | {f"hopeless {i}": 0.0 for i in range(400)}


@pytest.mark.anyio
async def test_groups_without_signal_become_few_where_most_items_are_hopeless() -> None:
    uniform = await groups(ItemValue(rate=1.0), Pupil(MOSTLY_HOPELESS), 300)
    chosen = await groups(ItemValue(rate=0.1), Pupil(MOSTLY_HOPELESS), 900)
    assert flat_share(uniform) > 0.8
    assert flat_share(chosen[-300:]) < 0.5


@pytest.mark.anyio
async def test_what_is_half_right_is_preferred_to_what_is_always_right_or_never() -> None:
    chances = {f"{kind} {i}": p for kind, p in (("half", 0.5), ("always", 1.0), ("never", 0.0)) for i in range(40)}
    made = await groups(ItemValue(rate=0.1), Pupil(chances), 600)
    asked = Counter(item.split()[0] for item, _ in made[-300:])
    assert asked["half"] > 0.6 * asked.total()
    assert min(asked["always"], asked["never"]) > 5


@pytest.mark.anyio
async def test_at_rate_one_the_environments_own_order_stays() -> None:
    numbers = iter(range(100))

    async def draw() -> int:
        return next(numbers)

    model = ItemValue(rate=1.0)
    assert [await model.pick(draw) for _ in range(50)] == list(range(50))


@pytest.mark.anyio
async def test_what_was_learnt_fades() -> None:
    model = ItemValue(rate=0.0)
    model.observe("old", [0.0] * GROUP)
    assert sum(model.success('"old"')) == PRIOR_STRENGTH + GROUP
    for i in range(1000):
        model.observe(f"other {i % 10}", [0.0, 1.0] * (GROUP // 2))
    assert PRIOR_STRENGTH < sum(model.success('"old"')) < PRIOR_STRENGTH + GROUP / 16


@pytest.mark.anyio
async def test_a_restart_goes_on_with_what_was_known() -> None:
    pupil = Pupil(MOSTLY_HOPELESS)
    model = ItemValue(rate=0.1)
    await groups(model, pupil, 600)
    resumed = ItemValue(rate=0.1)
    resumed.restore(json.loads(json.dumps(model.state())))
    assert resumed.state() == model.state()
    assert all(resumed.value(f'"mixed {i}"') == model.value(f'"mixed {i}"') for i in range(40))
    assert flat_share(await groups(resumed, pupil, 300)) < 0.8


def test_items_that_are_no_json_keep_their_posterior_over_a_restart() -> None:
    model = ItemValue(rate=0.0)
    model.observe({1, 2}, [0.0, 1.0])
    model.observe({3}, [1.0, 1.0])
    resumed = ItemValue(rate=0.0)
    resumed.restore(json.loads(json.dumps(model.state())))
    assert resumed.success("{3}") == model.success("{3}") != model.success("{1, 2}")


def test_a_long_item_is_known_again_after_a_restart_without_being_in_the_saved_position() -> None:
    values = ItemValue(0.0)
    long, short = "x" * 100_000, "short"
    for item in (long, short):
        values.observe(item, [1.0, 0.0, 0.0])
    state = json.loads(json.dumps(values.state()))
    assert len(json.dumps(state)) < 1000
    again = ItemValue(0.0)
    again.restore(state)
    for item in (long, short):
        assert again.success(str(item_key(item))) == values.success(str(item_key(item)))


@pytest.mark.anyio
async def test_no_item_is_no_item_and_what_has_no_key_is_the_environments_own_choice() -> None:
    async def none() -> None:
        return None

    async def unknown() -> object:
        return marker

    marker = object()
    assert item_key(marker) is None
    model = ItemValue(rate=0.0)
    assert await model.pick(none) is None
    assert await model.pick(unknown) is marker
    model.observe(marker, [1.0])
    assert model.state()["items"] == {}


@pytest.mark.parametrize(
    ("scores", "right"),
    [
        pytest.param([-3.0, 3.0, 2.0], 2, id="wide"),
        pytest.param([0.4, 0.4], 0, id="constant"),
        pytest.param([0, 1], 1, id="plain"),
    ],
)
def test_right_is_what_lies_above_the_middle_of_the_scores(scores: list[float], right: int) -> None:
    model = ItemValue(rate=0.0)
    model.observe("x", scores)
    assert model.state()["items"]['"x"'][:2] == [right, len(scores) - right]


def test_scores_that_are_none_say_nothing() -> None:
    model = ItemValue(rate=0.0)
    model.observe("x", [float("nan"), None, 1.0])  # type: ignore[list-item]
    assert model.state()["items"]['"x"'][:2] == [1.0, 0.0]


class Letters(BaseEnv):
    """Asks for a and b in turn."""

    name = "letters"
    turn = 0

    async def get_next_item(self) -> str:
        self.turn += 1
        return "ab"[self.turn % 2]

    def save_checkpoint(self, step: int, data: Any = None) -> None:
        super().save_checkpoint(step, {"turn": self.turn})


@pytest.mark.anyio
async def test_what_an_environment_learnt_of_its_items_is_part_of_its_position(tmp_path: Path) -> None:
    def environment(model: str) -> Letters:
        made = Letters(BaseEnvConfig(exploration_model=model, exploration_rate=0.0), [])  # type: ignore[arg-type]
        made.checkpoint_dir, made.curr_step = tmp_path, 3
        return made

    first = environment("item_value")
    assert first.exploration is not None
    assert await first.next_item() in ("a", "b")
    first.exploration.observe("a", [0.0, 1.0])
    first.save_checkpoint(3)
    resumed = environment("item_value")
    resumed.load_checkpoint()
    assert resumed.exploration is not None
    assert resumed.exploration.state() == first.exploration.state()
    assert resumed.turn == first.turn > 1

    plain = environment("none")
    plain.load_checkpoint()  # a run that goes on without the model
    assert plain.exploration is None and plain.turn == first.turn
    assert [await plain.next_item() for _ in range(4)] in (["a", "b"] * 2, ["b", "a"] * 2)


def test_memory_is_bounded() -> None:
    model = ItemValue(rate=0.0)
    for i in range(KEPT_ITEMS + 10):
        model.observe(i, [0.0, 1.0])
    known: dict[str, Any] = model.state()["items"]
    assert len(known) == KEPT_ITEMS
    assert "0" not in known
