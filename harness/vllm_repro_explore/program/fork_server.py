"""Fork server: import torch and other large packages once, then fork a process for each start.

    <release's python> fork_server.py FD [bare]

Each message on the socket FD is JSON, {module, cwd, env: variables beside the server's}, with four
file descriptors: standard input, output and error of the process, and a pipe that gets its id and
then its exit status, a line each. The server exits when the other end of FD is closed. It does not
import vLLM, whose files and variables may differ between starts. bare: it imports nothing at all.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch._inductor.lowering",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "openai.types.responses",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "numba",
    "xgrammar",
    "fastapi",
    "aiohttp",
    "cv2",
)
"""What vLLM imports from other packages, as far as it takes long."""


def main() -> None:
    """Import large packages, then fork on request; in a forked process run its module."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the search
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    if importlib.util.find_spec("torch") and "bare" not in sys.argv:
        for name in PACKAGES:
            with contextlib.suppress(Exception):  # vLLM's own import reports what it lacks
                importlib.import_module(name)
        # A lock that another thread holds would hang every fork.
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            signal.signal(signal.SIGINT, interrupt)
            os.execv(sys.executable, [sys.executable, *sys.argv, "bare"])
    gc.freeze()  # a collection after a fork would copy the shared pages
    module = _serve(socket.socket(fileno=int(sys.argv[1])))
    if module:
        signal.signal(signal.SIGINT, interrupt)  # a background job of a shell ignores it
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _serve(control: socket.socket) -> str:
    """Fork a process for each message, and in that process return the module to run.

    Return an empty text in the server, once the other end is closed.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not message:
            return ""
        if os.fork() == 0:
            control.close()
            return _begin(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _begin(start: dict[str, Any], descriptors: Sequence[int]) -> str:
    """Fork again; in the child set the streams, folder and variables, and return its module.

    start: the message. descriptors: of the three streams and of the report. The parent never
    returns: it waits for the child's exit, reports it, and exits.
    """
    *streams, report = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        for stream in streams:
            os.close(stream)
        _report_exit(pid, report)
    os.close(report)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(start["cwd"])
    os.environ.update(start["env"])
    sys.path[:0] = start["env"]["PYTHONPATH"].split(":")
    del sys.argv[1:]
    return str(start["module"])


def _report_exit(pid: int, report: int) -> None:
    """Write a process's id and, once it has ended, its exit status to the pipe; then exit."""
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
        os.write(report, f"{pid}\n".encode())
        os.write(report, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
