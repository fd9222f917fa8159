"""Blocks that hold the states of Mamba layers, step by step.

A request has one state, or with draft tokens one for each token that may be accepted: those lie in
blocks that follow each other in its block table. The rules stand for functions of vLLM 0.32.0:

| here | there |
|---|---|
| `begin`: in the mode "align" the state moves to the block of the step's last token |
`v1/worker/mamba_utils.py`, `preprocess_mamba` |
| `begin`: the first state is right if the request was not in the last step |
`InputBatch.add_request`, `num_accepted_tokens_cpu` |
| `end`: a state at the end of a block is kept in that block | `mamba_utils.py`,
`postprocess_mamba_fused_kernel` |
| `slot`: the first block in use | `v1/attention/backends/utils.py`, `mamba_get_block_table_tensor`
|
| `decodes` | `mamba_attn.py`, `BaseMambaAttentionMetadataBuilder._compute_common_metadata` |
| `begin`, second runner: the count of accepted tokens stays with the request |
`v1/worker/gpu/model_states/mamba_hybrid.py` |
| `decodes`, second runner | `v1/worker/gpu/model_runner.py`, `is_prefilling_np` and
`prefill_runs_as_decode_np` |
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any


def _source_contains(module: str, text: str) -> bool:
    """Return True if the source of a module contains a text; False if there is no such module.

    Releases differ here in no name that could be looked up, and an import takes seconds.
    """
    spec = importlib.util.find_spec(module)
    return (
        spec is not None
        and spec.origin is not None
        and text in Path(spec.origin).read_text(encoding="utf-8")
    )


_ALWAYS = _source_contains(
    "vllm.v1.worker.gpu_model_runner", "use_spec_decode = self.speculative_config is not None"
)
"""Whether a batch without a draft uses the counts of accepted tokens too."""
_TAILS = _source_contains("vllm.v1.attention.backends.mamba_attn", "padded_prompt_tail_rows")
"""Whether the last token of a prompt that placeholders of drafts follow decodes."""


class States:
    """Places of the Mamba states of each request in its block table, step by step."""

    def __init__(
        self,
        # vLLM's `VllmConfig`
        config: Any,
        # draft tokens of a step
        drafts: int,
        # copies the states from one index of a request's block table to another
        copy: Callable[[str, int, int], None],
        *,
        # use the rules of the second model runner
        second: bool,
    ) -> None:
        cache, self._second = config.cache_config, second
        self._align, self._block = cache.mamba_cache_mode == "align", cache.mamba_block_size
        self._drafts, self._copy = drafts, copy
        # rule of vLLM by which a request has lost its state; its next token is wrong
        self.lost: dict[str, str] = {}
        self._left_out: dict[str, int] = {}
        self._at: dict[str, int] = {}
        self._right: dict[str, int] = {}
        self._next: dict[str, int] = {}

    def begin(self, output: Any, computed: Mapping[str, int], stepped: Collection[str]) -> None:
        """Start a step: move states to the blocks that it writes to, and note states that are lost.

        computed: tokens of each request before the step. stepped: requests of the last step.
        """
        if not output.num_scheduled_tokens:
            return
        self._drafted = bool(output.scheduled_spec_decode_tokens)
        if self._second:
            for new in output.scheduled_new_reqs:
                self._next.pop(new.req_id, None)
                self._at.pop(new.req_id, None)
            self._right = dict(self._next)
        else:
            self._look_for_forgotten(output, stepped)
            self._right, self._next = (
                {name: self._next[name] for name in stepped if name in self._next},
                {},
            )
        if not self._align:
            return
        preempted = getattr(output, "preempted_req_ids", None) or ()
        for name in (
            *output.finished_req_ids,
            *preempted,
            *output.scheduled_cached_reqs.resumed_req_ids,
        ):
            self._at.pop(name, None)
        for name, count in output.num_scheduled_tokens.items():
            before = self._at.get(name, (computed[name] - 1) // self._block)
            now = self._at[name] = -(-(computed[name] + count) // self._block) - 1
            if before not in (-1, now):
                self._copy(name, before + self._right.get(name, 1) - 1, now)
                self._right[name] = 1

    def _look_for_forgotten(self, output: Any, stepped: Collection[str]) -> None:
        """Note in `lost` requests that lose their state because a step left them out."""
        self._left_out |= {
            name: right for name, right in self._next.items() if right > 1 and name not in stepped
        }
        again = (new.req_id for new in output.scheduled_new_reqs)
        for name in (
            *output.finished_req_ids,
            *again,
            *output.scheduled_cached_reqs.resumed_req_ids,
        ):
            self._left_out.pop(name, None)
        for name in output.num_scheduled_tokens:
            if self._left_out.pop(name, None) is not None:
                self.lost.setdefault(name, "left out of a step")

    def slot(self, name: str) -> int:
        """Return the block-table index of request `name`'s state after a step's first token."""
        return self._at.get(name, 0)

    def right(self, name: str) -> int:
        """Return the index in the block table of the state that a step starts from.

        Note in `lost` a state that vLLM does not find again.
        """
        right = self._right.get(name, 1)
        if right > 1 and not (self._drafted or _ALWAYS or self._second):
            self.lost.setdefault(name, "a step without drafts")
            return self.slot(name)
        return self.slot(name) + right - 1

    def decodes(self, name: str, start: int, prompt: int, count: int, drafts: int) -> bool:
        """Return True if a request decodes in this step, and does not prefill.

        It then keeps a state after each token, else one after the last. Note in `lost` a state that
        is lost by this. prompt: number of its tokens. count, drafts: tokens of the step, and how
        many of them are drafts.
        """
        if start >= prompt:
            if self._second:
                return True
            decoding = count <= 1 + (self._drafts if self._drafted or _ALWAYS else 0)
            if decoding and count > drafts + 1:
                self.lost.setdefault(name, "outputs computed again count as drafts")
        else:
            decoding = start > 0 and (
                count == 1 or ((_TAILS or self._second) and count == drafts + 1)
            )
            if drafts and not decoding:
                self.lost.setdefault(name, "a prompt with placeholders")
        return decoding

    def end(self, name: str, computed: int, count: int, drafts: int, accepted: int) -> None:
        """End a request's step: if it filled a block, copy the state at its end to that block.

        computed: tokens before the step. count, drafts: tokens of the step, and how many of them
        are drafts. accepted: tokens sampled and kept.
        """
        if not self._drafts:
            return
        self._next[name] = accepted
        if not self._align:
            return
        first = computed + count - drafts
        whole = (first + accepted - 1) // self._block
        if whole * self._block < first:
            return
        kept = whole - 1
        if kept == self._at[name]:
            self._next[name] = 1
        self._copy(name, self._at[name] + whole * self._block - first, kept)
