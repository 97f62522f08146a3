"""Small Python tasks with the tests that decide about them. The tests stay here: an agent is never shown them.

Invariant: a task says exactly what its tests ask for, so that who follows the text passes.
"""

from __future__ import annotations

from typing import Any

Task = dict[str, Any]
"""``task``: what is asked. ``test_code``: statements on what solution.py defines; those that raise have failed."""

_TASKS: list[tuple[str, str, str]] = [
    (
        "running_total",
        "Write running_total(numbers): the list of sums so far. running_total([1, 2, 3]) is [1, 3, 6].",
        """
assert running_total([1, 2, 3]) == [1, 3, 6]
assert running_total([]) == []
assert running_total([-4, 4, 0, 7]) == [-4, 0, 0, 7]
""",
    ),
    (
        "is_palindrome",
        "Write is_palindrome(text): True if text reads the same backwards, upper and lower case alike and all but "
        "letters and digits left out.",
        """
assert is_palindrome("Never odd or even") is True
assert is_palindrome("No lemon, no melon!") is True
assert is_palindrome("Hello") is False
assert is_palindrome("") is True
""",
    ),
    (
        "word_counts",
        "Write word_counts(text): a dict of each word in lower case to how often it occurs. Words are separated by "
        "white space.",
        """
assert word_counts("a b A") == {"a": 2, "b": 1}
assert word_counts("") == {}
assert word_counts("one\\ntwo  two") == {"one": 1, "two": 2}
""",
    ),
    (
        "flatten",
        "Write flatten(value): the list of everything in lists nested to any depth, in order. "
        "flatten([1, [2, [3]], 4]) is [1, 2, 3, 4].",
        """
assert flatten([1, [2, [3]], 4]) == [1, 2, 3, 4]
assert flatten([[], [[]]]) == []
assert flatten(["ab", ["c"]]) == ["ab", "c"]
""",
    ),
    (
        "roman",
        "Write roman(number): the Roman numeral of a whole number from 1 to 3999. roman(1994) is 'MCMXCIV'.",
        """
assert roman(1994) == "MCMXCIV"
assert roman(4) == "IV"
assert roman(3999) == "MMMCMXCIX"
assert [roman(n) for n in (1, 9, 40, 90, 400)] == ["I", "IX", "XL", "XC", "CD"]
""",
    ),
    (
        "balanced",
        "Write balanced(text): True if the brackets (), [] and {} in text open and close in the right order; anything "
        "else is skipped.",
        """
assert balanced("a(b[c]{d})") is True
assert balanced("(]") is False
assert balanced("((") is False
assert balanced(")(") is False
assert balanced("") is True
""",
    ),
    (
        "merge_intervals",
        "Write merge_intervals(intervals): pairs (start, end), in any order, as a sorted list of tuples in which those "
        "that overlap or touch are one.",
        """
assert merge_intervals([(1, 3), (2, 6), (8, 10)]) == [(1, 6), (8, 10)]
assert merge_intervals([(5, 6), (1, 5)]) == [(1, 6)]
assert merge_intervals([]) == []
assert merge_intervals([(1, 10), (2, 3)]) == [(1, 10)]
""",
    ),
    (
        "run_length",
        "Write run_length(text): each run of equal characters as the character and its count. run_length('aab') is "
        "'a2b1'.",
        """
assert run_length("aab") == "a2b1"
assert run_length("") == ""
assert run_length("zzzzzzzzzzzz") == "z12"
assert run_length("abba") == "a1b2a1"
""",
    ),
    (
        "primes_below",
        "Write primes_below(limit): the list of all primes smaller than limit, rising. It must be quick up to 100000.",
        """
assert primes_below(2) == []
assert primes_below(12) == [2, 3, 5, 7, 11]
assert len(primes_below(100000)) == 9592
""",
    ),
    (
        "transpose",
        "Write transpose(rows): a list of equally long lists with rows and columns exchanged. transpose([]) is [].",
        """
assert transpose([[1, 2, 3], [4, 5, 6]]) == [[1, 4], [2, 5], [3, 6]]
assert transpose([]) == []
assert transpose([[7]]) == [[7]]
""",
    ),
    (
        "group_anagrams",
        "Write group_anagrams(words): lists of words with the same letters, words in each list sorted, lists sorted.",
        """
assert group_anagrams(["tea", "eat", "tan", "ate"]) == [["ate", "eat", "tea"], ["tan"]]
assert group_anagrams([]) == []
assert group_anagrams(["b", "a", "b"]) == [["a"], ["b", "b"]]
""",
    ),
    (
        "evaluate_postfix",
        "Write evaluate_postfix(text): the value of an expression in postfix form, of whole numbers and + - * with "
        "spaces between. evaluate_postfix('3 4 + 2 *') is 14.",
        """
assert evaluate_postfix("3 4 + 2 *") == 14
assert evaluate_postfix("7") == 7
assert evaluate_postfix("2 5 -") == -3
assert evaluate_postfix("10 2 8 * + 3 -") == 23
""",
    ),
]


def built_in() -> list[Task]:
    """All of them, always in the same order."""
    return [{"name": name, "task": task, "test_code": tests.strip()} for name, task, tests in _TASKS]


def split(tasks: list[Task], share: float) -> tuple[list[Task], list[Task]]:
    """Tasks to train on, and the last of them, about ``share`` and at least one, for evaluation."""
    held_out = min(max(1, round(share * len(tasks))), len(tasks) - 1)
    return tasks[: len(tasks) - held_out], tasks[len(tasks) - held_out :]
