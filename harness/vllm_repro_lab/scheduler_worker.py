"""Worker without a model: it answers each step of the scheduler with tokens.

It also runs the worker half of a KV connector.

Its rules are those of vLLM's `GPUModelRunner` and `Worker`; each names the function that it stands
for. A token is a hash of the request's prompt and of the token's position, so that a request has
the same answer in every run.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_initialized,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker as GPUWorker
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from .record import observe

_MEMORY = 1 << 30
"""Bytes for the KV cache by which vLLM counts its blocks. Nothing is allocated."""
_IDS = range(100, 4000)
"""Answer tokens: ids of text in each tiny model's vocabulary."""


class Worker(WorkerBase):  # type: ignore[misc]  # vLLM is not installed here
    """vLLM worker without a model, which answers each step of the scheduler with tokens."""

    get_kv_connector_handshake_metadata = GPUWorker.get_kv_connector_handshake_metadata

    def init_device(self) -> None:
        """Set up the CPU device and the process group; no model is loaded."""
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        self._prompts: dict[str, list[int]] = {}
        self._answer: ModelRunnerOutput | None = None

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        """Answer a call that is for a model, its memory or its drafts."""

    load_model = set_kv_cache_layout = update_max_model_len = take_draft_token_ids = _do_nothing

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks of the model: text generation only."""
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return the KV cache spec of each layer, as `GPUModelRunner.get_kv_cache_spec` does.

        The layers are the `layer_types` of the model's configuration.
        """
        model, cache = self.model_config, self.cache_config
        text = model.hf_text_config
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        shape = {
            "block_size": cache.block_size,
            "num_kv_heads": model.get_num_kv_heads(self.parallel_config),
            "head_size": model.get_head_size(),
            "dtype": model.dtype,
        }
        specs: dict[str, Any] = {}
        for number, kind in enumerate(kinds):
            name = f"model.layers.{number}"
            if kind == "sliding_attention":
                specs[f"{name}.self_attn.attn"] = SlidingWindowSpec(
                    sliding_window=text.sliding_window, **shape
                )
            elif kind in ("linear_attention", "mamba"):
                specs[f"{name}.linear_attn"] = MambaSpec(
                    block_size=cache.block_size,
                    shapes=((2, 8), (2, 8)),
                    dtypes=(torch.float32, torch.float32),
                    page_size_padded=FullAttentionSpec(**shape).page_size_bytes,
                    mamba_cache_mode=cache.mamba_cache_mode,
                )
            else:
                specs[f"{name}.self_attn.attn"] = FullAttentionSpec(**shape)
        return specs

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Return the KV cache layouts of the CPU's attention backend, which serves all layers."""
        from vllm.v1.attention.backends import utils
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return [
            layout.name for layout in utils.get_supported_kv_cache_layouts([CPUAttentionBackend])
        ]

    def determine_available_memory(self) -> int:
        """Return the bytes from which vLLM counts KV cache blocks: 1 GiB, not allocated."""
        return _MEMORY

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Set the number of KV blocks, and start the KV connector's worker half if there is one."""
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        # to the configuration only in newer releases
        for name in ("hash_block_size", "cache_hit_alignment_tokens"):
            if hasattr(kv_cache_config, name) and hasattr(self.cache_config, name):
                setattr(self.cache_config, name, getattr(kv_cache_config, name))
        ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        if has_kv_transfer_group():
            get_kv_transfer_group().register_kv_caches({})

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compile nothing; return times of zero seconds."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def supports_draft_weight_updates(self) -> bool:
        """Return False: there is no draft model."""
        return False

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        """Stand for `GPUModelRunner.execute_model`: run the connector, and log preemptions.

        Return None: `sample_tokens` returns the step's tokens. If the step schedules no request,
        return its output.
        """
        if preempted := getattr(scheduler_output, "preempted_req_ids", None):
            observe("preempted", requests=len(preempted))
        if has_kv_transfer_group():
            get_kv_transfer_group().handle_preemptions(scheduler_output.kv_connector_metadata)
        tokens = self._sampled(scheduler_output)
        if not tokens:
            if not has_kv_transfer_group():
                return EMPTY_MODEL_RUNNER_OUTPUT
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(
                scheduler_output, self.vllm_config
            )
        with (
            set_forward_context(None, self.vllm_config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
                scheduler_output
            ) as transferred,
        ):
            pass  # here the model would compute
        self._answer = ModelRunnerOutput(
            req_ids=list(tokens),
            req_id_to_index={name: number for number, name in enumerate(tokens)},
            sampled_token_ids=list(tokens.values()),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=transferred,
        )
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | None:
        """Return the step's tokens, in place of `GPUModelRunner.sample_tokens`.

        With a grammar the token is one that its bitmask allows. None if no step was executed.
        """
        answer, self._answer = self._answer, None
        if grammar_output is not None and answer is not None:
            rows = zip(
                grammar_output.structured_output_request_ids,
                grammar_output.grammar_bitmask,
                strict=True,
            )
            for name, row in rows:
                allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
                tokens = answer.sampled_token_ids[answer.req_id_to_index[name]]
                tokens[:] = [int(allowed[token % len(allowed)]) for token in tokens]
        return answer

    def _sampled(self, scheduler_output: Any) -> dict[str, list[int]]:
        """Return the new tokens of each scheduled request, by its name.

        That is one token if the step computes its last known token, else none. Forget finished
        requests and keep the prompts of new ones. Stands for `GPUModelRunner._update_states`, and
        for the samples of partial prefills that `_prepare_inputs` discards.
        """
        for name in scheduler_output.finished_req_ids:
            self._prompts.pop(name, None)
        known: dict[str, tuple[int, int]] = {}  # computed tokens, and the answer's tokens so far
        for new in scheduler_output.scheduled_new_reqs:
            self._prompts[new.req_id] = list(new.prompt_token_ids)
            known[new.req_id] = new.num_computed_tokens, 0
        old = scheduler_output.scheduled_cached_reqs
        known.update(
            zip(
                old.req_ids,
                zip(old.num_computed_tokens, old.num_output_tokens, strict=True),
                strict=True,
            )
        )
        sampled: dict[str, list[int]] = {}
        for name, count in scheduler_output.num_scheduled_tokens.items():
            computed, answered = known[name]
            prompt, reached = self._prompts[name], computed + count
            sampled[name] = [_token(prompt, reached)] if reached >= len(prompt) + answered else []
        return sampled


def _token(prompt: list[int], position: int) -> int:
    """Return the answer's token at a position: a hash of the prompt and the position."""
    digest = hashlib.sha256(f"{prompt} {position}".encode()).digest()
    return _IDS[int.from_bytes(digest[:4]) % len(_IDS)]
