"""vLLM's offloading connector on its CPU platform.

`parts_connectors` lists the replaced name with its reason.

Only what copies blocks is replaced. Both halves of the connector, its manager and its spec are
vLLM's own. A transfer is under way for `store_polls` or `load_polls` polls, one for each step: keys
of `kv_connector_extra_config`, 1 by default.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from .event import Event


def install() -> None:
    """Replace the worker of vLLM's offloading connector by `Transfers`, in this process."""
    spec: Any = CPUOffloadingSpec
    if hasattr(spec, "get_worker"):  # from 0.25.0
        spec.get_worker = _transfers_of
    else:
        spec.get_handlers = _handlers


def _transfers_of(spec: Any, *_: Any) -> Any:
    """Return the `Transfers` of a spec, made on first use, whose copies move no data."""
    if "_repro_transfers" not in spec.__dict__:
        settings = spec.extra_config
        spec._repro_transfers = Transfers(
            lambda direction, *_: Event(int(settings.get(f"{direction}_polls", 1)))
        )
    return spec._repro_transfers


def _handlers(spec: Any, *_: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield a handler for each direction, as releases up to 0.24.0 ask for them."""
    source = importlib.import_module(CPUOffloadingSpec.__module__)
    gpu, cpu = source.GPULoadStoreSpec, source.CPULoadStoreSpec
    yield gpu, cpu, _transfers_of(spec)
    yield cpu, gpu, _transfers_of(spec)


class Transfers:
    """Worker of vLLM's offloading connector: it reports a transfer once its event is complete.

    begin: starts the copy of a direction between two lists of blocks, and returns its event.
    """

    def __init__(self, begin: Callable[[str, Any, Any], Any]) -> None:
        self._begin = begin
        self._events: dict[int, Any] = {}

    def submit_store(self, job_id: int, source: Any, target: Any, **_: Any) -> bool:
        """Begin the transfer of a job from GPU to CPU blocks; return True, as none is refused."""
        self._events[job_id] = self._begin("store", source, target)
        return True

    def submit_load(self, job_id: int, source: Any, target: Any, **_: Any) -> bool:
        """Begin the transfer of a job from CPU to GPU blocks; return True, as none is refused."""
        self._events[job_id] = self._begin("load", source, target)
        return True

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        """Begin a store if the source is on the GPU, else a load, as releases up to 0.24.0 ask.

        spec: source and target. Return True.
        """
        submit = self.submit_store if "GPU" in type(spec[0]).__name__ else self.submit_load
        return submit(job_id, *spec)

    def get_finished(self) -> list[Any]:
        """Count a poll of each transfer; return the jobs that are complete, each once."""
        done = [job for job, event in self._events.items() if event.query()]
        for job in done:
            del self._events[job]
        unknown = {"transfer_size": None, "transfer_time": None, "transfer_type": None}
        return [SimpleNamespace(job_id=job, success=True, **unknown) for job in done]

    def wait(self, job_ids: Iterable[int]) -> None:
        """Complete the transfers of these jobs now."""
        for job in self._events.keys() & set(job_ids):
            self._events[job].synchronize()

    def shutdown(self) -> None:
        """Do nothing: there is no thread to end."""
