"""vLLM's configuration of a case, made from flags, and the KV cache that its layers need."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.config import KVTransferConfig, model
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

_BYTES = 2 * 2 * 32 * 2
"""Bytes of one token in one layer: keys and values, 2 heads, 32 numbers, 2 bytes each."""


class NoBoot(Exception):
    """vLLM refuses to start with these flags."""


def pools_of(scheduler: Any) -> dict[str, Any]:
    """Return the block pools by name: "gpu", and "cpu" or "cpu1" for those of connectors."""
    pools = {"gpu": scheduler.kv_cache_manager.block_pool}
    for number, child in enumerate(
        getattr(scheduler.connector, "_connectors", [scheduler.connector])
    ):
        manager = getattr(child, "scheduler_manager", None)
        if (pool := getattr(manager, "cpu_block_pool", None)) is not None:
            pools["cpu" if not number else f"cpu{number}"] = pool
    return pools


def tiers_of(scheduler: Any) -> list[Any]:
    """Return vLLM's manager of the CPU's cache of each OffloadingConnector."""
    children = getattr(scheduler.connector, "_connectors", [scheduler.connector])
    halves: list[Any] = [getattr(child, "connector_scheduler", None) for child in children]
    return [half.manager for half in halves if hasattr(half, "manager")]


def _parse_once(get_config: Callable[..., Any]) -> Callable[..., Any]:
    """Return `get_config` with a cache: reading a config.json took a tenth of a case's time."""
    read: dict[str, bytes] = {}

    def get(path: str, *rest: Any, **more: Any) -> Any:
        if path not in read:
            read[path] = pickle.dumps(get_config(path, *rest, **more))
        return pickle.loads(read[path])  # vLLM changes it

    return get


model.get_config = _parse_once(model.get_config)


def config_of(case: Mapping[str, Any], **engine_arguments: Any) -> Any:
    """Return vLLM's configuration of a case. engine_arguments: more engine arguments.

    vLLM's own errors are raised if it refuses the flags.
    """
    if case["connector"]:
        failures = (
            {"kv_load_failure_policy": case["load_failures"]} if case.get("load_failures") else {}
        )
        engine_arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector=case["connector"],
            kv_role=(
                "kv_producer"
                if case["connector"].startswith(("Nixl", "Mooncake")) and not failures
                else "kv_both"
            ),
            kv_connector_extra_config=_extra(case),
            kv_connector_module_path=(
                f"{__package__}.stores" if case["connector"].endswith("StoreConnector") else None
            ),
            **failures,
        )
    if case["draft"]:
        engine_arguments["speculative_config"] = {
            "method": "ngram_gpu" if engine_arguments.get("async_scheduling") else "ngram",
            "num_speculative_tokens": case["draft"],
            "prompt_lookup_max": 4,
        }
    hybrid = "mamba" in case["layers"]
    if hybrid and case["caching"]:
        engine_arguments["mamba_cache_mode"] = (
            # the default of newer releases; `mamba` has no rules for "all", that of older ones
            "align"
        )
    config = EngineArgs(
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
        **engine_arguments,
    ).create_engine_config()
    if case["draft"] and case["eagle"]:
        # after the configuration, which loads the model that drafts
        config.speculative_config.method = "eagle"
    return config


def _extra(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `kv_connector_extra_config` of the case's KV connector."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": room_of(case)}
    if case["connector"] == "MultiConnector":
        first = "NixlConnector" if case.get("load_failures") else "SimpleCPUOffloadConnector"
        children = (first, "OffloadingConnector")
        return {
            "connectors": [
                {
                    "kv_connector": child,
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": dict(extra),
                }
                for child in children
            ]
        }
    if case["chunk_blocks"] > 1:
        extra["block_size"] = case["chunk_blocks"] * case["block"]
    return extra | ({"lazy_offload": True} if case["lazy"] else {})


def layer_specs(case: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the KV cache spec of each layer, by the layer's name."""
    cache, specs = config.cache_config, {}
    shape = {
        "block_size": case["block"],
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.bfloat16,
    }
    for number, kind in enumerate(case["layers"]):
        name = f"model.layers.{number}"
        match kind:
            case "full":
                specs[f"{name}.self_attn.attn"] = FullAttentionSpec(**shape)
            case "sliding":
                specs[f"{name}.self_attn.attn"] = SlidingWindowSpec(
                    sliding_window=case["window"], **shape
                )
            case "mamba":  # as `MambaBase.get_kv_cache_spec`, with states as large as a block
                specs[f"{name}.mamba"] = MambaSpec(
                    block_size=cache.mamba_block_size,
                    shapes=((case["block"] * _BYTES // 8,),),
                    dtypes=(torch.int64,),
                    mamba_cache_mode=cache.mamba_cache_mode,
                    num_speculative_blocks=case["draft"],
                )
    return specs


def memory_of(case: Mapping[str, Any]) -> int:
    """Return the bytes of the case's KV cache."""
    return int(case["blocks"] * case["block"] * _BYTES * len(case["layers"]))


def room_of(case: Mapping[str, Any]) -> int:
    """Return the bytes of CPU memory that an offloading connector may use."""
    return int(case["cpu_blocks"] * case["block"] * _BYTES)
