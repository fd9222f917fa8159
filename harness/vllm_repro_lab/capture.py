"""The capture guard: while a stream captures a graph, host and device may neither copy nor wait. Knows torch, and nothing of vLLM.

Between the enter and the exit of `torch.cuda.graph` each call of torch is held against what CUDA does then. What it would refuse raises;
what it would let through is let through; outside nothing is refused. No function is refused for its name. Two nets are laid: calls from
Python, where a transfer still shows, and the operators below them, where a C++ function that waits shows.

It sees what goes through torch's dispatcher and no more, and stands for one device and one stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from .memory import DEVICE, HOST, any_on_device, claim, claim_computed, on_device, pin, same_memory, tensors_in
from .refusals import STATE, check_call, check_operator, non_blocking, refuse, wait
from .replay import Recording

__all__ = ["CUDAGraph", "Guard", "graph", "install", "launch", "replace_waits"]

_PYTHON_OPERATORS: set[str] = set()
"""Custom operators whose body is Python: the calls in it are seen one by one, and the operator itself is no unit of device work."""


class Guard(TorchFunctionMode):  # type: ignore[misc]  # torch is not installed where this is checked
    """Python's calls: keeps the two memories apart, and sees transfers, which the operators below no longer show."""

    running = False

    def start(self) -> None:
        self.running = True
        self.__enter__()

    def stop(self) -> None:
        self.running = False
        self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name == "__get__":
            # What is made beside a device tensor asks for its device, and is the device's too.
            asked = getattr(func, "__self__", None) is torch.Tensor.device
            return DEVICE if asked and on_device(first) else func(*args, **keywords)
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
        # This platform says that nothing can be pinned, and whoever asks for it passes that on: on a GPU it would be. What is copied to the
        # host without waiting goes to memory that torch pins.
        if "pin_memory" in keywords or name == "pin_memory" or (target is HOST and non_blocking(name, args, keywords)):
            for one in tensors_in((result,)):
                pin(one)
        return result


class Operators(TorchDispatchMode):  # type: ignore[misc]  # torch is not installed where this is checked
    """The operators below Python's calls, while a stream captures: finds those that wait, and keeps what the graph holds."""

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
    """What a custom operator writes to, beside what it reads of the device's, is the device's too: a kernel reaches no other memory, and
    the CPU's code in Python makes such a place without naming one."""
    if isinstance(func, torch._ops.OpOverloadPacket) and any_on_device(args, keywords):
        schema = getattr(func, func.overloads()[0])._schema
        for index, told in enumerate(schema.arguments):
            if told.alias_info is not None and told.alias_info.is_write:
                value = args[index] if index < len(args) else keywords.get(told.name)
                for one in tensors_in((value,)):
                    claim(one)


def _target(name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> torch.device | None:
    """Where the call says that its result is to be: `DEVICE`, `HOST`, or None where it does not say."""
    if name in ("cpu", "cuda"):
        return HOST if name == "cpu" else DEVICE
    said = keywords.get("device")
    if said is None and name == "to":
        other = keywords.get("other", args[1] if len(args) > 1 else None)
        if isinstance(other, torch.Tensor):
            return DEVICE if on_device(other) else HOST
        said = other if isinstance(other, torch.device | str | int) else None
    if said is None:
        return None
    return DEVICE if said is DEVICE else HOST


def _placed(name: str, result: Any, args: tuple[Any, ...], target: torch.device) -> Any:
    """What was made in a place that the call names. On one device torch gives the memory of an argument back, where it has to be copied."""
    if isinstance(result, torch.Tensor):
        moved = on_device(result) is not (target is DEVICE) and any(
            same_memory(one, result) for one in tensors_in(args)
        )
        if moved or name in ("as_tensor", "asarray"):
            result = result.clone()
    for one in tensors_in((result,)):
        claim(one, device=target is DEVICE)
    return result


def _set_item(func: Any, args: Any) -> Any:
    """A number is set by a kernel that gets it as an argument; on the CPU it becomes a tensor first, which is no copy from the host."""
    before, STATE.by_number = STATE.by_number, isinstance(args[2], int | float | complex)
    try:
        return func(*args)
    finally:
        STATE.by_number = before


class CUDAGraph:
    """What a capture recorded, if it was to be recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recording: Recording | None = None

    def replay(self) -> None:
        if self.recording is None:
            refuse(RuntimeError("LAB: no graph was recorded, so none can be replayed"))
        self.recording.replay()

    def reset(self) -> None:
        self.recording = None


class graph:  # noqa: N801  # torch's name for it
    """`torch.cuda.graph`: from its enter to its exit a stream captures."""

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
    """Runs the stand-in of a kernel: what it does with its tensors is the device's own business, and one unit of a recording."""
    if STATE.recorded is not None and not STATE.in_kernel:
        STATE.recorded.kernel(kernel, args)
    STATE.in_kernel += 1
    try:
        kernel(*args)
    finally:
        STATE.in_kernel -= 1


def install(guard: Guard) -> None:
    """Puts the stand-ins into torch. `guard` is what custom operators with a body in Python run under, while it is on."""
    cuda: Any = torch.cuda
    cuda.graph, cuda.CUDAGraph = graph, CUDAGraph
    cuda.is_current_stream_capturing = lambda: STATE.capturing
    cuda.mem_get_info = lambda *_: (0, 0)
    replace_waits()
    _watch_python_operators(guard)


def replace_waits() -> None:
    """Again whenever somebody else has replaced them: some releases do so themselves."""
    places: tuple[Any, ...] = (torch.cuda, torch.accelerator)
    for place in places:
        place.synchronize = wait
    torch.accelerator.empty_cache = lambda *_, **__: None


def _watch_python_operators(guard: Guard) -> None:
    """torch takes both nets away where it calls an operator; where the operator's body is Python they are laid again inside it."""
    own = torch.library.Library.impl

    def impl(self: Any, op_name: Any, fn: Any, *args: Any, **keywords: Any) -> Any:
        if not callable(fn) or isinstance(fn, torch._ops.OpOverload):
            return own(self, op_name, fn, *args, **keywords)
        name = op_name if isinstance(op_name, str) else op_name._schema.name
        _PYTHON_OPERATORS.add(name if "::" in name else f"{self.ns}::{name}")

        @functools.wraps(fn)
        def body(*inner: Any, **named: Any) -> Any:
            with ExitStack() as nets:
                if guard.running and guard not in _get_current_function_mode_stack():
                    nets.enter_context(guard)
                if STATE.capturing and not any(
                    isinstance(one, Operators) for one in _get_current_dispatch_mode_stack()
                ):
                    nets.enter_context(Operators())
                return fn(*inner, **named)

        return own(self, op_name, body, *args, **keywords)

    torch.library.Library.impl = impl
