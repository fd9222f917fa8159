"""Ports that servers are told to use."""

from __future__ import annotations

import socket

import pytest

from vllm_repro.command.container import LOOPBACK
from vllm_repro.host.ports import free_port


def test_a_port_is_kept_for_the_server_that_is_told_to_use_it() -> None:
    port, *others = (free_port() for _ in range(100))
    assert len({port, *others}) == 100
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((LOOPBACK, port))
    socket.create_server((LOOPBACK, port)).close()  # as servers do
