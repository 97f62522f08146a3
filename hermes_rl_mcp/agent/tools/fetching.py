"""One page over HTTP for a model: public addresses only, bounded in time, bytes and redirects.

Invariant: unless private addresses are allowed, the connection goes to the very address that was found to be public, so
a name that changes its mind between question and connection leads nowhere.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import httpx

MAX_BYTES = 5_000_000
MAX_REDIRECTS = 5
TIMEOUT_S = 30.0
_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""A gateway turns these into the IPv4 address in their last four bytes."""
_PROTOCOL = ipaddress.ip_network("192.0.0.0/24")
"""Older Pythons count some of it as public."""
_HEADERS = {"user-agent": "hermes-rl-mcp", "accept": "text/html,application/xhtml+xml,text/*;q=0.9,*/*;q=0.5"}


class FetchError(Exception):
    """Why there is no page, in words for a model."""


@dataclass(frozen=True)
class Page:
    url: str
    """Where the redirects ended."""
    content_type: str
    """Lower case, without parameters."""
    charset: str | None
    data: bytes


def checked_url(url: str, *, allow_private: bool) -> list[str]:
    """The addresses of its host, all of them public. Raises FetchError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise FetchError(f"{url[:200]!r} is no URL.") from None
    if parts.scheme not in ("http", "https") or not host:
        raise FetchError(f"{url[:200]!r} is no http or https URL.")
    if parts.username or parts.password:
        raise FetchError("URLs with a user name or password are refused.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise FetchError(f"There is no host {host[:200]!r}.") from None
    addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    if not allow_private and not all(_is_public(address) for address in addresses):
        raise FetchError(f"{host} is an address of this machine or a private network; such addresses are refused.")
    return addresses


def fetch(url: str, *, allow_private: bool, timeout_s: float = TIMEOUT_S, max_bytes: int = MAX_BYTES) -> Page:
    """Raises FetchError."""
    deadline = time.monotonic() + timeout_s
    with httpx.Client(timeout=min(timeout_s, 15.0), trust_env=False, headers=_HEADERS) as client:
        for _ in range(MAX_REDIRECTS + 1):
            addresses = checked_url(url, allow_private=allow_private)
            answer = _get(client, url, addresses[0], deadline, max_bytes)
            if isinstance(answer, Page):
                return answer
            url = urljoin(url, answer)
    raise FetchError(f"More than {MAX_REDIRECTS} redirects.")


def _get(client: httpx.Client, url: str, address: str, deadline: float, max_bytes: int) -> Page | str:
    """The page, or where it redirects to."""
    asked = httpx.URL(url)
    # Connects to the address that was looked at; the certificate is still the name's.
    request = client.build_request(
        "GET",
        asked.copy_with(host=address),
        headers={"host": asked.netloc.decode("ascii")},
        extensions={"sni_hostname": asked.raw_host.decode("ascii")},
    )
    try:
        response = client.send(request, stream=True)
        try:
            if response.is_redirect and (location := response.headers.get("location")):
                return str(location)
            if response.status_code >= 400:
                raise FetchError(f"The server answered {response.status_code} {response.reason_phrase}.")
            data = b""
            for chunk in response.iter_bytes(65536):
                data += chunk
                if len(data) > max_bytes:
                    raise FetchError(f"The page has more than {max_bytes // 1_000_000} MB.")
                if time.monotonic() > deadline:
                    raise FetchError("The page took too long.")
            kind = response.headers.get("content-type", "text/html").partition(";")[0].strip().lower()
            return Page(url, kind, response.charset_encoding, data)
        finally:
            response.close()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FetchError(f"{asked.host} did not answer: {type(error).__name__}.") from None


def _is_public(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        carried = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            carried = ipaddress.IPv4Address(found.packed[-4:])
        if carried is not None:
            found = carried
        elif found not in _UNICAST:  # also the outdated forms that carry an IPv4 address
            return False
    return found.is_global and not found.is_multicast and found not in _PROTOCOL
