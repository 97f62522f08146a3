"""A group goes out as the bytes that came in where that is safe, and as what was checked where it is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl_mcp.contracts.rollout_api import ScoredData
from hermes_rl_mcp.rollout_api.groups import FieldError, decode_many, decode_one

PLAIN: dict[str, Any] = {
    "tokens": [[1, 2, 3], [1, 4]],
    "masks": [[-100, 2, 3], [-100, 4]],
    "scores": [0.5, 1.0],
    "inference_logprobs": [[1.0, -0.25, -1e-3], [1.0, -2.5]],
}


def text(**changes: Any) -> str:
    return json.dumps({**PLAIN, **changes})


def strictly(raw: bytes) -> Any:
    """As a reader that takes JSON at its word."""

    def no_constants(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), pairs
        return dict(pairs)

    assert b"\n" not in raw and b"\r" not in raw
    return json.loads(raw, parse_constant=no_constants, object_pairs_hook=no_repeats)


def test_a_body_that_needs_no_change_goes_out_byte_for_byte() -> None:
    body = text(env_id=3, overrides=[{"temperature": 0.5}, {}]).encode()
    (group,) = decode_one(body)
    assert group.raw.startswith(body[:-1])
    assert (group.size, group.env_id) == (2, 3)


UNSAFE = {
    "a key twice": text().replace('"scores"', '"scores": [1, 2], "scores"'),
    "a key twice, one hidden by an escape": text().replace('"scores"', '"\\u0073cores": [9, 9], "scores"'),
    "NaN under a key that comes again": text(overrides=[{"a": 1}, {}]).replace('{"a"', '{"a": NaN, "a"'),
    "Infinity under a key that comes again": text(overrides=[{"a": 1}, {}]).replace('{"a"', '{"a": -Infinity, "a"'),
    "line ends": json.dumps(PLAIN, indent=1).replace("\n", "\r\n"),
    "unknown keys": text(more={"tokens": 1}),
    "numbers as text": text(tokens=[["1", 2, 3], [1, 4]]),
    "truth values": text(scores=[True, False]),
    "spaces around": "  " + text() + "\t ",
}


@pytest.mark.parametrize("body", UNSAFE.values(), ids=UNSAFE)
def test_a_body_that_readers_could_understand_otherwise_goes_out_as_what_was_checked(body: str) -> None:
    (group,) = decode_one(body.encode())
    found = strictly(group.raw)
    assert list(found) == list(ScoredData.model_fields)
    assert found["tokens"] == PLAIN["tokens"] and all(type(score) is float for score in found["scores"])


def test_a_name_of_a_field_may_stand_anywhere_else() -> None:
    for changes in ({"generation_params": {"images": "scores"}}, {"images": ["tokens", {"env_id": 4}]}):
        (group,) = decode_one(text(**changes).encode())
        found = strictly(group.raw)
        assert set(found) == set(ScoredData.model_fields)
        assert found["images"] == changes.get("images") and found["env_id"] is None and group.env_id is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*ScoredData.model_fields, "x"]) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "scores": st.lists(VALUES, min_size=2, max_size=2),
            "generation_params": VALUES,
            "overrides": VALUES,
            "images": VALUES,
            "env_id": VALUES,
            "unknown": VALUES,
        },
    ),
    st.booleans(),
)
def test_alone_and_in_a_list_a_group_comes_to_the_same(changes: dict[str, Any], ascii_only: bool) -> None:
    """The list is always written anew: what goes out byte for byte must say the same, and be refused alike."""
    body = json.dumps({**PLAIN, **changes}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        (several,) = decode_many(b"[" + body + b"]")
    except FieldError as refused:
        with pytest.raises(FieldError) as alone:
            decode_one(body)
        assert [place for place, _, _ in alone.value.faults] == [place[1:] for place, _, _ in refused.faults]
        return
    (one,) = decode_one(body)
    assert (one.size, one.env_id) == (several.size, several.env_id)
    assert strictly(one.raw) == strictly(several.raw)
    assert set(strictly(one.raw)) == set(ScoredData.model_fields)
