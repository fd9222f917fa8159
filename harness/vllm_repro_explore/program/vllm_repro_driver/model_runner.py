"""Executor with the release's own CPU model runner, whose model is the hash transformer.

The runner decides which tokens, positions, blocks and slots the model reads, and what it samples.
So a case must go step by step as it does over `FakeExecutor`; where it does not, one of that
executor's rules is not the runner's.
"""

from __future__ import annotations

import copy
import importlib
import sys
from functools import cache
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

from vllm_repro_lab import async_steps, interpreter

from . import reference
from .config import layer_specs
from .executor import Answer, FakeExecutor, key_of, state_in


class _Attention(CPUAttentionBackend):  # type: ignore[misc]  # vLLM is not installed here
    """CPU attention backend whose kernels never run."""

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[int]:
        """Return the block sizes that the model runner may choose."""
        return [16, 32]  # no kernel runs, and newer ones want 32


class _Layer(AttentionLayerBase):  # type: ignore[misc]  # vLLM is not installed here
    """One attention layer, as far as a model runner looks at it."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self.kv_cache: Any = None
        self.impl = SimpleNamespace(num_heads=2, num_kv_heads=2, head_size=32, logits_soft_cap=0)

    def get_attn_backend(self) -> Any:
        """Return the Mamba2 backend for a Mamba layer, else that of CPU attention."""
        return Mamba2AttentionBackend if isinstance(self._spec, MambaSpec) else _Attention

    def get_kv_cache_spec(self, _: Any) -> Any:
        """Return the KV cache spec that the layer was made with."""
        return self._spec


class _LateCopy:
    """Replacement of the runner's `num_accepted_tokens_event`: its copy ends at `synchronize`.

    On a GPU the copy of these counts to the host may end earlier: then the batch and
    `_prepare_inputs` both move them. It may also end late, in a batch of other requests alone,
    which then get the counts of the batch before. Neither race occurs here.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._copied: Any = None

    def record(self) -> None:
        """Copy the batch's counts of accepted tokens."""
        batch = self._runner.input_batch
        self._copied = batch.num_accepted_tokens_cpu_tensor[: batch.num_reqs].clone()

    def synchronize(self) -> None:
        """Write the copied counts back to the batch, as if the copy ended just now."""
        batch, copied, self._copied = self._runner.input_batch, self._copied, None
        if copied is not None and batch.prev_req_id_to_index:
            batch.num_accepted_tokens_cpu_tensor[: len(copied)] = copied


class RunnerExecutor(FakeExecutor):
    """`FakeExecutor` whose steps are computed by vLLM's own CPU model runner."""

    def _init_executor(self) -> None:
        """Make vLLM's CPU model runner, with the hash transformer as its model."""
        super()._init_executor()
        self._read: dict[str, list[int]] = {}
        config = _with_ngram_drafts(self.vllm_config)
        with set_current_vllm_config(config):
            init_worker_distributed_environment(
                config, 0, f"file://{_meeting().name}/meeting", 0, "gloo"
            )
            self._runner = cpu_worker.CPUModelRunner(config, torch.device("cpu"))
        self._runner.model = SimpleNamespace(compute_logits=self._logits, **_copy_functions())
        self._runner._model_forward = self._model_forward
        if self.case["largest_image"]:
            self._runner.supports_mm_inputs = True
            self._runner.model.embed_multimodal = self._encode
            self._runner.model.embed_input_ids = self._embed
            self._runner.model.requires_raw_input_tokens = False
        self._runner.set_active_loras = lambda *_, **__: None
        if config.scheduler_config.async_scheduling and getattr(
            self._runner, "num_accepted_tokens_event", None
        ):
            self._runner.num_accepted_tokens_event = _LateCopy(self._runner)
        if getattr(self._runner, "use_async_spec_decode", False):
            self._keep_counts()
        if hasattr(self._runner, "drafter"):
            self._runner.drafter.propose = (
                self._propose_ahead
                if config.speculative_config.method == "ngram_gpu"
                else self._propose
            )
        layers = {name: _Layer(spec) for name, spec in layer_specs(self.case, config).items()}
        config.compilation_config.static_forward_context.update(layers)

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Let the model runner use the KV cache memory of `FakeExecutor`."""
        super().initialize_from_config(kv_cache_configs)
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        with set_current_vllm_config(self.vllm_config):
            self._runner.initialize_kv_cache(kv_cache_configs[0])
        layers = self.vllm_config.compilation_config.static_forward_context
        for name, (_, place) in zip(
            layer_specs(self.case, self.vllm_config), self._layers, strict=True
        ):
            layers[name].kv_cache = [torch.from_numpy(self._kv[place].view(np.int64))]
        kv_transfer_state._KV_CONNECTOR_AGENT = (
            self.half.connector if self.half is not None else None
        )

    def _keep_counts(self) -> None:
        """Keep the counts of accepted drafts, so that `_prepare_inputs` corrects positions.

        A GPU runner keeps them; CPU runners up to 0.24.0 do not.
        """
        runner, copy = self._runner, self._runner._copy_valid_sampled_token_count

        def keep(next_tokens: Any, counts: Any) -> None:
            copy(next_tokens, counts)
            runner.valid_sampled_token_count_gpu = counts

        runner._copy_valid_sampled_token_count = keep

    def reset_encoder_cache(self) -> None:
        """Forget the images that the model runner has encoded."""
        self._runner.reset_encoder_cache()

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        """Let vLLM's model runner compute a step, and return what it returns.

        non_block: return it as an `Answer`.
        """
        self.check_step(output)
        for new in output.scheduled_new_reqs:
            self._read[new.req_id] = list(
                getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            )
        self._read.update(
            {name: list(all_) for name, all_ in output.scheduled_cached_reqs.all_token_ids.items()}
        )
        self._widths = {
            name: len(drafts) for name, drafts in output.scheduled_spec_decode_tokens.items()
        }
        with set_current_vllm_config(self.vllm_config):
            answer = self._runner.execute_model(output)
        if self.half is not None:
            self.count_transfers(self.half)
        return Answer(answer) if non_block else answer

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the output of vLLM's model runner for the step, with its sampled tokens."""
        with set_current_vllm_config(self.vllm_config):
            answer = self._runner.sample_tokens(grammar_output)
        if hasattr(answer, "get_output"):
            answer = answer.get_output()
        if self.trace is not None:
            sampled = zip(answer.req_ids, answer.sampled_token_ids, strict=True)
            self.trace.append({name: [*self._rows[name], list(tokens)] for name, tokens in sampled})
        return Answer(answer) if non_block else answer

    def take_draft_token_ids(self) -> Any:
        """Return the draft tokens of vLLM's model runner."""
        return self._runner.take_draft_token_ids()

    def _encode(self, dummy: Any) -> Any:
        """Return the embeddings of an image, as a vision encoder would."""
        return [self._embed(torch.tensor(reference.image(int(dummy[0]), len(dummy))))]

    def _embed(
        self, ids: Any, multimodal_embeddings: Any = (), *, is_multimodal: Any = None
    ) -> Any:
        """Return embeddings that hold each id in three numbers, which are exact in bfloat16.

        multimodal_embeddings: those of images; they go where `is_multimodal` is set.
        """
        embeddings = torch.zeros((len(ids), self._runner.inputs_embeds_size), dtype=torch.bfloat16)
        for place in range(3):
            embeddings[:, place] = ids // 256**place % 256
        if len(multimodal_embeddings):
            embeddings[is_multimodal] = torch.cat(list(multimodal_embeddings))
        return embeddings

    def _model_forward(
        self, input_ids: Any, positions: Any, _: Any = None, inputs_embeds: Any = None, **__: Any
    ) -> Any:
        """Compute the hash transformer over the model runner's block tables and slots.

        Return for each token its state and the request's `eos`, of which `_logits` makes logits.
        """
        runner, batch = self._runner, self._runner.input_batch
        if inputs_embeds is not None:
            input_ids = (inputs_embeds[:, :3].long() * torch.tensor([1, 256, 65536])).sum(1)
        tokens, where = input_ids.numpy(), positions.numpy()
        bounds = runner.query_start_loc.np
        self._rows = {}
        states: list[Any] = []
        keys: list[Any] = []
        for place in range(batch.num_reqs):
            name, low, high = batch.req_ids[place], bounds[place], bounds[place + 1]
            traits = self.traits[name]
            self._rows[name] = [int(where[low]), int(high - low)]
            self._read[name][where[low] : where[high - 1] + 1] = tokens[low:high].tolist()
            key = key_of(traits.salt, int(batch.request_lora_mapping[place]))
            states.append(reference.embed(tokens[low:high], int(where[low]), key))
            keys += [traits.eos] * (high - low)
        for layer, ((group, memory), window) in enumerate(
            zip(self._layers, self.windows, strict=True)
        ):
            if self.case["layers"][layer] == "mamba":
                metadata = get_forward_context().attn_metadata[f"model.layers.{layer}.mamba"]
                for place in range(batch.num_reqs):
                    start = int(where[bounds[place]])
                    states[place] = _recur(
                        metadata, place, states[place], start, self._kv[memory], layer
                    )
                continue
            table, flat = batch.block_table[group], self._kv[memory].reshape(-1)
            paged = flat.reshape(-1, table.block_size)
            for place in range(batch.num_reqs):
                low, high = bounds[place], bounds[place + 1]
                flat[table.slot_mapping.gpu.numpy()[low:high]] = states[place]
            for place in range(batch.num_reqs):
                blocks = table.block_table.gpu.numpy()[place].astype(np.int64)
                start = int(where[bounds[place]])
                states[place] = reference.attend_in(
                    paged, blocks, table.block_size, states[place], start, window, layer
                )
        hidden = np.zeros((len(tokens), 2), dtype=np.int64)
        count = bounds[batch.num_reqs]
        hidden[:count, 0] = np.concatenate(states).view(np.int64)
        hidden[:count, 1] = keys
        return torch.from_numpy(hidden)

    def _logits(self, hidden: Any) -> Any:
        """Return logits whose largest is the token that each hidden state stands for.

        hidden: rows of (state, id of the EOS token), as 64-bit integers.
        """
        size = self.vllm_config.model_config.get_vocab_size()
        rows = [
            reference.logits(state.view(np.uint64), int(eos), size) for state, eos in hidden.numpy()
        ]
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros((0, size))

    def _propose(self, *arguments: Any, **named: Any) -> list[list[int]]:
        """Return the drafts of each row, as `NgramProposer.propose` does after a step.

        The place of the argument with the step's tokens differs between releases.
        """
        sampled = named.get("sampled_token_ids") or next(
            value for value in arguments if isinstance(value, list)
        )
        return [self._drafts_of(row, new) if new else [] for row, new in enumerate(sampled)]

    def _propose_ahead(self, *arguments: Any) -> tuple[Any, Any]:
        """Return each row's drafts and their number, as `NgramProposerGPU.propose` does.

        The last two arguments are each row's sampled tokens and the number of them that are valid.
        The ones before differ between releases.
        """
        sampled, counts = arguments[-2:]
        drafts = [
            self._drafts_of(row, sampled[row, :count].tolist()) for row, count in enumerate(counts)
        ]
        return torch.tensor(drafts, dtype=torch.int32), torch.full_like(counts, self.case["draft"])

    def _drafts_of(self, row: int, new: list[int]) -> list[int]:
        """Return the drafts for a row of the batch. new: the tokens that it just got."""
        name = self._runner.input_batch.req_ids[row]
        start, count = self._rows[name]
        traits = self.traits[name]
        key = key_of(traits.salt, int(self._runner.input_batch.request_lora_mapping[row]))
        return self._draft(
            self._read[name][: start + count - self._widths.get(name, 0)] + new, key, traits
        )


def _with_ngram_drafts(config: Any) -> Any:
    """Return the configuration with an n-gram proposer in place of EAGLE's model, if it has one.

    `RunnerExecutor` makes the drafts anyway; the proposer decides when the runner asks for them.
    """
    drafts = config.speculative_config
    if drafts is None or not drafts.use_eagle():
        return config
    config, drafts = copy.copy(config), copy.copy(drafts)
    drafts.method = "ngram_gpu" if config.scheduler_config.async_scheduling else "ngram"
    config.speculative_config = drafts
    return config


def _recur(
    metadata: Any, place: int, before_layer: Any, start: int, memory: Any, layer: int
) -> Any:
    """Compute a Mamba layer of one request, write its states to `memory`, return those after it.

    metadata: vLLM's; it names the blocks to read and to keep states in. place: of the request in
    the batch. before_layer: states before the layer, of the positions from `start` on.
    """
    count = metadata.num_decodes
    if place >= count:
        row = place - count
        blocks, right = (
            metadata.state_indices_tensor_p[row : row + 1],
            (0 if metadata.has_initial_states_p[row] else -1),
        )
    else:
        blocks = metadata.state_indices_tensor_d[place].reshape(-1)
        right = (
            0
            if metadata.num_accepted_tokens is None
            else int(metadata.num_accepted_tokens[place]) - 1
        )
    before = state_in(memory[int(blocks[right])]) if right >= 0 else 0
    states, kept = reference.recur(before_layer, before, start, layer)
    if place >= count:
        kept = kept[-1:]
    for block, state in zip(blocks.tolist(), kept, strict=False):
        memory[block] = state
    return states


@cache
def _copy_functions() -> dict[str, Any]:
    """Return, by name, the methods by which a hybrid model tells vLLM how to copy a Mamba state.

    The first call also makes vLLM's own copy kernels run in Triton's interpreter, in this process.
    """
    interpreter.install()
    mamba_utils: Any = importlib.reload(importlib.import_module("vllm.v1.worker.mamba_utils"))
    if hasattr(mamba_utils, "_TEMPORAL_TILES"):
        mamba_utils._TEMPORAL_TILES = 1  # copies of one block, each in one piece
    copy = importlib.import_module(
        "vllm.model_executor.layers.mamba.mamba_utils"
    ).get_temporal_copy_spec
    return {
        "get_mamba_state_copy_func": lambda: (copy,),
        "get_mamba_state_copy_funcs": lambda kinds: dict.fromkeys(kinds, (copy,)),
    }


@cache
def _meeting() -> TemporaryDirectory[str]:
    """Prepare this process for a model runner, once: replace functions of torch and vLLM.

    Return the folder through which its one worker forms its process group.
    """
    zeros = torch.zeros
    # nothing is pinned without CUDA
    torch.zeros = lambda *size, **more: zeros(*size, **more | {"pin_memory": False})
    async_steps.install()
    current_platform.import_kernels()
    # vLLM looks for its kernels in every module, and fails at Numba's compiler.
    compiler = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite")
    }
    (getattr(current_platform, "register_triton_kernel_overrides", None) or (lambda: None))()
    sys.modules.update(compiler)
    return TemporaryDirectory(prefix="vllm-repro-")  # removed when the process exits
