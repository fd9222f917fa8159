"""Recorded logs of real servers, pasted tracebacks, and the expected diagnosis of each."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from vllm_repro_diagnosis.diagnosis import Diagnosis, Phase
from vllm_repro_diagnosis.log_text import read_lines
from vllm_repro_diagnosis.tracebacks import Finder, Raised

DATA = Path(__file__).parents[1] / "data"


@cache
def recording(name: str) -> str:
    return (DATA / "recordings" / f"{name}.log").read_bytes().decode("utf-8", "replace")


def pasted(name: str) -> str:
    return (DATA / "pasted" / f"{name}.txt").read_text(encoding="utf-8")


def find_raised(text: str) -> tuple[Raised, ...]:
    finder = Finder()
    for line in read_lines(text):
        finder.feed(line)
    return finder.finish()


def inner(diagnosis: Diagnosis) -> str | None:
    return diagnosis.frames[-1].function if diagnosis.frames else None


# Every recording of a real server: died, phase, exception, innermost function.
REAL: dict[str, tuple[bool | None, Phase | None, str | None, str | None]] = {
    # stopped as asked, or never in trouble
    "v0.20.2-boot": (False, Phase.SHUTDOWN, None, None),
    "v0.20.2-sigterm-inflight": (False, Phase.SHUTDOWN, None, None),
    "v0.20.2-sigterm-group": (False, Phase.SHUTDOWN, None, None),
    "v0.20.2-sigint-group": (False, Phase.SHUTDOWN, None, None),
    "v0.28.0-sigterm": (False, Phase.SHUTDOWN, None, None),
    "v0.29.0-sigterm": (False, Phase.SHUTDOWN, None, None),
    "v0.32.0-boot": (False, Phase.SHUTDOWN, None, None),
    "v0.32.0-sigterm-inflight": (False, Phase.SHUTDOWN, None, None),
    "v0.32.0-sigint-group": (False, Phase.SHUTDOWN, None, None),
    "v0.32.0-two-ranks-second-killed-head": (False, Phase.SHUTDOWN, None, None),
    "v0.32.0-two-ranks-worker1-stopped-rank1": (False, Phase.SHUTDOWN, None, None),
    "v0.28.0-unknown-flag": (False, Phase.BOOT, None, None),
    # exceptions
    "v0.20.2-fault-workspace-uni-inflight": (True, Phase.REQUEST, "AssertionError", "_ensure_workspace_size"),
    "v0.20.2-workspace": (True, Phase.REQUEST, "AssertionError", "_ensure_workspace_size"),
    "v0.28.0-min-tokens": (True, Phase.REQUEST, "IndexError", "apply"),
    "v0.28.0-min-tokens-stream": (True, Phase.REQUEST, "IndexError", "apply"),
    "v0.32.0-fault-scheduler-inflight": (True, Phase.REQUEST, "AssertionError", "schedule"),
    "v0.32.0-fault-workspace-mp-inflight": (True, Phase.REQUEST, "AssertionError", "_ensure_workspace_size"),
    "v0.32.0-workspace-uni": (True, Phase.REQUEST, "AssertionError", "_ensure_workspace_size"),
    "v0.32.0-oom": (True, Phase.REQUEST, "torch.OutOfMemoryError", "_model_forward"),
    "v0.32.0-two-ranks-worker1-killed-head": (True, Phase.REQUEST, "RuntimeError", "all_reduce"),
    # a process was killed
    "v0.20.2-killed-idle": (True, Phase.IDLE, None, None),
    "v0.20.2-killed-inflight": (True, Phase.REQUEST, None, None),
    "v0.20.2-keepalive": (True, Phase.REQUEST, None, None),
    "v0.32.0-killed-idle": (True, Phase.IDLE, None, None),
    "v0.32.0-killed-inflight": (True, Phase.REQUEST, None, None),
    "v0.32.0-killed-streams": (True, Phase.REQUEST, None, None),
    "v0.32.0-keepalive": (True, Phase.REQUEST, None, None),
    "v0.32.0-segv-engine": (True, Phase.REQUEST, None, None),
    "v0.20.2-killed-worker": (True, Phase.REQUEST, None, None),
    "v0.32.0-killed-worker": (True, Phase.REQUEST, None, None),
    "v0.32.0-killed-worker-idle": (True, Phase.IDLE, None, None),
    "v0.32.0-two-ranks-worker1-killed-rank1": (True, None, None, None),
    # never came up
    "v0.28.0-no-config": (True, Phase.BOOT, "pydantic_core._pydantic_core.ValidationError", "__init__"),
    "v0.32.0-boot-killed": (True, Phase.BOOT, "RuntimeError", "wait_for_engine_startup"),
    "v0.32.0-boot-no-blocks": (True, Phase.BOOT, "ValueError", "_check_enough_kv_cache_memory"),
    # a log cannot tell
    "v0.20.2-hang": (None, Phase.REQUEST, None, None),
    "v0.32.0-hang": (None, Phase.REQUEST, None, None),
    "v0.20.2-api-killed": (None, Phase.IDLE, None, None),
    "v0.32.0-api-killed": (None, Phase.IDLE, None, None),
    "v0.32.0-sigterm-engine": (None, Phase.IDLE, None, None),
    "v0.32.0-two-ranks-second-killed-rank1": (None, None, None, None),
    "v0.32.0-two-ranks-worker1-stopped-head": (None, Phase.REQUEST, None, None),
}
DEATHS_WITH_ROOT = [name for name, (died, _, exception, _) in REAL.items() if died and exception]


def seen(diagnosis: Diagnosis) -> tuple[bool | None, Phase | None, str | None, str | None]:
    return diagnosis.died, diagnosis.phase, diagnosis.exception, inner(diagnosis)


def until(name: str, text: str) -> str:
    whole = recording(name)
    return whole[: whole.index(text)]
