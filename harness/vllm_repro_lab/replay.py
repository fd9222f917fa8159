"""Recording of a CUDA graph: a capture's operators and kernels, to run on the same tensors.

As in a real graph, the branches and numbers of the Python code are frozen at capture. The contents
of the tensors are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Recording:
    """Steps of a captured CUDA graph, in order, to run again on the same tensors.

    Keeps every tensor alive, as a graph's memory pool does.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def operator(
        self, func: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        """Record a torch operator.

        A replay copies the new result into the captured one, where later steps read it.
        """
        places = _tensors(result)

        def step() -> None:
            for place, result in zip(places, _tensors(func(*args, **keywords)), strict=True):
                if place.untyped_storage().data_ptr() != result.untyped_storage().data_ptr():
                    place.copy_(result)

        self._steps.append(step)

    def kernel(self, kernel: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Record a call of a kernel, whose results are what it writes to its arguments."""
        self._steps.append(lambda: kernel(*args))

    def replay(self) -> None:
        """Run all steps again."""
        for step in self._steps:
            step()


def _tensors(result: Any) -> list[torch.Tensor]:
    """Return the tensors in an operator's result, which may be one, a list or a tuple."""
    values = result if isinstance(result, list | tuple) else (result,)
    return [value for value in values if isinstance(value, torch.Tensor)]
