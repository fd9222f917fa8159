"""Names replaced by the mechanism `offload`. Imports neither torch nor vllm."""

from __future__ import annotations

from .record import Part

__all__ = ["PARTS"]

_WORKER = "vllm.v1.simple_kv_offload.worker"
_BACKEND = "vllm.v1.simple_kv_offload.copy_backend"
_POOL = "vllm.v1.core.block_pool"

PARTS = (
    Part(
        _WORKER,
        "DmaCopyBackend",
        "it copies with cuMemcpyBatchAsync, on CUDA streams",
        "the same lists of blocks are copied, and at once. When a store is over is a setting here: it is reported one step after the step "
        "that started it. The lists come from vLLM's scheduler half, where the bug is and nothing is replaced",
    ),
    Part(
        _WORKER,
        "torch",
        "torch.cuda.Stream, torch.cuda.current_stream and torch.Event need CUDA",
        "none: in this one module these three names are dummies, and every other is torch's",
    ),
    Part(
        _WORKER,
        "is_pin_memory_available",
        "memory is pinned with cudaHostRegister",
        "none: it is said to be unavailable, which only makes copies slower",
        otherwise=("PIN_MEMORY",),
    ),
    Part(
        _POOL,
        "BlockPool.get_num_free_blocks",
        "to see the list of free blocks run out",
        "none: it answers what it would; where blocks are about to be taken the list is counted, and a list that is too short is logged",
        runs=True,
    ),
    # Called or read, not replaced.
    Part(_BACKEND, "DmaCopyBackend.init", parameters=("gpu_caches", "cpu_caches", "device", "load_stream", "store_stream")),
    Part(
        _BACKEND,
        "DmaCopyBackend.launch_copy",
        parameters=("src_blocks", "dst_blocks", "is_store", "event_idx", "events_list"),
    ),
    Part(_BACKEND, "DmaCopyBackend.shutdown"),
    Part(_POOL, "BlockPool.get_new_blocks", parameters=("num_blocks",), runs=True),
    Part("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.popleft_n", runs=True),
    Part("vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector", "SimpleCPUOffloadConnector", runs=True),
)  # fmt: skip
