"""Secrets do not leave; ordinary values do."""

from __future__ import annotations

import json
import string
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hermes_rl_mcp import redact as module
from hermes_rl_mcp.redact import MASK, redact, redact_text

KEY = "sk-" + "a1B2" * 8


def test_values_of_secret_keys_are_masked_at_any_depth() -> None:
    found = redact({"openai": [{"api_key": "abc123def", "model_name": "m"}], "run": {"nonce": "n" * 8, "run_id": "r"}})
    assert found == {"openai": [{"api_key": MASK, "model_name": "m"}], "run": {"nonce": MASK, "run_id": "r"}}


def test_ordinary_fields_that_sound_alike_stay() -> None:
    values = {"max_token_length": 5, "tokens/trained": 3, "eos_token": "</s>", "tokenizer_name": "t", "api_key": "x"}
    assert redact(values) == values


def test_keys_in_text_are_masked_by_their_shape() -> None:
    for text in (
        f"key {KEY} end",
        "Authorization: Bearer abcdefgh.ijkl",
        "hf_" + "a" * 30,
        "OPENAI_API_KEY=hunter2222",
        "https://user:pass1234@host/x",
    ):
        masked = redact_text(text)
        assert MASK in masked
        for secret in (KEY, "abcdefgh.ijkl", "hf_aaaa", "hunter2222", "pass1234"):
            assert secret not in masked


def test_given_secrets_are_masked_inside_of_addresses() -> None:
    assert redact_text("http://127.0.0.1:8000/q1w2e3r4/v1", ["q1w2e3r4"]) == f"http://127.0.0.1:8000/{MASK}/v1"


@given(st.text(string.ascii_letters + string.digits, min_size=20, max_size=60), st.text(max_size=30))
def test_a_key_never_survives_wherever_it_stands(secret: str, around: str) -> None:
    text = f"{around} sk-{secret} {around}"
    shown = json.dumps(redact({"log": [text], "api_key": secret}))
    assert f"sk-{secret}" not in shown
    assert json.loads(shown)["api_key"] == MASK


PIECES = [
    *(
        "sk-",
        "hf_",
        "ghp_",
        "gho_",
        "ghu_",
        "ghs_",
        "ghr_",
        "github_pat_",
        "xoxb-",
        "AKIA",
        "tml-",
        "AIza",
        "A1B2C3D4E5",
    ),
    *(
        "a1b2c3d4e5f6",
        "0123456789ABCDEF",
        "bearer ",
        "BEARER\t",
        "api_key",
        "APIKEY",
        "Secret",
        "password",
        "auth-token",
    ),
    *("\N{KELVIN SIGN}ey", "\N{LATIN SMALL LETTER LONG S}ecret", "=", ": ", "://", "@", "u:p", " ", "\n", "é", '"'),
]


@example("a password=abcd1234")
@example("\N{LATIN SMALL LETTER LONG S}ecret=abcd1234")
@example("a://u:p@")
@settings(max_examples=200)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_the_quick_look_for_what_may_be_a_key_overlooks_nothing(text: str) -> None:
    searched = module._SECRET_VALUE.sub(MASK, text)
    for pattern, end in ((module._BEARER, ""), (module._ASSIGNED, ""), (module._URL_USER, "@")):
        searched = pattern.sub(rf"\g<1>{MASK}{end}", searched)
    assert redact_text(text) == searched


@pytest.mark.parametrize("text", ["a-", "x-token", "api_key", "a+", "a://b:", "bearer ", "sk-a", "a.b-"])
def test_text_that_was_made_to_take_long_does_not(text: str) -> None:
    began = time.process_time()
    redact_text(text * (200_000 // len(text)) + " token= ://@")
    assert time.process_time() - began < 5


@pytest.mark.parametrize("assigned", ["my-hf_token=abcd1234", "x.password: abcd1234", "?api_key='abcd1234'"])
def test_a_name_that_holds_a_secret_is_found_behind_anything(assigned: str) -> None:
    assert "abcd1234" not in redact_text(f"é-{assigned}") and "abcd1234" not in redact_text(assigned)
