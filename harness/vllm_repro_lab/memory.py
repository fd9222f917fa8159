"""Host or device marks on CPU tensors. Does not import vLLM.

A tensor is device memory if it was created on the object `DEVICE` or computed from device memory.
All else is host memory, also on another `torch.device("cpu")`. The mark is on the storage, so that
views share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

DEVICE = torch.device("cpu")
"""The simulated device. Equal to `HOST`; compare with `is`."""
HOST = torch.device("cpu")


def on_device(value: Any) -> bool:
    """Return True for a tensor in device memory, False for anything else."""
    return _marked(value, "_lab_device")


def is_pinned(value: Any) -> bool:
    """Return True for a tensor in pinned host memory."""
    return _marked(value, "_lab_pinned")


def claim(tensor: torch.Tensor, *, device: bool = True) -> None:
    """Mark a tensor's memory, shared with its views, as device memory, or else as host memory."""
    _mark(tensor, "_lab_device", device)


def pin(tensor: torch.Tensor) -> None:
    """Mark a tensor's memory as pinned."""
    _mark(tensor, "_lab_pinned", True)


def claim_computed(result: Any, args: Iterable[Any], keywords: Mapping[str, Any]) -> None:
    """Mark the tensors of a call's result as device memory if an argument is in device memory.

    A tensor that shares its memory with an argument keeps its mark. args, keywords: of the call.
    """
    results = list(tensors_in((result,)))
    inputs = list(tensors_in((*args, *keywords.values()))) if results else []
    if any(map(on_device, inputs)):
        for tensor in results:
            if not any(same_memory(tensor, operand) for operand in inputs):
                claim(tensor)


def any_on_device(args: Iterable[Any], keywords: Mapping[str, Any]) -> bool:
    """Return True if an argument is a device tensor, or a list or tuple that holds one."""
    return any(map(on_device, tensors_in((*args, *keywords.values()))))


def same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if both tensors share one storage."""
    return _storage(first) is _storage(second)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among `values` and in lists and tuples among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def _marked(value: Any, mark: str) -> bool:
    """Return True if the storage of a tensor has the mark; False for any other value."""
    storage = _storage(value)
    return storage is not None and getattr(storage, mark, False)


def _mark(tensor: torch.Tensor, mark: str, value: bool) -> None:
    """Set or clear a mark on the storage of a tensor."""
    storage = _storage(tensor)
    if storage is not None:
        setattr(storage, mark, value)


def _storage(value: Any) -> Any:
    """Return the storage of a tensor; None for other values and for tensors without one."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return torch.Tensor.untyped_storage(value)
    except (NotImplementedError, RuntimeError):
        return None  # sparse and functional tensors have none
