"""Which network addresses a configuration may name. Pure: nothing is looked up, so a host name counts as it is written.

A link-local address is never a judge or a model server: it is the cloud's metadata service, which hands out the keys
of the machine. Hosts in the local network are the operator's to allow.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,30}://[^\s\"'<>]+")
_NUMERIC = re.compile(r"[0-9a-fA-FxX.]+\Z")
_METADATA_NAMES = {"metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal"}
_METADATA_ADDRESSES = {
    ipaddress.ip_address(text) for text in ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254")
}
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that stand for an IPv4 address."""


def hosts_of(value: Any) -> Iterator[str]:
    """Hosts of all addresses in a value, at any depth; also of a text that is nothing but ``host`` or ``host:port``."""
    if isinstance(value, dict):
        for item in value.values():
            yield from hosts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from hosts_of(item)
    elif isinstance(value, str):
        found = [*_URL.findall(value)]
        if not found and not re.search(r"\s", value) and len(value) < 300:
            host = _host(f"//{value}")
            if host in _METADATA_NAMES or ((host.count(".") == 3 or ":" in host) and address_of(host)):
                yield host
        yield from (host for url in found if (host := _host(url)))


def is_metadata_service(host: str) -> bool:
    """Whether this is an address of the machine's own cloud, link or everybody on it, however it is spelled."""
    address = address_of(host)
    if address is None:
        return host in _METADATA_NAMES
    return address.is_link_local or address.is_multicast or address in _METADATA_ADDRESSES


def needs_permission(host: str, allowed: Sequence[str]) -> bool:
    """Whether this is a host of the local network that none of the operator's shell patterns allows."""
    address = address_of(host)
    private = address is not None and (address.is_private or address.is_unspecified) and not address.is_loopback
    return private and not any(fnmatch.fnmatchcase(host, pattern) for pattern in allowed)


def is_here(host: str) -> bool:
    """Whether what is sent there stays on this machine."""
    address = address_of(host)
    return host == "localhost" or host.endswith(".localhost") or (address is not None and address.is_loopback)


def address_of(host: str) -> Address | None:
    """The IP address that a host is, also as one number, in hex or octal, or wrapped in IPv6; None for a name."""
    try:
        address: Address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        if not _NUMERIC.match(host) or not host[0].isdigit():
            return None
        try:
            address = ipaddress.IPv4Address(socket.inet_aton(host))
        except OSError:
            return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _TRANSLATED:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".").lower()
    except ValueError:
        return ""
