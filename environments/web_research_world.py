"""A small invented world to search: pages that link to each other, and questions that their text alone answers.

Nothing in it is true, so no model knows an answer without looking. Invariant: the same seed makes the same world.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

TOWNS, PEOPLE, BRIDGES = 14, 24, 30
_FIRST = ("Ada", "Berin", "Calla", "Doran", "Elsu", "Fenn", "Gita", "Hale", "Ines", "Joren", "Kaia", "Lorn")
_STARTS = ("Ar", "Bel", "Cor", "Dun", "Es", "Fal", "Gren", "Hol", "Il", "Jor", "Kel", "Lun", "Mar", "Nor", "Os", "Pel")
_MIDDLES = ("a", "o", "e", "i", "an", "or", "el", "in")
_ENDS = ("wick", "ford", "mere", "stead", "holm", "dale", "bury", "gate", "ness", "combe")
_TRADES = ("wool", "salt", "glass", "clocks", "paper", "cider", "slate", "rope")
_KINDS = ("arch", "cable", "truss", "swing", "pontoon")


@dataclass(frozen=True)
class Page:
    url: str
    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """``sources``: the pages that have to be read."""

    text: str
    answer: str
    kind: str
    """lookup, two_pages or comparison."""
    sources: tuple[str, ...]


@dataclass(frozen=True)
class World:
    pages: list[Page]
    questions: list[Question]

    def write(self, path: Path) -> None:
        """As a corpus for ``HERMES_RL_SEARCH_CORPUS``."""
        rows = ({"url": page.url, "title": page.title, "text": page.text} for page in self.pages)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True)
class _Bridge:
    name: str
    town: str
    engineer: str
    opened: int
    length_m: int
    url: str


def make_world(seed: int = 0) -> World:
    rng = random.Random(f"world:{seed}")
    towns = _names(rng, TOWNS, set())
    surnames = _names(rng, PEOPLE, set(towns))
    people = [f"{rng.choice(_FIRST)} {surname}" for surname in surnames]
    born = {person: (rng.choice(towns), rng.randrange(1790, 1860)) for person in people}
    bridges = _bridges(rng, towns, people, born)
    pages = [_town_page(rng, town, bridges) for town in towns]
    pages += [_person_page(rng, person, *born[person]) for person in people]
    pages += [_bridge_page(rng, one) for one in bridges]
    questions = [question for one in bridges for question in _about(one, born)]
    for left, right in zip(bridges, bridges[1:] + bridges[:1], strict=True):
        first = min(left, right, key=lambda one: one.opened)
        text = f"Which bridge was opened first, the {left.name} or the {right.name}?"
        questions.append(Question(text, first.name, "comparison", (left.url, right.url)))
    rng.shuffle(questions)
    return World(pages, questions)


def _names(rng: random.Random, count: int, taken: set[str]) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        name = rng.choice(_STARTS) + rng.choice(_MIDDLES) + rng.choice(_ENDS)
        if name not in taken:
            taken.add(name)
            found.append(name)
    return found


def _bridges(
    rng: random.Random, towns: list[str], people: list[str], born: dict[str, tuple[str, int]]
) -> list[_Bridge]:
    years = rng.sample(range(1885, 1960), BRIDGES)  # no two in one year, so that every comparison has an answer
    bridges = []
    for name, year in zip(_names(rng, BRIDGES, {*towns, *(one.split()[1] for one in people)}), years, strict=True):
        engineer = rng.choice([one for one in people if born[one][1] <= year - 25])
        url = f"https://bridges.example/{name.lower()}"
        bridges.append(_Bridge(f"{name} Bridge", rng.choice(towns), engineer, year, rng.randrange(60, 900), url))
    return bridges


def _about(one: _Bridge, born: dict[str, tuple[str, int]]) -> list[Question]:
    town, year = born[one.engineer]
    person_url = _person_url(one.engineer)
    return [
        Question(f"In which year was the {one.name} opened?", str(one.opened), "lookup", (one.url,)),
        Question(f"In which town does the {one.name} stand?", one.town, "lookup", (one.url,)),
        Question(f"In which town was the engineer of the {one.name} born?", town, "two_pages", (one.url, person_url)),
        Question(
            f"In which year was the engineer of the {one.name} born?", str(year), "two_pages", (one.url, person_url)
        ),
    ]


def _bridge_page(rng: random.Random, one: _Bridge) -> Page:
    text = (
        f"The {one.name} is a {rng.choice(_KINDS)} bridge in the town of {one.town}. It was planned by the engineer "
        f"{one.engineer} and opened in {one.opened}. It is {one.length_m} metres long."
    )
    return Page(one.url, one.name, text)


def _person_page(rng: random.Random, person: str, town: str, year: int) -> Page:
    text = (
        f"{person} was an engineer, born in {year} in {town}, in a family that traded in {rng.choice(_TRADES)}. "
        f"{person.split()[0]} learnt the trade by building mills, and later planned bridges."
    )
    return Page(_person_url(person), person, text)


def _town_page(rng: random.Random, town: str, bridges: list[_Bridge]) -> Page:
    there = ", ".join(f"the {one.name}" for one in bridges if one.town == town) or "none"
    people = rng.randrange(2, 90) * 1000
    text = f"{town} is a town of {people} people, known for {rng.choice(_TRADES)}. Bridges in {town}: {there}."
    return Page(f"https://towns.example/{town.lower()}", town, text)


def _person_url(person: str) -> str:
    return f"https://people.example/{person.lower().replace(' ', '-')}"
