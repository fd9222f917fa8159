"""Executor without a model, whose KV cache lies in the blocks that the scheduler assigns.

It knows of a request only what `SchedulerOutput` contains. The rules stand for functions of vLLM
0.32.0's `v1/worker/gpu_model_runner.py`:

| here | there |
|---|---|
| `_update`: new, running and resumed requests, their blocks and tokens |
`GPUModelRunner._update_states` |
| `_update`: computed tokens less the rejected drafts of the step before | `_update_states`, with
`_update_states_after_model_execute` |
| `_inputs`: the worker's own drafts in place of placeholders | `_prepare_input_ids` |
| `reference.embed`: -1 is clamped | `execute_model`, "Clamp speculative scheduler placeholders" |
| `execute_model`: zeroed and copied blocks before the forward pass | `_zero_block_ids`,
`_update_states` |
| `execute_model`: loads begin before the forward pass |
`KVConnectorModelRunnerMixin._get_kv_connector_output` |
| `sample_tokens`: no token for a partial prefill | `_prepare_inputs` (`discard_request_mask`),
`_bookkeeping_sync` |
| `sample_tokens`: rows of the bitmask, one for each draft and one more |
`structured_output/utils.py`, `apply_grammar_bitmask` |
| `sample_tokens`: drafts are accepted until the first that differs | `rejection_sampler.py`, greedy
|
| `sample_tokens`: no end before the least tokens |
`v1/sample/logits_processor/builtin.py`, `MinTokensLogitsProcessor` |
| `_update`: an image without data is not encoded | `_process_encoder_cache_scheduler_output`,
`_batch_mm_inputs_from_scheduler` |
| `_inputs`: encoder outputs in place of placeholders | `_gather_mm_embeddings` |
| `_update`, second runner: a request keeps its tokens, count and drafts |
`v1/worker/gpu/states.py`, `RequestState` |
| `Answer`: none is there before it is asked for | `v1/executor/multiproc_executor.py`,
`FutureWrapper` |
"""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from . import reference
from .config import layer_specs, memory_of, room_of
from .invariants import listed_twice
from .mamba import States
from .workers import WorkerHalf, worker_half


class ModelRunnerError(Exception):
    """Stands for the RuntimeError that vLLM's own model runner raises with this message."""

    # where vLLM raises it
    place: ClassVar[dict[str, Any]] = {
        "file": "vllm/v1/worker/gpu_model_runner.py",
        "function": "_gather_mm_embeddings",
        "source": 'raise RuntimeError(f"Encoder cache miss for {mm_hash}.")',
        "frames": ["execute_model", "_preprocess", "_gather_mm_embeddings"],
    }


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Inputs of a request's answer other than its tokens."""

    salt: int = 0
    # see `reference`
    eos: int = 0
    # with the encoder's outputs in place of placeholders
    prompt: Sequence[int] = ()
    # tokens of its answer before which none ends it
    least: int = 0
    # its `Matcher`
    grammar: Any = None


@dataclass
class _Known:
    """Worker's record of a request: its tokens, blocks and drafts."""

    tokens: list[int]
    # tokens of its prompt; with the second runner those it came with, which may be more
    prompt: int
    blocks: list[list[int]]
    # see `reference`
    key: int
    traits: Traits
    images: list[Any]
    # proposed after its last step
    drafts: list[int] = field(default_factory=list)
    # tokens computed by then
    reached: int = 0


@dataclass
class _Row:
    """One request in one step: its tokens, position, states and block tables."""

    name: str
    # what is kept of the request between steps
    known: _Known
    # first position
    start: int
    tokens: list[int]
    # the proposed ones, at the end of `tokens`
    drafts: list[int]
    # a hash for each token (`reference.embed`)
    states: Any
    # its blocks in each group
    tables: list[Any]


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an executor's method: add its CPU time in microseconds to the executor's `cpu_us`."""

    @functools.wraps(method)
    def timed(self: Any, *arguments: Any, **named: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return method(self, *arguments, **named)
        finally:
            self.cpu_us += (time.thread_time_ns() - began) / 1000

    return timed


class FakeExecutor(Executor):  # type: ignore[misc]  # vLLM is not installed here
    """Executor without a model: it computes tokens from what lies in the KV cache blocks."""

    case: Mapping[str, Any]

    def _init_executor(self) -> None:
        """Set up an executor that knows no request yet."""
        # violations that the worker saw
        self.notes: list[tuple[str, str]] = []
        # what no worker is sent of requests
        self.traits: defaultdict[str, Traits] = defaultdict(Traits)
        # prompts that another server has computed: tokens, key, and whether their transfer fails
        self.remote: dict[str, tuple[list[int], int, bool]] = {}
        # for each of those the places of the blocks that come
        self.places: dict[str, list[list[int]]] = {}
        # why the engine may compute while it sleeps
        self.asleep = ""
        # the scheduler is to start nothing
        self.paused = False
        self.seen: Counter[str] = Counter()
        self.cpu_us = 0.0
        self.half: WorkerHalf | None = None
        self.trace: list[dict[str, Any]] | None = [] if self.case.get("trace") else None
        self.known: dict[str, _Known] = {}
        # Of each request of the last step: the first position that it did not compute.
        self._reached: dict[str, int] = {}
        self._pending: Any = None
        self._encoded: dict[str, list[int]] = {}
        self._random = np.random.default_rng(self.case["seed"])

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return True: the scheduler may run a step ahead."""
        return True

    @property
    def max_concurrent_batches(self) -> int:
        """Return the steps in flight: 2 with asynchronous scheduling, else 1."""
        return 2 if self.scheduler_config.async_scheduling else 1

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Return the one task of this model, generation."""
        return ("generate",)

    def collective_rpc(self, method: Any, *_: Any, non_block: bool = False, **__: Any) -> Any:
        """Return [None] for the one worker, or [False] for `supports_draft_weight_updates`.

        The method "sleep" overwrites the KV cache with noise; no other does anything. non_block:
        return the list as an `Answer`.
        """
        name = method if isinstance(method, str) else getattr(method, "__name__", "")
        if name == "sleep":
            for memory in self._kv:
                memory[:] = self._noise(memory.shape)
        answer = [False if name == "supports_draft_weight_updates" else None]
        return Answer(answer) if non_block else answer

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        """Answer a call that is for a model, its device or another process."""

    check_health = shutdown = compile_or_warm_up_model = _do_nothing
    set_kv_cache_layout = reset_mm_cache = execute_dummy_batch = _do_nothing

    def add_lora(self, *_: Any) -> bool:
        """Return True: every LoRA adapter counts as loaded."""
        return True

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        """Return an empty list: no other engine connects to this worker."""
        return []

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Return the KV cache layouts of vLLM's CPU attention backend."""
        from vllm.v1.attention.backends import utils
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return [
            [layout.name for layout in utils.get_supported_kv_cache_layouts([CPUAttentionBackend])]
        ]

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """Return the KV cache spec of each layer, for the one worker."""
        return [layer_specs(self.case, self.vllm_config)]

    def determine_available_memory(self) -> list[int]:
        """Return the bytes for the KV cache, for the one worker."""
        return [memory_of(self.case)]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Make the KV cache, filled with noise, and the connector's worker half if there is one.

        Layers at the same address share memory, as in the real one.
        """
        (config,) = kv_cache_configs
        self._config = config
        places: dict[Any, int] = {}
        memory: dict[str, int] = {}
        for number, tensor in enumerate(config.kv_cache_tensors):
            if hasattr(tensor, "shared_by"):
                memory.update(
                    {name: places.setdefault(number, len(places)) for name in tensor.shared_by}
                )
            else:
                for place, name in enumerate(tensor.layers):
                    memory[name] = places.setdefault(
                        tensor.offset + place * tensor.layer_stride, len(places)
                    )
        groups = {
            name: number
            for number, group in enumerate(config.kv_cache_groups)
            for name in group.layer_names
        }
        self._sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        self._layers = [
            (groups[name], memory[name]) for name in layer_specs(self.case, self.vllm_config)
        ]
        self._kv = [self._noise((config.num_blocks, self.case["block"])) for _ in places]
        self.windows = [
            self.case["window"] if kind == "sliding" else 0 for kind in self.case["layers"]
        ]
        second = self.case["runner"] == 2
        self._states = States(
            self.vllm_config, self.case["draft"], self._copy_states, second=second
        )
        # for each request that a rule of vLLM's loses KV or states of: the rule
        self.lost = self._states.lost
        if self.vllm_config.kv_transfer_config is not None:
            polls = self.case["store_polls"], self.case["load_polls"]
            self.half = worker_half(self.vllm_config, config, self, *polls)

    @functools.cached_property
    def endless(self) -> Any:
        """Return a bitmask that forbids only the end token."""
        return reference.endless(self.vllm_config.model_config.get_vocab_size())

    def _noise(self, shape: tuple[int, ...]) -> Any:
        """Return random content, as of memory that was never written to."""
        return self._random.integers(0, 2**63, size=shape, dtype=np.uint64)

    def reset_encoder_cache(self) -> None:
        """Forget the encoded images."""
        self._encoded.clear()

    def get_simple_cpu_offload_num_blocks(self) -> int:
        """Return how many blocks of all layers the connector has room for.

        Counted as `SimpleCPUOffloadWorker` counts them (from 0.33.0 on).
        """
        return int(
            max(
                1,
                room_of(self.case)
                * self._config.num_blocks
                // self._config.kv_cache_tensors[0].size,
            )
        )

    def get(self, block: int) -> Any:
        """Return a copy of a KV cache block's content in all layers."""
        return [memory[block].copy() for memory in self._kv]

    def put(self, block: int, content: Any) -> None:
        """Write content to a KV cache block.

        None stands for a place that was never stored to; note a violation, and write nothing.
        """
        if content is None:
            self.notes.append(
                (
                    "loads-unwritten",
                    f"block {block} is loaded from a place that was never stored to",
                )
            )
            return
        for memory, row in zip(self._kv, content, strict=True):
            memory[block] = row

    def fetch(self, name: str, groups: list[list[tuple[int, int]]]) -> bool:
        """Write the KV of a request's prompt, as another server computed it, and return True.

        Return False if the case lets the fetch fail. Note in `lost` a request whose window lacks
        its first token.

        groups: for each KV cache group, its blocks with their places in the prompt, from 1 on; the
        null block has the place 0.
        """
        tokens, key, fails = self.remote[name]
        if fails:
            return False
        kept = reference.layers(tokens, key, self.windows)
        for values, (group, place), window in zip(kept, self._layers, self.windows, strict=False):
            size, first = self._sizes[group], len(tokens) - window
            # The last token is computed again; its window begins at `first`.
            places = {at for _, at in groups[group]}
            if (
                window
                and first >= 0
                and (first + 1) % size == 0
                and first // size + 1 not in places
            ):
                self.lost.setdefault(name, "fetched without the first token of a window")
            for block, at in groups[group]:
                # nothing is known of the null block
                part = values[(at - 1) * size : at * size] if at else ()
                self._kv[place][block, : len(part)] = part
        self.seen["fetched"] += 1
        return True

    def check_step(self, output: Any) -> None:
        """Note what no step should have.

        These are tokens while the engine sleeps or is paused, a request beyond `max_len`, and
        drafts of a request that is not in the step, for which the runner has no row.
        """
        if self.is_sleeping and output.total_num_scheduled_tokens:
            self.notes.append(
                (
                    f"computes-asleep ({self.asleep})",
                    "a step has tokens, and the KV cache no memory",
                )
            )
        for name in set(output.scheduled_spec_decode_tokens) - set(output.num_scheduled_tokens):
            self.notes.append(("drafts-of-no-row", f"{name} has drafts, and no tokens in the step"))
        if self.paused and output.total_num_scheduled_tokens:
            self.notes.append(("computes-while-paused", f"{output.num_scheduled_tokens}"))
        if (reached := _reached_by(output)) > self.case["max_len"]:
            self.notes.append(("beyond-the-length", f"{reached} tokens of {self.case['max_len']}"))

    def count_transfers(self, half: WorkerHalf) -> None:
        """Count the transfers of a step, and note those that list a block twice."""
        listed = half.take_listed()
        self.notes += listed_twice(listed)
        for direction, _ in listed:
            self.seen["stores" if direction == "store" else "loads"] += 1

    @_timed
    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        """Compute a step over the KV cache; `sample_tokens` then returns its tokens.

        Return None, or the empty output of a step that schedules no request. non_block: return it
        as an `Answer`.
        """
        self.check_step(output)
        half = self.half
        if half is not None:
            half.before(output)
        for pair in getattr(output, "kv_cache_block_copies", None) or ():
            self.put(pair.dst_block_id, self.get(pair.src_block_id))
        for block in getattr(output, "new_block_ids_to_zero", None) or ():
            for memory in self._kv:
                memory[block] = 0
        computed = self._update(output)
        if half is not None:
            half.start()
        if "mamba" in self.case["layers"]:
            self._states.begin(output, computed, self._stepped)
        batch = self._inputs(output, computed)
        self._forward(batch)
        copied = None
        if half is not None:
            copied = half.after(output)
            self.count_transfers(half)
        if not batch:
            self._reached = {}
            empty = _output({}, copied)
            return Answer(empty) if non_block else empty
        # The scheduler changes its own lists while a worker still computes.
        widths = {name: len(drafts) for name, drafts in output.scheduled_spec_decode_tokens.items()}
        fits = _reached_by(output) + self.case["draft"] <= self.case["max_len"]
        self._pending = batch, widths, fits, copied
        return Answer(None) if non_block else None

    def _update(self, output: Any) -> dict[str, int]:
        """Update what the worker knows of requests; return each scheduled one's computed tokens.

        output: vLLM's SchedulerOutput. Images are encoded and forgotten as it asks.
        """
        asynchronous = self.scheduler_config.async_scheduling
        second = self.case["runner"] == 2
        self.seen["preempted"] += len(getattr(output, "preempted_req_ids", None) or ())
        for name in output.finished_req_ids:
            self.known.pop(name, None)
        for image in output.free_encoder_mm_hashes:
            self._encoded.pop(image, None)
        computed: dict[str, int] = {}
        self._stepped: set[str] = set()
        for new in output.scheduled_new_reqs:
            traits = self.traits[new.req_id]
            tokens = list(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids)
            self.known[new.req_id] = _Known(
                tokens,
                len(tokens) if second else len(new.prompt_token_ids),
                [list(blocks) for blocks in new.block_ids],
                key_of(traits.salt, new.lora_request.lora_int_id if new.lora_request else 0),
                traits,
                list(new.mm_features or ()),
            )
            computed[new.req_id] = new.num_computed_tokens
            self.seen["hits"] += new.num_computed_tokens > 0
            self.seen["cached tokens"] += new.num_computed_tokens
        old = output.scheduled_cached_reqs
        self.seen["resumed"] += len(old.resumed_req_ids)
        for place, name in enumerate(old.req_ids):
            known, resumed = self.known[name], name in old.resumed_req_ids
            blocks, answered = old.new_block_ids[place], old.num_output_tokens[place]
            computed[name] = old.num_computed_tokens[place]
            if resumed:
                known.blocks = [list(group) for group in blocks]
            elif blocks is not None:
                for mine, more in zip(known.blocks, blocks, strict=True):
                    mine.extend(more)
            stepped = name in self._reached and not resumed
            if second:
                computed[name] = known.reached
                continue
            if stepped:
                self._stepped.add(name)
            if stepped and asynchronous:
                # A model runner that keeps the count on its device corrects it by its own last
                # step, not by the scheduler's.
                computed[name] = self._reached[name]
                continue
            del known.tokens[known.prompt + answered :]
            if not stepped:
                known.drafts = []
                if asynchronous and answered and name in old.all_token_ids:
                    known.tokens = list(old.all_token_ids[name])
        for name, numbers in output.scheduled_encoder_inputs.items():
            for image in (self.known[name].images[number] for number in numbers):
                if image.data is not None:
                    self._encoded[image.identifier] = reference.image(
                        int(image.data["dummy"].data[0]), image.mm_position.length
                    )
        return computed

    def _place_images(self, known: _Known, start: int, tokens: list[int]) -> None:
        """Put the encoder's outputs in place of placeholders in `tokens`, from position `start` on.

        Raises `ModelRunnerError` if an image is not encoded.
        """
        for image in known.images:
            first = image.mm_position.offset
            low, high = (
                max(first, start),
                min(first + image.mm_position.length, start + len(tokens)),
            )
            if low < high:
                if (encoded := self._encoded.get(image.identifier)) is None:
                    raise ModelRunnerError(f"Encoder cache miss for {image.identifier}.")
                tokens[low - start : high - start] = encoded[low - first : high - first]

    def _inputs(self, output: Any, computed: dict[str, int]) -> list[_Row]:
        """Return each scheduled request with the tokens, position and blocks of its step.

        Note a violation if a scheduled token does not exist yet.
        """
        batch = []
        for name, count in output.num_scheduled_tokens.items():
            known, start = self.known[name], computed[name]
            drafts = list(output.scheduled_spec_decode_tokens.get(name, ()))
            if drafts and self.scheduler_config.async_scheduling:
                drafts = (known.drafts + [1] * len(drafts))[: len(drafts)]
            tokens = known.tokens[start : start + count - len(drafts)] + drafts
            if len(tokens) != count:
                seen = (
                    f"{count} scheduled from {start}, {len(drafts)} drafts, {len(known.tokens)}"
                    " tokens known"
                )
                why = f" ({self.lost[name]})" if name in self.lost else ""
                self.notes.append((f"schedules-unknown-token{why}", f"{name}: {seen}"))
                tokens = (tokens + [0] * count)[:count]
            self._place_images(known, start, tokens)
            tables = [np.asarray(blocks or [0], dtype=np.int64) for blocks in known.blocks]
            batch.append(
                _Row(
                    name,
                    known,
                    start,
                    tokens,
                    drafts,
                    reference.embed(tokens, start, known.key),
                    tables,
                )
            )
        return batch

    def _forward(self, batch: list[_Row]) -> None:
        """Compute the KV cache and states of a step, layer by layer.

        A request may read what another one writes in the same step.
        """
        for layer, ((group, place), window) in enumerate(
            zip(self._layers, self.windows, strict=True)
        ):
            memory, size = self._kv[place], self._sizes[group]
            if self.case["layers"][layer] == "mamba":
                for row in batch:
                    self._recur(row, group, memory, layer)
                continue
            for row in batch:
                self._check_blocks(row, group, row.start, "writes")
                reference.write(memory, row.tables[group], size, row.states, row.start)
            for row in batch:
                self._check_blocks(
                    row, group, max(0, row.start - window + 1) if window else 0, "reads"
                )
                row.states = reference.attend_in(
                    memory, row.tables[group], size, row.states, row.start, window, layer
                )

    def _check_blocks(self, row: _Row, group: int, first: int, verb: str) -> None:
        """Note a violation if a request has no block for one of its positions from `first` on.

        verb: "reads" or "writes", for the name of the violation.
        """
        blocks, size = row.known.blocks[group], self._sizes[group]
        index = range(first // size, (row.start + len(row.tokens) - 1) // size + 1)
        if index.stop > len(blocks) or 0 in blocks[index.start : index.stop]:
            self._look_up(row.name, blocks, np.asarray(index), verb)

    def _recur(self, row: _Row, group: int, memory: Any, layer: int) -> None:
        """Compute a Mamba layer for one request, from the state that its step starts from.

        Set `row.states`. Write the state after the last token, or in a decode that after each one.
        """
        slot, table = self._states.slot(row.name), row.known.blocks[group]
        before = 0
        if row.start:
            before = state_in(
                memory[self._look_up(row.name, table, self._states.right(row.name), "reads-state")]
            )
        row.states, kept = reference.recur(row.states, before, row.start, layer)
        decodes = self._states.decodes(
            row.name, row.start, row.known.prompt, len(row.tokens), len(row.drafts)
        )
        for place, state in enumerate(kept if decodes else kept[-1:]):
            memory[self._look_up(row.name, table, slot + place, "writes-state")] = state

    def _copy_states(self, name: str, source: int, target: int) -> None:
        """Copy a request's Mamba states from one index of its block table to another."""
        for kind, (group, place) in zip(self.case["layers"], self._layers, strict=True):
            if kind == "mamba":
                memory, table = self._kv[place], self.known[name].blocks[group]
                state = memory[self._look_up(name, table, source, "reads-state")]
                memory[self._look_up(name, table, target, "writes-state")] = state

    def _look_up(self, name: str, blocks: list[int], index: Any, verb: str) -> Any:
        """Return the blocks at indices of a block table; the last one beyond its end.

        Note a violation, whose name begins with `verb`, for an index beyond the table, and for
        block 0, the null block.
        """
        table, index = np.asarray(blocks or [0], dtype=np.int64), np.atleast_1d(index)
        if index[-1] >= len(table):
            self.notes.append(
                (f"{verb}-no-block", f"{name}: index {index[-1]} of a block table of {len(table)}")
            )
        chosen = table[np.minimum(index, len(table) - 1)]
        if not chosen.all() and name not in self.lost:
            self.notes.append(
                (
                    f"{verb}-null-block",
                    f"{name}: index {index[chosen == 0][0]} of {index[0]} to {index[-1]}",
                )
            )
        return chosen

    @_timed
    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the output of the step of `execute_model`: its tokens, under grammar bitmasks.

        A request gets its accepted drafts and one more token; none in a partial prefill. Then draft
        for the next step.
        """
        batch, widths, fits, copied = self._pending
        self._pending = None
        rows: dict[str, int] = {}
        most: dict[str, int] = {}
        if grammar_output is not None:
            limits = getattr(grammar_output, "num_acceptable_drafts", None)
            names, at = grammar_output.structured_output_request_ids, 0
            counts = [1 + widths.get(name, 0) for name in names]
            # as many for each (from 0.33.0)
            if (mask_rows := len(grammar_output.grammar_bitmask)) != sum(counts):
                counts = [mask_rows // len(names)] * len(names)
            for place, name in enumerate(names):
                rows[name] = at
                at += counts[place]
                # only the second runner looks at it
                if limits is not None and self.case["runner"] == 2:
                    most[name] = limits[place]
        sampled: dict[str, list[int]] = {}
        self._reached = {}
        width = self.case["draft"]
        for row in batch:
            known, name = row.known, row.name
            sampled[name] = []
            self._reached[name] = row.start + len(row.tokens)
            known.drafts = [] if fits else [0] * width
            if row.start + len(row.tokens) < len(known.tokens):
                self._states.end(name, row.start, len(row.tokens), 0, 1)
                known.reached = self._reached[name]
                continue
            new, drafts = sampled[name], row.drafts
            for place, state in enumerate(row.states[-1 - len(drafts) :]):
                mask = grammar_output.grammar_bitmask[rows[name] + place] if name in rows else None
                answered = len(known.tokens) + len(new) - len(known.traits.prompt)
                if max(answered, 0) < known.traits.least:
                    mask = self.endless
                new.append(reference.pick(state, mask, known.traits.eos))
                if place < len(drafts) and (
                    new[-1] != drafts[place] or place >= most.get(name, len(drafts))
                ):
                    break
            self._states.end(name, row.start, len(row.tokens), len(drafts), len(new))
            self.seen["accepted"] += len(new) - 1
            self.seen["masked"] += name in rows
            self._reached[name] -= len(drafts) + 1 - len(new)
            known.reached = self._reached[name]
            known.tokens.extend(new)
            if fits and width:
                known.drafts = self._draft(known.tokens, known.key, known.traits)
        if self.trace is not None:
            self.trace.append(
                {row.name: [row.start, len(row.tokens), sampled[row.name]] for row in batch}
            )
        answer = _output({name: list(new) for name, new in sampled.items()}, copied)
        return Answer(answer) if non_block else answer

    def _draft(self, known: list[int], key: int, traits: Traits) -> list[int]:
        """Return drafts: some right tokens, then wrong ones, so that some are rejected.

        known: tokens that they follow, of prompt and answer. key: `key_of` the salt and LoRA.
        """
        width, prompt = self.case["draft"], traits.prompt
        right = (len(known) * 7 + self.case["seed"]) % (width + 1)
        tokens = [*prompt[: len(known)], *known[len(prompt) :]]
        for _ in range(right):
            row = traits.grammar.row(tokens[len(prompt) :]) if traits.grammar else None
            state = reference.states(tokens, key, self.windows)[-1]
            tokens.append(reference.pick(state, row, traits.eos))
        return tokens[len(known) :] + [reference.TEXT[1]] * (width - right)

    @_timed
    def take_draft_token_ids(self) -> Any:
        """Return the drafts that followed the last step; None without drafting."""
        if not self.case["draft"]:
            return None
        names = [name for name in self._reached if name in self.known]
        return DraftTokenIds(names, [list(self.known[name].drafts) for name in names])


def key_of(salt: int, lora: int) -> int:
    """Return the number by which a request's states differ with its salt and LoRA adapter."""
    return salt * 1000 + lora


class Answer(Future[Any]):
    """Future of a worker's answer, not done until it is asked for, like vLLM's FutureWrapper."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        """Set the answer now that it is asked for, and return it."""
        if not self.done():
            self.set_result(self._value)
        return super().result(timeout)


def state_in(block: Any) -> Any:
    """Return the Mamba state that a KV cache block holds.

    Each slot holds the same number, unless a layer of another kind wrote to the block.
    """
    return block.flat[0] + np.bitwise_or.reduce(block ^ block.flat[0], axis=None)


def _reached_by(output: Any) -> int:
    """Return the highest number of tokens that a request of a step has after it.

    With asynchronous scheduling the last step's drafts count, although some may be rejected.
    """
    counted = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    old = output.scheduled_cached_reqs
    counted += zip(old.req_ids, old.num_computed_tokens, strict=True)
    lengths = output.num_scheduled_tokens
    return max((computed + lengths[name] for name, computed in counted), default=0)


def _output(sampled: dict[str, list[int]], copied: Any) -> ModelRunnerOutput:
    """Return vLLM's ModelRunnerOutput of a step. copied: output of the KV connector."""
    return ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={name: number for number, name in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=copied,
    )
