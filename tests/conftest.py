"""Fixtures that several modules share."""

from __future__ import annotations

import fcntl
import gc
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.browser import browser as browser
from tests.browser import opened as opened
from tests.commands import SHORT_WAITS
from tests.patched_rehearsal import diffs as diffs
from tests.report_examples import check_files
from vllm_repro import cli
from vllm_repro.host import machine
from vllm_repro.servers.orphans import sweep

GPU_STUBS = Path(__file__).parents[1] / "fixtures" / "gpu_stubs"

# How long an example takes says more of the machine, which has other work, than of the code. A test
# draws the same examples in each run; the nightly job looks for others with `--hypothesis-profile
# random`.
settings.register_profile(
    "same-examples",
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "random", settings.get_profile("same-examples"), derandomize=False, max_examples=400
)
settings.load_profile("same-examples")
os.environ.pop("TMPDIR", None)  # it has a name in what is printed, as of a user who sets it
os.environ["COLUMNS"] = "200"  # xdist and pytest alone set different widths
# Scripts that tests start have this Python, as in an activated environment; pyenv's takes 70 ms.
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@dataclass(frozen=True)
class Done:
    """Exit status, both outputs and report folder of a finished `vllm-repro`."""

    status: int
    out: str
    err: str
    folder: Path | None
    # judged again from an earlier run's journal (tests/live/kept.py)
    kept: bool = False

    @property
    def run(self) -> Path:
        """Folder of the run that the command must have made."""
        assert self.folder is not None, self.err
        return self.folder

    @property
    def report(self) -> Any:
        """Content of `report.json`."""
        return json.loads((self.run / "report.json").read_text(encoding="utf-8"))

    @property
    def trial(self) -> Any:
        """First trial of the first arm in `report.json`."""
        return self.report["arms"][0]["trials"][0]

    @property
    def outcomes(self) -> dict[str, list[str]]:
        """Outcomes of the trials by arm."""
        arms = self.report["arms"]
        return {arm["name"]: [trial["outcome"] for trial in arm["trials"]] for arm in arms}


Harness = Callable[..., Done]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the workers of pytest-xdist play the tests of boots one after another.

    They wait more than they compute: side by side, at the end, they would leave the cores idle.
    `worksteal` gives each worker one piece of the list.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    boots = [item for item in items if "running" in item.path.parts]
    others = [item for item in items if "running" not in item.path.parts]
    begin, end = _pieces(len(others), workers**2), _pieces(len(boots), workers)
    items.clear()
    for worker in range(workers):
        first = workers * worker
        items += others[begin[first] : begin[first + worker]]
        items += boots[end[worker] : end[worker + 1]]
        items += others[begin[first + worker] : begin[first + workers]]


def _pieces(length: int, count: int) -> list[int]:
    """Return where each of `count` equal pieces begins, and `length`."""
    return [length * at // count for at in range(count + 1)]


def pytest_collection_finish() -> None:
    """Keep what collection made out of the collector, which would walk it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked `alone` while no other docker or live test runs on any worker.

    One file is locked shared or exclusive; a second one queues the workers, so that later tests do
    not overtake a waiting one.
    """
    if not {"docker", "live"} & set(item.keywords):
        return (yield)
    folder = Path(__file__).parent
    with (folder / "conftest.py").open("rb") as room:
        with (folder / "__init__.py").open("rb") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if "alone" in item.keywords else fcntl.LOCK_SH)
        return (yield)


_STATES = count()


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give each test its own state folder, so that tests do not remove each other's processes."""
    # made by the tests that need it, which are few
    state = tmp_path_factory.getbasetemp() / f"state-{next(_STATES)}"
    # its own, so that a test's patches are undone by the end
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", str(state))
        environment.setenv("VLLM_REPRO_SCENARIOS", "")  # `--scenarios` changes it in this process
        # the rehearsal engine waits as long as vLLM does: 5 s
        environment.setenv("VLLM_WATCHDOG_TIME_S", "0.1")
        yield state
        if state.exists():
            sweep()


class StubGpus:
    """Put the stub of nvidia-smi on PATH, with four cards unless a test changes them."""

    def __init__(self, folder: Path) -> None:
        self.servers = folder / "servers"
        self.servers.mkdir()
        self._file = folder / "cards.json"
        self.say()

    def say(self, **state: object) -> None:
        """Change what the stub answers; its file lists the fields."""
        machine.forget_failure()
        self._file.write_text(json.dumps({"servers": str(self.servers)} | state), encoding="utf-8")


@pytest.fixture
def stub_gpus(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StubGpus]:
    folder = tmp_path_factory.mktemp("gpus")
    (folder / "nvidia-smi").symlink_to(GPU_STUBS / "nvidia-smi")
    (folder / "dmesg").symlink_to("/bin/true")
    (folder / "python3").symlink_to(sys.executable)  # of the stubs: pyenv's takes 0.1 s to start
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("STUB_GPUS", str(folder / "cards.json"))
    monkeypatch.setenv("STUB_SERVERS", str(folder / "servers"))
    monkeypatch.setenv("TMPDIR", str(folder))  # of the locks
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("vllm_repro.host.gpu_lease._POLL_S", 0.1)  # each poll starts the stub
    yield StubGpus(folder)
    machine.forget_failure()


def _reported(out: Path) -> dict[Path, int]:
    """Return the newest run of each scenario and the time of its report."""
    runs = [latest.resolve() for latest in sorted(out.glob("*/latest"))]
    return {
        run: (run / "report.json").stat().st_mtime_ns
        for run in runs
        if (run / "report.json").exists()
    }


@pytest.fixture
def anyio_backend() -> str:
    """Run tests that are coroutines (`pytest.mark.anyio`) on asyncio alone."""
    return "asyncio"


@pytest.fixture
def sigint() -> Iterator[None]:
    """Raise `KeyboardInterrupt` for SIGINT, which a worker of pytest-xdist ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # an interrupt in a callback of the collector, such as Hypothesis's, is lost
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits that the verdicts of a fake need not."""
    for name, value in SHORT_WAITS.items():
        monkeypatch.setattr(name, value)
    # a fake has no stacks worth py-spy's processor time
    monkeypatch.setattr("vllm_repro_diagnosis.live.stacks_of", lambda _: ())


@pytest.fixture
def harness(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    short_waits: None,  # noqa: ARG001  # a fixture, used for its effect
) -> Harness:
    """Return a function that runs the command in this process; reports go to `tmp_path/reports`."""

    def call(*words: str, env: Mapping[str, str] | None = None, stdin: str | None = None) -> Done:
        out = tmp_path / "reports"
        before = _reported(out)
        encoding = (env or {}).get("PYTHONIOENCODING", "utf-8")
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
        handlers = {
            number: signal.getsignal(number)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        }
        with monkeypatch.context() as patched:
            for name, value in {
                "VLLM_REPRO_REPORTS": str(out),
                "VLLM_REPRO_SCENARIOS": "",
                "CI": "true",
                **(env or {}),
            }.items():
                patched.setenv(name, value)
            patched.setattr(sys, "stdout", streams[0])
            patched.setattr(sys, "stderr", streams[1])
            patched.setattr(
                sys, "stdin", io.TextIOWrapper(io.BytesIO((stdin or "").encode()), encoding="utf-8")
            )
            try:
                status = cli.main(words)
            except SystemExit as left:
                status = int(left.code or 0)
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        texts = []
        for stream in streams:
            stream.flush()
            texts.append(stream.buffer.getvalue().decode(encoding))
        check_files(out)
        # Not the report of an earlier call: a test that looked at that one could not fail.
        new = [
            folder for folder, written in _reported(out).items() if before.get(folder) != written
        ]
        return Done(status, texts[0], texts[1], new[0] if new else None)

    return call
