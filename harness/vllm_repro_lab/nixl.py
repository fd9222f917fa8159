"""Worker half of vLLM's NIXL connector without NIXL. `parts_scheduler` lists the replaced names.

It sends nothing: a request whose blocks wait for a remote server counts as fetched in the step after its end.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["install"]

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector"
_NAMES = ("NixlPullConnectorWorker", "NixlConnectorWorker")
"""Of the worker half; the second in older releases."""


def install() -> None:
    """Replace the worker half in the connector's module."""
    connector: Any = importlib.import_module(_CONNECTOR)
    for name in _NAMES:
        if hasattr(connector, name):
            setattr(connector, name, _Worker)


class _Worker:
    """What the connector asks of its worker half."""

    xfer_handshake_metadata = None
    use_host_buffer = False
    copy_blocks = None
    pcp_rank = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self._sent: set[str] = set()

    def register_kv_caches(self, _: Any) -> None: ...

    def start_load_kv(self, metadata: Any) -> None:
        self._sent |= set(metadata.reqs_to_send)

    def get_finished(self) -> tuple[set[str], set[str]]:
        sent, self._sent = self._sent, set()
        return sent, set()

    def get_transfer_results(self) -> Any:
        """Stand for `get_finished` in newer releases."""
        base: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
        sent, received = self.get_finished()
        return base.KVConnectorTransferResults(finished_sending=sent, finished_recving=received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def get_kv_connector_stats(self) -> None: ...

    def shutdown(self) -> None: ...
