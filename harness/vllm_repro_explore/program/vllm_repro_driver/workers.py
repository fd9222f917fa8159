"""Worker half of a connector: vLLM's code with simulated copies.

A transfer reads and writes only when it completes, after a number of polls. That is as late as a
device may, so a block that is freed too early is noticed.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from vllm_repro_lab import nixl
from vllm_repro_lab.event import Event

Pairs = list[tuple[int, int]]


class WorkerHalf:
    """Worker half of a KV connector: its calls in a step, in the order of vLLM's model runner."""

    def __init__(self, connector: Any, copiers: Sequence[Copier]) -> None:
        self.connector = connector
        self._copiers = copiers

    @property
    def busy(self) -> bool:
        """Return True while a transfer is under way."""
        return any(copier.busy for copier in self._copiers)

    def take_listed(self) -> list[tuple[str, list[int]]]:
        """Return (direction, GPU blocks) of each transfer that began since the last call."""
        return [transfer for copier in self._copiers for transfer in copier.take_listed()]

    def before(self, output: Any) -> None:
        """Handle preemptions and bind the step's metadata, before any load starts."""
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self.connector.bind_connector_metadata(output.kv_connector_metadata)

    def start(self) -> None:
        """Start the loads of the step."""
        self.connector.start_load_kv(SimpleNamespace(no_compile_layers={}, attn_metadata=None))

    def after(self, output: Any) -> Any:
        """Finish the connector's step: return its `KVConnectorOutput`, and clear its metadata."""
        connector = self.connector
        connector.wait_for_save()
        answer = KVConnectorOutput()
        if hasattr(connector, "get_transfer_results"):
            results = connector.get_transfer_results(output.finished_req_ids)
            for name in ("finished_sending", "finished_recving", "failed_recving"):
                setattr(answer, name, getattr(results, name))
        else:
            answer.finished_sending, answer.finished_recving = connector.get_finished(
                output.finished_req_ids
            )
        answer.invalid_block_ids = connector.get_block_ids_with_load_errors()
        answer.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return answer


class Copier:
    """Simulated copies of KV blocks; `memory` is the executor whose blocks are copied.

    store_polls, load_polls: how often a copy is polled before it is complete.
    """

    def __init__(self, memory: Any, store_polls: int, load_polls: int) -> None:
        self._polls = {"store": store_polls, "load": load_polls}
        self._memory = memory
        self._saved: dict[int, Any] = {}  # by the connector's own block number
        self._listed: list[tuple[str, list[int]]] = []
        self._waiting: list[Event] = []

    @property
    def busy(self) -> bool:
        """Return True while a transfer is under way."""
        self._waiting = [transfer for transfer in self._waiting if not transfer.over]
        return bool(self._waiting)

    def take_listed(self) -> list[tuple[str, list[int]]]:
        """Return (direction, GPU blocks) of each transfer that began since the last call."""
        listed, self._listed = self._listed, []
        return listed

    def begin(self, direction: str, source: Iterable[int], target: Iterable[int]) -> Event:
        """Begin a copy of source blocks to target blocks; return the event of its end.

        direction: "store" from the GPU to the connector, or "load".
        """
        pairs = [(int(read), int(written)) for read, written in zip(source, target, strict=True)]
        blocks = [gpu if direction == "store" else written for gpu, written in pairs]
        copy = self._save if direction == "store" else self._load
        return self.transfer(direction, blocks, lambda: copy(pairs))

    def transfer(self, direction: str, blocks: list[int], copy: Callable[[], None]) -> Event:
        """Begin a transfer of GPU blocks that calls `copy` at its end; return the event of that.

        direction: "store" or "load".
        """
        self._listed.append((direction, blocks))
        begun = Event(self._polls[direction], copy)
        self._waiting.append(begun)
        return begun

    def shutdown(self) -> None:
        """Do nothing: there is no thread to stop."""

    def _save(self, pairs: Pairs) -> None:
        """Copy GPU blocks to the connector's store."""
        self._saved.update({stored: self._memory.get(gpu) for gpu, stored in pairs})

    def _load(self, pairs: Pairs) -> None:
        """Copy blocks of the connector's store to GPU blocks."""
        for stored, gpu in pairs:
            self._memory.put(gpu, self._saved.get(stored))


class _SimpleCopies(Copier):
    """Replacement of `DmaCopyBackend` in the worker of SimpleCPUOffloadConnector."""

    def launch_copy(
        self,
        src_blocks: Any,
        dst_blocks: Any,
        is_store: bool,
        event_idx: int,
        events_list: Any,
        wait_event: Any = None,
    ) -> None:
        """Begin a store or a load, and append its event to `events_list`."""
        events_list.append(
            (event_idx, self.begin("store" if is_store else "load", src_blocks, dst_blocks))
        )


class _Fetches(Copier, nixl.Worker):
    """Fake NIXL worker: a fetch completes after `polls` polls.

    memory: the executor, whose `remote` has the other server's prompts.
    """

    def __init__(self, config: Any, groups: Any, memory: Any, polls: int) -> None:
        Copier.__init__(self, memory, 0, polls)
        nixl.Worker.__init__(self, config, "", groups)
        self._poll_counts: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        """Return True while a fetch is under way."""
        return bool(self._fetching)

    def fetch(self, name: str, meta: Any) -> bool | None:
        """Poll the fetch of a request's blocks from another server.

        Return True if the blocks have come, False if they will not come, and None until that is
        known.
        """
        self._poll_counts[name] += 1
        if self._poll_counts[name] <= self._polls["load"]:
            return None
        came: bool = self._memory.fetch(name, nixl.pairs_of(meta))
        return came

    def released(self, fetched: set[str]) -> set[str]:
        """Return the requests whose held blocks may be freed: all, in the step after their end."""
        return set(self._held)


class _Pulls(_Fetches):
    """Replacement of Mooncake's worker half, with simulated pulls.

    A pull does not name the other server's blocks, as that server chooses them; here the executor's
    `places` has them.
    """

    def start_load_kv(self, metadata: Any) -> None:
        """Begin the pulls of this step, and hold blocks that another server will pull."""
        self._held |= {name for name, (_, blocks) in metadata.reqs_to_send.items() if any(blocks)}
        for pulls in metadata.reqs_to_recv.values():
            for name, meta in pulls.items():
                if any(meta.local_block_ids):
                    meta.remote = SimpleNamespace(
                        request_id=meta.transfer_id, block_ids=self._memory.places[name]
                    )
                    self._fetching[name] = meta

    def fetch(self, name: str, meta: Any) -> bool | None:
        """Do as `_Fetches.fetch`; return None also for a failed pull that the release hides."""
        came = super().fetch(name, meta)
        # Up to 0.29.0 `receive_kv` logs a pull that failed, and tells nobody.
        return None if came is False and not _mooncake_reports() else came


@cache
def _mooncake_reports() -> bool:
    """Return True if the release's own Mooncake worker half reports a failed pull.

    The first call replaces that half by nothing, so that the connector makes none.
    """
    module: Any = importlib.import_module(
        "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
    )
    reports = hasattr(module.MooncakeConnectorWorker, "_handle_failed_recv")
    module.MooncakeConnectorWorker = lambda *_: None  # `_install` gives the connector another
    return reports


def worker_half(
    config: Any, groups: Any, memory: Any, store_polls: int, load_polls: int
) -> WorkerHalf:
    """Return the worker half of the configured KV connector, with simulated copies.

    memory: the executor whose blocks are copied. groups: vLLM's KVCacheConfig.

    Replaces NIXL's and Mooncake's worker halves in this process. Raises `NotImplementedError` for
    a connector that has no simulated copier.
    """
    nixl.install()
    if config.kv_transfer_config.kv_connector.startswith("Mooncake"):
        _mooncake_reports()
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, groups)
    parts = getattr(connector, "_connectors", None) or [connector]
    return WorkerHalf(
        connector,
        [_install(part, config, groups, memory, store_polls, load_polls) for part in parts],
    )


def _places(gpu: Any, chunks: Sequence[int], blocks: int) -> Sequence[int]:
    """Return the place in the connector's store of each GPU block of a transfer.

    gpu: vLLM's spec of the GPU blocks. chunks: numbers of the store's chunks that it uses, each of
    `blocks` blocks. As in `SingleDirectionOffloadingHandler`, a group's blocks follow each other,
    and its first one may lie within a chunk.
    """
    if blocks == 1:
        return chunks
    places: list[int] = []
    at = 0
    for count, index in zip(gpu.group_sizes, gpu.block_indices, strict=True):
        skipped = index % blocks if count else 0
        used = -(-(skipped + count) // blocks)
        inside = [
            int(chunk) * blocks + place
            for chunk in chunks[at : at + used]
            for place in range(blocks)
        ]
        places += inside[skipped : skipped + count]
        at += used
    return places


def _install(
    connector: Any, config: Any, groups: Any, memory: Any, store_polls: int, load_polls: int
) -> Copier:
    """Put simulated copies into a connector, and return their copier.

    Raises `NotImplementedError` for a connector that has no simulated copier.
    """
    name = type(connector).__name__
    if name == "SimpleCPUOffloadConnector":
        from vllm.v1.simple_kv_offload import worker

        from vllm_repro_lab.no_cuda import without_cuda

        without_cuda(worker)
        copies = _SimpleCopies(memory, store_polls, load_polls)
        if connector.worker_handler is not None:  # there is none without prefix caching
            connector.worker_handler._backend = copies
        return copies
    if name == "OffloadingConnector":
        from vllm_repro_lab.offloading import Transfers

        copier = Copier(memory, store_polls, load_polls)
        blocks = memory.case["chunk_blocks"]

        def begin(direction: str, source: Any, target: Any) -> Event:
            if direction == "store":
                return copier.begin(
                    direction, source.block_ids, _places(source, target.block_ids, blocks)
                )
            return copier.begin(
                direction, _places(target, source.block_ids, blocks), target.block_ids
            )

        connector.connector_worker.worker = Transfers(begin)
        return copier
    if name.startswith("Nixl"):
        connector.connector_worker = fetches = _Fetches(config, groups, memory, load_polls)
        return fetches
    if name.startswith("Mooncake"):
        connector.connector_worker = pulls = _Pulls(config, groups, memory, load_polls)
        return pulls
    if name.endswith("StoreConnector"):
        connector.memory = memory
        connector.copier = Copier(memory, store_polls, load_polls)
        return connector.copier  # type: ignore[no-any-return]  # vLLM is not installed here
    raise NotImplementedError(f"no simulated copier for {name}")
