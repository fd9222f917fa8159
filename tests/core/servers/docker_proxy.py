"""Proxy to the Docker Engine that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path


class Proxy:
    """Proxy on a unix socket.

    cut: end all connections, as a restart of dockerd does. close: also refuse new ones.
    """

    def __init__(self, path: Path, engine: str) -> None:
        self.host = f"unix://{path}"
        self._engine = engine.removeprefix("unix://")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        for end in self._open:
            with contextlib.suppress(OSError):  # the other side has closed it
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # never listened on
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._open:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._engine)
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pass_on, args=(one, other), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the connection was cut
            while data := one.recv(65536):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):  # the other side has closed it
                end.shutdown(socket.SHUT_RDWR)
