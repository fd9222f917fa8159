"""Entry point of `vllm-repro` and `python -m vllm_repro`. The rest is imported in `main`, after the handler for Ctrl-C is set."""

import os
import signal
import sys
from types import FrameType

from vllm_repro.errors import INTERRUPTED

__all__ = ["main"]


def main() -> int:
    """Run the command and return its exit status."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else SIGINT is ignored, as in a background job: leave it so
        signal.signal(signal.SIGINT, _leave)
    from vllm_repro import cli  # with the handler set

    try:
        signal.signal(signal.SIGINT, handler)
        return cli.main()
    except KeyboardInterrupt:
        return INTERRUPTED


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the signature that signal.signal asks for
    """Exit at once: during imports some modules print an exception and some swallow it."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
