"""Ports of this host."""

from __future__ import annotations

import os
import socket
from collections import deque

from vllm_repro.command.container import LOOPBACK
from vllm_repro.errors import InfraError

_HELD: deque[int] = deque()
"""Sockets of the ports given last. While one is bound, no other process is given its port."""


def free_port(address: str = LOOPBACK) -> int:
    """Return a port of this host's `address` that nothing listens on now.

    Only a program that asks for this very port gets it, with SO_REUSEADDR, as servers do.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind((address, 0))
    port = int(probe.getsockname()[1])
    _HELD.append(probe.detach())
    if len(_HELD) > 100:
        os.close(_HELD.popleft())
    return port


def check_port(port: int) -> None:
    """Raise `InfraError` if something listens on `port` of 127.0.0.1.

    A dying old server would answer in place of the new one.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise InfraError(
                f"port {port} on {LOOPBACK} is in use ({error.strerror})",
                hint="run it again: another free port is taken",
            ) from error
