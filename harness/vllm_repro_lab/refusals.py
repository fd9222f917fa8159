"""Copies and waits that CUDA refuses during graph capture. Does not import vLLM.

Errors have the class and text of a CUDA build of torch. torch refuses copies between the device and
host memory that is not pinned. The CUDA driver refuses blocking copies of pinned memory, and reads
of values back to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from .memory import DEVICE, HOST, any_on_device, is_pinned, on_device
from .replay import Recording

COPY = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is"
    " pinned. Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
)
WAIT = (
    "CUDA error: operation not permitted when stream is capturing\nSearch for"
    " `cudaErrorStreamCaptureUnsupported' in"
    " https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
)
NUMPY = (
    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host"
    " memory first."
)

_WAITING = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "allclose",
        "bincount",
        "equal",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
    )
)
"""Operators whose CUDA versions read a value back before they return."""
_MAKING = ("tensor", "as_tensor", "asarray", "new_tensor")
"""Functions that fill host memory from Python numbers and copy it."""


@dataclass
class State:
    """State of graph capture in this process, with counts of captures, checks and refusals."""

    capturing: bool = False
    # depth of running kernel replacements, which are not checked
    in_kernel: int = 0
    # a Python number is being set, which is no copy
    by_number: bool = False
    # captures, checked operators and refusals since the start
    captures: int = 0
    checked: int = 0
    refused: int = 0
    # captures are recorded
    recording: bool = False
    # recording of the current capture
    recorded: Recording | None = None

    @property
    def watching(self) -> bool:
        """Return True during a capture, outside kernel replacements: calls must be checked."""
        return self.capturing and not self.in_kernel


STATE = State()


def check_call(
    name: str,
    first: Any,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    target: torch.device | None,
) -> None:
    """Raise CUDA's error if a Python call of torch copies or waits without calling an operator.

    Called for each call while a graph is captured.

    name: of the function. first: its first argument. target: the device named for the result, None
    if none is.
    """
    if name in _READING and on_device(first):
        refuse(_READING[name]())
    if name in ("to", "cpu", "cuda") and target is not None and isinstance(first, torch.Tensor):
        blocking = not non_blocking(name, args, keywords)
        if on_device(first) and target is HOST and blocking:
            refuse(_copied())  # torch pins the new host memory of a non-blocking copy
        if not on_device(first) and target is DEVICE:
            _check_copy(pinned=is_pinned(first), waits=blocking)
    if name in _MAKING and (
        target is DEVICE or (name == "new_tensor" and target is None and on_device(first))
    ):
        data = args[-1] if args else keywords.get("data")
        if not on_device(data):
            _check_copy(pinned=is_pinned(data), waits=True)


def check_operator(name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Count a checked operator; raise CUDA's error if it copies or waits as capture forbids."""
    STATE.checked += 1
    first = args[0] if args else None
    if name in _WAITING and any_on_device(args, keywords):
        refuse(_waited())
    if (
        name == "aten::repeat_interleave"
        and on_device(args[-1])
        and keywords.get("output_size") is None
    ):
        refuse(_waited())
    if name == "aten::copy_" and on_device(first) is not on_device(args[1]):
        host: Any = args[1] if on_device(first) else first
        if not (STATE.by_number and host.dim() == 0):
            _check_copy(pinned=is_pinned(host), waits=not non_blocking(name, args, keywords))
    if name in ("aten::index", "aten::index_put_", "aten::index_put") and on_device(first):
        _check_indices(name, args)


def non_blocking(name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Return True if `non_blocking` is set in a call of `to`, `cpu`, `cuda` or `copy_`."""
    if "non_blocking" in keywords or len(args) < 2:
        return bool(keywords.get("non_blocking"))
    # to(device, dtype, non_blocking), to(other, non_blocking), cuda(device, non_blocking),
    # copy_(source, non_blocking)
    place = 3 if name == "to" and not isinstance(args[1], torch.Tensor) else 2
    return len(args) > place and args[place] is True


def wait(*_: Any, **__: Any) -> None:
    """Replace a synchronization: refuse it during capture, else return at once."""
    if STATE.watching:
        refuse(_waited())


def refuse(error: Exception) -> NoReturn:
    """Count a refusal in `STATE` and raise `error`; a CUDA build raises it in C++.

    The lab raises nowhere else.
    """
    STATE.refused += 1
    raise error


def _check_indices(name: str, args: tuple[Any, ...]) -> None:
    """Raise CUDA's error for indexing refused in graph capture: by a host tensor, or by a mask.

    CUDA would copy a host tensor, and wait to count a mask's true values. Masks alone may be used
    to assign one number. name, args: of the operator, on a device tensor.
    """
    indices = [index for index in args[1] if index is not None]
    masks = [index.dtype in (torch.bool, torch.uint8) for index in indices]
    if name != "aten::index" and all(masks) and args[2].numel() == 1:
        return
    for index, mask in zip(indices, masks, strict=True):
        if not on_device(index):
            refuse(_copied())
        if mask:
            refuse(_waited())


def _check_copy(*, pinned: bool, waits: bool) -> None:
    """Raise CUDA's error for a copy unless its host memory is pinned and it does not wait."""
    if not pinned:
        refuse(_copied())
    if waits:
        refuse(_waited())


# Errors by what is refused.
_copied = partial(RuntimeError, COPY)
_waited = partial(getattr(torch, "AcceleratorError", RuntimeError), WAIT)
_no_array = partial(TypeError, NUMPY)

_READING: Mapping[str, Callable[[], Exception]] = {
    "tolist": _copied,
    "numpy": _no_array,
    "__array__": _no_array,
    "__repr__": _waited,
    "__str__": _waited,
}
"""Methods that read a tensor's values without an operator that shows it."""
