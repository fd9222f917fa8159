"""KV connector that moves nothing and reports each transfer late.

vLLM loads it by path, like a user's own connector:

    --kv-transfer-config '{"kv_connector":"LateConnector","kv_role":"kv_both",
      "kv_connector_module_path":"vllm_repro_lab.late_connector"}'

`kv_transfer_params` of a request: "load": steps until the load of its whole blocks is reported;
"load_after_end": the same, but counted from the request's end, which is then an abort; "save":
steps from its end until its save is reported, which holds its blocks as vLLM's interface provides;
"reject": a load in the step that needs it, whose blocks are then reported not to have come. Without
them the connector ignores the request. `kv_connector_extra_config`: {"echo": 40} makes it the
second of a MultiConnector: it loads nothing, and reports each load of the first 40 steps later once
more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

# a step's shortest time, about a GPU's: steps without a pause keep the server from reading an abort
# on a busy machine
STEP_S = 0.005


@dataclass
class _Begun(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed here
    """Transfers that the scheduler half begins in a step."""

    # request id -> steps
    loads: dict[str, int] = field(default_factory=dict)
    # request id -> steps
    saves: dict[str, int] = field(default_factory=dict)
    # blocks
    rejected: set[int] = field(default_factory=set)


class LateConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """Both halves of a KV connector that moves nothing and reports each load and save late."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block = vllm_config.cache_config.block_size
        self._echo = int(self._kv_transfer_config.get_from_extra_config("echo", 0))
        self._next = _Begun()
        self._seen: set[str] = set()
        self._loading: dict[str, int] = {}
        self._saving: dict[str, int] = {}
        self._rejected: set[int] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return (tokens to load, whether asynchronously) for a prompt that asks for a load.

        Return (0, False) for others, once the load has begun, and if `echo` is configured.
        """
        requested = _asked(request).keys() & {"load", "load_after_end", "reject"}
        if self._echo or not requested or request.request_id in self._seen:
            return 0, False
        tokens = (request.num_tokens - 1) // self._block * self._block - num_computed_tokens
        return (tokens, "reject" not in requested) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note a load that the request asks for, for the worker half, which reports its end.

        If `echo` is configured, it is another connector's load, reported that many steps later once
        more. For `reject`, note the blocks whose load must fail.
        """
        if (
            "load" in _asked(request)
            and request.request_id not in self._seen
            and (num_external_tokens or self._echo)
        ):
            self._seen.add(request.request_id)
            self._next.loads[request.request_id] = int(_asked(request)["load"]) + self._echo

        if "reject" in _asked(request) and num_external_tokens:
            self._seen.add(request.request_id)
            (block_ids,) = blocks.get_block_ids()
            self._next.rejected.update(block_ids[: (request.num_tokens - 1) // self._block])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the transfers that begin in this step, for the worker half."""
        begun, self._next = self._next, _Begun()
        return begun

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Begin what the request asks for at its end: a save, a load that ends later, or both.

        Return (True, None) for a save: vLLM then keeps the blocks until the save is reported done.
        Else (False, None), as always with `echo`.
        """
        self._seen.discard(request.request_id)
        if "load_after_end" in _asked(request):
            self._next.loads[request.request_id] = int(_asked(request)["load_after_end"])
        if self._echo or "save" not in _asked(request):
            return False, None
        self._next.saves[request.request_id] = int(_asked(request)["save"])
        return True, None

    request_finished_all_groups = request_finished

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """In the worker: take the loads and saves that begin in this step."""
        begun = self._get_connector_metadata()
        self._loading.update(begun.loads)
        self._saving.update(begun.saves)
        self._rejected = begun.rejected

    def get_block_ids_with_load_errors(self) -> set[int]:
        """In the worker: return the blocks whose load fails in this step, as `reject` asks."""
        return self._rejected

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """In the worker: sleep 5 ms, and return the requests with due saves and due loads."""
        time.sleep(STEP_S)
        return _due(self._saving), _due(self._loading)

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        """Move nothing."""

    wait_for_layer_load = save_kv_layer = wait_for_save = _do_nothing


def _asked(request: Any) -> dict[str, Any]:
    """Return what a request asks of the connector in `kv_transfer_params`; empty if nothing."""
    return request.kv_transfer_params or {}


def _due(transfers: dict[str, int]) -> set[str] | None:
    """Count down the steps of each transfer; remove and return the requests that are due.

    Return None if none is due, as vLLM's interface requires.
    """
    done = {name for name, left in transfers.items() if left <= 0}
    for name in list(transfers):
        transfers[name] -= 1
    for name in done:
        del transfers[name]
    return done or None
