from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fake_vllm import COMPLETES, COMPLETION, METRICS, Exchange, FakeVllm, answering, keeping
from vllm_repro.client.client import Client
from vllm_repro.errors import InfraError
from vllm_repro.journal.journal import Journal
from vllm_repro.running import watch as watch_module
from vllm_repro.running.death_signs import Channel, log_sign
from vllm_repro.running.log_file import follow
from vllm_repro.running.state import TimeLimits
from vllm_repro.running.watch import Watch
from vllm_repro.servers.base import Exit
from vllm_repro.servers.kinds import ServerKind
from vllm_repro_diagnosis.standstill import Reading

QUICK = TimeLimits(boot_stall=5.0, answer_stall=1.0, grace=1.0)


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_LOOK_AGAIN", (0.02, 0.05, 0.1))
    monkeypatch.setattr(watch_module, "_CHILDREN_POLL", 0.05)
    monkeypatch.setattr(watch_module, "_COUNTERS_POLL", 0.1)
    monkeypatch.setattr(watch_module, "_SECOND_WITNESS", 0.2)
    monkeypatch.setattr(watch_module, "observe", lambda *_: Reading(url="", seconds=0.0))


def channels_of(watch: Watch) -> list[Channel]:
    return [sign.channel for sign in watch.signs]


def watched(
    fake: FakeVllm,
    work: Callable[[Watch, Client], Awaitable[None]],
    folder: Path,
    *,
    boots: bool = True,
    kind: ServerKind = ServerKind.PROCESS,
) -> Watch:
    """Return the watch over `fake` after `work` is done. boots: the server becomes ready."""

    async def run() -> Watch:
        with Journal(folder / "journal.jsonl") as journal:
            async with (
                Client(fake.base_url) as client,
                Watch(fake, kind, client, journal, QUICK, lambda _: None) as watch,
            ):
                assert await watch.until_ready() is boots
                await work(watch, client)
                watch.stopping()
                return watch

    with fake:
        return asyncio.run(run())


async def until_over(watch: Watch, _: Client) -> None:
    async with asyncio.timeout(10):
        await watch.over()


async def ask(watch: Watch, client: Client, *, stream: bool = False) -> None:
    """Send one request; cancel it when the watch reports a death."""
    watch.in_flight += 1
    request = asyncio.create_task(client.ask("/v1/completions", {"stream": stream}))
    over = asyncio.create_task(watch.over())
    try:
        async with asyncio.timeout(10):
            await asyncio.wait([request, over], return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.in_flight -= 1
        request.cancel()
        over.cancel()
        await asyncio.gather(request, over, return_exceptions=True)


@pytest.mark.parametrize(
    ("works", "kind"),
    [(0.0, ServerKind.PROCESS), (0.01, ServerKind.PROCESS), (0.0, ServerKind.ATTACH)],
)
def test_the_last_look_ends_early_at_an_idle_engine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: float, kind: ServerKind
) -> None:
    early = kind is ServerKind.PROCESS and not works
    monkeypatch.setattr(watch_module, "_LAST_LOOK_AT_VLLM", 60.0 if early else 0.6)
    used = itertools.count()
    monkeypatch.setattr(watch_module, "engine_cpu_seconds", lambda _: next(used) * works)
    took: list[float] = []

    async def look(watch: Watch, _: Client) -> None:
        began = time.monotonic()
        await watch.last_look()
        took.append(time.monotonic() - began)

    watched(FakeVllm(tmp_path / "log", {}), look, tmp_path, kind=kind)
    assert (took[0] < 30.0) if early else (took[0] >= 0.6)


def test_a_wait_for_an_answer_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_QUIET", 0.2)
    lines: list[str] = []

    async def shown(watch: Watch, client: Client) -> None:
        watch.notify = lines.append
        await ask(watch, client)

    watched(FakeVllm(tmp_path / "log", {"/v1/completions": Exchange.stall}), shown, tmp_path)
    assert "waiting for 1 answer: nothing moved for 1 s; a hang after 1 s" in lines


def test_an_api_server_that_answers_nothing_any_more_hangs(tmp_path: Path) -> None:
    def completions(exchange: Exchange) -> None:
        exchange.fake.paths["/metrics"] = answering(404)
        exchange.stall()

    watch = watched(FakeVllm(tmp_path / "log", {"/v1/completions": completions}), ask, tmp_path)
    assert "/metrics does not answer" in (watch.hung or "")
    assert not watch.dead.is_set()


def test_without_any_counter_a_long_request_decides_nothing(tmp_path: Path) -> None:
    paths = {"/metrics": answering(404), "/v1/completions": Exchange.stall}
    with pytest.raises(InfraError, match="/metrics never answered"):
        watched(FakeVllm(tmp_path / "log", paths), ask, tmp_path)


@pytest.mark.parametrize(
    ("running", "values", "hung"),
    [(0, 1000, True), (1, 1000, False), (1, 2, True)],
    ids=["waits", "runs", "repeats"],
)
def test_used_blocks_are_progress_unless_they_repeat(
    tmp_path: Path, running: int, values: int, hung: bool
) -> None:
    """A request that is preempted again and again uses the same blocks each time."""
    scrapes = iter(range(1000))
    ends = time.monotonic() + (20 if hung else 3) * QUICK.answer_stall  # a hang ends it early

    def metrics(exchange: Exchange) -> None:
        usage = f"vllm:kv_cache_usage_perc {next(scrapes) % values / 1000}\n"
        waiting = (
            f"vllm:num_requests_running {running}.0\nvllm:num_requests_waiting {1 - running}.0\n"
        )
        exchange.answer(200, f"{waiting}{usage}process_start_time_seconds 1000.0\n", "text/plain")

    def completions(exchange: Exchange) -> None:
        while time.monotonic() < ends:
            time.sleep(0.05)
        exchange.answer(200, COMPLETION)

    fake = FakeVllm(tmp_path / "log", {"/metrics": metrics, "/v1/completions": completions})
    assert (watched(fake, ask, tmp_path).hung is not None) is hung


def test_a_stream_that_goes_on_is_no_hang_without_counters(tmp_path: Path) -> None:
    def completions(exchange: Exchange) -> None:
        exchange.send_response(200)
        exchange.send_header("Connection", "close")
        exchange.end_headers()
        for _ in range(20):
            exchange.wfile.write(b'data: {"choices": [{"text": "x", "finish_reason": null}]}\n\n')
            time.sleep(0.1)
        exchange.close_connection = True

    fake = FakeVllm(tmp_path / "log", {"/v1/completions": completions})
    assert watched(fake, partial(ask, stream=True), tmp_path).hung is None


@pytest.mark.parametrize("status", [None, 500, 503])
@pytest.mark.parametrize(
    ("bad", "steps", "dead"),
    [(1, False, False), (2, False, False), (50, False, True), (50, True, False)],
)
def test_health_alone_is_no_death(
    tmp_path: Path, status: int | None, bad: int, steps: bool, dead: bool
) -> None:
    """A gateway may answer `/health` or lose it: a death also needs an engine without tokens."""
    asked: list[float] = []
    canaries: list[dict[str, Any]] = []

    def health(exchange: Exchange) -> None:
        asked.append(time.monotonic())
        if not 2 <= len(asked) < 2 + bad:
            exchange.answer(200)
        elif status is None:
            exchange.reset()
        else:
            exchange.answer(status)

    async def work(watch: Watch, _: Client) -> None:
        while len(asked) < (16 if steps else 6) and not watch.dead.is_set():
            await asyncio.sleep(0.02)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(watch.dead.wait(), 5 if dead else 0.1)

    canary = COMPLETES if steps else answering(502)
    paths = {"/health": health, "/v1/completions": keeping(canaries, canary)}
    watch = watched(FakeVllm(tmp_path / "log", paths), work, tmp_path)
    assert watch.dead.is_set() is dead
    assert (Channel.HEALTH in {sign.channel for sign in watch.signs}) is (bad == 50)
    assert len(canaries) == (bad == 50), "one canary for each time that /health fails"


@pytest.mark.parametrize("balanced", [False, True])
def test_a_restart_is_a_death_and_two_servers_are_not(tmp_path: Path, balanced: bool) -> None:
    scrapes = itertools.count(1)

    def metrics(exchange: Exchange) -> None:
        number = next(scrapes)
        other = number % 2 if balanced else number > 2
        exchange.answer(
            200, METRICS.replace("1000.0", "2000.0") if other else METRICS, "text/plain"
        )

    fake = FakeVllm(tmp_path / "log", {"/metrics": metrics})
    if balanced:
        with pytest.raises(InfraError, match="several servers answer"):
            watched(fake, until_over, tmp_path)
    else:
        assert channels_of(watched(fake, until_over, tmp_path)) == [Channel.RESTART]


@pytest.mark.parametrize(("kind", "counted"), [(ServerKind.PROCESS, 7), (ServerKind.ATTACH, 2)])
def test_preemptions_count_from_the_start_of_server_or_watch(
    tmp_path: Path, kind: ServerKind, counted: int
) -> None:
    counts = iter((5, 6))

    def metrics(exchange: Exchange) -> None:
        exchange.answer(200, f"vllm:num_preemptions_total {next(counts, 7)}.0\n", "text/plain")

    async def work(watch: Watch, _: Client) -> None:
        async with asyncio.timeout(10):
            while watch.counters.preemptions != counted:
                await asyncio.sleep(0.05)

    watched(FakeVllm(tmp_path / "log", {"/metrics": metrics}), work, tmp_path, kind=kind)


@pytest.mark.parametrize("boots", [True, False])
def test_an_exit_of_another_node_is_a_death_during_boot_only(tmp_path: Path, boots: bool) -> None:
    class TwoNodes(FakeVllm):
        async def rank_exited(self) -> tuple[int, Exit]:
            while boots and not ready.is_set():
                await asyncio.sleep(0.02)
            return 1, Exit(code=1, detail="gone", at=time.time())

    async def work(_watch: Watch, _client: Client) -> None:
        ready.set()
        await asyncio.sleep(0.1)

    ready = threading.Event()
    fake = TwoNodes(tmp_path / "log", {} if boots else {"/health": answering(503)})
    watch = watched(fake, work, tmp_path, boots=boots)
    assert channels_of(watch) == ([] if boots else [Channel.RANK])
    assert "rank-exited" in (tmp_path / "journal.jsonl").read_text(encoding="utf-8")


def test_a_channel_that_falls_over_is_not_taken_for_a_quiet_one(tmp_path: Path) -> None:
    class Broken(FakeVllm):
        def processes(self) -> tuple[int, ...]:
            raise RuntimeError("this should not happen")

    with pytest.raises(RuntimeError, match="this should not happen"):
        watched(Broken(tmp_path / "log", {}), until_over, tmp_path)  # at once, not after a limit
    assert "channel-broken" in (tmp_path / "journal.jsonl").read_text(encoding="utf-8")


# An engine that starts something: for a moment after the fork the copy bears the name of what it
# was copied from.
ENGINE = """
import os, sys, time
pid = os.fork()
if pid == 0:
    time.sleep(0.8)
    os._exit(0)
os.waitpid(pid, 0)
time.sleep(600)
"""


@pytest.mark.parametrize("channels", [[], [Channel.ENGINE_PROCESS]])
def test_an_exit_of_a_fork_is_no_exit_of_the_engine(
    tmp_path: Path, channels: list[Channel]
) -> None:
    engine = subprocess.Popen(
        ["VLLM::EngineCore", "-c", ENGINE], executable=sys.executable, stdout=subprocess.DEVNULL
    )

    class WithEngine(FakeVllm):
        looks = 0

        def processes(self) -> tuple[int, ...]:
            self.looks += 1
            below = subprocess.run(
                ["pgrep", "-P", str(engine.pid)], capture_output=True, text=True, check=False
            ).stdout.split()
            own = (engine.pid,) if engine.poll() is None else ()
            return (1, *own, *map(int, below))

    async def work(watch: Watch, _client: Client) -> None:
        while len(fake.processes()) == 3:  # until the copy is gone
            await asyncio.sleep(0.05)
        seen = fake.looks
        while fake.looks < seen + 3:  # until the watch knows that, and the engine
            await asyncio.sleep(0.05)
        if channels:
            engine.kill()
            await asyncio.wait_for(watch.dead.wait(), 60)

    fake = WithEngine(tmp_path / "log", {})
    try:
        watch = watched(fake, work, tmp_path)
    finally:
        engine.kill()
        engine.wait()
    assert channels_of(watch) == channels


FATAL = "ERROR 11-20 08:24:30 [core.py:1138] EngineCore encountered a fatal error."


def test_junk_in_the_log_is_read_past(tmp_path: Path) -> None:
    fake = FakeVllm(tmp_path / "log", {"/v1/completions": Exchange.reset})

    async def work(watch: Watch, client: Client) -> None:
        with fake.log_path.open("ab") as file:
            file.write(b"\xff\xfe\x00" * 1000 + b"\n" + b"x" * 20_000_000 + b"\r\n")
            file.write(FATAL.encode() + b"\n")
        await until_over(watch, client)

    watch = watched(fake, work, tmp_path)
    signs = [(sign.channel, sign.decisive) for sign in watch.signs]
    assert signs == [(Channel.LOG, False), (Channel.CANARY, False), (Channel.LOG, True)]


def test_a_fatal_line_of_a_working_engine_is_no_death(tmp_path: Path) -> None:
    """A log may quote such a line."""
    asked: list[dict[str, Any]] = []

    async def work(watch: Watch, _: Client) -> None:
        fake.write(FATAL)
        async with asyncio.timeout(10):
            while not asked:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert not watch.ended
        assert (watch.fatal_lines, watch.refuted_lines) == (1, 1)

    fake = FakeVllm(tmp_path / "log", {"/v1/completions": keeping(asked)})
    assert [sign.decisive for sign in watched(fake, work, tmp_path).signs] == [False]


def test_signs_after_the_first_are_kept_and_the_end_is_awaited(tmp_path: Path) -> None:
    async def work(watch: Watch, _: Client) -> None:
        fake.die(FATAL)
        await asyncio.wait_for(watch.dead.wait(), 10)
        threading.Timer(0.4, fake.ended.set).start()
        await watch.aftermath()
        assert watch.exit is not None, "it was gone well within the grace"

    fake = FakeVllm(tmp_path / "log", {})
    channels = channels_of(watched(fake, work, tmp_path))
    assert (channels[0], channels[-1]) == (Channel.LOG, Channel.PROCESS)


@pytest.mark.parametrize("ready", [False, True])
def test_a_process_that_ends_during_the_boot_is_no_sign(tmp_path: Path, ready: bool) -> None:
    """A boot starts and ends helpers; later an exit of a process named by vLLM is a death."""
    child = subprocess.Popen(
        ["VLLM::Worker", "-c", "import time; time.sleep(600)"], executable=sys.executable
    )
    looks: list[bool] = []

    class Booting(FakeVllm):
        def processes(self) -> tuple[int, ...]:
            looks.append(child.poll() is None)
            return (os.getpid(), child.pid) if looks[-1] else (os.getpid(),)

    def health(exchange: Exchange) -> None:
        # Answers once the watch has seen the child, and during the boot also that it is gone.
        exchange.answer(200 if looks.count(True) > 1 and (ready or looks.count(False) > 1) else 503)
        if not ready and looks.count(True) > 1:
            child.kill()

    async def work(watch: Watch, _: Client) -> None:
        if ready:
            child.kill()
            await asyncio.wait_for(watch.dead.wait(), 10)

    try:
        watch = watched(Booting(tmp_path / "log", {"/health": health}), work, tmp_path)
    finally:
        child.kill()
        child.wait()
    assert channels_of(watch) == ([Channel.ENGINE_PROCESS] if ready else [])


def lines_of(path: Path, writes: list[bytes], expected: int) -> list[str]:
    """Return the lines of a log that is written while it is read. It does not exist at first."""
    lines: list[str] = []

    async def read() -> None:
        async for line, written in follow(path):
            assert written > 0
            lines.extend([line] if line else [])
            if len(lines) == expected:
                return
            with path.open("ab") as file:
                file.write(writes.pop(0) if writes else b"")

    async def first() -> None:
        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        path.write_bytes(writes.pop(0))
        await asyncio.wait_for(task, 10)

    asyncio.run(first())
    return lines


def test_lines_come_whole_however_they_were_written(tmp_path: Path) -> None:
    writes = [b"one\ntw", b"o\nthree\r25%", b"\r50%\nfour\xff\n"]
    assert lines_of(tmp_path / "log", writes, 6) == [
        "one",
        "two",
        "three",
        "25%",
        "50%",
        "four\ufffd",
    ]


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    long, after = lines_of(tmp_path / "log", [b"x" * 200_000, b"y" * 200_000, b"\nnext\n"], 2)
    assert (len(long), after) == (65536, "next")


OTHER_LINES = [
    "",
    "INFO: 400 Bad Request",
    "Traceback (most recent call last):",
    "ERROR 11-20 x",
    (
        "(APIServer pid=7) INFO 11-20 08:24:30 [logger.py:39] Received request: prompt: 'why"
        " EngineCore failed to start'"
    ),
    ("(APIServer pid=7) INFO 11-20 08:24:30 [logger.py:39] EngineCore encountered a fatal error."),
    "EngineCore encountered a fatal error.",
    (
        "(APIServer pid=7) ERROR 11-20 08:24:30 [serving.py:9] bad prompt: EngineCore"
        " encountered a fatal error."
    ),
    (
        "UserWarning: resource_tracker: process died unexpectedly, relaunching.  Some resources"
        " might leak."
    ),
]


@pytest.mark.parametrize(
    ("line", "decisive"),
    [
        (
            (
                "(EngineCore pid=1) ERROR 11-20 08:24:30 [core.py:1138] EngineCore encountered a"
                " fatal error."
            ),
            True,
        ),
        ("ERROR 11-20 08:24:30 [core.py:1038] EngineCore failed to start.", True),
        (
            (
                "(Worker_TP1 pid=7) ERROR 11-20 08:24:30 [multiproc_executor.py:949] WorkerProc hit"
                " an exception."
            ),
            True,
        ),
        (
            (
                "RuntimeError: Engine core initialization failed. See root cause above. Failed core"
                " proc(s): {}"
            ),
            True,
        ),
        (
            (
                "ERROR 11-20 08:24:30 [core_client.py:642] Engine core proc EngineCore died"
                " unexpectedly, shutting down client."
            ),
            True,
        ),
        (
            (
                "WARNING 11-20 08:24:30 [core_client.py:817] [shutdown] MPClient: engine core"
                " exited unexpectedly; starting"
            ),
            True,
        ),
        (
            (
                "ERROR 11-20 08:24:30 [multiproc_executor.py:315] Worker proc VllmWorker-0 died"
                " unexpectedly (exit code: None)"
            ),
            True,
        ),
        (
            (
                "ERROR 03-01 10:00:00 core.py:291] EngineCore hit an exception: Traceback (most"
                " recent call last):"
            ),
            True,
        ),
        (
            (
                "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause"
                " above."
            ),
            True,
        ),
        ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", False),
        # Other lines are none.
        *((line, None) for line in OTHER_LINES),
    ],
)
def test_each_log_line_of_a_death_is_a_sign(line: str, decisive: bool | None) -> None:
    _, sign_decides = log_sign(line) or (None, None)
    assert sign_decides is decisive
