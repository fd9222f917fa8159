"""Triton's interpreter in place of vLLM's Triton placeholder for CPUs.

With it vLLM's own kernels run, in Python.

A module imported with the placeholder keeps it. Install the interpreter before those modules;
`exit_if_late` checks that.
"""

from __future__ import annotations

import sys

import vllm.triton_utils as triton_utils


def install() -> None:
    """Give modules imported from now on the real Triton; TRITON_INTERPRET=1 must be set."""
    import triton
    import triton.language

    triton_utils.triton, triton_utils.tl = triton, triton.language


def exit_if_late() -> None:
    """Exit with a message if a vLLM module was imported before the real Triton was installed."""
    late = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("vllm.")
        and type(getattr(module, "triton", None)).__name__ == "TritonPlaceholder"
    ]
    if late:
        sys.exit(
            "cannot install Triton's interpreter: already imported with the placeholder:"
            f" {', '.join(late)}"
        )
