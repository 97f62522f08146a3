"""Who may talk to a loopback server at all: no web page, no rebound host name, nobody without the secret prefix.

Invariant: a request that a browser made for a page, or that names a host other than this machine, gets no path.
"""

from __future__ import annotations

import argparse
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hermes_rl_mcp.errors import PreflightError

BROWSER_HEADERS = ("origin", "sec-fetch-site")
"""Browsers add them to what a page sends, and pages cannot take them away. Programs do not send them."""


@dataclass(frozen=True)
class Refusal:
    """HTTP status and a sentence."""

    status: int
    sentence: str


def admitted_path(headers: Mapping[str, str], path: str, *, path_prefix: str, any_host: bool) -> str | Refusal:
    """The path below the prefix (secret first component, or empty). ``any_host`` only if a person asked for it."""
    if any(name in headers for name in BROWSER_HEADERS):
        return Refusal(403, "Requests from web pages are refused.")
    if not any_host and not is_loopback(headers.get("host", "")):
        return Refusal(403, "The Host header does not name this machine's loopback address.")
    if not path_prefix:
        return path
    first, _, rest = path[1:].partition("/")
    if not secrets.compare_digest(first.encode(), path_prefix.encode()):
        return Refusal(404, "There is nothing at this address.")
    return f"/{rest}"


def bound_socket(host: str, port: int) -> socket.socket:
    """Bound, not yet listening; port 0 takes a free one. Raises PreflightError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without the protocol's number asyncio does not switch Nagle off, and each answer in two parts waits for 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise PreflightError(
            f"Cannot listen on {host} port {port}: {error.strerror}.",
            hint="Choose another port with --port (0 takes a free one), or stop the program that uses this one.",
        ) from None
    return sock


def is_loopback(host: str) -> bool:
    """Whether a Host header or an address, with or without a port, means this machine."""
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    elif host.count(":") > 1:
        name = host
    else:
        name = host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def port_number(text: str) -> int:
    """For argparse: a port, or 0 for a free one. Sockets answer a number out of range with an OverflowError."""
    if text.isdecimal() and int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port; ports are numbers from 0 to 65535")
