"""EngineCore of a case over the fake executor, in this process and without a thread.

It adapts to a release by the functions and fields that the release has. Importing it replaces some
functions of vLLM.
"""

from __future__ import annotations

import inspect
import os
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
import vllm.plugins
from vllm import sampling_params
from vllm.config import KVEventsConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import registry
from vllm.multimodal import cache
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash
from vllm.v1.engine import EngineCoreRequest, core
from vllm.v1.structured_output.request import get_structured_output_key

from .config import NoBoot, config_of
from .executor import FakeExecutor
from .kv_events import KVIndex
from .reference import EOS, REPETITION, STOPS

_SCHEMA = (
    '{"type":"object","properties":{"n":{"type":"integer"},"ok":{"type":"boolean"}},'
    '"required":["n","ok"],"additionalProperties":false}'
)
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json": _SCHEMA},
    "object": {"json_object": True},
    "regex": {"regex": "[xy]{2,9}z?"},
    "choice": {"choice": ["red", "green", "dark blue"]},
    "ebnf": {"grammar": 'root ::= "a" | "b" root'},
    "two-roots": {"grammar": 'root ::= "a"\nroot ::= "b"'},
    "no-rule": {"grammar": "root ::= missing"},
    "empty-or-any": {"regex": "^(|.*)$"},
    "unchecked": {"grammar": 'root ::= "a"'},
}
"""Structured outputs by name. The last four are faulty or unusual.

"unchecked" loses its rule after the API server's check, so that the engine fails to compile it.
"""
FAULTY = ("two-roots", "no-rule", "empty-or-any", "unchecked")

_FIELDS = set(EngineCoreRequest.__struct_fields__)
_ARRIVALS = count()


class Refused(Exception):
    """vLLM's frontend, or the engine's input thread, answers a request with an error.

    Arguments: the error, and True if vLLM should accept the request.
    """


# Replace what would outlive a case or start another process.
for _name in ("freeze_gc_heap", "enable_envs_cache", "maybe_attach_gc_debug_callback"):
    if hasattr(core, _name):
        setattr(core, _name, lambda *_, **__: None)
core.load_general_plugins = vllm.plugins.load_general_plugins = lambda: None
registry._run_in_subprocess = lambda call: call()


class _Engine(core.EngineCoreProc):  # type: ignore[misc]  # vLLM is not installed here
    """EngineCoreProc without the sockets and threads that its own `__init__` adds to EngineCore."""

    def __init__(self, config: Any, executor: Any) -> None:
        core.EngineCore.__init__(self, config, executor, log_stats=executor.case["stats"])
        self.output_queue: Any = queue.SimpleQueue()
        self.engines_running = self.reject_new_requests = False
        self.shutdown_state = core.EngineShutdownState.RUNNING


def boot(case: Mapping[str, Any]) -> Any:
    """Return vLLM's EngineCoreProc for a case. Raises `NoBoot` if it refuses the flags.

    Sets VLLM_USE_V2_MODEL_RUNNER in this process.
    """
    flags: dict[str, Any] = {
        "async_scheduling": case["asynchronous"],
        "scheduling_policy": "priority" if case["priority"] else "fcfs",
        "long_prefill_token_threshold": case["threshold"],
        "disable_chunked_mm_input": case["whole_images"],
    }
    if case["events"]:
        flags["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    if case["loras"]:
        flags |= {"enable_lora": True, "max_loras": case["loras"], "max_lora_rank": 8}
    if case["whole_images"] and case["largest_image"] > case["chunk"]:  # as `MultiModalBudget` does
        raise NoBoot("an image is larger than a chunk, and must be whole")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    try:
        config = config_of(case, **flags)
        config.scheduler_config.async_scheduling = case["asynchronous"]
        # After the config, which refuses the second runner without Triton; `FakeExecutor` needs
        # none.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = f"{case['runner'] - 1}"
        engine = _Engine(config, _executor(case))
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise NoBoot(f"{type(error).__name__}: {error}") from error
    engine.scheduler.kv_event_publisher = engine.kv_index = KVIndex()
    if connector := engine.scheduler.connector:
        # the index is of the GPU's pool, and some releases name it in events of a CPU pool, too
        connector.take_events = engine.kv_index.of_connector
    if case["largest_image"]:
        scheduler, room = engine.scheduler, max(case["chunk"], case["largest_image"])
        scheduler.max_num_encoder_input_tokens = room  # as of MultiModalBudget, which needs a model
        scheduler.encoder_cache_manager = type(scheduler.encoder_cache_manager)(cache_size=room)
    if room := case["image_cache"]:
        engine.image_cache, engine.mm_receiver_cache = _image_caches(room)
    manager = engine.structured_output_manager
    for name, looks in (("executor", case["grammar_looks"]), ("executor_for_fillmask", 0)):
        if hasattr(manager, name):
            getattr(manager, name).shutdown(wait=False)
            setattr(manager, name, _Inline(looks))
    return engine


def event_block_of(key: Any) -> tuple[int, Any]:
    """Return (group, hash) as KV events have them, for a key of the prefix cache."""
    return get_group_id(key), maybe_convert_block_hash(get_block_hash(key))


def _executor(case: Mapping[str, Any]) -> Any:
    """Return the executor class of one case; EngineCore makes its own instance.

    Raises `NoBoot` if the case asks for a model runner that cannot run here.
    """
    base = FakeExecutor
    if case.get("worker") == "runner":
        if case["runner"] == 2:
            raise NoBoot("its model runner: the second one needs a GPU")
        try:
            from .model_runner import RunnerExecutor  # here: it imports vLLM's workers

            base = RunnerExecutor
        except (ImportError, AttributeError) as error:
            raise NoBoot(f"its model runner: {type(error).__name__}: {error}") from error
    return type("CaseExecutor", (base,), {"case": case})


class _Inline:
    """Replacement of a thread pool: it works at once, in the calling thread.

    looks: how often a future of it then reports "not done".
    """

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call at once; return a future with the result or exception, reported as done later."""
        future = _Late()
        future.looks = self._looks
        try:
            future.set_result(call(*arguments))
        except Exception as error:  # as a real pool keeps it
            future.set_exception(error)
        return future

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no thread to stop."""


class _Late(Future[Any]):
    """Future that reports "not done" to the first `looks` questions."""

    looks = 0

    def _early(self) -> bool:
        """Count a look; return True if it is one of the first `looks`."""
        self.looks -= 1
        return self.looks >= 0

    def done(self) -> bool:
        """Count a look; return False for the first `looks`, then True."""
        return not self._early()

    def result(self, timeout: float | None = None) -> Any:
        """Return the result. With a timeout, count a look and raise TimeoutError if too early."""
        if timeout is not None and self._early():
            raise TimeoutError
        return super().result(timeout)


def sampling(engine: Any, ask: Mapping[str, Any]) -> SamplingParams:
    """Return a request's SamplingParams. Raise `Refused` if the frontend refuses its grammar.

    If its prompt comes from a prefill server, add the blocks to the executor's `places`.
    """
    grammar, transfer = ask["grammar"], _transfer(engine, ask)
    params = SamplingParams(
        max_tokens=ask["answer"],
        min_tokens=min(ask["least"], ask["answer"]),
        temperature=0.0,
        ignore_eos=not (ask["eos"] > 0 or grammar),
        structured_outputs=StructuredOutputsParams(**GRAMMARS[grammar]) if grammar else None,
        stop_token_ids=list(STOPS) if ask["stops"] else None,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
    )
    if ask["eos"] < 0:
        params.repetition_detection = sampling_params.RepetitionDetectionParams(**REPETITION)
    params.update_from_generation_config({}, EOS)
    if grammar:
        config, check = engine.vllm_config, params._validate_structured_outputs
        known = {
            "model_config": config.model_config,
            "structured_outputs_config": config.structured_outputs_config,
            "tokenizer": engine.structured_output_manager.tokenizer,
        }
        try:
            check(**{name: known[name] for name in inspect.signature(check).parameters})
        except Exception as error:  # whatever it raises is the answer of an HTTP request
            raise Refused(str(error), False) from error
    if grammar == "unchecked":
        params.structured_outputs.grammar = GRAMMARS["no-rule"]["grammar"]
    return params


def _transfer(engine: Any, ask: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `kv_transfer_params` of a request; empty for one of this engine alone.

    If its prompt comes from a prefill server, add the blocks to the executor's `places`.
    """
    if ask["fetch"]:
        name = engine.vllm_config.kv_transfer_config.kv_connector
        return {"stored": True} if name.endswith("StoreConnector") else _prefilled(engine, ask)
    transfer = {"do_remote_decode": True, "do_remote_prefill": False}
    return transfer | {"transfer_id": f"transfer {ask['number']}"} if ask["remote"] else {}


def _prefilled(engine: Any, ask: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `kv_transfer_params` that a prefill server with the same flags answers.

    A block's id is its place in the prompt from 1 on; 0 is the null block. The blocks are also
    added to the executor's `places`.
    """
    places, prompt = [], ask["prompt"]
    for manager in engine.scheduler.kv_cache_manager.coordinator.single_type_managers:
        first = min(manager.get_num_skipped_tokens(prompt), prompt) // manager.block_size
        last = -(-prompt // manager.block_size)
        places.append([0] * first + list(range(first + 1, last + 1)))
    connector = engine.scheduler.connector
    half = getattr(connector, "_connectors", [connector])[0].connector_scheduler
    clip = getattr(half, "get_exchange_clipped_blocks", None) or half.get_sw_clipped_blocks
    blocks = clip(tuple(places))
    engine.model_executor.places[f"r{ask['number']}"] = blocks
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(group) for group in blocks],
        "remote_engine_id": "prefill",
        "remote_request_id": "prefill",
        "remote_host": "localhost",
        "remote_port": 1,
        "remote_bootstrap_addr": "http://localhost:1",
        "transfer_id": f"transfer {ask['number']}",
        "tp_size": 1,
        "remote_num_tokens": prompt,
    }


def _image_caches(room: int) -> tuple[Any, Any]:
    """Return both halves of the cache of processed images: the API server's and the engine's.

    room: bytes of each.
    """
    sender = (
        getattr(cache, "LruKeyReplicatedSenderCache", None) or cache.MultiModalProcessorSenderCache
    )
    receiver = (
        getattr(cache, "LruKeyReplicatedReceiverCache", None) or cache.MultiModalReceiverCache
    )
    of_model = SimpleNamespace(mm_processor_cache_gb=room / 2**30)
    config = SimpleNamespace(get_multimodal_config=lambda: of_model)
    return sender(config), receiver(config)


def _image(number: int, length: int) -> MultiModalKwargsItem:
    """Return an image of one color as a processor makes it: `length` bytes."""
    item = MultiModalKwargsItem.dummy(length)
    item["dummy"].data = torch.full((length,), number, dtype=torch.uint8)
    return item


def request_of(
    engine: Any,
    name: str,
    prompt: list[int],
    sampling: SamplingParams,
    ask: Mapping[str, Any],
    resumable: bool = False,
) -> tuple[Any, int]:
    """Return (request, wave) as EngineCore's input thread hands them to the engine.

    If the engine lacks an image in its cache, the request is sent again with the image. resumable:
    more parts of a streaming session follow. Raises `Refused` if the answer is an error.
    """
    lora = ask["lora"]
    values = {
        "request_id": name,
        "prompt_token_ids": list(prompt),  # vLLM extends it in a session
        "mm_features": _features(engine, ask["images"]),
        "sampling_params": sampling,
        "pooling_params": None,
        "eos_token_id": EOS,
        "arrival_time": float(next(_ARRIVALS)),  # two requests never arrive at once
        "lora_request": LoRARequest(f"lora{lora}", lora, f"/lora/{lora}") if lora else None,
        "cache_salt": f"salt{ask['salt']}" if ask["salt"] else None,
        "data_parallel_rank": None,
        "priority": ask["priority"],
        "resumable": resumable,
    }
    # as `InputProcessor` does with a prompt that is too long once its images are in
    if ask["refused"]:
        raise Refused("the API server refuses it", False)
    request = EngineCoreRequest(**{key: value for key, value in values.items() if key in _FIELDS})
    try:
        added: tuple[Any, int] = engine.preprocess_add_request(request)
    except Exception as error:
        if missed := getattr(error, "mm_hashes", ()):  # MultiModalCacheMissError
            for missing in missed:
                engine.image_cache.invalidate(missing)
            # the client sends it again
            return request_of(engine, name, prompt, sampling, ask, resumable)
        raise Refused(str(error), not ask["grammar"]) from error
    return added


def _features(engine: Any, images: Sequence[tuple[int, int, int]]) -> list[Any]:
    """Return a request's images as the API server sends them.

    An image has no data if the engine should already have it; the API server's cache is updated.
    Raises `Refused` if an image is larger than the cache.
    """
    features = [
        MultiModalFeatureSpec(
            data=_image(number, length),
            modality="image",
            identifier=f"image {number}",
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for offset, length, number in images
    ]
    if sender := getattr(engine, "image_cache", None):
        for feature in features:
            sender.touch_sender_cache_item(feature.identifier)
        try:
            for feature in features:
                feature.data, _ = sender.get_and_update_item((feature.data, ()), feature.identifier)
        except ValueError as error:  # releases before 0.29.0 refuse what is larger than the cache
            raise Refused(str(error), False) from error
    return features


class Matcher:
    """Bitmasks of a request's grammar after any beginning of its answer."""

    def __init__(self, engine: Any, sampling: SamplingParams) -> None:
        self._engine, self._sampling = engine, sampling
        self._grammar: Any = None
        self._accepted: list[int] = []

    def row(self, answer: list[int]) -> Any:
        """Return the bitmask of the token after an answer; None once the grammar has ended.

        Fastest if the answer extends that of the last call.
        """
        count = len(self._accepted)
        if self._grammar is None or answer[:count] != self._accepted:
            self._grammar, count = _compiled(self._engine, self._sampling), 0
        for token in answer[count:]:
            if not self._grammar.is_terminated():
                self._grammar.accept_tokens("", [token])
        self._accepted = list(answer)
        if self._grammar.is_terminated():
            return None
        mask = self._engine.structured_output_manager.backend.allocate_token_bitmask(1)
        self._grammar.fill_bitmask(mask, 0)
        return mask.numpy()[0]


def _compiled(engine: Any, sampling: SamplingParams) -> Any:
    """Return a request's grammar in its first state, compiled by the engine's backend."""
    compile_grammar = engine.structured_output_manager.backend.compile_grammar
    more = {}
    if "stop_token_ids" in inspect.signature(compile_grammar).parameters:
        more["stop_token_ids"] = sampling.all_stop_token_ids
    return compile_grammar(*get_structured_output_key(sampling.structured_outputs), **more)
