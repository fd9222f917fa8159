"""`vllm-repro`, and `python -m vllm_repro`.

Whatever does the work is imported only in `main`: it takes seconds, and who interrupts them has interrupted nothing yet.
"""

import os
import signal
import sys
from types import FrameType

from vllm_repro.errors import INTERRUPTED

__all__ = ["main"]


def main() -> int:
    """The exit status of the contract."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else SIGINT is ignored, as in a job of the background, and shall be
        signal.signal(signal.SIGINT, _leave)
    from vllm_repro import cli  # with the handler set

    try:
        signal.signal(signal.SIGINT, handler)
        return cli.main()
    except KeyboardInterrupt:
        return INTERRUPTED


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the signature that signal.signal asks for
    """At once: an exception in the middle of an import is printed by some module or other, and by some is swallowed."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
