"""vLLM's engine without a model. `parts_connectors` lists the replaced names with their reasons.

API server, EngineCore, scheduler, KV cache manager, executor and both halves of a KV connector are
vLLM's own. `scheduler_worker.Worker` stands for the worker with its model runner. Requests that
reach an idle engine within `GATHER` seconds of the first enter it together, shorter prompts first,
so that the same workload leads to the same steps.
"""

from __future__ import annotations

import importlib
import queue
import time
from collections import deque
from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from . import idle_half, nixl, offload, offloading
from .wrapping import keep, wrap

GATHER = 0.5
"""Seconds that an idle engine waits for more requests after the first."""

_OFFLOADING_WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker"


def install() -> None:
    """Install the engine without a model in this process: its worker, queue and connectors."""
    # The executor and asynchronous scheduling stay as vLLM chose them for a GPU.
    keep(
        CpuPlatform,
        "parallel_config.distributed_executor_backend",
        "scheduler_config.async_scheduling",
    )
    wrap(CpuPlatform, "check_and_update_config", check_and_update_config)
    wrap(EngineCoreProc, "_process_input_queue", process_input_queue)
    idle_half.install()
    nixl.install()
    offload.install()
    offloading.install()
    worker: Any = importlib.import_module(_OFFLOADING_WORKER).OffloadingConnectorWorker
    worker.register_kv_caches = _register_without_memory
    simple: Any = importlib.import_module("vllm.v1.simple_kv_offload.worker").SimpleCPUOffloadWorker
    simple.register_kv_caches = _copy_nothing


def check_and_update_config(original: Any, cls: Any, vllm_config: Any) -> None:
    """Make vLLM use the lab's worker, which has no model; then run the original method."""
    vllm_config.parallel_config.worker_cls = "vllm_repro_lab.scheduler_worker.Worker"
    original(cls, vllm_config)


def process_input_queue(original: Any, engine: Any) -> None:
    """Make EngineCore's input queue gather requests, then read it as vLLM does.

    This method returns before a step, so no frame of the lab is in a step's traceback.
    """
    engine.input_queue.__class__ = _Gathering
    original(engine)


class _Gathering(queue.Queue):  # type: ignore[type-arg]  # it takes the place of a queue of vLLM
    """EngineCore's input queue, in which an idle engine gathers and sorts requests."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next item.

        If it is a request and the engine is idle, wait 0.5 s for more, and sort the queue: requests
        by prompt length, then all else.
        """
        first = super().get(block, timeout)
        if not block or first[0] is not EngineCoreRequestType.ADD:
            return first
        time.sleep(GATHER)
        with self.mutex:
            first, *rest = sorted([first, *self.queue], key=_order)
            self.queue = deque(rest)
        return first


def _order(item: tuple[Any, Any]) -> tuple[bool, list[int], list[int]]:
    """Return the sort key: added requests by prompt length, then by tokens; all else after them."""
    kind, content = item
    if kind is not EngineCoreRequestType.ADD:
        return True, [], []
    prompt = list(content[0].prompt_token_ids or ())
    return False, [len(prompt)], prompt


def _copy_nothing(worker: Any, *_: Any) -> None:
    """Let SimpleCPUOffloadConnector's copies move no data: they get no memory of layers.

    Stands for `SimpleCPUOffloadWorker.register_kv_caches`.
    """
    worker._backend = offload.CopyBackend()


def _register_without_memory(worker: Any, *_: Any) -> None:
    """Let the connector's worker make its transfers without memory of layers.

    Stands for `OffloadingConnectorWorker.register_kv_caches`.
    """
    # the second to 0.24.0
    make = getattr(worker, "_init_worker", None) or worker._register_handlers
    make(None)
