"""Executor with the release's own CPU model runner, whose model is the hash transformer.

The runner decides which tokens, positions, blocks and slots the model reads, and what it samples. So a case must go step by step as it does
over `FakeExecutor`; where it does not, one of that executor's rules is not the runner's.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker import cpu_model_runner
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

from . import reference
from .engine import layer_specs
from .executor import FakeExecutor, key_of

__all__ = ["RunnerExecutor"]


class _Layer(AttentionLayerBase):  # type: ignore[misc]  # vLLM is not installed here
    """One attention layer, as far as a model runner looks at it."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self.kv_cache: Any = None
        self.impl = SimpleNamespace()

    def get_attn_backend(self) -> Any:
        return CPUAttentionBackend

    def get_kv_cache_spec(self, _: Any) -> Any:
        return self._spec


class RunnerExecutor(FakeExecutor):
    """`FakeExecutor` with the state and the steps of vLLM's model runner."""

    def _init_executor(self) -> None:
        super()._init_executor()
        config = self.vllm_config
        with set_current_vllm_config(config):
            _join()
            init_worker_distributed_environment(config, 0, _Meeting.method, 0, "gloo")
            self._runner = cpu_model_runner.CPUModelRunner(config, torch.device("cpu"))
        self._runner.model = SimpleNamespace(compute_logits=self._logits)
        self._runner._model_forward = self._model_forward
        self._runner.propose_draft_token_ids = self._propose_all
        layers = {name: _Layer(spec) for name, spec in layer_specs(self.case).items()}
        config.compilation_config.static_forward_context.update(layers)

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        super().initialize_from_config(kv_cache_configs)
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        with set_current_vllm_config(self.vllm_config):
            self._runner.initialize_kv_cache(kv_cache_configs[0])
        kv_transfer_state._KV_CONNECTOR_AGENT = self.half.connector if self.half is not None else None

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        with set_current_vllm_config(self.vllm_config):
            return self._runner.execute_model(output)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        with set_current_vllm_config(self.vllm_config):
            answer = self._runner.sample_tokens(grammar_output)
        if self.trace is not None:
            self.trace.append({name: [*self._rows[name], sampled] for name, sampled in zip(answer.req_ids, answer.sampled_token_ids, strict=True)})
        return answer

    def take_draft_token_ids(self) -> Any:
        return self._runner.take_draft_token_ids()

    def _model_forward(self, input_ids: Any, positions: Any, *_: Any, **__: Any) -> Any:
        """Compute layer by layer over the runner's block tables."""
        runner, batch = self._runner, self._runner.input_batch
        tokens, where = input_ids.numpy(), positions.numpy()
        bounds = runner.query_start_loc.np
        self._rows = {}
        states: list[Any] = []
        keys: list[Any] = []
        for place in range(batch.num_reqs):
            name, low, high = batch.req_ids[place], bounds[place], bounds[place + 1]
            salt, eos = self.traits.get(name, (0, 0))
            self._rows[name] = [int(where[low]), int(high - low)]
            states.append(reference.embed(tokens[low:high], int(where[low]), key_of(salt, 0)))
            keys += [eos] * (high - low)
        for layer, ((group, memory), window) in enumerate(zip(self._layers, self.windows, strict=True)):
            table, flat = batch.block_table[group], self._kv[memory].reshape(-1)
            for place in range(batch.num_reqs):
                low, high = bounds[place], bounds[place + 1]
                flat[table.slot_mapping.np[low:high]] = states[place]
            for place in range(batch.num_reqs):
                start, end = int(where[bounds[place]]), int(where[bounds[place + 1] - 1]) + 1
                first = max(0, start - window + 1) if window else 0
                at = np.arange(first, end)
                blocks = table.block_table.np[place, at // table.block_size].astype(np.int64)
                read = flat[blocks * table.block_size + at % table.block_size]
                states[place] = reference.attend(states[place], read, first, start, window, layer)
        hidden = np.zeros((len(tokens), 2), dtype=np.int64)
        count = bounds[batch.num_reqs]
        hidden[:count, 0] = np.concatenate(states).view(np.int64)
        hidden[:count, 1] = keys
        return torch.from_numpy(hidden)

    def _logits(self, hidden: Any) -> Any:
        size = self.vllm_config.model_config.get_vocab_size()
        rows = [reference.logits(state.view(np.uint64), int(eos), size) for state, eos in hidden.numpy()]
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros((0, size))

    def _propose_all(self, _: Any, sampled: Any, *__: Any, **___: Any) -> Any:
        batch = self._runner.input_batch
        found = []
        for place, new in enumerate(sampled):
            name = batch.req_ids[place]
            salt, eos = self.traits.get(name, (0, 0))
            tokens = batch.token_ids_cpu[place, : batch.num_tokens_no_spec[place]].tolist()
            found.append(self._draft(tokens, key_of(salt, 0), eos) if new else [])
        return found


class _Meeting:
    method = ""


def _join() -> None:
    """Name the file at which the one worker of this process meets itself."""
    if not _Meeting.method:
        _Meeting.method = f"file://{tempfile.mkdtemp(prefix='vllm-repro-')}/meeting"
