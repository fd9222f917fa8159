"""Names replaced by the mechanism `scheduler`. Imports neither torch nor vllm."""

from __future__ import annotations

from dataclasses import replace

from .parts_nixl import PARTS as _NIXL
from .parts_offload import PARTS as _SIMPLE
from .parts_offloading import PARTS as _OFFLOADING
from .record import Part

__all__ = ["PARTS"]

_WORKER = "vllm.v1.worker.gpu_worker"

PARTS = (
    Part(
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config",
        "it chooses the CPU worker with its model, and switches asynchronous scheduling off",
        "the lab's worker computes no model: its tokens are hashes, so answers prove nothing. The executor and asynchronous scheduling are "
        "those that vLLM chooses on a GPU",
        parameters=("vllm_config",),
        runs=True,
    ),
    Part(
        "vllm.v1.engine.core",
        "EngineCoreProc._process_input_queue",
        "which requests share a step depends on when they arrive",
        "an idle engine waits for more requests after the first, and takes those that came shortest first. So each run has the same steps. "
        "On a GPU the same burst may need many tries",
        runs=True,
    ),
    Part(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker",
        "OffloadingConnectorWorker.register_kv_caches",
        "it maps the memory of the model's layers",
        "there is no memory to map",
        otherwise=("OffloadingConnectorWorker._register_handlers",),
    ),
    *_OFFLOADING,
    *(replace(part, needed=False) for part in _SIMPLE),
    Part(
        "vllm.v1.simple_kv_offload.worker",
        "SimpleCPUOffloadWorker.register_kv_caches",
        "it maps the memory of the model's layers",
        "there is no memory to map, so that copies move nothing",
        needed=False,
    ),
    *_NIXL,
    Part(_WORKER, "Worker.get_kv_connector_handshake_metadata", runs=True),
    Part(_WORKER, "init_worker_distributed_environment", runs=True),
    Part(
        "vllm.v1.worker.kv_connector_model_runner_mixin",
        "KVConnectorModelRunnerMixin.maybe_get_kv_connector_output",
        runs=True,
    ),
)
