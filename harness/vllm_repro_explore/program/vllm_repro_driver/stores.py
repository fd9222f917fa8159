"""KV connectors that load prompts that another engine has stored, and may fail to.

`StoreConnector` loads in the step that needs the prompt, as ExampleConnector does.
`LateStoreConnector` loads before that step and saves the blocks of each finished request, as
LMCacheMPConnector does.

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
class _Transfers(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed here
    """Transfers that begin in a step."""

    # for each request the blocks to load, and their places in the prompt from 1 on
    loads: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    # for each request the blocks to save
    saves: dict[str, list[int]] = field(default_factory=dict)


class StoreConnector(KVConnectorBase_V1):  # type: ignore[misc]  # as above
    """Connector that loads stored prompts in the step that needs them; both of its halves.

    The scheduler half has neither `memory` nor `copier`.
    """

    # the executor
    memory: Any = None
    # simulates transfers of its blocks
    copier: Any = None
    # what a wrong answer is blamed on after a load failed; empty if on nothing
    lost_by = "after a rejected load"

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block = vllm_config.cache_config.block_size
        self._first: dict[str, int] = {}
        self._next = _Transfers()
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
            self._next.loads[request.request_id] = [(table[place], place + 1) for place in places]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the loads and saves that the worker half begins in this step."""
        begun, self._next = self._next, _Transfers()
        return begun

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Load the step's blocks at once; note those that did not come."""
        for name, blocks in self._get_connector_metadata().loads.items():
            self._load(name, blocks)

    def _load(self, name: str, blocks: list[tuple[int, int]]) -> None:
        """Load a request's blocks now, or note that they did not come."""
        if not self.memory.fetch(name, [blocks]):
            self._failed |= {block for block, _ in blocks}
            if self.lost_by:
                self.memory.lost.setdefault(name, self.lost_by)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that did not come since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: transfers begin in `start_load_kv`."""

    wait_for_layer_load = save_kv_layer = wait_for_save = _do_nothing


class LateStoreConnector(StoreConnector):
    """Connector that loads stored prompts ahead, and saves the blocks of each request that ends.

    Both take steps. Of a request that is aborted while it loads, the worker half reports two ends.
    A prompt is loaded once, as with NIXL.
    """

    lost_by = ""

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
        for name, blocks in begun.loads.items():
            self._loads[name] = self.copier.transfer(
                "load", [block for block, _ in blocks], partial(self._load, name, blocks)
            )
        for name, saved in begun.saves.items():
            # a step in flight may still write into the last one, and a load into any
            kept = [] if name in self._loads else saved[:-1]
            check = partial(self._check_saved, name, kept, self._content(kept))
            self._saves[name] = self.copier.transfer("store", saved, check)

    def _content(self, blocks: list[int]) -> list[bytes]:
        """Return the content of blocks, a part for each layer."""
        return [part.tobytes() for block in blocks for part in self.memory.get(block)]

    def _check_saved(self, name: str, blocks: list[int], before: list[bytes]) -> None:
        """Note a violation if the content of blocks changed while they were saved."""
        if self._content(blocks) != before:
            self.memory.notes.append(("saved-block-changed", f"{name}: it was freed too early"))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Count a poll of each transfer; return the requests whose saves and loads have ended."""
        return _ended(self._saves), _ended(self._loads)


def _ended(transfers: dict[str, Any]) -> set[str]:
    """Remove the transfers that have ended, and return their requests."""
    ended = {name for name, transfer in transfers.items() if transfer.query()}
    for name in ended:
        del transfers[name]
    return ended
