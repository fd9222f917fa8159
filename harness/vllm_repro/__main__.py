"""Entry point of `vllm-repro` and `python -m vllm_repro`.

The rest is imported in `main`, after the handlers of signals are set.
"""

import gc
import io
import os
import signal
import sys
from types import FrameType
from typing import Any, TextIO

from vllm_repro.errors import INTERRUPTED

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class _Output(io.FileIO):
    """A file whose reader may leave, as in `vllm-repro run … | head -1`: the rest is discarded."""

    def write(self, data: Any) -> int:
        """Write `data` and return its number of bytes, also if the reader has left."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def _ignore_broken_pipes(stream: TextIO | None) -> Any:
    """Return `stream` with broken pipes ignored, so that they do not change the exit status.

    A stream that is no text file, or None, is returned as it is.
    """
    if not isinstance(stream, io.TextIOWrapper):  # None if it is closed
        return stream
    raw = _Output(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # as Python does for -u
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def main() -> int:
    """Run `vllm-repro` and return its exit status.

    Replace `sys.stdout` and `sys.stderr`. Until the command line is parsed, a signal exits at once
    with status 130; then the earlier handlers are back.
    """
    sys.stdout, sys.stderr = _ignore_broken_pipes(sys.stdout), _ignore_broken_pipes(sys.stderr)
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        # else it is ignored, as in a background job
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _leave)

    def restore_handlers() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    # httpx imports its own command with click, rich and pygments if it can: 0.1 s and 8 MiB.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # None refuses an import
    from vllm_repro import cli  # with the handlers set

    try:
        return cli.main(parsed=restore_handlers)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        gc.freeze()  # else the interpreter collects all objects once more as it exits: 0.2 s


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Exit with status 130 on a signal: some modules print or swallow an exception at import."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
