"""Names of the operator's settings for tools, and how one is read. Pure functions of a mapping."""

from __future__ import annotations

from collections.abc import Mapping

from hermes_rl_mcp.redact import SECRET_PREFIX, secret_values

SEARCH_BACKEND = "HERMES_RL_SEARCH_BACKEND"
"""corpus, searxng, tavily or brave; unset = the first of these that is set up."""
SEARCH_CORPUS = "HERMES_RL_SEARCH_CORPUS"
"""A JSON lines file of pages (url, title, text): search and extraction without a network."""
SEARXNG_URL = "SEARXNG_URL"
TAVILY_API_KEY = "TAVILY_API_KEY"
TAVILY_URL = "TAVILY_URL"
BRAVE_API_KEY = "BRAVE_API_KEY"
BRAVE_URL = "BRAVE_URL"
ALLOW_PRIVATE_URLS = "HERMES_RL_ALLOW_PRIVATE_URLS"
"""1 = web and browser tools may open addresses of this machine and its networks."""
VISION_URL, VISION_MODEL, VISION_API_KEY = "HERMES_RL_VISION_URL", "HERMES_RL_VISION_MODEL", "HERMES_RL_VISION_API_KEY"
IMAGE_URL, IMAGE_MODEL, IMAGE_API_KEY = "HERMES_RL_IMAGE_URL", "HERMES_RL_IMAGE_MODEL", "HERMES_RL_IMAGE_API_KEY"
BROWSER = "HERMES_RL_BROWSER"
"""Chromium's program; unset = Playwright's own, else the first one in PATH."""
TERMINAL_TIMEOUT = "TERMINAL_TIMEOUT"
"""Seconds that a command may take when the model names none."""

PLAIN = (
    *(SEARCH_BACKEND, SEARCH_CORPUS, SEARXNG_URL, TAVILY_URL, BRAVE_URL, ALLOW_PRIVATE_URLS, BROWSER, TERMINAL_TIMEOUT),
    *(VISION_URL, VISION_MODEL, IMAGE_URL, IMAGE_MODEL),
)
KEYS = (TAVILY_API_KEY, BRAVE_API_KEY, VISION_API_KEY, IMAGE_API_KEY)


def setting(settings: Mapping[str, str], name: str) -> str:
    """Its value without surrounding space, else that of ``HERMES_RL_SECRET_<name>``, else empty."""
    return settings.get(name, "").strip() or settings.get(SECRET_PREFIX + name, "").strip()


def is_on(settings: Mapping[str, str], name: str) -> bool:
    return setting(settings, name).lower() in ("1", "true", "yes", "on")


def secrets_of(settings: Mapping[str, str]) -> list[str]:
    """What must not stand in a tool's result."""
    return secret_values(settings)
