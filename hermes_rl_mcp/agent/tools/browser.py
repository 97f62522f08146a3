"""browser_*: a page that a model sees as an outline with references, and acts on by them.

Invariant: one browser for a task, made at the first call and closed with the task.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import logging
import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue

from hermes_rl_mcp.agent.interfaces import CallContext, Handler, Tool
from hermes_rl_mcp.agent.settings import ALLOW_PRIVATE_URLS, BROWSER, is_on, setting
from hermes_rl_mcp.agent.tools import media
from hermes_rl_mcp.agent.tools.browser_session import NAVIGATE_MS, BrowserSession, chromium_program
from hermes_rl_mcp.agent.tools.fetching import FetchError, checked_url
from hermes_rl_mcp.agent.tools.schema import arguments, choice, flag, number, text
from hermes_rl_mcp.errors import InvalidValueError

log = logging.getLogger(__name__)

_KEY = "browser"
SNAPSHOT_CHARS = 8_000
"""Of a snapshot that is not asked for in full."""
_SCROLL_PIXELS = 600
_EXPRESSION_CHARS = 20_000


def _session(context: CallContext) -> BrowserSession:
    found = context.state.get(_KEY)
    if found is None:
        program = chromium_program(setting(context.settings, BROWSER))
        found = BrowserSession(program, allow_private=is_on(context.settings, ALLOW_PRIVATE_URLS))
        context.state[_KEY] = found
    return found


def _acting(work: Callable[[CallContext, dict[str, Any]], JsonValue]) -> Handler:
    """What goes wrong in the browser is a result: the model can do something else."""

    def handler(context: CallContext, args: dict[str, Any]) -> JsonValue:
        from playwright.async_api import Error

        try:
            return work(context, args)
        except (Error, TimeoutError) as error:
            return {"success": False, "error": str(error).split("Call log:")[0].strip()[:500]}

    return handler


def navigate(context: CallContext, args: dict[str, Any]) -> JsonValue:
    url = args["url"] if "://" in args["url"] else f"https://{args['url']}"
    try:
        checked_url(url, allow_private=is_on(context.settings, ALLOW_PRIVATE_URLS))
    except FetchError as error:
        return {"success": False, "error": str(error)}
    session = _session(context)

    async def go() -> dict[str, JsonValue]:
        response = await session.page.goto(url, wait_until="domcontentloaded", timeout=NAVIGATE_MS)
        return {"success": True, "status": response.status if response else None, **await _seen(session, full=False)}

    return session.run(go())


def snapshot(context: CallContext, args: dict[str, Any]) -> JsonValue:
    session = _session(context)

    async def look() -> dict[str, JsonValue]:
        return {"success": True, **await _seen(session, full=bool(args.get("full")))}

    return session.run(look())


def click(context: CallContext, args: dict[str, Any]) -> JsonValue:
    session = _session(context)

    async def act() -> dict[str, JsonValue]:
        await _element(session, args["ref"]).click()
        return await _after(session)

    return session.run(act())


def type_text(context: CallContext, args: dict[str, Any]) -> JsonValue:
    session = _session(context)

    async def act() -> dict[str, JsonValue]:
        await _element(session, args["ref"]).fill(args["text"])
        return await _after(session)

    return session.run(act())


def scroll(context: CallContext, args: dict[str, Any]) -> JsonValue:
    session = _session(context)
    by = _SCROLL_PIXELS if args["direction"] == "down" else -_SCROLL_PIXELS

    async def act() -> dict[str, JsonValue]:
        place = await session.page.evaluate("by => { window.scrollBy(0, by); return window.scrollY; }", by)
        return {"success": True, "scrolled_to": place}

    return session.run(act())


def back(context: CallContext, args: dict[str, Any]) -> JsonValue:
    session = _session(context)

    async def act() -> dict[str, JsonValue]:
        await session.page.go_back(wait_until="domcontentloaded", timeout=NAVIGATE_MS)
        return await _after(session)

    return session.run(act())


def press(context: CallContext, args: dict[str, Any]) -> JsonValue:
    session = _session(context)

    async def act() -> dict[str, JsonValue]:
        await session.page.keyboard.press(args["key"])
        return await _after(session)

    return session.run(act())


def get_images(context: CallContext, args: dict[str, Any]) -> JsonValue:
    session = _session(context)
    script = (
        "() => [...document.images].slice(0, 100).map(i => "
        "({src: i.currentSrc || i.src, alt: i.alt, width: i.naturalWidth, height: i.naturalHeight}))"
    )

    async def look() -> JsonValue:
        images = await session.page.evaluate(script)
        shown: list[JsonValue] = [{**one, "src": one["src"][:2000]} for one in images]
        return {"success": True, "images": shown, "count": len(shown)}

    return session.run(look())


def vision(context: CallContext, args: dict[str, Any]) -> JsonValue:
    session = _session(context)

    async def shoot() -> bytes:
        return bytes(await session.page.screenshot(type="png"))

    picture = session.run(shoot())
    path = posixpath.join("screenshots", f"{context.state.setdefault('screenshots', 0) + 1}.png")
    context.state["screenshots"] += 1
    context.sandbox().write_bytes(path, picture)
    question = args["question"]
    if args.get("annotate"):
        outline = session.run(_seen(session, full=False))["snapshot"]
        question = f"{question}\n\nOutline of the page, with references in [ref=...]:\n{outline}"
    return {"success": True, "analysis": media.described(context, picture, question), "screenshot_path": path}


def console(context: CallContext, args: dict[str, Any]) -> JsonValue:
    session = _session(context)
    result: dict[str, JsonValue] = {"success": True}
    if expression := args.get("expression"):

        async def evaluate() -> Any:
            return await session.page.evaluate(expression)

        value = json.dumps(session.run(evaluate()), ensure_ascii=False, default=str)
        result["result"] = value if len(value) <= _EXPRESSION_CHARS else f"{value[:_EXPRESSION_CHARS]}..."
    result["messages"] = [dict(one) for one in session.console]
    if args.get("clear"):
        session.console.clear()
    return result


def cdp(context: CallContext, args: dict[str, Any]) -> JsonValue:
    session = _session(context)

    async def send() -> JsonValue:
        channel = await session.page.context.new_cdp_session(session.page)
        try:
            reply = await channel.send(args["method"], args.get("params") or {})
        finally:
            await channel.detach()
        return {"success": True, "result": json.loads(json.dumps(reply, default=_text_of_bytes))}

    return session.run(send(), min(float(args.get("timeout") or 30), 120.0))


def dialog(context: CallContext, args: dict[str, Any]) -> JsonValue:
    session = _session(context)
    wanted = args.get("dialog_id")
    found = next((one for one in session.dialogs if wanted in (None, one["dialog_id"])), None)
    if found is None:
        return {"success": False, "error": "There is no such dialog open.", "dialogs": _dialogs(session)}

    async def answer() -> dict[str, JsonValue]:
        session.dialogs.remove(found)
        if args["action"] == "accept":
            await found["object"].accept(args.get("prompt_text") or "")
        else:
            await found["object"].dismiss()
        return {"success": True, "dialog_id": found["dialog_id"], "dialogs": _dialogs(session)}

    return session.run(answer())


def _element(session: BrowserSession, ref: str) -> Any:
    name = ref.strip().removeprefix("@").removeprefix("[ref=").removesuffix("]")
    if not name.isalnum():
        raise InvalidValueError(f"{ref[:40]!r} is no reference.", hint="Take one from browser_snapshot, such as e5.")
    return session.page.locator(f"aria-ref={name}")


async def _after(session: BrowserSession) -> dict[str, JsonValue]:
    if not session.dialogs:
        await session.settled()
    return {"success": True, **await _seen(session, full=False)}


async def _seen(session: BrowserSession, *, full: bool) -> dict[str, JsonValue]:
    if session.dialogs:  # a page that waits for an answer shows nothing else
        return {"url": session.page.url, "dialogs": _dialogs(session)}
    outline = await session.page.aria_snapshot(mode="ai")
    if not full and len(outline) > SNAPSHOT_CHARS:
        rest = len(outline) - SNAPSHOT_CHARS
        outline = f"{outline[:SNAPSHOT_CHARS]}\n... [{rest} more characters; browser_snapshot(full=true) has all]"
    return {"url": session.page.url, "title": await session.page.title(), "snapshot": outline}


def _dialogs(session: BrowserSession) -> list[JsonValue]:
    return [{name: value for name, value in one.items() if name != "object"} for one in session.dialogs]


def _text_of_bytes(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def missing(settings: Mapping[str, str]) -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "pip install 'hermes-rl-mcp[browser]' and have a Chromium (playwright install chromium)"
    return None


def _vision_missing(settings: Mapping[str, str]) -> str | None:
    return missing(settings) or media.vision_missing(settings)


_REF = text("A reference from the page's outline, such as e5")


def _tool(name: str, description: str, parameters: dict[str, Any], work: Callable[..., JsonValue]) -> Tool:
    away = _vision_missing if name == "browser_vision" else missing
    return Tool(name, "browser", description, parameters, _acting(work), away)


TOOLS = (
    _tool(
        "browser_navigate",
        "Open a page. Answers with its outline, in which elements have references.",
        arguments(("url",), url=text("Its address", minLength=1)),
        navigate,
    ),
    _tool(
        "browser_snapshot",
        "The page's outline as it is now. References of earlier outlines may be out of date.",
        arguments((), full=flag(f"All of it, where it has more than {SNAPSHOT_CHARS} characters")),
        snapshot,
    ),
    _tool("browser_click", "Click an element.", arguments(("ref",), ref=_REF), click),
    _tool(
        "browser_type",
        "Put text into a field, in place of what is there.",
        arguments(("ref", "text"), ref=_REF, text=text("The text")),
        type_text,
    ),
    _tool(
        "browser_scroll",
        "Scroll the page.",
        arguments(("direction",), direction=choice("Where to", "up", "down")),
        scroll,
    ),
    _tool("browser_back", "Go back to the page before.", arguments(), back),
    _tool(
        "browser_press",
        "Press a key.",
        arguments(("key",), key=text("Such as Enter, Tab, Escape, ArrowDown or Control+a")),
        press,
    ),
    _tool("browser_get_images", "Pictures of the page: address, text, size.", arguments(), get_images),
    _tool(
        "browser_vision",
        "Ask a question about how the page looks.",
        arguments(
            ("question",),
            question=text("What you want to know"),
            annotate=flag("Show the page's outline with references along with the picture"),
        ),
        vision,
    ),
    _tool(
        "browser_console",
        "Messages and errors of the page's scripts; or the value of an expression.",
        arguments((), clear=flag("Forget the messages"), expression=text("JavaScript to evaluate in the page")),
        console,
    ),
    _tool(
        "browser_cdp",
        "A command of Chromium's DevTools protocol, for the page.",
        arguments(
            ("method",),
            method=text("Such as Network.getCookies"),
            params={"type": "object", "description": "Its parameters", "additionalProperties": True},
            target_id=text("Accepted; the command goes to the page that is seen"),
            timeout=number("Seconds", minimum=0, default=30),
        ),
        cdp,
    ),
    _tool(
        "browser_dialog",
        "Answer a dialog that the page has opened (alert, confirm, prompt).",
        arguments(
            ("action",),
            action=choice("The answer", "accept", "dismiss"),
            prompt_text=text("For a prompt: what to enter"),
            dialog_id=text("Which; default: the oldest"),
        ),
        dialog,
    ),
)
