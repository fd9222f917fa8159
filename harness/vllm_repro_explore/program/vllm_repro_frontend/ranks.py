"""Data-parallel engines, their coordinator and clients, of which one runs at a time.

The loops are those of vLLM: `DPEngineCoreProc.run_busy_loop` with real schedulers, and
`DPCoordinatorProc.process_input_socket`. Sockets, model and collectives are stand-ins. A message
keeps its place among those of its link alone, as with ZeroMQ, and a collective waits for all ranks.
A seed chooses which of them goes on, or which link delivers.
"""

from __future__ import annotations

import json
import queue
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import vllm.config.parallel as parallel
import zmq  # type: ignore[import-not-found]  # vLLM's
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType, coordinator, core
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

_BLOCK = 16
_ENCODER = MsgpackEncoder()
_MOST_TURNS = 5_000
"""Cases that come to rest take some hundred."""
_MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "ffn_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 32,
    "torch_dtype": "float32",
}
IDLE = ("waits for a message", "waits for messages")
"""Where an engine and the coordinator may be at the end."""


def _config() -> VllmConfig:
    """Return the configuration of a small model; its weights are never loaded."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=512
        )
        limits = SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=512,
            max_model_len=512,
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        cache = CacheConfig(block_size=_BLOCK, enable_prefix_caching=True)
        cache.num_gpu_blocks = 1000
        return VllmConfig(model_config=model, scheduler_config=limits, cache_config=cache)


class StoppedError(BaseException):
    """The world ends. No `Exception`: vLLM's loops catch some of those."""


class _Actor:
    """A thread that runs when it is its turn."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        # what it waits for; None if it can go on
        self.waits_for: Callable[[], bool] | None = None
        self.where = ""
        self.done = False


class World:
    """Engines of `count` ranks, a coordinator and `clients` clients.

    every: steps from a collective on the state of the ranks to the next.
    """

    def __init__(self, count: int, clients: int, every: int, seed: int) -> None:
        self.count, self.every = count, every
        self.rng = Random(seed)
        self.turns = 0
        self.log: list[str] = []
        self.errors: list[str] = []
        # by call and rank: what went wrong; empty if nothing
        self.replies: dict[tuple[int, int], str] = {}
        self.finished: set[str] = set()
        # steps with requests, by rank
        self.forwards: Counter[int] = Counter()
        # wave that each client knows
        self.wave = [0] * clients
        self._actors: dict[str, _Actor] = {}
        self._links: dict[str, tuple[deque[Any], Callable[[Any], None]]] = {}
        self._back = threading.Semaphore(0)
        self._stopped = False
        self._now = ""
        # by group: calls of the present round by rank, results by round
        self._rounds: dict[str, tuple[dict[int, tuple[str, Any]], list[Any]]] = {}
        self._calls = 0
        self.mail = {name: deque[Any]() for name in ("front", "back", "subscribers")}
        self.mail["subscribers"].extend([b"\x01"] * count)
        self.engines = [_engine(self, rank) for rank in range(count)]
        for rank, engine in enumerate(self.engines):
            for sender in (*(f"client {number}" for number in range(clients)), "coordinator"):
                self._links[f"{sender} to rank {rank}"] = deque(), _inbox(engine)
            self._links[f"rank {rank} to coordinator"] = deque(), self.mail["back"].append
        for number in range(clients):
            self._links[f"coordinator to client {number}"] = deque(), self._learn(number)
        for rank, engine in enumerate(self.engines):
            self.start(f"rank {rank}", engine.run_busy_loop)
        self.start("coordinator", lambda: _coordinate(self))

    # ── turns ───────────────────────────────────────────────────────────────

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Start an actor; it runs when `run` chooses it."""
        actor = self._actors[name] = _Actor()

        def run() -> None:
            actor.turn.acquire()
            try:
                if not self._stopped:
                    work()
            except (StoppedError, SystemExit):
                pass
            except BaseException as error:
                self.errors.append(f"{name} ends: {type(error).__name__}: {error}")
            actor.done = True
            self._back.release()

        threading.Thread(target=run, daemon=True).start()

    def wait(self, until: Callable[[], bool] | None, where: str) -> None:
        """Give the turn away until something holds; None: until the next turn."""
        actor = self._actors[self._now]
        actor.waits_for, actor.where = until, where
        self._back.release()
        actor.turn.acquire()
        if self._stopped:
            raise StoppedError
        actor.waits_for = None

    def run(self) -> list[str]:
        """Let the actors run until none can go on. Return what is wrong then; empty if nothing."""
        while self.turns < _MOST_TURNS:
            able = [
                name
                for name, actor in self._actors.items()
                if not actor.done and (actor.waits_for is None or actor.waits_for())
            ]
            full = [name for name, (messages, _) in self._links.items() if messages]
            if not able and not full:
                break
            self.turns += 1
            chosen = self.rng.choice([*able, *full])
            if chosen in self._links:
                messages, deliver = self._links[chosen]
                deliver(messages.popleft())
            else:
                self._now = chosen
                self._actors[chosen].turn.release()
                self._back.acquire()
        else:
            self.errors.append("it never comes to rest")
        stuck = [
            f"{name} {actor.where}"
            for name, actor in self._actors.items()
            if not actor.done and actor.where not in IDLE
        ]
        left = [name for engine in self.engines for name in engine.scheduler.requests]
        self._stopped = True
        for actor in self._actors.values():
            if not actor.done:
                actor.turn.release()
                self._back.acquire()
        return [*self.errors, *stuck, *(f"{name} is left" for name in left if not stuck)]

    def send(self, link: str, message: Any) -> None:
        """Put a message on a link."""
        self._links[link][0].append(message)

    def collective(self, group: str, rank: int, call: str, value: Any) -> list[Any]:
        """Wait until all ranks call a collective of a group; return their values."""
        calls, results = self._rounds.setdefault(group, ({}, []))
        this = len(results)
        calls[rank] = call, value
        if len(calls) == self.count:
            if len({call for call, _ in calls.values()}) > 1:
                self.errors.append(f"the ranks meet in different collectives of {group}")
            results.append([calls[other][1] for other in sorted(calls)])
            calls.clear()
        self.wait(lambda: len(results) > this, f"waits in {call} of {group}")
        values: list[Any] = results[this]
        return values

    # ── clients ─────────────────────────────────────────────────────────────

    def _learn(self, number: int) -> Callable[[Any], None]:
        def learn(message: bytes) -> None:
            _, self.wave[number], _ = msgspec.msgpack.decode(message)

        return learn

    def add(self, client: int, rank: int, name: str, tokens: int, *, more: bool = False) -> None:
        """Send a request, or a session's chunk if `more` may follow, as vLLM's clients do."""
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[10, 11, 12, 13, 14],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            client_index=client,
            current_wave=self.wave[client],
            resumable=more,
        )
        ready = self.engines[rank].preprocess_add_request(request)
        self.send(f"client {client} to rank {rank}", (EngineCoreRequestType.ADD, ready))
        self.log.append(f"client {client}: {name} to rank {rank}")

    def abort(self, client: int, rank: int, name: str) -> None:
        """Send an abort."""
        self.send(f"client {client} to rank {rank}", (EngineCoreRequestType.ABORT, [name]))
        self.log.append(f"client {client}: abort of {name} to rank {rank}")

    def call(self, client: int, method: str, *values: Any) -> int:
        """Call a method of all engines, as `AsyncLLM` does; return the number of the call."""
        self._calls += 1
        for rank in range(self.count):
            call = (client, (self._calls, rank), method, values)
            self.send(f"client {client} to rank {rank}", (EngineCoreRequestType.UTILITY, call))
        self.log.append(f"client {client}: {method}{values} to all")
        return self._calls

    def answered(self, call: int) -> bool:
        """Return True if all ranks have answered a call."""
        return all((call, rank) in self.replies for rank in range(self.count))


def _inbox(engine: Any) -> Callable[[Any], None]:
    def take(message: Any) -> None:
        if message[0] == EngineCoreRequestType.ABORT:
            engine.aborts_queue.put_nowait(message[1])
        engine.input_queue.put_nowait(message)

    return take


# ── an engine ───────────────────────────────────────────────────────────────


class _Input(queue.Queue[Any]):
    """An engine's queue of messages, which gives the turn away."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if block:
            self._world.wait(lambda: len(self.queue) > 0, IDLE[0])
        return super().get(block=False)

    def empty(self) -> bool:
        self._world.wait(None, "looks for messages")
        return super().empty()


class _Output:
    """An engine's queue of answers."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def put_nowait(self, item: Any) -> None:
        client, outputs = item
        world, rank = self._world, self._rank
        outputs.engine_index = rank
        if client == -1:
            world.send(f"rank {rank} to coordinator", _ENCODER.encode(outputs))
            for name in ("wave_complete", "start_wave"):
                if (wave := getattr(outputs, name)) is not None:
                    world.log.append(f"rank {rank}: {name} {wave}")
            return
        if (reply := outputs.utility_output) is not None:
            why = reply.failure_message or ""
            world.replies[reply.call_id] = why
            world.log.append(f"rank {rank}: answers call {reply.call_id[0]}{why and f': {why}'}")
        world.finished.update(outputs.finished_requests or ())


class _Executor:
    """A model that takes no time, and meets the other ranks in each step."""

    supported_tasks = ("generate",)

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self.is_sleeping = False

    def execute_dummy_batch(self) -> None:
        self._world.collective("the step", self._rank, "a forward pass", None)

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        names = list(scheduled.num_scheduled_tokens)
        if not names:
            future.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
            return future
        self._world.log.append(f"rank {self._rank}: a step of {', '.join(names)}")
        self._world.forwards[self._rank] += 1
        if self.is_sleeping:
            self._world.errors.append(f"rank {self._rank} computes while it sleeps")
        self.execute_dummy_batch()
        places = {name: place for place, name in enumerate(names)}
        tokens = [[7]] * len(names)
        future.set_result(
            ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)
        )
        return future

    def collective_rpc(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def sleep(self, level: int) -> None:
        self.is_sleeping = True

    def wake_up(self, tags: Any = None) -> None:
        self.is_sleeping = False

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...


class _Group:
    """The group of all ranks, as one of them has it."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank

    def size(self) -> int:
        return self.world.count


def _reduce(tensor: Any, group: _Group, call: str, of: Callable[[Any], Any]) -> None:
    values = group.world.collective("the ranks' state", group.rank, call, tensor.clone())
    tensor.copy_(of(torch.stack(values)))


_ALL_REDUCE = torch.distributed.all_reduce


def _all_reduce(tensor: Any, op: Any = None, group: Any = None, **more: Any) -> Any:
    if isinstance(group, _Group):
        return _reduce(tensor, group, "has_unfinished_dp", lambda rows: rows.max(0).values)
    return _ALL_REDUCE(tensor, op=op, group=group, **more)


def prepare() -> None:
    """Put the stand-ins for collectives into vLLM, and make what all engines share.

    Raises `NotImplementedError` if the ranks of this vLLM meet in other calls.
    """
    if not hasattr(parallel, "cpu_all_reduce_"):
        raise NotImplementedError("its ranks meet in other calls than those of 0.33.0")
    init_none_hash(sha256)
    coordinator.set_process_title = lambda *_, **__: None
    parallel.cpu_all_reduce_ = lambda tensor, group, **_: _reduce(
        tensor, group, "sync_dp_state", lambda rows: rows.sum(0)
    )
    torch.distributed.all_reduce = _all_reduce
    _SHARED.update(config=_config(), hasher=get_request_block_hasher(_BLOCK, sha256))


_SHARED: dict[str, Any] = {}


def _engine(world: World, rank: int) -> Any:
    """Return an engine of vLLM without processes and sockets."""
    config = _SHARED["config"]
    heads = FullAttentionSpec(block_size=_BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=1000, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], heads)]
    )
    cache.hash_block_size = _BLOCK
    engine: Any = object.__new__(core.DPEngineCoreProc)
    vars(engine).update(
        vllm_config=config,
        scheduler=Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            log_stats=False,
            block_size=_BLOCK,
            hash_block_size=_BLOCK,
            include_finished_set=True,
            structured_output_manager=StructuredOutputManager(config),
        ),
        model_executor=_Executor(world, rank),
        input_queue=_Input(world),
        output_queue=_Output(world, rank),
        aborts_queue=queue.Queue(),
        engine_index=rank,
        dp_rank=rank,
        dp_size=world.count,
        dp_group=_Group(world, rank),
        dp_sync_interval=world.every,
        engines_running=False,
        shutdown_state=core.EngineShutdownState.RUNNING,
        reject_new_requests=False,
        has_coordinator=True,
        publish_dp_lb_stats=True,
        last_counts=(0, 0),
        process_input_queue_block=True,
        enable_fault_tolerance=False,
        batch_queue=None,
        batch_queue_size=1,
        step_fn=engine.step,
        log_stats=False,
        _weight_version="0",
        _idle_state_callbacks=[],
        check_for_draft_tokens=False,
        async_scheduling=False,
        mm_receiver_cache=None,
        is_pooling_model=False,
        _pooler_config_logged=True,
        prefill_schedule_interval=0,
        step_counter=0,
        current_wave=0,
        pending_pause=False,
        ignore_start_dp_wave=False,
        eep_scaling_state=None,
        structured_output_manager=None,
        request_block_hasher=_SHARED["hasher"],
        _attach_weight_version=lambda _: None,
    )
    return engine


# ── the coordinator ─────────────────────────────────────────────────────────


def _coordinate(world: World) -> None:
    """Run the coordinator's loop on stand-ins of its sockets."""

    class Socket:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> Socket:
            return self

        def __exit__(self, *_: object) -> None: ...

        def recv(self) -> Any:
            return world.mail[self.name].popleft()

        def send(self, message: bytes) -> None:
            if self.name == "front":
                for number in range(len(world.wave)):
                    world.send(f"coordinator to client {number}", message)

        def send_multipart(self, parts: Sequence[bytes]) -> None:
            kind = EngineCoreRequestType(parts[0])
            wave, without = msgspec.msgpack.decode(parts[1])
            world.log.append(f"coordinator: start of wave {wave}, but for rank {without}")
            for rank in range(world.count):
                world.send(f"coordinator to rank {rank}", (kind, (wave, without)))

    class Poller:
        def __init__(self) -> None:
            self._sockets: list[Socket] = []

        def register(self, socket: Socket, _: Any) -> None:
            self._sockets.append(socket)

        def poll(self, timeout: Any = None) -> list[tuple[Socket, int]]:
            world.wait(lambda: any(world.mail[each.name] for each in self._sockets), IDLE[1])
            return [(each, 1) for each in self._sockets if world.mail[each.name]]

    sockets = map(Socket, ("front", "back", "subscribers"))
    coordinator.make_zmq_socket = lambda **_: next(sockets)
    coordinator.zmq = SimpleNamespace(**{**vars(zmq), "Poller": Poller})
    # a millisecond each turn
    coordinator.time = SimpleNamespace(time=lambda: world.turns / 1000)
    process: Any = object.__new__(coordinator.DPCoordinatorProc)
    process.ctx = None
    process.engines = [coordinator.EngineState() for _ in range(world.count)]
    process.stats_update_interval_ms = 100
    process.enable_wave_coordination = True
    process.process_input_socket("front", "back", "subscribers")
