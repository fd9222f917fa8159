"""Names in vLLM's own code, by the part of an engine's life that they belong to.

Function names outlive releases; files and lines do not. What a frame is called is therefore the one thing
about vLLM's source that a diagnosis relies on, and it is written down here only.
"""

from __future__ import annotations

from vllm_repro.diagnosis.tracebacks import Raised

__all__ = ["CLEANUP", "LOOPS", "booting", "leaves_the_engine", "starting", "stepping", "warming_up"]

LOOPS = frozenset(
    {
        "_execute_worker_rpc",
        "_process_engine_step",
        "run_busy_loop",
        "run_engine_core",
        "worker_busy_loop",
        "worker_main",
    }
)
"""The loops in which EngineCore and workers live: an exception printed with one of them came from an
engine.
"""

CLEANUP = frozenset(
    {
        "__aexit__",
        "__del__",
        "__exit__",
        "_cleanup",
        "_cleanup_profiling_kv_cache",
        "cleanup",
        "cleanup_dist_env_and_memory",
        "close",
        "destroy",
        "destroy_process_group",
        "shutdown",
        "terminate",
    }
)
"""What runs when something has ended already; an exception in there is not why."""

_WARMUP = frozenset(
    {
        "_capture_cudagraphs",
        "_dummy_pooler_run",
        "_dummy_run",
        "_dummy_sampler_run",
        "_warmup_and_capture",
        "capture_model",
        "compile_or_warm_up_model",
        "determine_available_memory",
        "kernel_warmup",
        "profile_cudagraph_memory",
        "profile_run",
        "warming_up_model",
    }
)
_STEP = frozenset(
    {
        "_process_engine_step",
        "execute_dummy_batch",
        "execute_model",
        "sample_tokens",
        "schedule",
        "step",
        "step_fn",
        "step_with_batch_queue",
        "take_draft_token_ids",
        "update_from_output",
    }
)
_BOOT = frozenset(
    {
        "_init_executor",
        "_initialize_kv_caches",
        "init_device",
        "initialize_from_config",
        "initialize_kv_cache",
        "load_model",
    }
)
_START = frozenset(
    {
        "<module>",
        "build_async_engine_client",
        "build_async_engine_client_from_engine_args",
        "run_headless",
        "run_server",
    }
)
# A call that a client asks for beside the steps (a LoRA adapter, sleeping): its failure is handed back, and
# the engine goes on.
_UTILITY = frozenset({"_invoke_utility_method", "add_lora", "save_sharded_state", "sleep", "wake_up"})
_ENGINE_FILES = ("vllm/v1/worker/", "vllm/v1/core/", "vllm/v1/engine/core", "vllm/v1/executor/")


def warming_up(functions: frozenset[str]) -> bool:
    """Profiling, compiling or capturing. An idle engine of a data-parallel group runs dummy batches too,
    while it serves.
    """
    return bool(functions & _WARMUP) and "execute_dummy_batch" not in functions


def stepping(functions: frozenset[str]) -> bool:
    """In a step of the engine, which it takes only when there are requests."""
    return bool(functions & _STEP) and not functions & _WARMUP


def booting(functions: frozenset[str]) -> bool:
    return bool(functions & _BOOT)


def starting(functions: frozenset[str]) -> bool:
    """In the server program itself, on the way to its first engine."""
    return bool(functions & _START)


def leaves_the_engine(raised: Raised) -> bool:
    """Whether the exception passed through a step, or a boot, of EngineCore or a worker: nothing catches it
    there and goes on.
    """
    functions = frozenset(raised.functions)
    inside = any(frame.file.startswith(_ENGINE_FILES) for frame in raised.frames)
    return inside and bool(functions & (_STEP | _WARMUP | _BOOT)) and not functions & _UTILITY
