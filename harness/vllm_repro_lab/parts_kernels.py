"""Names replaced by the mechanisms that run kernels and captures on a CPU.

Imports neither torch nor vllm.
"""

from __future__ import annotations

from .record import Part

_NO_GRAPH = (
    "there is no CUDA graph to record: the same dummy batches simply run, at the same sizes and in"
    " the same order"
)

DRY_RUN = (
    Part(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.init_device",
        "the GPU worker makes the workspace manager there, the CPU worker makes none",
        "none: vLLM's init_workspace_manager is called first, with the arguments that the GPU "
        "worker gives it",
        runs=True,
    ),
    Part(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.compile_or_warm_up_model",
        "the GPU worker captures graphs at its end and so locks the workspace, the CPU worker "
        "does not",
        "vLLM's own capture_model() sizes and locks the workspace, unless the command line turns "
        "graphs off. While it runs the mode is "
        "FULL_DECODE_ONLY; what the GPU's default adds to that are piecewise graphs, whose dummy "
        "batches use no workspace",
        runs=True,
    ),
    Part(
        "vllm.v1.worker.gpu_model_runner",
        "graph_capture",
        "it opens a CUDA stream",
        f"none: {_NO_GRAPH}",
    ),
    Part(
        "torch.cuda.memory",
        "mem_get_info",
        "it asks the CUDA driver",
        "the log's memory taken by graphs is 0; nothing else uses it",
    ),
    Part(
        "torch.accelerator",
        "synchronize",
        "it asks an accelerator",
        "none: on a CPU everything is done when it returns",
    ),
    Part(
        "torch.accelerator",
        "empty_cache",
        "it asks an accelerator",
        "none: there is no cache of device memory",
    ),
    # Called, not replaced.
    Part("vllm.v1.worker.workspace", "init_workspace_manager", runs=True),
    Part("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.capture_model", runs=True),
    Part("vllm.config.vllm", "VllmConfig._set_cudagraph_sizes", runs=True),
    Part(
        "vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher.initialize_cudagraph_keys", runs=True
    ),
)

PROFILE = (
    Part(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.determine_available_memory",
        "the GPU worker profiles a dummy run there before anything is locked, the CPU worker"
        " does not",
        "none: vLLM's own profile_run() is called first, with graphs or without, as the GPU worker"
        " does",
        runs=True,
    ),
    Part("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.profile_run", runs=True),
)

_NO_TRITON = "a Triton kernel, and there is no Triton driver for this CPU"
_NUMBERS = (
    "none: the same bytes by the same formulas, in PyTorch. The workspace is asked for, and its"
    " assertion raised, before the kernel"
)
_DECODE = "vllm.v1.attention.ops.triton_turboquant_decode"
_STORE = "vllm.v1.attention.ops.triton_turboquant_store"
_BACKEND = "vllm.v1.attention.backends.turboquant_attn"
_LAYOUT = (
    "BLOCK_SIZE",
    "MSE_BYTES",
    "KPS",
    "VQB",
    "VAL_DATA_BYTES",
    "MSE_BITS",
    "KEY_FP8",
    "NORM_CORRECTION",
)
_TQ_CACHE = ("KV_cache_ptr", "Block_table_ptr", "Centroids_ptr", "HEAD_DIM", *_LAYOUT)
_SLOTS = ("Value_ptr", "KV_cache_ptr", "Slot_mapping_ptr", "D", "H", "BLOCK_SIZE", "KPS", "VQB")
_MERGE = ("Mid_O", "o", "lse", "B_Seqlen", "NUM_KV_SPLITS", "Lv")
_STRIDES = ("stride_cache_block", "stride_cache_pos", "stride_cache_head")

TURBOQUANT = (
    Part(
        "vllm.platforms.cpu",
        "CpuPlatform.get_attn_backend_cls",
        "the CPU platform answers CPU_ATTN for every cache",
        "none: for a turboquant cache it answers with vLLM's own TURBOQUANT backend, as the CUDA "
        "platform does",
    ),
    Part(
        "vllm.triton_utils.importing",
        "TritonPlaceholder",
        "vLLM's stand-in for the module triton lacks next_power_of_2 in some releases",
        "none: the missing function is added, and gives the kernels their block sizes",
        runs=True,
    ),
    Part(
        _STORE,
        "_tq_fused_store_mse",
        _NO_TRITON,
        _NUMBERS,
        ("Y_ptr", "Norms_ptr", "Midpoints_ptr", "MSE_BITS", *_SLOTS, *_STRIDES),
    ),
    Part(_STORE, "_tq_fused_store_fp8", _NO_TRITON, _NUMBERS, ("Key_ptr", *_SLOTS, *_STRIDES)),
    Part(
        _DECODE,
        "_tq_decode_stage1",
        _NO_TRITON,
        _NUMBERS,
        (
            "Q_rot_ptr",
            "Seq_lens_ptr",
            "Mid_o_ptr",
            "stride_bt_b",
            "NUM_KV_HEADS",
            "NUM_KV_SPLITS",
            "KV_GROUP_SIZE",
            "ATTN_SCALE",
            *_TQ_CACHE,
        ),
    ),
    Part(
        _DECODE, "_tq_full_dequant_kv", _NO_TRITON, _NUMBERS, ("K_out_ptr", "V_out_ptr", *_TQ_CACHE)
    ),
    Part(_DECODE, "_fwd_kernel_stage2", _NO_TRITON, _NUMBERS),
    Part(_BACKEND, "_tq_full_dequant_kv", _NO_TRITON, _NUMBERS),
    # Called, not replaced. The kernel is replaced in the module where TurboQuant calls it.
    Part(_BACKEND, "TurboQuantAttentionBackend", runs=True),
    Part("vllm.v1.attention.ops.triton_decode_attention", "_fwd_kernel_stage2", parameters=_MERGE),
)

_FLASH = (
    "FlashAttention has kernels for GPUs only, so on a CPU TurboQuant takes its path without it"
)

FLASH = (
    Part(
        _BACKEND,
        "_HAS_FLASH_ATTN",
        _FLASH,
        "none: it is True, as on a GPU, so TurboQuant chooses between its paths as it does there",
    ),
    Part(
        _BACKEND,
        "flash_attn_varlen_func",
        _FLASH,
        "none: causal attention of each sequence in the call, in PyTorch",
    ),
)
"""Also replaced by the mechanism `turboquant-flash`."""

_ATTENTION = "vllm.models.deepseek_v4.nvidia.flashmla"
_CLASS = "DeepseekV4FlashMLAAttention"
_DEEPSEEK_CACHE = "vllm.models.deepseek_v4.common.ops.cache_utils"
_INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
_CUDA_KERNEL = "a kernel for CUDA"
_AFTER = "in PyTorch. The workspace is asked for, and its assertion raised, before it"

INTERPRETER = (
    Part(
        "vllm.triton_utils",
        "triton",
        "the CPU build puts a placeholder there, since Triton as it is published has no backend for"
        " CPUs",
        "none: it is the real Triton with TRITON_INTERPRET=1, so that vLLM's own kernels run,"
        " slowly",
        runs=True,
    ),
    Part(
        "vllm.triton_utils",
        "tl",
        "the same placeholder",
        "none: the language of the real Triton",
        runs=True,
    ),
    Part("triton", "jit", runs=True),
)

DEEPSEEK = (
    *INTERPRETER,
    *DRY_RUN,
    *PROFILE,
    Part(
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config",
        "on a CPU without AMX it turns chunked prefill and prefix caching off for this model, "
        "and raises max_num_batched_tokens to "
        "max_model_len",
        "sizes as on a GPU: these three stay as the command line has them",
        runs=True,
    ),
    Part(
        "vllm.models.deepseek_v4.cpu.model",
        "DeepseekV4CPUAttention",
        "the CPU's attention class asks for no workspace",
        "puts the lines of the bug there: a subclass of it with forward_mqa, _forward_prefill, "
        "_forward_decode and both backends of "
        f"vLLM's own {_CLASS}, as the release or the arm has them",
        runs=True,
    ),
    Part(
        _ATTENTION,
        "dequantize_and_gather_k_cache",
        _CUDA_KERNEL,
        f"none: the same values, {_AFTER}",
    ),
    Part(_ATTENTION, "combine_topk_swa_indices", _CUDA_KERNEL, f"none: the same indices, {_AFTER}"),
    Part(_ATTENTION, "flash_mla_sparse_fwd", _CUDA_KERNEL, f"none: the same attention, {_AFTER}"),
    Part(
        _ATTENTION,
        "flash_mla_with_kvcache",
        _CUDA_KERNEL,
        "none: vLLM's own kernel for CPUs, with its arguments rearranged; decoding asks for no "
        "workspace",
    ),
    Part(
        "vllm.v1.attention.backends.mla.sparse_swa",
        "get_mla_metadata",
        "it plans a CUDA kernel's tiles",
        "none: the plan is an empty object, which nothing reads",
    ),
    Part(
        _INDEXER,
        "SparseAttnIndexer.forward_cpu",
        "on a CPU the indexer reserves nothing in a dummy run",
        "gives the locked size that a GPU has: a dummy run goes through the indexer's own "
        "forward_cuda, which then does nothing but "
        "reserve. Real steps stay on the CPU's path",
        runs=True,
    ),
    Part(
        "vllm.v1.worker.workspace",
        "WorkspaceManager._get_workspace_id",
        "to see what a prefill asks for",
        "none: it returns the same value, and logs the size that a prefill requests before it is "
        "compared with the lock",
        runs=True,
    ),
    # Called or read, not replaced.
    Part(
        _ATTENTION,
        f"{_CLASS}.forward_mqa",
        parameters=("q", "kv", "positions", "output"),
        runs=True,
    ),
    Part(_ATTENTION, f"{_CLASS}._forward_prefill", parameters=("q", "swa_metadata"), runs=True),
    Part(_ATTENTION, f"{_CLASS}._forward_decode", runs=True),
    Part(_ATTENTION, f"{_CLASS}.backend_cls", runs=True),
    Part(_ATTENTION, f"{_CLASS}.swa_backend_cls", runs=True),
    Part(
        _DEEPSEEK_CACHE,
        "dequantize_and_gather_k_cache",
        parameters=(
            "out",
            "k_cache",
            "seq_lens",
            "gather_lens",
            "block_table",
            "block_size",
            "offset",
        ),
    ),
    Part(
        _DEEPSEEK_CACHE,
        "combine_topk_swa_indices",
        parameters=(
            "topk_indices",
            "query_start_loc",
            "seq_lens",
            "gather_lens",
            "window_size",
            "compress_ratio",
            "topk",
            "M",
            "N",
            "out",
        ),
    ),
    Part("vllm._custom_ops", "flash_mla_with_kvcache_cpu"),
    Part(
        _INDEXER,
        "SparseAttnIndexer.forward_cuda",
        parameters=("hidden_states", "q_quant", "k", "weights"),
        runs=True,
    ),
    Part(
        "vllm.v1.worker.workspace",
        "WorkspaceManager._ensure_workspace_size",
        parameters=("required_bytes",),
        runs=True,
    ),
    Part("vllm.v1.worker.workspace", "WorkspaceManager.is_locked", runs=True),
)

_WORKER = "vllm.v1.worker.cpu_worker"
_RUNNER = "vllm.v1.worker.cpu_model_runner"
_GPU_RUNNER = "vllm.v1.worker.gpu_model_runner"
_CUDA_GRAPHS = "torch.cuda.graphs"
_RULE = (
    "while a stream captures, a copy or a wait between host and device raises what torch raises in"
    " a CUDA build. The rule is about tensors and knows no function of vLLM; the last frames of"
    " such a death are the guard's, where a CUDA build has C++"
)
_SERVED = "What runs after the capture runs without graphs"
_REPLAYED = (
    "The operators and kernels that ran while a graph was captured are kept, with the numbers that"
    " Python worked out then, and a replay runs them again on the same tensors: it freezes what a"
    " graph freezes"
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
        "none: CpuPlatform.graph_pool_handle is added and returns a constant, since memory is "
        "not pooled",
        runs=True,
        needed=False,
    ),
    Part(
        _WORKER,
        "CPUWorker.init_device",
        "the GPU worker makes the workspace manager there, the CPU worker makes none",
        "none: vLLM's init_workspace_manager is called first, with the arguments that the GPU "
        "worker gives it",
        runs=True,
    ),
    Part(
        _WORKER,
        "CPUWorker.determine_available_memory",
        "the GPU worker captures the largest graphs there, to learn what memory they take",
        "vLLM's own profile_cudagraph_memory() is called where the GPU worker calls it, unless "
        "graphs are off",
        runs=True,
    ),
    Part(
        _WORKER,
        "CPUWorker.compile_or_warm_up_model",
        "the GPU worker captures graphs at its end and so locks the workspace, the CPU worker "
        "does not",
        "vLLM's own capture_model() is called where the GPU worker calls it, unless the command "
        "line asks for eager mode",
        runs=True,
    ),
    Part(
        _RUNNER,
        "CPUModelRunner.__init__",
        "on a CPU all tensors lie in one memory",
        "the runner gets a device object of its own: what is made there, or computed from that, "
        "is the device's, and all else the host's",
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
        "vLLM's own CUDAGraphWrapper is put around the model under the condition of the GPU "
        "runner; the weights are the device's",
        runs=True,
    ),
    Part(
        _RUNNER,
        "CPUModelRunner.get_model",
        "it gives the wrapped model",
        "none: the GPU runner's own, which unwraps it, takes its place",
    ),
    Part(
        "torch.library",
        "Library.impl",
        "torch looks no further than the call of a custom operator",
        "none: the guard sees into those whose body is Python",
        runs=True,
    ),
    Part(
        "vllm.utils.cpu_triton_utils",
        "_FuncWrapper",
        "vLLM's CPU versions of the sampler's kernels know fewer arguments than some releases "
        "pass, and no server that drafts boots there",
        "none: arguments that they do not know are left out while they are switched off",
        runs=True,
        needed=False,
    ),
    Part(
        _CUDA_GRAPHS,
        "is_current_stream_capturing",
        "it asks the CUDA driver",
        "it is true while a stand-in of a graph captures",
    ),
    Part(
        "torch.cuda",
        "synchronize",
        "it asks the CUDA driver",
        "none while nothing captures, since everything is done by then",
    ),
    Part(
        "torch.accelerator",
        "synchronize",
        "it asks an accelerator",
        "none while nothing captures, since everything is done by then",
    ),
    Part(
        "torch.accelerator",
        "empty_cache",
        "it asks an accelerator",
        "none: there is no cache of device memory",
    ),
    Part(
        "torch.cuda.memory",
        "mem_get_info",
        "it asks the CUDA driver",
        "the log's memory taken by graphs is 0; nothing else uses it",
    ),
    Part(_GPU_RUNNER, "graph_capture", "it opens a CUDA stream", "none: there is one stream"),
    Part(
        "vllm.compilation.cuda_graph",
        "weak_ref_tensors",
        "it frees memory of the graphs' pool",
        "none: the memory is kept",
    ),
    # Called, not replaced.
    Part("vllm.compilation.cuda_graph", "CUDAGraphWrapper", runs=True),
    Part("vllm.v1.worker.workspace", "init_workspace_manager", runs=True),
    Part(_GPU_RUNNER, "GPUModelRunner.get_model", runs=True),
    Part(_GPU_RUNNER, "GPUModelRunner.capture_model", runs=True),
    Part(_GPU_RUNNER, "GPUModelRunner.profile_cudagraph_memory", runs=True),
    Part("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadataBuilder", runs=True),
    Part("vllm.v1.attention.backend", "AttentionCGSupport", runs=True),
    Part(
        "vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher.initialize_cudagraph_keys", runs=True
    ),
)

GUARDED = (
    Part(_CUDA_GRAPHS, "graph", "there is no CUDA graph to capture", f"{_RULE}. {_SERVED}"),
    Part(
        _CUDA_GRAPHS,
        "CUDAGraph",
        "there is no CUDA graph to hold",
        f"none: it holds nothing. {_SERVED}",
    ),
    Part(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionMetadataBuilder._cudagraph_support",
        "the CPU's backend says that it cannot be captured",
        "a plain cache is captured as well: it says what the backends of a GPU say of batches that"
        " decode alike",
        otherwise=("CPUAttentionMetadataBuilder",),
    ),
    *_BOTH,
)
"""For the guard without the recorder."""

RECORDED = (
    Part(_CUDA_GRAPHS, "graph", "there is no CUDA graph to capture", f"{_RULE}. {_REPLAYED}"),
    Part(
        _CUDA_GRAPHS,
        "CUDAGraph",
        "there is no CUDA graph to replay",
        f"a replay of what was recorded. {_REPLAYED}; the reuse of "
        "memory, streams and races are not in it",
    ),
    *_BOTH,
)
"""For the guard and the recorder.

A plain cache gets no graphs: a replay would freeze what the CPU backend plans on the host.
"""
