"""What a graph keeps of the code that ran while it was captured: operators and kernels, on the same tensors, with the numbers of then.

A graph knows nothing of Python: which branch was taken, and each number that Python worked out, is frozen in it. What lies in the tensors
is not; a replay reads them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Recording"]


class Recording:
    """In the order in which it ran. It keeps every tensor alive, as a graph's memory pool does."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def operator(self, func: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        """An operator of torch; its result of later goes where that of now lies, since whatever comes after reads it there."""
        places = _tensors(result)

        def step() -> None:
            for place, found in zip(places, _tensors(func(*args, **keywords)), strict=True):
                if place.untyped_storage().data_ptr() != found.untyped_storage().data_ptr():
                    place.copy_(found)

        self._steps.append(step)

    def kernel(self, kernel: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._steps.append(lambda: kernel(*args))

    def replay(self) -> None:
        for step in self._steps:
            step()


def _tensors(result: Any) -> list[torch.Tensor]:
    values = result if isinstance(result, list | tuple) else (result,)
    return [value for value in values if isinstance(value, torch.Tensor)]
