"""Capture guard: raises CUDA's error for a copy or wait across devices during graph capture.

It checks torch calls inside `torch.cuda.graph`, at two levels. `Guard` sees calls from Python, and
so transfers. `Operators` sees the operators below them, and so C++ functions that wait. It does not
import vLLM. Limits: it sees only what goes through torch's dispatcher, and models one device with
one stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from .memory import (
    DEVICE,
    HOST,
    any_on_device,
    claim,
    claim_computed,
    on_device,
    pin,
    same_memory,
    tensors_in,
)
from .refusals import STATE, check_call, check_operator, non_blocking, refuse, wait
from .replay import Recording

_PYTHON_OPERATORS: set[str] = set()
"""Custom operators with a Python body.

Their inner calls are checked and recorded instead of the operator itself.
"""


class Guard(TorchFunctionMode):  # type: ignore[misc]  # torch is not installed here
    """Function mode for calls from Python: marks host and device memory, refuses transfers."""

    running = False

    def start(self) -> None:
        """Begin to mark memory and to check calls, in this process."""
        self.running = True
        self.__enter__()

    def stop(self) -> None:
        """Stop marking memory and checking calls."""
        self.running = False
        self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name == "__get__":
            # Code that creates a tensor beside a device tensor reads its `.device`: the new tensor
            # must be on the device too.
            is_device = getattr(func, "__self__", None) is torch.Tensor.device
            return DEVICE if is_device and on_device(first) else func(*args, **keywords)
        target = _target(name, args, keywords)
        if STATE.watching:
            check_call(name, first, args, keywords, target)
        if name == "__setitem__":
            return _set_item(func, args)
        result = func(*args, **keywords)
        if target is not None:
            result = _placed(name, result, args, target)
        else:
            claim_computed(result, args, keywords)
            _claim_written(func, args, keywords)
        # The CPU platform reports that it cannot pin, so callers pass pin_memory=False; on a GPU
        # the memory would be pinned. torch also pins the target of a non-blocking copy to the host.
        if (
            "pin_memory" in keywords
            or name == "pin_memory"
            or (target is HOST and non_blocking(name, args, keywords))
        ):
            for tensor in tensors_in((result,)):
                pin(tensor)
        return result


class Operators(TorchDispatchMode):  # type: ignore[misc]  # torch is not installed here
    """Dispatch mode during capture: refuses operators that wait, and records the others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        name = func._schema.name
        if STATE.watching:
            check_operator(name, args, keywords)
        result = func(*args, **keywords)
        claim_computed(result, args, keywords)
        if STATE.recorded is not None and not STATE.in_kernel and name not in _PYTHON_OPERATORS:
            STATE.recorded.operator(func, args, keywords, result)
        return result


def _claim_written(func: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Mark arguments that a custom operator writes to as device memory, if an argument is.

    A kernel can reach no other memory, but vLLM's Python code for the CPU allocates outputs without
    naming a device.
    """
    if isinstance(func, torch._ops.OpOverloadPacket) and any_on_device(args, keywords):
        schema = getattr(func, func.overloads()[0])._schema
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else keywords.get(argument.name)
                for tensor in tensors_in((value,)):
                    claim(tensor)


def _target(name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> torch.device | None:
    """Return the device that a call of torch names for its result, `DEVICE` or `HOST`.

    Return None if it names none.
    """
    if name in ("cpu", "cuda"):
        return HOST if name == "cpu" else DEVICE
    device = keywords.get("device")
    if device is None and name == "to":
        like = keywords.get("other", args[1] if len(args) > 1 else None)
        if isinstance(like, torch.Tensor):
            return DEVICE if on_device(like) else HOST
        device = like if isinstance(like, torch.device | str | int) else None
    if device is None:
        return None
    return DEVICE if device is DEVICE else HOST


def _placed(name: str, result: Any, args: tuple[Any, ...], target: torch.device) -> Any:
    """Mark a result that the call placed on `target`, and return it.

    Return a clone if it shares an argument's memory, which is on the other side; also for
    `as_tensor` and `asarray`.
    """
    if isinstance(result, torch.Tensor):
        moved = on_device(result) is not (target is DEVICE) and any(
            same_memory(tensor, result) for tensor in tensors_in(args)
        )
        if moved or name in ("as_tensor", "asarray"):
            result = result.clone()
    for tensor in tensors_in((result,)):
        claim(tensor, device=target is DEVICE)
    return result


def _set_item(func: Any, args: Any) -> Any:
    """Set items of a tensor; a Python number that is set is no copy from the host.

    CUDA passes a Python number as a kernel argument; the CPU makes a tensor of it, which must not
    count as a copy.
    """
    before, STATE.by_number = STATE.by_number, isinstance(args[2], int | float | complex)
    try:
        return func(*args)
    finally:
        STATE.by_number = before


class CUDAGraph:
    """`torch.cuda.CUDAGraph`: holds the recording of a capture, if recording is on."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recording: Recording | None = None

    def replay(self) -> None:
        """Run the recorded steps again. Raises RuntimeError if nothing was recorded."""
        if self.recording is None:
            refuse(RuntimeError("LAB: cannot replay: no graph was recorded"))
        self.recording.replay()

    def reset(self) -> None:
        """Drop the recording."""
        self.recording = None


class graph:  # noqa: N801  # torch's name for it
    """`torch.cuda.graph`: a stream captures between its enter and its exit."""

    def __init__(self, cuda_graph: CUDAGraph, *_: Any, **__: Any) -> None:
        self._graph = cuda_graph
        self._operators = Operators()

    def __enter__(self) -> None:
        STATE.captures += 1
        STATE.recorded = Recording() if STATE.recording else None
        self._operators.__enter__()
        STATE.capturing = True

    def __exit__(self, *raised: Any) -> None:
        STATE.capturing = False
        self._operators.__exit__(*raised)
        self._graph.recording, STATE.recorded = STATE.recorded, None


def launch(kernel: Callable[..., None], *args: Any) -> None:
    """Run the PyTorch replacement of a kernel; its copies and waits are not checked.

    During a recording it also becomes one step of the graph, unless another kernel calls it.
    """
    if STATE.recorded is not None and not STATE.in_kernel:
        STATE.recorded.kernel(kernel, args)
    STATE.in_kernel += 1
    try:
        kernel(*args)
    finally:
        STATE.in_kernel -= 1


def install(guard: Guard) -> None:
    """Replace torch's CUDA names for graph capture, so that a capture runs on a CPU.

    Custom operators with a Python body run under `guard` while it is running.
    """
    cuda: Any = torch.cuda
    cuda.graph, cuda.CUDAGraph = graph, CUDAGraph
    cuda.is_current_stream_capturing = lambda: STATE.capturing
    cuda.mem_get_info = lambda *_: (0, 0)
    replace_waits()
    _watch_python_operators(guard)


def replace_waits() -> None:
    """Replace torch's `synchronize`, which is refused during capture, and `empty_cache`.

    Call it again after vLLM code that replaces them itself.
    """
    places: tuple[Any, ...] = (torch.cuda, torch.accelerator)
    for place in places:
        place.synchronize = wait
    torch.accelerator.empty_cache = lambda *_, **__: None


def _watch_python_operators(guard: Guard) -> None:
    """Replace `Library.impl`, so that custom operators with a Python body are checked inside.

    Their body runs under `guard` while that is running, and under `Operators` during a capture:
    torch disables both modes while it calls an operator.
    """
    original = torch.library.Library.impl

    def impl(self: Any, op_name: Any, fn: Any, *args: Any, **keywords: Any) -> Any:
        if not callable(fn) or isinstance(fn, torch._ops.OpOverload):
            return original(self, op_name, fn, *args, **keywords)
        name = op_name if isinstance(op_name, str) else op_name._schema.name
        _PYTHON_OPERATORS.add(name if "::" in name else f"{self.ns}::{name}")

        @functools.wraps(fn)
        def body(*inner: Any, **named: Any) -> Any:
            with ExitStack() as modes:
                if guard.running and guard not in _get_current_function_mode_stack():
                    modes.enter_context(guard)
                if STATE.capturing and not any(
                    isinstance(mode, Operators) for mode in _get_current_dispatch_mode_stack()
                ):
                    modes.enter_context(Operators())
                return fn(*inner, **named)

        return original(self, op_name, body, *args, **keywords)

    torch.library.Library.impl = impl
