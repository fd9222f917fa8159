"""Worker half of a KV connector for which the lab has no other: it moves and reports nothing.

LMCache, Mooncake and connectors of other packages move KV blocks with a GPU or over a network. The
scheduler half, which decides, is their own. A request whose load or save it reports later waits for
ever. MultiConnector makes its connectors itself, with their own worker halves.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from .wrapping import wrap

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1."
# Connectors whose worker half runs, or has another one of the lab.
_OTHERS = ("multi_connector", "nixl", "offloading_connector", "simple_cpu_offload_connector")


def install() -> None:
    """Make vLLM's factory of connectors return `IdleHalf` as the worker half of unknown ones."""
    wrap(KVConnectorFactory, "create_connector", create_connector)


def _nothing(*_: Any, **__: Any) -> None:
    pass


IdleHalf: Any = type(
    "IdleHalf",
    (KVConnectorBase_V1,),
    dict.fromkeys(KVConnectorBase_V1.__abstractmethods__, _nothing) | {"__module__": __name__},
)


def create_connector(
    original: Any, cls: Any, config: Any, role: Any, kv_cache_config: Any = None
) -> Any:
    """Return the connector's half for `role`, or `IdleHalf`."""
    known = (f"{__package__}.", *(f"{_V1}{name}" for name in _OTHERS))
    parents = cls.get_connector_class(config.kv_transfer_config).__mro__
    if role is KVConnectorRole.WORKER and not any(
        parent.__module__.startswith(known) for parent in parents
    ):
        return IdleHalf(config, role, kv_cache_config)
    return original(cls, config=config, role=role, kv_cache_config=kv_cache_config)
