"""The worker half of a connector: vLLM's own, above a stand-in for what copies. A transfer is over after so many polls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

__all__ = ["Half", "worker_half"]


class Half:
    """What a worker does with its connector in one step, in the order of vLLM's model runner.

    listed: for each transfer since the last look, its direction and the blocks of the GPU that it lists.
    """

    def __init__(self, connector: Any, copiers: Sequence[Any]) -> None:
        self._connector = connector
        self._copiers = copiers

    @property
    def busy(self) -> bool:
        return any(copier.busy for copier in self._copiers)

    def take_listed(self) -> list[tuple[str, list[int]]]:
        return [one for copier in self._copiers for one in copier.take_listed()]

    def step(self, output: Any) -> Any:
        """The answer of the connector's workers to a step of the scheduler, as a `KVConnectorOutput`."""
        connector = self._connector
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        connector.start_load_kv(SimpleNamespace(no_compile_layers={}, attn_metadata=None))
        connector.wait_for_save()
        found = KVConnectorOutput()
        finished = connector.get_finished(output.finished_req_ids)
        found.finished_sending, found.finished_recving = finished
        found.invalid_block_ids = connector.get_block_ids_with_load_errors()
        build = getattr(connector, "build_connector_worker_meta", None)
        if build is not None:
            found.kv_connector_worker_meta = build()
        connector.clear_connector_metadata()
        return found


class _Copier:
    """Counts polls for transfers, and keeps what they list."""

    def __init__(self, store_polls: int, load_polls: int) -> None:
        self._polls = {"store": store_polls, "load": load_polls}
        self._listed: list[tuple[str, list[int]]] = []

    @property
    def busy(self) -> bool:
        """Whether a transfer is on its way."""
        return False

    def take_listed(self) -> list[tuple[str, list[int]]]:
        found, self._listed = self._listed, []
        return found

    def _note(self, direction: str, blocks: Iterable[int]) -> None:
        self._listed.append((direction, [int(block) for block in blocks]))


class _SimpleCopies(_Copier):
    """In place of `DmaCopyBackend` in the simple connector's worker."""

    def __init__(self, store_polls: int, load_polls: int, event: Any) -> None:
        super().__init__(store_polls, load_polls)
        self._event = event
        self._lists: list[Any] = []

    @property
    def busy(self) -> bool:
        return any(self._lists)

    def launch_copy(
        self, src_blocks: Any, dst_blocks: Any, is_store: bool, event_idx: int, events_list: Any, wait_event: Any = None
    ) -> None:
        direction = "store" if is_store else "load"
        self._note(direction, src_blocks if is_store else dst_blocks)
        if not any(known is events_list for known in self._lists):
            self._lists.append(events_list)
        events_list.append((event_idx, self._event(polls=self._polls[direction])))

    def shutdown(self) -> None: ...


class _OffloadingCopies(_Copier):
    """In place of what copies in the offloading connector's worker: jobs by their number."""

    def __init__(self, store_polls: int, load_polls: int) -> None:
        super().__init__(store_polls, load_polls)
        self._left: Counter[int] = Counter()
        self._jobs: list[int] = []

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def _submit(self, direction: str, job: int, gpu: Any) -> bool:
        self._note(direction, gpu.block_ids)
        self._left[job] = self._polls[direction]
        self._jobs.append(job)
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit("store", job_id, src_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit("load", job_id, dst_spec)

    def transfer_async(self, job_id: int, spec: Any) -> bool:
        source, target = spec
        if "GPU" in type(source).__name__:
            return self._submit("store", job_id, source)
        return self._submit("load", job_id, target)

    def get_finished(self) -> list[Any]:
        done = [job for job in self._jobs if self._left[job] <= 0]
        self._jobs = [job for job in self._jobs if self._left[job] > 0]
        for job in self._jobs:
            self._left[job] -= 1
        return [
            SimpleNamespace(job_id=job, success=True, transfer_size=None, transfer_time=None, transfer_type=None)
            for job in done
        ]

    def wait(self, job_ids: Iterable[int]) -> None:
        for job in job_ids:
            self._left[job] = 0

    def shutdown(self) -> None: ...


def worker_half(config: Any, groups: Any, store_polls: int, load_polls: int) -> Half:
    """Raises `NotImplementedError` for a connector whose worker half has no stand-in here."""
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, groups)
    copiers = [
        _install(one, store_polls, load_polls) for one in getattr(connector, "_connectors", None) or [connector]
    ]
    return Half(connector, copiers)


def _install(connector: Any, store_polls: int, load_polls: int) -> _Copier:
    name = type(connector).__name__
    if name == "SimpleCPUOffloadConnector":
        from vllm.v1.simple_kv_offload import worker
        from vllm_repro_lab.offload import Event, without_cuda

        without_cuda(worker)
        copies = _SimpleCopies(store_polls, load_polls, Event)
        if connector.worker_handler is not None:  # there is none without prefix caching
            connector.worker_handler._backend = copies
        return copies
    if name == "OffloadingConnector":
        jobs = _OffloadingCopies(store_polls, load_polls)
        connector.connector_worker.worker = jobs
        return jobs
    raise NotImplementedError(f"no stand-in for the worker half of {name}")
