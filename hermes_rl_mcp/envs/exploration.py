"""Which item is asked next: ``exploration_model: item_value`` prefers items that the policy gets right about half the
time, because groups that are all right or all wrong teach nothing.

Each item has a Beta posterior of its success. What was learnt about it fades, because the policy changes. Items never
asked share one prior, the mean of all first answers. Invariant: ``exploration_rate`` of all items are the environment's
own choice, whatever the posteriors say, so no item is given up for good.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEPT_ITEMS = 1000
"""Items remembered; those asked the longest time ago are forgotten first."""
FRESH = 4
"""Items of the environment's own choice among which, and those remembered, one is chosen."""
HALF_LIFE = 200.0
"""Groups after which an observation counts half."""
PRIOR_STRENGTH = 2.0
"""Observations that the prior is worth."""
RECENT = 32
"""Items just asked are not asked again, or this many places of a batch would hold the same few; never more than half
of those remembered."""
SHARPNESS = 4.0
"""Exponent of an item's value in its odds."""
SAVED_ITEM_CHARS = 2000
"""Of longer items only what was learnt is in the saved position, which is written about once a second."""
_KEY_CHARS = 200

Draw = Callable[[], Awaitable[Any]]
Key = Callable[[Any], str | None]


@dataclass
class Known:
    """What was seen of one item."""

    item: Any
    """None after a restart if it was no JSON, or long; then it counts again once the environment draws it."""
    right: float
    wrong: float
    at: int
    """Group count when it was last updated."""


def item_key(item: Any) -> str | None:
    """The item's JSON, or its text form where that says what it is, and of long ones a digest; None for what cannot be
    told apart."""
    try:
        text = json.dumps(item, sort_keys=True)
    except (TypeError, ValueError):
        text = repr(item)
        if f"{id(item):x}" in text:
            return None
    return text if len(text) <= _KEY_CHARS else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


class ItemValue:
    """Chooses items and learns from how their groups came out. Not safe for threads; one per environment."""

    def __init__(self, rate: float, key: Key = item_key, seed: int = 0) -> None:
        """``rate``: share of items that are the environment's own choice, from 0 to 1."""
        self._rate = rate
        self._key = key
        self._rng = random.Random(seed)
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._recent: deque[str] = deque(maxlen=RECENT)
        self._groups = 0
        self._first_right, self._first_answers = 1.0, 2.0
        self._lowest, self._highest = 0.0, 1.0

    async def pick(self, draw: Draw) -> Any:
        """The next item; None if the environment has none. ``draw`` is its ``get_next_item``."""
        if self._rng.random() < self._rate:
            return self._taken(await draw())
        half = len(self._known) // 2
        recent = set(list(self._recent)[-half:]) if half else set()
        items, weights = self._remembered(recent)
        for _ in range(FRESH):
            item = await draw()
            if item is None:
                break
            key = self._key(item)
            if key is None:
                return item
            known = self._known.get(key)
            if key not in recent and (known is None or known.item is None):
                items.append(item)
                weights.append(self.value(key) ** SHARPNESS)
        if not items:
            return self._taken(await draw())
        return self._taken(self._rng.choices(items, weights)[0])

    def _remembered(self, recent: set[str]) -> tuple[list[Any], list[float]]:
        """Items that may be asked again, and their odds. ``value`` of each, written out: it is all that takes time."""
        mean = self._first_right / self._first_answers
        prior_a, prior_b = PRIOR_STRENGTH * mean, PRIOR_STRENGTH * (1.0 - mean)
        items, weights = [], []
        for key, known in self._known.items():
            if known.item is not None and key not in recent:
                faded = 0.5 ** ((self._groups - known.at) / HALF_LIFE)
                a, b = prior_a + known.right * faded, prior_b + known.wrong * faded
                items.append(known.item)
                weights.append((a * b / ((a + b) * (a + b + 1.0))) ** SHARPNESS)
        return items, weights

    def observe(self, item: Any, scores: Sequence[float]) -> None:
        """How the answers to an item were scored. Right is what lies above the middle of all scores seen; at first
        these are taken to lie between 0 and 1. What is no finite number is left out."""
        key = self._key(item)
        scores = [score for score in scores if isinstance(score, int | float) and math.isfinite(score)]
        if key is None or not scores:
            return
        self._groups += 1
        self._lowest, self._highest = min(self._lowest, *scores), max(self._highest, *scores)
        middle = (self._lowest + self._highest) / 2
        right = float(sum(score > middle for score in scores))
        known = self._known.pop(key, None)
        if known is None:
            known = Known(item, 0.0, 0.0, self._groups)
            self._first_right += right
            self._first_answers += len(scores)
        faded = self._faded(known)
        self._known[key] = Known(
            item, known.right * faded + right, known.wrong * faded + len(scores) - right, self._groups
        )
        if len(self._known) > KEPT_ITEMS:
            self._known.popitem(last=False)

    def success(self, key: str) -> tuple[float, float]:
        """The two numbers of the Beta posterior of an item's success."""
        mean = self._first_right / self._first_answers
        a, b = PRIOR_STRENGTH * mean, PRIOR_STRENGTH * (1.0 - mean)
        if known := self._known.get(key):
            faded = self._faded(known)
            a, b = a + known.right * faded, b + known.wrong * faded
        return a, b

    def value(self, key: str) -> float:
        """Expected variance of one answer's success, p(1 - p): at most a quarter, for a success of one half."""
        a, b = self.success(key)
        return a * b / ((a + b) * (a + b + 1.0))

    def state(self) -> dict[str, Any]:
        """For the environment's saved position. JSON."""
        items = {
            key: [known.right, known.wrong, known.at, known.item if is_json(known.item, SAVED_ITEM_CHARS) else None]
            for key, known in self._known.items()
        }
        return {
            "items": items,
            "groups": self._groups,
            "first": [self._first_right, self._first_answers],
            "scores": [self._lowest, self._highest],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what ``state`` gave."""
        self._known = OrderedDict(
            (key, Known(item, right, wrong, at)) for key, (right, wrong, at, item) in state["items"].items()
        )
        self._groups = state["groups"]
        self._first_right, self._first_answers = state["first"]
        self._lowest, self._highest = state["scores"]

    def _taken(self, item: Any) -> Any:
        if item is not None and (key := self._key(item)) is not None:
            self._recent.append(key)
            if (known := self._known.get(key)) and known.item is None:
                known.item = item
        return item

    def _faded(self, known: Known) -> float:
        return float(0.5 ** ((self._groups - known.at) / HALF_LIFE))


def is_json(item: Any, most_chars: int | None = None) -> bool:
    """Whether it comes back from a file as it was, and takes no more than ``most_chars`` there."""
    try:
        text = json.dumps(item)
        return (most_chars is None or len(text) <= most_chars) and bool(json.loads(text) == item)
    except (TypeError, ValueError):
        return False
