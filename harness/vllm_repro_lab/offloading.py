"""vLLM's offloading connector on its CPU platform.

`parts_connectors` lists the replaced name with its reason.

Only what copies blocks is replaced. Both halves of the connector, its manager and its spec are
vLLM's own. A transfer is under way for `store_polls` or `load_polls` polls, one for each step: keys
of `kv_connector_extra_config`, 1 by default.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


def install() -> None:
    """Install the replacement in this process."""
    spec: Any = CPUOffloadingSpec
    if hasattr(spec, "get_worker"):  # from 0.25.0
        spec.get_worker = _transfers_of
    else:
        spec.get_handlers = _handlers


def _transfers_of(spec: Any, *_: Any) -> _Transfers:
    """Return the transfers of a spec, made on first use."""
    if "_repro_transfers" not in spec.__dict__:
        polls = (
            int(spec.extra_config.get(f"{direction}_polls", 1)) for direction in ("store", "load")
        )
        spec._repro_transfers = _Transfers(*polls)
    transfers: _Transfers = spec._repro_transfers
    return transfers


def _handlers(spec: Any, *_: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield a handler for each direction, as releases up to 0.24.0 ask for them."""
    source = importlib.import_module(CPUOffloadingSpec.__module__)
    gpu, cpu = source.GPULoadStoreSpec, source.CPULoadStoreSpec
    yield gpu, cpu, _transfers_of(spec)
    yield cpu, gpu, _transfers_of(spec)


class _Transfers:
    """Transfers that move no data. Each is reported after its polls, or once it was waited for."""

    def __init__(self, store_polls: int, load_polls: int) -> None:
        self._store_polls, self._load_polls = store_polls, load_polls
        self._polls: dict[int, int] = {}

    def submit_store(self, job_id: int, *_: Any) -> bool:
        self._polls[job_id] = self._store_polls
        return True

    def submit_load(self, job_id: int, *_: Any, **__: Any) -> bool:
        self._polls[job_id] = self._load_polls
        return True

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        """Submit a transfer, as releases up to 0.24.0 do, by its source."""
        submit = self.submit_store if "GPU" in type(spec[0]).__name__ else self.submit_load
        return submit(job_id)

    def get_finished(self) -> list[Any]:
        done = [job for job, left in self._polls.items() if left <= 0]
        self._polls = {job: left - 1 for job, left in self._polls.items() if left > 0}
        unknown = {"transfer_size": None, "transfer_time": None, "transfer_type": None}
        return [SimpleNamespace(job_id=job, success=True, **unknown) for job in done]

    def wait(self, job_ids: Iterable[int]) -> None:
        for job in self._polls.keys() & set(job_ids):
            self._polls[job] = 0

    def shutdown(self) -> None: ...
