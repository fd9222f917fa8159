"""Names replaced by `dry_run`, which runs the batches of a capture without capturing. Imports neither torch nor vllm."""

from __future__ import annotations

from .record import Part

__all__ = ["PARTS", "PROFILE"]

_GRAPHS = "there is no CUDA graph to record: the same dummy batches simply run, at the same sizes and in the same order"

PARTS = (
    Part(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.init_device",
        "the GPU worker makes the workspace manager there, the CPU worker makes none",
        "none: vLLM's init_workspace_manager is called first, with the arguments that the GPU worker gives it",
        runs=True,
    ),
    Part(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.compile_or_warm_up_model",
        "the GPU worker captures graphs at its end and so locks the workspace, the CPU worker does not",
        "vLLM's own capture_model() sizes and locks the workspace, unless the command line turns graphs off. While it runs the mode is "
        "FULL_DECODE_ONLY; what the GPU's default adds to that are piecewise graphs, whose dummy batches use no workspace",
        runs=True,
    ),
    Part("vllm.v1.worker.gpu_model_runner", "graph_capture", "it opens a CUDA stream", f"none: {_GRAPHS}"),
    Part("torch.cuda.memory", "mem_get_info", "it asks the CUDA driver", "the log's memory taken by graphs is 0; nothing else uses it"),
    Part("torch.accelerator", "synchronize", "it asks an accelerator", "none: on a CPU everything is done when it returns"),
    Part("torch.accelerator", "empty_cache", "it asks an accelerator", "none: there is no cache of device memory"),
    # Called, not replaced.
    Part("vllm.v1.worker.workspace", "init_workspace_manager", runs=True),
    Part("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.capture_model", runs=True),
    Part("vllm.config.vllm", "VllmConfig._set_cudagraph_sizes", runs=True),
    Part("vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher.initialize_cudagraph_keys", runs=True),
)  # fmt: skip

PROFILE = (
    Part(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.determine_available_memory",
        "the GPU worker profiles a dummy run there before anything is locked, the CPU worker does not",
        "none: vLLM's own profile_run() is called first, with graphs or without, as the GPU worker does",
        runs=True,
    ),
    Part("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.profile_run", runs=True),
)
