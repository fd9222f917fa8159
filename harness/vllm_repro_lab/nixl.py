"""Worker half of vLLM's NIXL connector without NIXL, on a server that is its own prefill server.

`parts_connectors` lists the replaced names.

The blocks of a request that ends with `do_remote_decode` are held until a later request has fetched
them: from `remote_engine_id` of this server (`"engine_id"` in `--kv-transfer-config`). A fetch ends
after `FETCH_S` seconds. From any other engine it fails.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

FETCH_S = 1.0
"""Duration of a fetch, in seconds. Requests that come within it are fetched together."""

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector"
_WORKERS = ("NixlPullConnectorWorker", "NixlConnectorWorker")
_CONNECTORS = ("NixlBaseConnector", "NixlConnector")
_LISTENERS = ("set_xfer_handshake_metadata_pp_aware", "set_xfer_handshake_metadata")
"""Names in new releases, then in older ones."""


def install() -> None:
    """Replace the worker half of vLLM's NIXL connector by `Worker`, so that it opens no port."""
    module: Any = importlib.import_module(_CONNECTOR)
    for name in _WORKERS:
        if hasattr(module, name):
            setattr(module, name, Worker)
    connector = next(getattr(module, name) for name in _CONNECTORS if hasattr(module, name))
    for name in _LISTENERS:
        if name in vars(connector):
            setattr(connector, name, lambda *_: None)


class Worker:
    """Worker half of vLLM's NIXL connector without NIXL: it copies blocks within this server.

    As in `NixlBaseConnectorWorker`, the last local blocks of a group are the last remote ones, and
    a failure names the blocks of the request unless the model is hybrid.
    """

    xfer_handshake_metadata = None
    use_host_buffer = False
    copy_blocks = None
    pcp_rank = 0

    def __init__(self, config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self._engine_id, self._groups = engine_id, kv_cache_config.kv_cache_groups
        kinds = {type(group.kv_cache_spec).__name__ for group in self._groups}
        self._hybrid = not config.scheduler_config.disable_hybrid_kv_cache_manager and kinds != {
            "FullAttentionSpec"
        }
        self._blocks = kv_cache_config.num_blocks
        self._caches: dict[str, Any] = {}
        self._held: set[str] = set()
        self._fetching: dict[str, Any] = {}
        self._ends: dict[str, float] = {}
        self._failed: set[str] = set()
        self._invalid: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Keep the KV cache tensor of each layer, in which `fetch` copies blocks."""
        self._caches = kv_caches

    def start_load_kv(self, metadata: Any) -> None:
        """Note the step's requests: those whose blocks to hold, and those to fetch."""
        self._held |= set(metadata.reqs_to_send)
        for name, meta in metadata.reqs_to_recv.items():
            # Newer releases also wait for a request whose blocks all came from the prefix cache
            # meanwhile.
            if any(meta.local_block_ids) or getattr(meta, "awaiting_kvs", False):
                self._fetching[name] = meta

    def fetch(self, name: str, meta: Any) -> bool | None:
        """Copy the remote blocks of a prompt to its local ones, and return True.

        Return None in the first second after the first call, and then False if the blocks are those
        of another engine.
        """
        end = self._ends.setdefault(name, time.monotonic() + FETCH_S)
        if time.monotonic() < end:
            return None
        del self._ends[name]
        if meta.remote.engine_id != self._engine_id:
            return False
        for group, pairs in zip(self._groups, pairs_of(meta), strict=True):
            for layer in set(group.layer_names) & set(self._caches):
                cache = self._caches[layer].movedim(
                    self._caches[layer].shape.index(self._blocks), 0
                )
                for block, source in pairs:
                    cache[block].copy_(cache[source])
        return True

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Try all fetches; return the requests to free, and those whose fetch ended or failed."""
        fetched = {name: self.fetch(name, meta) for name, meta in self._fetching.items()}
        ended = {name for name, came in fetched.items() if came is not None}
        remote = set()
        for name in ended:
            meta = self._fetching.pop(name)
            remote.add(meta.remote.request_id)
            if not fetched[name]:
                self._failed.add(name)
                self._invalid |= set() if self._hybrid else set(meta.local_block_ids[0])
        sent = self._held & self.released(remote)
        self._held -= sent
        return sent, ended

    def released(self, fetched: set[str]) -> set[str]:
        """Return the requests whose held blocks may be freed: here those that were fetched.

        fetched: the requests whose blocks this server has fetched since the last call.
        """
        return fetched

    def get_transfer_results(self) -> Any:
        """Return the transfers that ended and those that failed since the last call.

        Newer releases call this instead of `get_finished`.
        """
        base: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
        sent, received = self.get_finished()
        failed, self._failed = self._failed, set()
        return base.KVConnectorTransferResults(
            finished_sending=sent, finished_recving=received, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of the fetches that failed since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def _do_nothing(self, *_: Any) -> None:
        """Answer a call that is for NIXL, its threads or its buffers."""

    set_host_xfer_buffer_ops = get_kv_connector_stats = shutdown = _do_nothing


def pairs_of(meta: Any) -> list[list[tuple[int, int]]]:
    """Return (local block, remote block) for each copy of a fetch, by KV cache group."""
    groups = zip(meta.local_block_ids, meta.remote.block_ids, strict=True)
    return [
        list(zip(mine, theirs[len(theirs) - len(mine) :], strict=True)) for mine, theirs in groups
    ]
