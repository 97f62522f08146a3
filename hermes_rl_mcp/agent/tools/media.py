"""vision_analyze and image_generate, by endpoints that speak OpenAI's API.

Invariant: a picture that a model names comes from its sandbox or a public address; keys go to the endpoint alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import posixpath
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from pydantic import JsonValue

from hermes_rl_mcp.agent import settings as names
from hermes_rl_mcp.agent.interfaces import CallContext, Tool
from hermes_rl_mcp.agent.settings import setting
from hermes_rl_mcp.agent.tools.fetching import FetchError, fetch
from hermes_rl_mcp.agent.tools.schema import arguments, choice, text
from hermes_rl_mcp.errors import EndpointError, InvalidValueError

TIMEOUT_S = 120.0
MAX_IMAGE_BYTES = 20_000_000
_MAGIC = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))
_SIZES = {"landscape": "1536x1024", "square": "1024x1024", "portrait": "1024x1536"}


def vision_analyze(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """``{success, analysis}``."""
    return {"success": True, "analysis": described(context, _image(context, args["image_url"]), args["question"])}


def described(context: CallContext, image: bytes, question: str) -> str:
    """What the vision model answers about a picture. Raises EndpointError, InvalidValueError."""
    kind = _kind(image)
    picture = f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
    content = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": picture}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2000}
    answer = _asked(context.settings, "VISION", "/chat/completions", body)
    try:
        return str(answer["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError):
        raise EndpointError("The vision endpoint gave no answer.", hint="Look at its address and model.") from None


def image_generate(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """``{success, image}``: a URL, or a file in the sandbox."""
    body = {"prompt": args["prompt"], "n": 1, "size": _SIZES[args.get("aspect_ratio") or "landscape"]}
    answer = _asked(context.settings, "IMAGE", "/images/generations", body)
    try:
        one = answer["data"][0]
        if one.get("url"):
            return {"success": True, "image": str(one["url"])}
        data = base64.b64decode(one["b64_json"], validate=True)
        kind = _kind(data)
    except (KeyError, IndexError, TypeError, AttributeError, binascii.Error, InvalidValueError):
        raise EndpointError("The image endpoint gave no picture.", hint="Look at its address and model.") from None
    path = posixpath.join("images", f"{hashlib.sha256(data).hexdigest()[:12]}.{kind}")
    context.sandbox().write_bytes(path, data)
    return {"success": True, "image": path}


def _image(context: CallContext, source: str) -> bytes:
    """Bytes of a data URL, a public URL, or a file in the sandbox. Raises InvalidValueError."""
    try:
        if source.startswith("data:"):
            return base64.b64decode(source.partition(",")[2], validate=True)
        if source.startswith(("http://", "https://")):
            allowed = names.is_on(context.settings, names.ALLOW_PRIVATE_URLS)
            return fetch(source, allow_private=allowed, max_bytes=MAX_IMAGE_BYTES).data
        return context.sandbox().read_bytes(source.removeprefix("file://"))
    except (FetchError, OSError, binascii.Error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidValueError(f"The picture cannot be read: {why}", hint="Name a file or a public URL.") from None


def _kind(image: bytes) -> str:
    kind = next((kind for magic, kind in _MAGIC if image.startswith(magic)), None)
    if kind is None or len(image) > MAX_IMAGE_BYTES:
        raise InvalidValueError(
            "That is no picture." if kind is None else "The picture is too large.",
            hint="PNG, JPEG, GIF and WebP up to 20 MB can be looked at.",
        )
    return kind


def _asked(settings: Mapping[str, str], which: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    url, model, key = (setting(settings, f"HERMES_RL_{which}_{part}") for part in ("URL", "MODEL", "API_KEY"))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    what = f"The {which.lower()} endpoint"
    try:
        response = httpx.post(
            url.rstrip("/") + route, json={"model": model, **body}, headers=headers, timeout=TIMEOUT_S
        )
        answer = response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise EndpointError(f"{what} did not answer: {type(error).__name__}.", hint="Try again later.") from None
    if not isinstance(answer, dict):
        raise EndpointError(
            f"{what} answered {response.status_code}.", hint="The operator should look at its settings."
        )
    return answer


def vision_missing(settings: Mapping[str, str]) -> str | None:
    return _unset(settings, names.VISION_URL, names.VISION_MODEL)


def _unset(settings: Mapping[str, str], *needed: str) -> str | None:
    away = [name for name in needed if not setting(settings, name)]
    return f"set {' and '.join(away)} to an endpoint that speaks OpenAI's API" if away else None


_image_missing: Callable[[Mapping[str, str]], str | None] = lambda settings: _unset(  # noqa: E731 - one line for a field
    settings, names.IMAGE_URL, names.IMAGE_MODEL
)

TOOLS = (
    Tool(
        "vision_analyze",
        "vision",
        "Ask a question about a picture.",
        arguments(
            ("image_url", "question"),
            image_url=text("A URL, or the path of a file in your sandbox"),
            question=text("What you want to know"),
        ),
        vision_analyze,
        vision_missing,
    ),
    Tool(
        "image_generate",
        "image_gen",
        "Make a picture from a description. Gives its URL or its path in your sandbox.",
        arguments(
            ("prompt",),
            prompt=text("What it shows", minLength=1),
            aspect_ratio=choice("Its shape", *_SIZES, default="landscape"),
        ),
        image_generate,
        _image_missing,
    ),
)
