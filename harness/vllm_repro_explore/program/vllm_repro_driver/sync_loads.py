"""KV connector that loads prompts in the step that needs them, and may fail to.

vLLM's own connectors load before that step.

vLLM loads it by path, like a user's own connector. `kv_transfer_params` of a request: {"stored":
true} if another engine has computed its prompt. The worker half reports the blocks that did not
come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


@dataclass
class _Loads(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed here
    """Loads of a step: for each request its blocks, and their places in the prompt from 1 on."""

    by_request: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


class StoreConnector(KVConnectorBase_V1):  # type: ignore[misc]  # as above
    """Connector that loads stored prompts in the step that needs them; both of its halves.

    memory: the executor; None in the scheduler half.
    """

    memory: Any = None

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
