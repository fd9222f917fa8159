"""The mechanism `scheduler` with stubs of vLLM: what a burst becomes, which tokens a step has, when a transfer is reported."""

from __future__ import annotations

import importlib
import queue
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Kind = Enum("Kind", "ADD ABORT UTILITY")


class Stub(ModuleType):
    """Module of vLLM: every name is a class without methods."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


class Platform:
    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = False
        vllm_config.parallel_config.distributed_executor_backend = "mp"


class Engine:
    def __init__(self) -> None:
        self.input_queue: Any = queue.Queue()

    def _process_input_queue(self) -> None: ...


NAMES = (
    "numpy",
    "torch",
    "vllm",
    "vllm.distributed",
    "vllm.distributed.kv_transfer",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker",
    "vllm.forward_context",
    "vllm.platforms",
    "vllm.platforms.cpu",
    "vllm.v1",
    "vllm.v1.core",
    "vllm.v1.core.block_pool",
    "vllm.v1.engine",
    "vllm.v1.engine.core",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_offload",
    "vllm.v1.kv_offload.cpu",
    "vllm.v1.kv_offload.cpu.spec",
    "vllm.v1.outputs",
    "vllm.v1.simple_kv_offload",
    "vllm.v1.simple_kv_offload.worker",
    "vllm.v1.worker",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
    "vllm.v1.worker.worker_base",
)
PLUGIN = ("nixl", "offload", "offloading", "scheduler", "scheduler_worker")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    modules: dict[str, Any] = {name: Stub(name) for name in NAMES}
    modules["vllm.platforms.cpu"].CpuPlatform = type(
        "CpuPlatform", (Platform,), dict(vars(Platform))
    )
    modules["vllm.v1.engine.core"].EngineCoreProc = type(
        "EngineCoreProc", (Engine,), dict(vars(Engine))
    )
    modules["vllm.v1.engine"].EngineCoreRequestType = Kind
    modules["vllm.v1.worker.gpu_worker"].Worker.get_kv_connector_handshake_metadata = None
    modules["vllm.v1.core.block_pool"].BlockPool.get_num_free_blocks = None
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], child, module)
    for name in PLUGIN:
        monkeypatch.delitem(sys.modules, f"vllm_repro_lab.{name}", raising=False)
    yield modules
    for name in PLUGIN:
        sys.modules.pop(f"vllm_repro_lab.{name}", None)


def test_the_simple_connector_copies_nothing_and_reports_it(vllm: dict[str, Any]) -> None:
    importlib.import_module("vllm_repro_lab.scheduler").install()
    worker = vllm["vllm.v1.simple_kv_offload.worker"].SimpleCPUOffloadWorker()
    worker.register_kv_caches({})
    done: list[tuple[int, Any]] = []
    worker._backend.launch_copy([1, 2], [3, 4], is_store=True, event_idx=7, events_list=done)
    worker._backend.launch_copy([3], [1], is_store=False, event_idx=8, events_list=done)
    assert [(number, [event.query(), event.query()]) for number, event in done] == [
        (7, [False, True]),
        (8, [True, True]),
    ]


def added(*prompt: int) -> tuple[Kind, Any]:
    return Kind.ADD, (SimpleNamespace(prompt_token_ids=list(prompt)), 0)


def test_a_burst_enters_an_idle_engine_at_once_shorter_prompts_first(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = importlib.import_module("vllm_repro_lab.scheduler")
    plugin.install()
    engine = vllm["vllm.v1.engine.core"].EngineCoreProc()
    engine._process_input_queue()
    late, waits = added(1), []

    def arrives(seconds: float) -> None:
        waits.append(seconds)
        engine.input_queue.put(late)

    monkeypatch.setattr(plugin.time, "sleep", arrives)
    first, second, abort = added(1, 2, 3), added(1, 2), (Kind.ABORT, ["a"])
    for item in (first, abort, second):
        engine.input_queue.put(item)
    taken = [engine.input_queue.get(), *(engine.input_queue.get_nowait() for _ in range(3))]
    assert taken == [late, second, first, abort]
    assert waits == [plugin.GATHER]
    engine.input_queue.put((Kind.UTILITY, None))
    assert engine.input_queue.get() == (Kind.UTILITY, None)
    assert len(waits) == 1, "a call that is no request does not wait"


def test_the_platform_chooses_the_worker_alone(vllm: dict[str, Any]) -> None:
    importlib.import_module("vllm_repro_lab.scheduler").install()
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend="uni", worker_cls="auto"),
        scheduler_config=SimpleNamespace(async_scheduling=True),
    )
    vllm["vllm.platforms.cpu"].CpuPlatform.check_and_update_config(config)
    assert vars(config.parallel_config) == {
        "distributed_executor_backend": "uni",
        "worker_cls": "vllm_repro_lab.scheduler_worker.Worker",
    }
    assert config.scheduler_config.async_scheduling is True


def step(
    counts: dict[str, int], *, new: dict[str, Any] | None = None, old: dict[str, Any] | None = None
) -> Any:
    """Return a scheduler's output.

    new: prompt and computed tokens; old: computed tokens and those of the answer.
    """
    fresh = [
        SimpleNamespace(req_id=name, prompt_token_ids=prompt, num_computed_tokens=computed)
        for name, (prompt, computed) in (new or {}).items()
    ]
    cached = SimpleNamespace(
        req_ids=list(old or {}),
        num_computed_tokens=[computed for computed, _ in (old or {}).values()],
        num_output_tokens=[answered for _, answered in (old or {}).values()],
    )
    return SimpleNamespace(
        finished_req_ids=set(),
        scheduled_new_reqs=fresh,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=counts,
    )


@pytest.mark.usefixtures("vllm")
def test_a_token_comes_with_the_last_known_token_and_is_the_same_after_a_preemption() -> None:
    worker = importlib.import_module("vllm_repro_lab.scheduler_worker").Worker()
    worker._prompts = {}
    prompt = list(range(10))
    assert worker._sampled(step({"a": 8}, new={"a": (prompt, 0)})) == {"a": []}
    (first,) = worker._sampled(step({"a": 2}, old={"a": (8, 0)}))["a"]
    (second,) = worker._sampled(step({"a": 1}, old={"a": (10, 1)}))["a"]
    assert first != second
    assert worker._sampled(step({"a": 10}, old={"a": (0, 1)})) == {"a": []}, (
        "preempted: its answer is computed again"
    )
    assert worker._sampled(step({"a": 1}, old={"a": (10, 1)})) == {"a": [second]}
    assert worker._sampled(step({"b": 4}, new={"b": (prompt, 6)})) == {"b": [first]}, (
        "after a prefix hit"
    )


@pytest.mark.usefixtures("vllm")
def test_a_transfer_is_reported_after_its_polls_or_when_it_was_waited_for() -> None:
    plugin = importlib.import_module("vllm_repro_lab.offloading")
    spec = SimpleNamespace(extra_config={"store_polls": 2})
    transfers = plugin._transfers_of(spec)
    assert plugin._transfers_of(spec) is transfers
    transfers.submit_store(1, None, None)
    transfers.submit_load(2, None, None, expedited=True)
    done = [[one.job_id for one in transfers.get_finished()] for _ in range(3)]
    assert done == [[], [2], [1]]
    transfers.transfer_async(3, (type("GPULoadStoreSpec", (), {})(), None))
    transfers.wait({3, 4})
    assert [one.job_id for one in transfers.get_finished()] == [3]
