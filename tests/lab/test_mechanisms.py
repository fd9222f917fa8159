"""The plugin and its mechanisms with stubs of vLLM."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import importlib
import json
import os
import queue
import subprocess
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from enum import Enum
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import vllm_repro_lab
from tests.golden_files import missing
from vllm_repro.servers.lab import plugin_folder
from vllm_repro_diagnosis.boot_facts import Observation, observed
from vllm_repro_diagnosis.log_text import read_lines
from vllm_repro_lab import nixl
from vllm_repro_lab.parts import GRAPHS, MECHANISMS
from vllm_repro_lab.record import Part, Survey, names_in, survey, write_atomically


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


class CpuPlatform:
    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        vllm_config.checked_by = cls.__name__
        vllm_config.scheduler_config.async_scheduling = False
        vllm_config.parallel_config.distributed_executor_backend = "mp"


class EngineCoreProc:
    def __init__(self) -> None:
        self.input_queue: Any = queue.Queue()

    def _process_input_queue(self) -> None: ...


class Link:
    """Block in the free list."""

    next_free_block: Link | None = None


class BlockPool:
    """The parts of vLLM's class that the plugin uses."""

    def __init__(self, counter: int, real: int) -> None:
        head, tail = Link(), Link()
        last = head
        for _ in range(real):
            last.next_free_block = Link()
            last = last.next_free_block
        last.next_free_block = tail
        self.counter = counter
        self.free_block_queue = SimpleNamespace(fake_free_list_head=head, fake_free_list_tail=tail)

    def get_num_free_blocks(self) -> int:
        return self.counter

    def get_new_blocks(self, num_blocks: int) -> None:
        if num_blocks > self.get_num_free_blocks():
            raise ValueError("Cannot get free blocks")
        self.popleft_n(num_blocks)

    def popleft_n(self, n: int) -> None:
        link: Link | None = self.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(n):
            assert link is not None
            link = link.next_free_block


Kind = Enum("Kind", "ADD ABORT UTILITY")
Role = Enum("Role", "SCHEDULER WORKER")


class Connector(ABC):
    """A KV connector as vLLM's base class is one."""

    def __init__(self, config: Any, role: Role, kv_cache_config: Any = None) -> None:
        self.config, self.role, self.kv_cache_config = config, role, kv_cache_config

    @abstractmethod
    def start_load_kv(self, context: Any, **_: Any) -> None: ...


class KVConnectorFactory:
    """vLLM's factory, for a connector that is the configuration's `kv_transfer_config`."""

    @classmethod
    def get_connector_class(cls, kv_transfer_config: Any) -> Any:
        return kv_transfer_config

    @classmethod
    def create_connector(cls, config: Any, role: Role, kv_cache_config: Any = None) -> Any:
        return cls.get_connector_class(config.kv_transfer_config)(config, role, kv_cache_config)


CORE, CPU = "vllm.v1.engine.core", "vllm.platforms.cpu"
POOL, WORKER = "vllm.v1.core.block_pool", "vllm.v1.simple_kv_offload.worker"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
NAMES = (
    "fastapi",
    "fastapi.responses",
    "numpy",
    "torch",
    "torch.cuda",
    "vllm",
    "vllm.distributed",
    "vllm.distributed.kv_transfer",
    FACTORY,
    BASE,
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker",
    "vllm.engine",
    "vllm.engine.protocol",
    "vllm.forward_context",
    "vllm.platforms",
    CPU,
    "vllm.sampling_params",
    "vllm.v1",
    "vllm.v1.core",
    POOL,
    "vllm.v1.engine",
    CORE,
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_offload",
    "vllm.v1.kv_offload.cpu",
    "vllm.v1.kv_offload.cpu.spec",
    "vllm.v1.outputs",
    "vllm.v1.simple_kv_offload",
    WORKER,
    "vllm.v1.worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
    "vllm.v1.worker.worker_base",
)
IMPORT_VLLM = (
    "async_steps",
    "idle_half",
    "nixl",
    "offload",
    "offloading",
    "scheduler",
    "scheduler_worker",
    "segments",
)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Put stubs in place of vLLM's modules and return them. The plugin is imported anew."""
    modules: dict[str, Any] = {name: Stub(name) for name in NAMES}
    modules["torch"].device = str
    for module, stub in ((CPU, CpuPlatform), (CORE, EngineCoreProc), (POOL, BlockPool)):
        # a copy, because the plugin changes it
        setattr(modules[module], stub.__name__, type(stub.__name__, (stub,), dict(vars(stub))))
    modules["vllm.v1.engine"].EngineCoreRequestType = Kind
    modules[FACTORY].KVConnectorFactory = type("Factory", (KVConnectorFactory,), {})
    modules[BASE].KVConnectorBase_V1, modules[BASE].KVConnectorRole = Connector, Role
    modules["vllm.v1.worker.gpu_worker"].Worker.get_kv_connector_handshake_metadata = None
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], child, module)
    for name in IMPORT_VLLM:
        monkeypatch.delitem(sys.modules, f"vllm_repro_lab.{name}", raising=False)
    yield modules
    for name in IMPORT_VLLM:
        sys.modules.pop(f"vllm_repro_lab.{name}", None)


def load(name: str) -> Any:
    """Import a module of the plugin and install its replacements, if it has any."""
    module = importlib.import_module(f"vllm_repro_lab.{name}")
    getattr(module, "install", lambda: None)()
    return module


def config_of(*, asynchronous: bool | None) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend="uni", worker_cls="auto"),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )


def test_streams_and_events_do_nothing(vllm: dict[str, Any]) -> None:
    load("async_steps")
    torch = vllm["torch"]
    with vllm["vllm.v1.worker.cpu_model_runner"]._torch_cuda_wrapper():
        stream, event = torch.cuda.Stream(), torch.cuda.Event(blocking=True)
    stream.wait_stream(torch.cuda.current_stream())
    event.record(stream)
    event.synchronize()
    assert torch.Event is torch.cuda.Event


@pytest.mark.parametrize("decided", [True, False, None])
def test_the_platform_keeps_decisions_and_changes_the_rest(
    vllm: dict[str, Any], decided: bool | None
) -> None:
    load("async_steps")
    config = config_of(asynchronous=decided)
    vllm[CPU].CpuPlatform.check_and_update_config(config)
    assert config.scheduler_config.async_scheduling is decided
    assert config.parallel_config.distributed_executor_backend == "mp"
    assert config.checked_by == "CpuPlatform"


class SegmentEngine:
    """Engine that answers each segment with its length."""

    def __init__(self) -> None:
        self.params: list[Any] = []

    async def generate(
        self, inputs: AsyncIterator[Any], params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        self.params.append(params)
        assert request_id
        async for segment in inputs:
            length = len(segment.prompt["prompt_token_ids"])
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[length])])


def test_segments_are_fed_to_one_request(vllm: dict[str, Any]) -> None:
    vllm["vllm.engine.protocol"].StreamingInput = SimpleNamespace
    vllm["vllm.sampling_params"].SamplingParams.from_optional = dict
    vllm["vllm.sampling_params"].RequestOutputKind.DELTA = "delta"
    vllm["fastapi.responses"].JSONResponse = dict
    plugin, engine = load("segments"), SegmentEngine()
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))

    async def body() -> dict[str, Any]:
        return {"model": "m", "segments": [[7, 8, 9], 0, [10]], "max_tokens": 2}

    async def passed_on(request: Any) -> str:
        return f"passed on {request.url.path}"

    def answer(path: str) -> Any:
        request = SimpleNamespace(url=SimpleNamespace(path=path), json=body, app=app)
        return asyncio.run(plugin.route(request, passed_on))

    assert answer("/v1/completions") == "passed on /v1/completions"
    assert engine.params == []
    assert answer("/segments") == {"token_ids": [3, 1]}
    assert engine.params == [{"max_tokens": 2, "output_kind": "delta"}]


class Log(list[str]):
    def info(self, text: str, *values: object) -> None:
        self.append(text % values)

    @property
    def observed(self) -> tuple[Observation, ...]:
        prefix = "(Worker pid=1) INFO 11-21 20:43:24 [o.py:1]"
        return observed(read_lines("\n".join(f"{prefix} {line}" for line in self)))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    lines = Log()
    monkeypatch.setattr("vllm_repro_lab.record._logger", lines)
    return lines


class Rows(dict[Any, Any]):
    """Rows with a tensor's indexing by a list."""

    def __getitem__(self, places: Sequence[int]) -> list[bytes]:
        return [super(Rows, self).__getitem__(place) for place in places]

    def __setitem__(self, places: Sequence[int], rows: Sequence[bytes]) -> None:
        for place, row in zip(places, rows, strict=True):
            super().__setitem__(place, row)


def test_only_cuda_names_are_replaced_and_only_in_that_module(vllm: dict[str, Any]) -> None:
    torch, worker, plugin = vllm["torch"], vllm[WORKER], load("offload")
    assert (worker.DmaCopyBackend, worker.PIN_MEMORY) == (plugin.CopyBackend, False)
    assert (worker.torch.zeros, worker.torch.cuda.other) == (torch.zeros, torch.cuda.other)
    low, _high = worker.torch.cuda.Stream.priority_range()
    worker.torch.Event().record(worker.torch.cuda.current_stream())
    assert isinstance(worker.torch.cuda.Stream(priority=low), worker.torch.cuda.Stream)
    assert torch.cuda.Stream is not worker.torch.cuda.Stream
    without_constant = SimpleNamespace()
    plugin.without_cuda(without_constant)
    assert without_constant.is_pin_memory_available() is False


@pytest.mark.usefixtures("vllm")
def test_copies_are_immediate_and_stores_complete_later(log: Log) -> None:
    gpu = {"kv": Rows({n: b"g%d" % n for n in range(5)})}
    cpu = {"kv": Rows(dict.fromkeys(range(5), b"c"))}
    backend = load("offload").CopyBackend()
    backend.init(gpu, cpu, None, None, None)
    copies: list[tuple[int, Any]] = []
    backend.launch_copy(
        [3, 1, 3], [0, 1, 2], is_store=True, event_idx=7, events_list=copies, wait_event=object()
    )
    assert cpu["kv"][[0, 1, 2, 3]] == [b"g3", b"g1", b"g3", b"c"]
    backend.launch_copy([2], [4], is_store=False, event_idx=8, events_list=copies)
    assert gpu["kv"][[4]] == [b"g3"]
    (index, store), (_, fetched) = copies
    assert (index, store.query(), store.query(), fetched.query()) == (7, False, True, True)
    assert log.observed == (
        Observation("store", {"event": 7, "blocks": 3, "distinct": 2, "twice": [3]}),
    )


@pytest.mark.usefixtures("vllm")
def test_synchronize_completes_a_store() -> None:
    event = load("offload").Event(polls=1)
    event.synchronize()
    assert event.query()


@pytest.mark.usefixtures("vllm")
def test_not_more_than_32_blocks_are_named(log: Log) -> None:
    load("offload")._observe_store(0, [*range(100), *range(50)])
    values = {"event": 0, "blocks": 150, "distinct": 100, "twice": list(range(32))}
    assert log.observed == (Observation("store", values),)


def test_a_short_free_list_is_logged_without_a_lab_frame(vllm: dict[str, Any], log: Log) -> None:
    load("offload")
    with pytest.raises(AssertionError) as death:
        vllm[POOL].BlockPool(counter=106, real=34).get_new_blocks(50)
    assert log.observed == (Observation("free_list", {"counter": 106, "walked": 34, "asked": 50}),)
    frames = [frame.name for frame in traceback.extract_tb(death.value.__traceback__)]
    assert frames[1:] == ["get_new_blocks", "popleft_n"]


def test_a_long_enough_free_list_is_not_logged(vllm: dict[str, Any], log: Log) -> None:
    load("offload")
    pool = vllm[POOL].BlockPool(counter=34, real=34)
    pool.get_new_blocks(34)
    assert pool.get_num_free_blocks() == 34
    assert vllm[POOL].BlockPool(counter=106, real=34).get_num_free_blocks() == 106
    with pytest.raises(ValueError, match="Cannot get"):
        pool.get_new_blocks(35)
    assert not log


def test_the_simple_connector_copies_nothing_and_reports_it(vllm: dict[str, Any]) -> None:
    load("scheduler")
    worker = vllm[WORKER].SimpleCPUOffloadWorker()
    worker.register_kv_caches({})
    done: list[tuple[int, Any]] = []
    worker._backend.launch_copy([1, 2], [3, 4], is_store=True, event_idx=7, events_list=done)
    worker._backend.launch_copy([3], [1], is_store=False, event_idx=8, events_list=done)
    assert [(number, event.query(), event.query()) for number, event in done] == [
        (7, False, True),
        (8, True, True),
    ]


@pytest.mark.parametrize(
    ("module", "stays"),
    [
        ("vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector", False),
        ("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector", False),
        ("my_connector", False),
        ("vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector", True),
        ("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", True),
        ("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector", True),
        ("vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector", True),
        ("vllm_repro_lab.late_connector", True),
    ],
)
def test_the_worker_half_of_an_unknown_connector_is_idle(
    module: str, stays: bool, vllm: dict[str, Any]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise AssertionError("it needs a GPU")

    load("idle_half")
    own = type("Own", (Connector,), {"__module__": module, "start_load_kv": fails})
    make = vllm[FACTORY].KVConnectorFactory.create_connector
    config = SimpleNamespace(kv_transfer_config=own)
    decides = make(config=config, role=Role.SCHEDULER, kv_cache_config="blocks")
    assert (type(decides), decides.kv_cache_config) == (own, "blocks")
    moves = make(config, Role.WORKER)
    assert (isinstance(moves, own), moves.config, moves.role) == (stays, config, Role.WORKER)
    if not stays:
        assert moves.start_load_kv(None, layers=1) is None
    config.kv_transfer_config = type("Child", (own,), {"__module__": "my_connector"})
    assert isinstance(make(config, Role.WORKER), own) is stays, "so is a class made from it"


def added(*prompt: int) -> tuple[Kind, Any]:
    return Kind.ADD, (SimpleNamespace(prompt_token_ids=list(prompt)), 0)


def test_a_burst_enters_an_idle_engine_shorter_prompts_first(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = load("scheduler")
    engine = vllm[CORE].EngineCoreProc()
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
    load("scheduler")
    config = config_of(asynchronous=True)
    vllm[CPU].CpuPlatform.check_and_update_config(config)
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
def test_a_token_is_the_same_after_a_preemption() -> None:
    worker = load("scheduler_worker").Worker()
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
def test_a_transfer_is_reported_after_polls_or_a_wait() -> None:
    plugin = importlib.import_module("vllm_repro_lab.offloading")  # not installed
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


class FullAttentionSpec: ...


class SlidingWindowSpec: ...


def worker_of(*specs: type) -> nixl.Worker:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False)
    )
    groups = [SimpleNamespace(kv_cache_spec=spec(), layer_names=["layer"]) for spec in specs]
    return nixl.Worker(config, "here", SimpleNamespace(kv_cache_groups=groups, num_blocks=9))


def fetch_of(engine: str, *local: list[int], awaiting: bool = False) -> Any:
    remote = SimpleNamespace(
        engine_id=engine, request_id="prefill", block_ids=[[4, 5, 6]] * len(local)
    )
    return SimpleNamespace(local_block_ids=local, remote=remote, awaiting_kvs=awaiting)


def nixl_step(
    worker: nixl.Worker, *, fetched: Any = None, held: str = ""
) -> tuple[set[str], set[str]]:
    loads = {} if fetched is None else {"r1": fetched}
    worker.start_load_kv(
        SimpleNamespace(reqs_to_recv=loads, reqs_to_send={held: 1.0} if held else {})
    )
    return worker.get_finished()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "FETCH_S", 0)


def test_the_last_remote_blocks_are_copied_to_the_local_ones() -> None:
    assert nixl.pairs_of(fetch_of("here", [1, 2], [3])) == [[(1, 5), (2, 6)], [(3, 6)]]


def test_a_prefill_is_held_until_it_was_fetched() -> None:
    worker = worker_of(FullAttentionSpec)
    assert nixl_step(worker, held="prefill") == (set(), set())
    assert nixl_step(worker, fetched=fetch_of("here", [1])) == ({"prefill"}, {"r1"})
    assert nixl_step(worker) == (set(), set())


@pytest.mark.parametrize(
    ("specs", "invalid"),
    [((FullAttentionSpec,), {1, 2}), ((FullAttentionSpec, SlidingWindowSpec), set())],
)
def test_a_failure_names_blocks_unless_the_model_is_hybrid(
    specs: tuple[type, ...], invalid: set[int]
) -> None:
    worker = worker_of(*specs)
    _, ended = nixl_step(worker, fetched=fetch_of("gone", *([1, 2] for _ in specs)))
    assert ended == {"r1"}
    assert [worker.get_block_ids_with_load_errors() for _ in range(2)] == [invalid, set()]


def test_a_whole_hit_is_reported_only_if_the_scheduler_waits() -> None:
    worker = worker_of(FullAttentionSpec)
    assert nixl_step(worker, fetched=fetch_of("here", [])) == (set(), set())
    assert nixl_step(worker, fetched=fetch_of("here", [], awaiting=True)) == (set(), {"r1"})


def test_a_fetch_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "FETCH_S", 60)
    assert nixl_step(worker_of(FullAttentionSpec), fetched=fetch_of("here", [1])) == (set(), set())


PACKAGE = Path(vllm_repro_lab.__file__).parent

SOURCE = """
from elsewhere import borrowed as here

LIMIT: int = 3

class Worker:
    slots = 2

    def init_device(self, first, /, second, *, third=None):
        def inner(): ...

try:
    import fast
except ImportError:
    fast = None

if LIMIT:
    async def kernel(Key_ptr, D): ...
"""


def surveyed(folder: Path, *parts: Part) -> Survey:
    """Look up parts in a release that has one module, `worker`."""
    path = folder / "worker.py"
    path.write_text(SOURCE, encoding="utf-8")
    return survey(parts, lambda part: (path.name, path) if part.module == "worker" else None)


def test_names_are_those_that_a_module_has_with_their_parameters() -> None:
    assert dict(names_in(SOURCE)) == {
        **dict.fromkeys(("here", "LIMIT", "Worker", "Worker.slots", "fast"), ()),
        "Worker.init_device": ("self", "first", "second", "third"),
        "kernel": ("Key_ptr", "D"),
    }


def test_a_release_that_has_every_part(tmp_path: Path) -> None:
    found = surveyed(
        tmp_path,
        Part("worker", "Worker.init_device", "no GPU", "none"),
        Part("worker", "kernel", "no Triton", "none", ("Key_ptr",)),
        Part("worker", "here"),
    )
    file = {"file": "worker.py", "sha256": hashlib.sha256(SOURCE.encode()).hexdigest()}
    reasons = {"worker.Worker.init_device": "no GPU", "worker.kernel": "no Triton"}
    assert found.as_fields() == {
        "replaced": [
            {"name": name, **file, "why": why, "effect": "none"} for name, why in reasons.items()
        ]
    }


def test_missing_names_are_listed(tmp_path: Path) -> None:
    lacking = surveyed(
        tmp_path,
        Part("gone", "anything", "w", "e"),
        Part("worker", "Worker.warm_up", "w", "e"),
        Part("worker", "kernel", "w", "e", ("Key_ptr", "KPS")),
        Part("worker", "renamed"),
    )
    assert lacking.missing == (
        "gone.anything",
        "worker.Worker.warm_up",
        "worker.kernel(KPS)",
        "worker.renamed",
    )


def test_an_optional_part_is_listed_if_a_release_has_it(tmp_path: Path) -> None:
    names = (("worker", "kernel"), ("gone", "kernel"), ("worker", "renamed"))
    found = surveyed(tmp_path, *(Part(*name, "w", "e", needed=False) for name in names))
    assert ([part["name"] for part in found.replaced], found.missing) == (["worker.kernel"], ())


def test_the_facts_file_is_written_atomically(tmp_path: Path) -> None:
    write_atomically(tmp_path / "lab.json", {"replaced": []})
    assert json.loads((tmp_path / "lab.json").read_text(encoding="utf-8")) == {"replaced": []}
    with pytest.raises(TypeError):
        write_atomically(tmp_path / "other.json", {"replaced": object()})
    assert not (tmp_path / "other.json").exists()


def test_each_replacement_has_a_reason_and_an_effect() -> None:
    for mechanism, graphs in product(MECHANISMS.values(), ("", *GRAPHS)):
        if graphs and mechanism.alone:
            continue
        replaced = [part for part in mechanism.parts_with(graphs) if part.effect]
        assert len({(part.module, part.name) for part in replaced}) == len(replaced) > 0
        assert all(part.why for part in replaced)


@pytest.mark.parametrize("module", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_only_refuse_raises(module: Path) -> None:
    raising = [
        function.name
        for function in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Raise | ast.Assert)
    ]
    assert raising == (["refuse"] if module.stem == "refusals" else [])


@pytest.mark.parametrize("module", ["memory", "refusals", "replay", "capture"])
def test_the_guard_does_not_import_vllm(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    imported = [
        f"{getattr(node, 'module', '')} {alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for alias in node.names
    ]
    assert not [name for name in imported if name.strip().startswith("vllm")]
    names = {node.id.lower() for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not [name for name in names if "turbo" in name or "prefill" in name]


def register(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call the plugin's entry point twice, as vLLM does.

    Use a separate Python with `path` first and without the harness.
    """
    call = (
        "import vllm_repro_lab, sys; vllm_repro_lab.register(); vllm_repro_lab.register();"
        " print('torch' in sys.modules)"
    )
    keep = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("REPRO_LAB", "PYTHON"))
    }
    return subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            f"import sys; sys.path[:0] = {[str(path), str(plugin_folder())]!r}; {call}",
        ],
        env={**keep, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("environment", "result"),
    [
        ({}, (0, "False\n", "")),
        (
            {"MECHANISM": "turbo"},
            (1, "", f"the lab has no mechanism 'turbo'; choose one of {', '.join(MECHANISMS)}\n"),
        ),
        (
            {"MECHANISM": "turboquant", "CAPTURE": "guarded"},
            (1, "", "REPRO_LAB_CAPTURE is 'guarded'; it must be guard or record\n"),
        ),
    ],
)
def test_without_a_mechanism_it_does_nothing_and_unknown_settings_are_refused(
    tmp_path: Path, environment: dict[str, str], result: tuple[int, str, str]
) -> None:
    done = register(tmp_path, **{f"REPRO_LAB_{name}": value for name, value in environment.items()})
    assert (done.returncode, done.stdout, done.stderr) == result


@pytest.mark.parametrize("graphs", ["", *GRAPHS])
def test_a_release_without_the_names_exits_with_a_message(tmp_path: Path, graphs: str) -> None:
    """Which names are checked depends on the capture mode."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    facts = tmp_path / "lab.json"
    done = register(
        tmp_path,
        REPRO_LAB_MECHANISM="turboquant",
        REPRO_LAB_CAPTURE=graphs,
        REPRO_LAB_FACTS=str(facts),
    )
    written = json.loads(facts.read_text(encoding="utf-8"))
    message = "the lab cannot run this release: it has no vllm."
    assert (done.returncode, done.stderr[: len(message)]) == (1, message)
    assert written["mechanism"] == "turboquant"
    checked = {
        "vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls": True,
        "vllm.compilation.cuda_graph.CUDAGraphWrapper": bool(graphs),
        "vllm.config.vllm.VllmConfig._set_cudagraph_sizes": not graphs,
    }
    assert {name: name in written["unsupported"] for name in checked} == checked


def test_called_names_are_marked_as_running() -> None:
    idle = " ".join(
        f"{part.module}.{part.name}"
        for mechanism in MECHANISMS.values()
        for part in mechanism.parts_with("")
        if not part.runs
    )
    names = (
        "vllm.v1.attention.ops.triton_decode_attention._fwd_kernel_stage2",
        "vllm.v1.simple_kv_offload.copy_backend.DmaCopyBackend.launch_copy",
    )
    running = ("CPUWorker", "BlockPool", "capture_model")
    assert missing(idle, *names, *running) == [*running]
