"""The names and addresses of machines, as servers listen on them and clients name them."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

from tunesmith.errors import ConfigError, boundary


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is written as; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_wildcard(host: str) -> bool:
    """Whether a server that listens on it can be reached at every address of the machine."""
    address = address_of(host)
    return address is not None and address.is_unspecified


def check_address(host: str, port: int) -> None:
    """Raises ConfigError: a server cannot listen there. What it needs is loaded only afterwards."""
    refused = f"cannot listen on {host}:{port}; choose another --host or --port"
    with boundary(ConfigError, refused, OSError):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)


def is_loopback(host: str) -> bool:
    address = address_of(host)
    if address is None:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback


def is_served_name(host: str, name: str) -> bool:
    """Whether a server that listens on ``host`` is meant by ``name``.

    At every address of the machine, these are its own name and all addresses: a page whose name was
    rebound has neither.
    """
    if is_loopback(name) or name == host.lower():
        return True
    own = {socket.gethostname().lower(), socket.getfqdn().lower()}
    return is_wildcard(host) and (name in own or address_of(name) is not None)
