"""Names used by the mechanism `late-connector`. Imports neither torch nor vllm."""

from __future__ import annotations

from .record import Part

__all__ = ["PARTS"]

PARTS = (
    Part(
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1",
        "connectors such as NIXL and LMCache move KV blocks with a GPU or over a network",
        "the lab's LateConnector, which --kv-transfer-config loads by path, moves nothing. It rejects a load, or "
        "reports each load and save after as many steps as the request says. "
        "What the scheduler does with the reports is vLLM's own code. Answers prove nothing",
        runs=True,
    ),
    Part("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorMetadata", runs=True),
    Part("vllm.distributed.kv_transfer.kv_connector.v1.base", "SupportsHMA", runs=True),
)
