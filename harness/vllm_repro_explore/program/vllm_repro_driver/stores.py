"""KV connectors that load prompts that another engine has stored, and may fail to.

One loads in the step that needs them, as none of vLLM's own does. The other loads before that step
and saves what ends, as LMCache does.

vLLM loads them by path, like a user's own connectors. `kv_transfer_params` of a request: {"stored":
true} if another engine has computed its prompt. The worker half reports the blocks that did not
come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


@dataclass
class _Loads(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed here
    """Transfers that begin in a step.

    by_request: the blocks to load of each request, and their places in the prompt from 1 on. saves:
    the blocks to save.
    """

    by_request: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    saves: dict[str, list[int]] = field(default_factory=dict)


class StoreConnector(KVConnectorBase_V1):  # type: ignore[misc]  # as above
    """Connector that loads stored prompts in the step that needs them; both of its halves.

    memory: the executor. copier: simulates its transfers. Both are None in the scheduler half.
    """

    memory: Any = None
    copier: Any = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block = vllm_config.cache_config.block_size
        self._first: dict[str, int] = {}
        self._next = _Loads()
        self._failed: set[int] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return (tokens to load, False): a stored prompt's whole blocks without its last token.

        Return (0, False) for a prompt that is not stored, or if no more of it can be loaded.
        """
        whole = (request.num_prompt_tokens - 1) // self._block * self._block
        if whole <= num_computed_tokens or not (request.kv_transfer_params or {}).get("stored"):
            return 0, False
        self._first[request.request_id] = num_computed_tokens
        return whole - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks that the next step loads for a request."""
        if num_external_tokens:
            (table,) = blocks.get_block_ids()
            first = self._first[request.request_id]
            places = range(first // self._block, (first + num_external_tokens) // self._block)
            self._next.by_request[request.request_id] = [
                (table[place], place + 1) for place in places
            ]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the loads that the worker half does in this step."""
        begun, self._next = self._next, _Loads()
        return begun

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Load the step's blocks at once; note those that did not come."""
        for name, blocks in self._get_connector_metadata().by_request.items():
            self._load(name, blocks)

    def _load(self, name: str, blocks: list[tuple[int, int]]) -> None:
        """Load a request's blocks now, or note that they did not come."""
        if not self.memory.fetch(name, [blocks]):
            self._failed |= {block for block, _ in blocks}
            self.memory.lost.setdefault(name, "after a rejected load")

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that did not come since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: every load is complete at its start, and nothing is stored."""

    wait_for_layer_load = save_kv_layer = wait_for_save = _do_nothing


class LateStoreConnector(StoreConnector):
    """Connector that loads stored prompts ahead, and saves the blocks of each request that ends.

    Both take steps. A request that is aborted while it loads has two ends to come. A prompt is
    loaded once, as with NIXL.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loads: dict[str, Any] = {}
        self._saves: dict[str, Any] = {}
        self._asked: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return (tokens to load, True), or (0, False) if there are none."""
        tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        tokens *= request.request_id not in self._asked
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks that the next step begins to load, and that they were asked for."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._asked.add(request.request_id)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Begin to save the request's blocks; return (True, None), which keeps them until the end.

        Return (False, None) if it has none.
        """
        if block_ids:
            self._next.saves[request.request_id] = list(block_ids)
        return bool(block_ids), None

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Begin the loads and saves of the step."""
        begun = self._get_connector_metadata()
        for name, blocks in begun.by_request.items():
            self._loads[name] = self.copier.transfer(
                "load", [block for block, _ in blocks], partial(self._load, name, blocks)
            )
        for name, saved in begun.saves.items():
            self._saves[name] = self.copier.transfer("store", saved, lambda: None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Count a poll of each transfer; return the requests whose saves and loads have ended."""
        return _ended(self._saves), _ended(self._loads)


def _ended(transfers: dict[str, Any]) -> set[str]:
    """Remove the transfers that have ended, and return their requests."""
    ended = {name for name, transfer in transfers.items() if transfer.query()}
    for name in ended:
        del transfers[name]
    return ended
