"""Scheduler made from flags as EngineCore does, with both halves of its connector."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
import vllm
from vllm.config import KVTransferConfig, model
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from .shadow import Shadow
from .workers import Half, worker_half

__all__ = ["Engine", "NoBoot", "config_of", "layer_specs", "memory_of", "pools_of", "room_of", "version"]

_BYTES = 2 * 2 * 32 * 2
"""Bytes of one token in one layer: keys and values, 2 heads, 32 numbers, 2 bytes each."""


class NoBoot(Exception):
    """vLLM refuses to start with these flags."""


def version() -> str:
    return str(vllm.__version__)


class Engine:
    """vLLM's scheduler and connector, without a model.

    half: the connector's worker half with simulated copies; None without a connector.
    asynchronous: schedule a step before the previous one was answered.
    """

    def __init__(self, case: Mapping[str, Any]) -> None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        try:
            config = config_of(case)
            _register_specs(config)
            groups = _stated_groups(case, config) if case.get("groups") else _kv_cache_config(case, config)
        except (ValueError, NotImplementedError) as error:
            raise NoBoot(f"{type(error).__name__}: {error}") from error
        # Set it after the config: vLLM refuses the second runner without Triton, which a scheduler does not need.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if case["runner"] == 2 else "0"
        self.asynchronous = bool(case["asynchronous"])
        config.scheduler_config.async_scheduling = self.asynchronous
        blocks, hashed = resolve_kv_cache_block_sizes(groups, config)
        make = config.scheduler_config.get_scheduler_cls()
        try:
            self.scheduler = make(
                vllm_config=config,
                kv_cache_config=groups,
                structured_output_manager=StructuredOutputManager(config),
                block_size=blocks,
                hash_block_size=hashed,
                log_stats=False,
            )
        except (ValueError, NotImplementedError) as error:
            raise NoBoot(f"{type(error).__name__}: {error}") from error
        connector = self.scheduler.connector
        self.shadow = Shadow(self.managers)
        self.half: Half | None = None
        if connector is not None:
            self.half = worker_half(config, groups, self.shadow, case["store_polls"], case["load_polls"])
        self._hasher = None
        if config.cache_config.enable_prefix_caching or connector is not None:
            function = _hash_function(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(function)
            self._hasher = get_request_block_hasher(hashed, function)

    def request(self, name: str, prompt: list[int], answer: int) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    @property
    def managers(self) -> tuple[Any, ...]:
        """Return the manager of each group of layers; it knows the blocks of each request."""
        return tuple(self.scheduler.kv_cache_manager.coordinator.single_type_managers)

    @property
    def pools(self) -> dict[str, Any]:
        return pools_of(self.scheduler)

    def close(self) -> None:
        shutdown = getattr(self.scheduler, "shutdown", None)
        if shutdown is not None:
            shutdown()


def pools_of(scheduler: Any) -> dict[str, Any]:
    """Return the block pools by name: the GPU's, and those of connectors."""
    found = {"gpu": scheduler.kv_cache_manager.block_pool}
    for number, one in enumerate(getattr(scheduler.connector, "_connectors", [scheduler.connector])):
        manager = getattr(one, "scheduler_manager", None)
        if (pool := getattr(manager, "cpu_block_pool", None)) is not None:
            found["cpu" if not number else f"cpu{number}"] = pool
    return found


def _parse_once(get_config: Callable[..., Any]) -> Callable[..., Any]:
    """Let vLLM read a model's config.json once: this took a tenth of a case's time."""
    read: dict[str, bytes] = {}

    def get(path: str, *given: Any, **more: Any) -> Any:
        if path not in read:
            read[path] = pickle.dumps(get_config(path, *given, **more))
        return pickle.loads(read[path])  # vLLM changes it

    return get


model.get_config = _parse_once(model.get_config)


def config_of(case: Mapping[str, Any], **given: Any) -> Any:
    """Return vLLM's configuration of a case. given: more engine arguments."""
    if case["connector"]:
        failures = {"kv_load_failure_policy": case["load_failures"]} if case.get("load_failures") else {}
        given["kv_transfer_config"] = KVTransferConfig(
            kv_connector=case["connector"],
            kv_role="kv_producer" if case["connector"].startswith(("Nixl", "Mooncake")) and not failures else "kv_both",
            kv_connector_extra_config=_extra(case),
            **failures,
        )
    if case["draft"]:
        given["speculative_config"] = {
            "method": "ngram_gpu" if given.get("async_scheduling") else "ngram",
            "num_speculative_tokens": case["draft"],
            "prompt_lookup_max": 4,
        }
    hybrid = "mamba" in case["layers"]
    if hybrid and case["caching"]:
        given["mamba_cache_mode"] = (
            "align"  # the default of newer releases; `mamba` has no rules for "all", that of older ones
        )
    return EngineArgs(
        model=os.environ["REPRO_DRIVER_MAMBA_MODEL" if hybrid else "REPRO_DRIVER_MODEL"],
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=case["max_len"],
        block_size=case["block"],
        enable_chunked_prefill=True,
        enable_prefix_caching=case["caching"],
        max_num_batched_tokens=case["chunk"],
        max_num_seqs=case["seqs"],
        num_gpu_blocks_override=case["blocks"],
        disable_hybrid_kv_cache_manager=not case["hybrid"],
        enforce_eager=True,
        **given,
    ).create_engine_config()


def _extra(case: Mapping[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {"cpu_bytes_to_use": room_of(case)}
    name = case["connector"]
    if name == "SimpleCPUOffloadConnector":
        return extra | ({"lazy_offload": True} if case["lazy"] else {})
    if name == "OffloadingConnector":
        return extra
    if name == "MultiConnector":
        first = "NixlConnector" if case.get("load_failures") else "SimpleCPUOffloadConnector"
        children = (first, "OffloadingConnector")
        return {
            "connectors": [
                {"kv_connector": child, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra)}
                for child in children
            ]
        }
    return {}


def _kv_cache_config(case: Mapping[str, Any], config: Any) -> Any:
    """Return layer groups and pool, made by vLLM's own rules from the spec of each layer."""
    specs = layer_specs(case, config)
    _lay_out(config, list(specs.values()))
    (worker,) = _planned(config, [specs], [memory_of(case)])
    found = generate_scheduler_kv_cache_config([worker])
    config.cache_config.num_gpu_blocks = found.num_blocks
    config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in found.kv_cache_groups)
    alignment = getattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens", None)
    if alignment is not None:
        blocks, hashed = resolve_kv_cache_block_sizes(found, config)
        found.hash_block_size = hashed
        found.cache_hit_alignment_tokens = alignment(found, config, blocks, hashed)
    return found


def layer_specs(case: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the KV cache spec of each layer."""
    found = {}
    for number, kind in enumerate(case["layers"]):
        name = f"model.layers.{number}"
        if kind == "mamba":
            found[f"{name}.mamba"] = _mamba_spec(case, config)
        else:
            found[f"{name}.self_attn.attn"] = _spec(case["block"], 0 if kind == "full" else case["window"])
    return found


def _mamba_spec(case: Mapping[str, Any], config: Any) -> Any:
    """Return what `MambaBase.get_kv_cache_spec` does, with a state as large as a block of attention."""
    cache = config.cache_config
    return MambaSpec(
        block_size=cache.mamba_block_size,
        shapes=((case["block"] * _BYTES // 8,),),
        dtypes=(torch.int64,),
        mamba_cache_mode=cache.mamba_cache_mode,
        num_speculative_blocks=case["draft"],
    )


def memory_of(case: Mapping[str, Any]) -> int:
    """Return the bytes of the case's KV cache."""
    return int(case["blocks"] * case["block"] * _BYTES * len(case["layers"]))


def room_of(case: Mapping[str, Any]) -> int:
    """Return the bytes that a connector has room for."""
    return int(case["cpu_blocks"] * case["block"] * _BYTES)


def _planned(config: Any, specs: list[Any], memory: list[int]) -> Any:
    """Call `get_kv_cache_configs`, which releases from 0.33.0 have in another module, after a step that makes the groups."""
    if hasattr(kv_cache_utils, "get_kv_cache_configs"):
        return kv_cache_utils.get_kv_cache_configs(config, specs, memory)
    from vllm.v1.core import kv_cache_planning as planning

    return planning.get_kv_cache_configs(config, specs, memory, planning.get_global_kv_cache_groups(config, specs))


def _stated_groups(case: Mapping[str, Any], config: Any) -> Any:
    """Return one layer for each stated group (block size, window), sharing one pool."""
    specs = {f"layer.{number}": _spec(block, window) for number, (block, window) in enumerate(case["groups"])}
    page = next(iter(specs.values())).page_size_bytes
    config.cache_config.num_gpu_blocks = case["blocks"]
    config.cache_config.block_size = min(spec.block_size for spec in specs.values())
    return KVCacheConfig(
        num_blocks=case["blocks"],
        kv_cache_tensors=[KVCacheTensor(size=page * case["blocks"], shared_by=list(specs))],
        kv_cache_groups=[KVCacheGroupSpec([name], spec) for name, spec in specs.items()],
    )


def _spec(block: int, window: int) -> Any:
    shape = {"block_size": block, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    return SlidingWindowSpec(sliding_window=window, **shape) if window else FullAttentionSpec(**shape)


def _lay_out(config: Any, specs: list[Any]) -> None:
    """Set the KV cache layout of the CPU attention, which newer releases need before they size the cache."""
    from vllm.v1.attention.backends import utils

    if not hasattr(utils, "resolve_kv_cache_layout"):
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    layouts = utils.get_supported_kv_cache_layouts([CPUAttentionBackend])
    utils.resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], specs)


def _register_specs(config: Any) -> None:
    try:
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    except ImportError:
        return
    register_all_kvcache_specs(config)


def _hash_function(name: str) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name

    return get_hash_fn_by_name(name)
