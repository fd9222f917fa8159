"""Cost of the harness: a boot and request of real vLLM with and without it, in turn (A B B A).

Bare: start the argv, ask `/health` ten times a second, send the request, SIGTERM, wait. Harness:
the whole command, from interpreter start to reports. Boot times vary by more than the harness
costs, so the tables also show its own processor time (without children), and the time before the
server starts and after it is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from vllm_repro.host.ports import free_port
from vllm_repro.host.processes import session_members
from vllm_repro.journal.journal import read
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Arm
from vllm_repro.scenario.workload import Request
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import site_class

VERSION = "0.28.0"
SCENARIO, ARM = "min-tokens-stop-ids", "near-miss"


@dataclass(frozen=True)
class Bare:
    """Seconds of a bare run: in all, and until the first 200."""

    wall: float
    boot: float


@dataclass(frozen=True)
class Harnessed:
    """Seconds of a harness run.

    In all, until the first 200, processor time, before the server starts, after it is gone.
    """

    wall: float
    boot: float
    cpu: float
    before: float
    after: float


def bare(launch: Launch, request: Request, log: Path) -> Bare:
    """Boot once without the harness. The server is gone when this returns or raises."""
    began = time.monotonic()
    with log.open("wb") as out:
        server = subprocess.Popen(
            launch.argv,
            env={**os.environ, **launch.env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{launch.port}", timeout=60, trust_env=False
        ) as client:
            while not _healthy(client):
                if server.poll() is not None:
                    raise RuntimeError(
                        "the server ended:"
                        f" {log.read_text(encoding='utf-8', errors='replace')[-2000:]}"
                    )
                time.sleep(0.1)
            boot = time.monotonic() - began
            model = client.get("/v1/models").json()["data"][0]["id"]
            body = {
                "model": model,
                "prompt": request.prompt,
                "max_tokens": request.max_tokens,
                "temperature": 0,
                "stream": request.stream,
                **request.fields,
            }
            client.post(request.endpoint, json=body).raise_for_status()
        server.terminate()
        server.wait()
        # workers outlive the API server, and the harness waits for them
        while session_members(server.pid):
            time.sleep(0.05)
        return Bare(time.monotonic() - began, boot)
    finally:
        for process in session_members(server.pid):
            with contextlib.suppress(psutil.Error):  # ended by itself
                process.kill()
        server.wait()


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def harnessed(out: Path) -> Harnessed:
    """Run the command once. Raise `RuntimeError` if it fails."""
    began, began_at = time.monotonic(), time.time()
    with (out / "output.txt").open("wb") as output:
        words = [
            "run",
            SCENARIO,
            "--server",
            "process",
            "--vllm",
            VERSION,
            "--arm",
            ARM,
            "--expect",
            "any",
        ]
        run = subprocess.Popen(
            [sys.executable, "-m", "vllm_repro", *words, "--out", str(out)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)
        wall, ended_at = time.monotonic() - began, time.time()
        # A zombie still has its times, without those of its children.
        times = psutil.Process(run.pid).cpu_times()
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
        run.wait()
    recording = read(next(out.glob(f"{SCENARIO}/2*/journal.jsonl")))
    started, ready, ended = (
        recording.first(event) for event in ("server-started", "ready", "trial-ended")
    )
    if started is None or ready is None or ended is None:
        raise RuntimeError((out / "output.txt").read_text(encoding="utf-8"))
    return Harnessed(
        wall,
        float(ready["boot_s"]),
        times.user + times.system,
        started.t - began_at,
        ended_at - ended.t,
    )


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return median and range."""
    return (
        f"{statistics.median(values):.{digits}f}"
        f" ({min(values):.{digits}f}..{max(values):.{digits}f})"
    )


def table(a: Sequence[Bare], b: Sequence[Harnessed]) -> str:
    pairs = [100 * (with_it.wall / without.wall - 1) for without, with_it in zip(a, b, strict=True)]
    rows = [
        "| seconds: median (min..max) | bare | harness |",
        "|---|---|---|",
        f"| wall, all of it | {spread([o.wall for o in a])} | {spread([o.wall for o in b])} |",
        (
            f"| of that the boot, to the first 200 | {spread([o.boot for o in a])} |"
            f" {spread([o.boot for o in b])} |"
        ),
        (
            f"| of that the rest | {spread([o.wall - o.boot for o in a])} |"
            f" {spread([o.wall - o.boot for o in b])} |"
        ),
        f"| before the server starts | | {spread([o.before for o in b])} |",
        f"| after it is gone | | {spread([o.after for o in b])} |",
        f"| processor time of the harness's process | | {spread([o.cpu for o in b])} |",
        f"| wall, harness over bare, pair by pair, % | | {spread(pairs, 1)} |",
    ]
    return "\n".join([f"n={len(a)} each.", "", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-n", type=int, default=6, metavar="N", help="boots of each; an even number"
    )
    given = parser.parse_args()
    if ReleaseCache().get(Source(release=VERSION)) is None:
        print(f"not measured: vLLM {VERSION} is not in the cache; a `vllm-repro run` installs it")
        return
    scenario = find(SCENARIO)
    arm: Arm = next(arm for arm in scenario.arms if arm.name == ARM)
    site = site_class(ServerKind.PROCESS)(
        ServerOptions(vllm=Source(release=VERSION)), scenario, print
    )
    (request,) = (step for step in scenario.workload_of(arm) if isinstance(step, Request))
    a: list[Bare] = []
    b: list[Harnessed] = []
    for turn in range(given.n):
        for which in "AB" if turn % 2 == 0 else "BA":
            with tempfile.TemporaryDirectory(prefix="vllm-repro-bench-") as folder:
                if which == "A":
                    a.append(
                        bare(
                            site.launch(scenario, arm, free_port()),
                            request,
                            Path(folder) / "server.log",
                        )
                    )
                else:
                    b.append(harnessed(Path(folder)))
    print(f"\n### The harness's own cost, vLLM {VERSION} as a process\n")
    print(table(a, b), flush=True)


if __name__ == "__main__":
    main()
