"""Worker module of vLLM's simple CPU offload connector without CUDA."""

from __future__ import annotations

from typing import Any

import torch

from .event import Event


def without_cuda(module: Any) -> None:
    """Replace streams and events in the connector's worker module; turn off pinned memory."""
    module.torch = _Over(
        torch, cuda=_Over(torch.cuda, Stream=_Stream, current_stream=_Stream), Event=Event
    )
    if hasattr(module, "PIN_MEMORY"):
        module.PIN_MEMORY = False
    else:
        module.is_pin_memory_available = lambda: False


class _Over:
    """View of a module with some names replaced; the module itself is unchanged."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Stream:
    """Dummy CUDA stream: copies are complete when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority of a CUDA stream."""
        return 0, -1
