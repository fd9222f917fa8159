"""vLLM's offloading connector on its CPU platform. `parts_offloading` lists the replaced name with its reason.

Only what copies blocks is replaced. Both halves of the connector, its manager and its spec are vLLM's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

__all__ = ["install"]


def install() -> None:
    """Install the replacement in this process."""
    spec: Any = CPUOffloadingSpec
    if hasattr(spec, "get_worker"):  # from 0.25.0
        spec.get_worker = _transfers_of
    else:
        spec.get_handlers = _handlers


def _transfers_of(spec: Any, *_: Any) -> _Transfers:
    """Return the transfers of a spec, made on first use."""
    own: _Transfers = spec.__dict__.setdefault("_repro_transfers", _Transfers())
    return own


def _handlers(spec: Any, *_: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield a handler for each direction, as releases up to 0.24.0 ask for them."""
    source = importlib.import_module(CPUOffloadingSpec.__module__)
    yield source.GPULoadStoreSpec, source.CPULoadStoreSpec, _transfers_of(spec)
    yield source.CPULoadStoreSpec, source.GPULoadStoreSpec, _Transfers()


class _Transfers:
    """Transfers that move no data. Each is reported at the second poll, or once it was waited for."""

    def __init__(self) -> None:
        self._polls: dict[int, int] = {}

    def submit_store(self, job_id: int, *_: Any) -> bool:
        self._polls[job_id] = 1
        return True

    submit_load = submit_store
    transfer_async = submit_store  # to 0.24.0

    def get_finished(self) -> list[Any]:
        done = [job for job, left in self._polls.items() if left <= 0]
        self._polls = {job: left - 1 for job, left in self._polls.items() if left > 0}
        unknown = {"transfer_size": None, "transfer_time": None, "transfer_type": None}
        return [SimpleNamespace(job_id=job, success=True, **unknown) for job in done]

    def wait(self, job_ids: Iterable[int]) -> None:
        for job in self._polls.keys() & set(job_ids):
            self._polls[job] = 0

    def shutdown(self) -> None: ...
