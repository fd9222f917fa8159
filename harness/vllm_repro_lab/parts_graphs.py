"""Names replaced for the capture guard and the recorder. Imports neither torch nor vllm."""

from __future__ import annotations

from .record import Part

__all__ = ["GUARDED", "RECORDED"]

_WORKER = "vllm.v1.worker.cpu_worker"
_RUNNER = "vllm.v1.worker.cpu_model_runner"
_GPU_RUNNER = "vllm.v1.worker.gpu_model_runner"
_GRAPHS = "torch.cuda.graphs"
_RULE = (
    "while a stream captures, a copy or a wait between host and device raises what torch raises in a CUDA build. The rule is about "
    "tensors and knows no function of vLLM; the last frames of such a death are the guard's, where a CUDA build has C++"
)
_SERVED = "What runs after the capture runs without graphs"
_REPLAYED = (
    "The operators and kernels that ran while a graph was captured are kept, with the numbers that Python worked out then, and a replay "
    "runs them again on the same tensors: it freezes what a graph freezes"
)

_BOTH = (
    Part(
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config",
        "the CPU platform wipes the graph mode and the capture sizes",
        "none: they stay as asked for, and vLLM resolves them as on a GPU",
        runs=True,
    ),
    Part(
        "vllm.platforms.interface",
        "Platform.support_static_graph_mode",
        "the CPU platform answers that it has no graphs",
        "none: it answers what the CUDA platform does, so that the mode is kept",
    ),
    Part(
        "vllm.platforms.interface",
        "Platform.get_global_graph_pool",
        "it calls the platform's graph_pool_handle, which a CPU does not have",
        "none: CpuPlatform.graph_pool_handle is added and returns a constant, since memory is not pooled",
        runs=True,
        needed=False,
    ),
    Part(
        _WORKER,
        "CPUWorker.init_device",
        "the GPU worker makes the workspace manager there, the CPU worker makes none",
        "none: vLLM's init_workspace_manager is called first, with the arguments that the GPU worker gives it",
        runs=True,
    ),
    Part(
        _WORKER,
        "CPUWorker.determine_available_memory",
        "the GPU worker captures the largest graphs there, to learn what memory they take",
        "vLLM's own profile_cudagraph_memory() is called where the GPU worker calls it, unless graphs are off",
        runs=True,
    ),
    Part(
        _WORKER,
        "CPUWorker.compile_or_warm_up_model",
        "the GPU worker captures graphs at its end and so locks the workspace, the CPU worker does not",
        "vLLM's own capture_model() is called where the GPU worker calls it, unless the command line asks for eager mode",
        runs=True,
    ),
    Part(
        _RUNNER,
        "CPUModelRunner.__init__",
        "on a CPU all tensors lie in one memory",
        "the runner gets a device object of its own: what is made there, or computed from that, is the device's, and all else the host's",
        runs=True,
    ),
    Part(
        _RUNNER,
        "CPUModelRunner._postprocess_tensors",
        "on a CPU the two halves of a buffer are made one tensor",
        "none: it is left out, so that a buffer has a half on each side and is copied, as on a GPU",
    ),
    Part(
        _RUNNER,
        "CPUModelRunner.load_model",
        "the GPU runner wraps the model for graphs, the CPU runner does not",
        "vLLM's own CUDAGraphWrapper is put around the model under the condition of the GPU runner; the weights are the device's",
        runs=True,
    ),
    Part(
        _RUNNER,
        "CPUModelRunner.get_model",
        "it gives the wrapped model",
        "none: the GPU runner's own, which unwraps it, takes its place",
    ),
    Part("torch.library", "Library.impl", "torch looks no further than the call of a custom operator", "none: the guard sees into those "
         "whose body is Python", runs=True),
    Part(
        "vllm.utils.cpu_triton_utils",
        "_FuncWrapper",
        "vLLM's CPU versions of the sampler's kernels know fewer arguments than some releases pass, and no server that drafts boots there",
        "none: arguments that they do not know are left out while they are switched off",
        runs=True,
        needed=False,
    ),
    Part(_GRAPHS, "is_current_stream_capturing", "it asks the CUDA driver", "it is true while a stand-in of a graph captures"),
    Part("torch.cuda", "synchronize", "it asks the CUDA driver", "none while nothing captures, since everything is done by then"),
    Part("torch.accelerator", "synchronize", "it asks an accelerator", "none while nothing captures, since everything is done by then"),
    Part("torch.accelerator", "empty_cache", "it asks an accelerator", "none: there is no cache of device memory"),
    Part("torch.cuda.memory", "mem_get_info", "it asks the CUDA driver", "the log's memory taken by graphs is 0; nothing else uses it"),
    Part(_GPU_RUNNER, "graph_capture", "it opens a CUDA stream", "none: there is one stream"),
    Part("vllm.compilation.cuda_graph", "weak_ref_tensors", "it frees memory of the graphs' pool", "none: the memory is kept"),
    # Called, not replaced.
    Part("vllm.compilation.cuda_graph", "CUDAGraphWrapper", runs=True),
    Part("vllm.v1.worker.workspace", "init_workspace_manager", runs=True),
    Part(_GPU_RUNNER, "GPUModelRunner.get_model", runs=True),
    Part(_GPU_RUNNER, "GPUModelRunner.capture_model", runs=True),
    Part(_GPU_RUNNER, "GPUModelRunner.profile_cudagraph_memory", runs=True),
    Part("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadataBuilder", runs=True),
    Part("vllm.v1.attention.backend", "AttentionCGSupport", runs=True),
    Part("vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher.initialize_cudagraph_keys", runs=True),
)  # fmt: skip

GUARDED = (
    Part(_GRAPHS, "graph", "there is no CUDA graph to capture", f"{_RULE}. {_SERVED}"),
    Part(_GRAPHS, "CUDAGraph", "there is no CUDA graph to hold", f"none: it holds nothing. {_SERVED}"),
    Part(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionMetadataBuilder._cudagraph_support",
        "the CPU's backend says that it cannot be captured",
        "a plain cache is captured as well: it says what the backends of a GPU say of batches that decode alike",
        otherwise=("CPUAttentionMetadataBuilder",),
    ),
    *_BOTH,
)
"""For the guard without the recorder."""

RECORDED = (
    Part(_GRAPHS, "graph", "there is no CUDA graph to capture", f"{_RULE}. {_REPLAYED}"),
    Part(_GRAPHS, "CUDAGraph", "there is no CUDA graph to replay", f"a replay of what was recorded. {_REPLAYED}; the reuse of "
         "memory, streams and races are not in it"),
    *_BOTH,
)  # fmt: skip
"""For the guard and the recorder. A plain cache gets no graphs: a replay would freeze what the CPU backend plans on the host."""
