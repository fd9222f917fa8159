"""Triton's interpreter in place of the Triton driver that there is none of for this CPU: vLLM's own kernels run, in Python.

vLLM's CPU build puts a placeholder where Triton has no CPU backend, and a module that was imported with it keeps it: so this comes
before those modules, and `insist` holds that it did.
"""

from __future__ import annotations

import sys

import vllm.triton_utils as triton_utils

__all__ = ["insist", "install"]


def install() -> None:
    """Gives every module that is imported from now on the real Triton, which TRITON_INTERPRET=1 has made an interpreter."""
    import triton
    import triton.language

    triton_utils.triton, triton_utils.tl = triton, triton.language


def insist() -> None:
    """Ends the process with a sentence where a module of vLLM's was there before the real Triton."""
    late = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("vllm.") and type(getattr(module, "triton", None)).__name__ == "TritonPlaceholder"
    ]
    if late:
        sys.exit(f"the lab came too late for Triton's interpreter: {', '.join(late)} had a placeholder")
