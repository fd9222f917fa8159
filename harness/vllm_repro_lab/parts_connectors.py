"""Names replaced by the mechanisms of the scheduler and of KV connectors.

Imports neither torch nor vllm.
"""

from __future__ import annotations

from dataclasses import replace

from .record import Part

_SIMPLE_WORKER = "vllm.v1.simple_kv_offload.worker"
_BACKEND = "vllm.v1.simple_kv_offload.copy_backend"
_POOL = "vllm.v1.core.block_pool"

OFFLOAD = (
    Part(
        _SIMPLE_WORKER,
        "DmaCopyBackend",
        "it copies with cuMemcpyBatchAsync, on CUDA streams",
        "the same lists of blocks are copied, and at once. When a store is over is a setting "
        "here: it is reported one step after the step "
        "that started it. The lists come from the connector's scheduler half, which is vLLM's own",
    ),
    Part(
        _SIMPLE_WORKER,
        "torch",
        "torch.cuda.Stream, torch.cuda.current_stream and torch.Event need CUDA",
        "none: in this one module these three names are dummies, and every other is torch's",
    ),
    Part(
        _SIMPLE_WORKER,
        "is_pin_memory_available",
        "memory is pinned with cudaHostRegister",
        "none: it is said to be unavailable, which only makes copies slower",
        otherwise=("PIN_MEMORY",),
    ),
    Part(
        _POOL,
        "BlockPool.get_num_free_blocks",
        "to see the list of free blocks run out",
        "none: it answers what it would; where blocks are about to be taken the list is counted, "
        "and a list that is too short is logged",
        runs=True,
    ),
    # Called or read, not replaced.
    Part(
        _BACKEND,
        "DmaCopyBackend.init",
        parameters=("gpu_caches", "cpu_caches", "device", "load_stream", "store_stream"),
    ),
    Part(
        _BACKEND,
        "DmaCopyBackend.launch_copy",
        parameters=("src_blocks", "dst_blocks", "is_store", "event_idx", "events_list"),
    ),
    Part(_BACKEND, "DmaCopyBackend.shutdown"),
    Part(_POOL, "BlockPool.get_new_blocks", parameters=("num_blocks",), runs=True),
    Part("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.popleft_n", runs=True),
    Part(
        "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector",
        "SimpleCPUOffloadConnector",
        runs=True,
    ),
)

_SPEC = "vllm.v1.kv_offload.cpu.spec"

OFFLOADING = (
    Part(
        _SPEC,
        "CPUOffloadingSpec.get_worker",
        "it copies with CUDA streams, events and kernels",
        "a transfer moves no data and is reported one poll after it began. Which blocks are"
        " transferred, and when, is decided in the connector's scheduler half, which is vLLM's own."
        " Answers from loaded blocks prove nothing",
        otherwise=("CPUOffloadingSpec.get_handlers",),
    ),
)

NIXL = (
    Part(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
        "NixlPullConnectorWorker",
        "NIXL moves blocks between servers",
        "a prompt is fetched from the blocks that an earlier request of the same server left, one"
        " second later; from another server it fails to come. Which blocks are copied is decided by"
        " the scheduler half, which is vLLM's own",
        otherwise=("NixlConnectorWorker",),
    ),
    Part(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
        "NixlBaseConnector.set_xfer_handshake_metadata_pp_aware",
        "it opens a port for decode servers, the same one on each server of a host",
        "none: there is no other server",
        otherwise=(
            "NixlBaseConnector.set_xfer_handshake_metadata",
            "NixlConnector.set_xfer_handshake_metadata",
        ),
    ),
)

LATE_CONNECTOR = (
    Part(
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1",
        "connectors such as NIXL and LMCache move KV blocks with a GPU or over a network",
        "the lab's LateConnector, which --kv-transfer-config loads by path, moves nothing. It"
        " rejects a load, or reports each load and save after as many steps as the request says."
        " What the scheduler does with the reports is vLLM's own code. Answers prove nothing",
        runs=True,
    ),
    Part("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorMetadata", runs=True),
    Part("vllm.distributed.kv_transfer.kv_connector.v1.base", "SupportsHMA", runs=True),
)

ASYNC = (
    Part(
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config",
        "it switches asynchronous scheduling off",
        "the scheduler runs a step ahead unless --no-async-scheduling is given, as on a GPU."
        " Scheduler, batch and sampler are vLLM's own. The CPU computes a step before it returns,"
        " so copies and kernels never overlap",
        runs=True,
    ),
    Part(
        "vllm.v1.worker.cpu_model_runner",
        "_torch_cuda_wrapper",
        "its streams cannot wait before 0.25.1, and torch has no CUDA stream here",
        "streams and events do nothing while the model runner is made, as they do later",
        runs=True,
    ),
    Part("vllm.engine.protocol", "StreamingInput", runs=True),
)

_GPU_WORKER = "vllm.v1.worker.gpu_worker"

SCHEDULER = (
    Part(
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config",
        "it chooses the CPU worker with its model, and switches asynchronous scheduling off",
        "the lab's worker computes no model: its tokens are hashes, so answers prove nothing. The"
        " executor and asynchronous scheduling are those that vLLM chooses on a GPU",
        parameters=("vllm_config",),
        runs=True,
    ),
    Part(
        "vllm.v1.engine.core",
        "EngineCoreProc._process_input_queue",
        "which requests share a step depends on when they arrive",
        "an idle engine waits for more requests after the first, and takes those that came shortest"
        " first. So each run has the same steps. Requests that come together may need many tries"
        " on a GPU",
        runs=True,
    ),
    Part(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker",
        "OffloadingConnectorWorker.register_kv_caches",
        "it maps the memory of the model's layers",
        "there is no memory to map",
        otherwise=("OffloadingConnectorWorker._register_handlers",),
    ),
    *OFFLOADING,
    *(replace(part, needed=False) for part in OFFLOAD),
    Part(
        "vllm.v1.simple_kv_offload.worker",
        "SimpleCPUOffloadWorker.register_kv_caches",
        "it maps the memory of the model's layers",
        "there is no memory to map, so that copies move nothing",
        needed=False,
    ),
    *NIXL,
    Part(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.create_connector",
        "connectors such as LMCache's move KV blocks with a GPU or over a network",
        "the worker half of a connector without a part here moves and reports nothing, so a request"
        " whose load or save it would report waits for ever. The scheduler half is its own",
        parameters=("config", "role"),
        runs=True,
    ),
    Part("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1", runs=True),
    Part(_GPU_WORKER, "Worker.get_kv_connector_handshake_metadata", runs=True),
    Part(_GPU_WORKER, "init_worker_distributed_environment", runs=True),
    Part(
        "vllm.v1.worker.kv_connector_model_runner_mixin",
        "KVConnectorModelRunnerMixin.maybe_get_kv_connector_output",
        runs=True,
    ),
)
