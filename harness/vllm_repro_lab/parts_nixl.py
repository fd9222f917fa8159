"""Names replaced by the mechanisms `nixl` and `scheduler`. Imports neither torch nor vllm."""

from __future__ import annotations

from .record import Part

__all__ = ["PARTS"]

PARTS = (
    Part(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
        "NixlPullConnectorWorker",
        "NIXL moves blocks between servers",
        "a prompt is fetched from the blocks that an earlier request of the same server left, one second later; from another server it "
        "fails to come. Which blocks are copied is decided by the scheduler half, which is vLLM's own",
        otherwise=("NixlConnectorWorker",),
    ),
    Part(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
        "NixlBaseConnector.set_xfer_handshake_metadata_pp_aware",
        "it opens a port for decode servers, the same one on each server of a host",
        "none: there is no other server",
        otherwise=("NixlBaseConnector.set_xfer_handshake_metadata", "NixlConnector.set_xfer_handshake_metadata"),
    ),
)
