"""Ports of this host."""

from __future__ import annotations

import socket

from vllm_repro.command.container import LOOPBACK
from vllm_repro.errors import InfraError


def free_port(address: str = LOOPBACK) -> int:
    """Return a port of this host's `address` that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


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
