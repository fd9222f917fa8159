"""Two memories in one: each tensor of a CPU is the host's or the device's, by what made it. Knows torch, and nothing of vLLM.

Whoever names `DEVICE`, this very object, makes device memory, and what is computed from device memory is device memory. Whoever names any
other `torch.device("cpu")`, or none, makes the host's. The mark is on the storage, so that every view has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

__all__ = [
    "DEVICE",
    "HOST",
    "any_on_device",
    "claim",
    "claim_computed",
    "is_pinned",
    "on_device",
    "pin",
    "same_memory",
    "tensors_in",
]

DEVICE = torch.device("cpu")
"""The device. Equal to the host's and another object: `is` tells them apart."""
HOST = torch.device("cpu")


def on_device(value: Any) -> bool:
    """False also for what is no tensor."""
    return _marked(value, "_lab_device")


def is_pinned(value: Any) -> bool:
    return _marked(value, "_lab_pinned")


def claim(tensor: torch.Tensor, *, device: bool = True) -> None:
    """Makes a tensor's memory, and so that of its views, the device's or the host's."""
    _mark(tensor, "_lab_device", device)


def pin(tensor: torch.Tensor) -> None:
    _mark(tensor, "_lab_pinned", True)


def claim_computed(result: Any, args: Iterable[Any], keywords: Mapping[str, Any]) -> None:
    """New memory that was computed from the device's is the device's. What was given, and written to, stays whose it is."""
    found = list(tensors_in((result,)))
    given = list(tensors_in((*args, *keywords.values()))) if found else []
    if any(map(on_device, given)):
        for one in found:
            if not any(same_memory(one, other) for other in given):
                claim(one)


def any_on_device(args: Iterable[Any], keywords: Mapping[str, Any]) -> bool:
    return any(map(on_device, tensors_in((*args, *keywords.values()))))


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _storage(one) is _storage(other)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values, and in the lists and tuples among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, torch.Tensor))


def _marked(value: Any, mark: str) -> bool:
    storage = _storage(value)
    return storage is not None and getattr(storage, mark, False)


def _mark(tensor: torch.Tensor, mark: str, value: bool) -> None:
    storage = _storage(tensor)
    if storage is not None:
        setattr(storage, mark, value)


def _storage(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return torch.Tensor.untyped_storage(value)
    except (NotImplementedError, RuntimeError):
        return None  # sparse and functional tensors have none
