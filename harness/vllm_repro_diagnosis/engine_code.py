"""Names of functions in vLLM's code, by the part of an engine's life they belong to.

Function names outlive releases; files and lines do not. All that a diagnosis assumes about vLLM's
source is listed here.
"""

from __future__ import annotations

from vllm_repro_diagnosis.tracebacks import Raised


def _names(text: str) -> frozenset[str]:
    """Return the words of a text as a set of function names."""
    return frozenset(text.split())


LOOPS = _names("""
    _execute_worker_rpc _process_engine_step _run_engine _run_worker_process engine_step
    run_busy_loop run_engine_core run_engine_loop run_mp_engine start_worker_execution_loop
    worker_busy_loop worker_main
""")
"""Loops of EngineCore and workers: an exception with such a frame came from an engine."""

MAIN = _names("run_engine_core run_mp_engine")
"""Main functions of an engine's process: the interpreter prints what leaves them."""

CLEANUP = _names("""
    __aexit__ __del__ __exit__ _cleanup _cleanup_profiling_kv_cache cleanup
    cleanup_dist_env_and_memory close destroy destroy_process_group shutdown terminate
""")
"""Functions that run after an end; a second exception in one of them is not the cause."""

TEARDOWN = CLEANUP - _names("__aexit__ __exit__ close")
"""Functions that run only when a process ends.

A context manager also exits in a healthy step: a graph capture fails in `__exit__`.
"""

_WARMUP = _names("""
    _capture_cudagraphs determine_num_available_blocks _dummy_pooler_run _dummy_run
    _dummy_sampler_run _warmup_and_capture capture_model compile_or_warm_up_model
    determine_available_memory kernel_warmup profile_cudagraph_memory profile_run warming_up_model
""")
STEP = _names("""
    _process_engine_step engine_step execute_dummy_batch execute_model run_engine_loop sample_tokens
    schedule step step_async step_fn step_with_batch_queue take_draft_token_ids update_from_output
""")
"""Functions of any step: alone they do not show which part of vLLM failed."""
_MODELS = "vllm/model_executor/models/"
_OF_REQUEST = _names("accept_tokens grammar_bitmask")
"""Functions that need a request, and may be all that is left of a traceback."""
_BOOT = _names(
    "_check_enough_kv_cache_memory _init_executor _initialize_kv_caches "
    "check_enough_kv_cache_memory get_kv_cache_config get_kv_cache_configs init_device "
    "initialize_from_config initialize_kv_cache load_model"
)
_START = _names("""
    build_async_engine_client build_async_engine_client_from_engine_args
    create_engine_config create_server_socket from_engine_args run_headless run_server
""")
# Calls that a client requests beside the steps (a LoRA adapter, sleeping): the engine returns their
# failure and continues.
_UTILITY = _names("_invoke_utility_method add_lora save_sharded_state sleep wake_up")
_SURVIVED = ("Invocation of ", "Unexpected error pre-processing")
_OF_ONE_CALL = _names("_invoke_utility_method process_input_sockets")
"""Headlines and functions of core.py for errors that fail one call: the engine goes on."""
_ENGINE_FILES = (
    *("vllm/v1/worker/", "vllm/v1/core/", "vllm/v1/engine/core", "vllm/v1/executor/"),
    "vllm_ascend/worker/",
    *("vllm/worker/", "vllm/core/", "vllm/engine/", "vllm/executor/"),  # to 0.10
)


def warming_up(functions: frozenset[str]) -> bool:
    """Return True if one of the functions profiles, warms up or captures graphs.

    The dummy batches of an idle data-parallel engine do not count.
    """
    return bool(functions & _WARMUP) and "execute_dummy_batch" not in functions


def stepping(functions: frozenset[str]) -> bool:
    """Return True if one of the functions runs in an engine's step, and none in the warm-up."""
    return bool(functions & (STEP | _OF_REQUEST)) and not functions & _WARMUP


def booting(functions: frozenset[str]) -> bool:
    """Return True if one of the functions belongs to an engine's boot, such as `load_model`."""
    return bool(functions & _BOOT)


def starting(raised: Raised) -> bool:
    """Return True if a frame is of what comes before an engine serves.

    It is of the server program, of `LLM()`, or of a model that is built.
    """
    in_boot = constructing(raised) or constructing(raised, _MODELS)
    return not _START.isdisjoint(raised.functions) or in_boot


def constructing(raised: Raised, files: str = "vllm/entrypoints/llm.py") -> bool:
    """Return True if the exception left a constructor in one of the files whose path has `files`.

    By default it is `LLM()`, the constructor of a program without a server.
    """
    return any(frame.function == "__init__" and files in frame.file for frame in raised.frames)


def of_one_call(raised: Raised) -> bool:
    """Return True if the exception failed one call of the engine or a worker, which goes on."""
    functions = frozenset(raised.functions)
    utility = functions & _UTILITY and not functions & (STEP | _WARMUP | _BOOT)
    return raised.headline.startswith(_SURVIVED) or bool(functions & _OF_ONE_CALL or utility)


def leaves_the_engine(raised: Raised) -> bool:
    """Return True if an exception came out of an engine's step or boot: nothing catches it.

    A call such as `add_lora` does not count: the engine returns its failure to the client.
    """
    functions = frozenset(raised.functions)
    inside = any(frame.file.startswith(_ENGINE_FILES) for frame in raised.frames)
    return inside and bool(functions & (STEP | _WARMUP | _BOOT)) and not functions & _UTILITY
