"""Readings of a running server: processes from /proc, `/health` and `/metrics`, Python stacks.

It only reads: no signal is sent and no process is paused. `py-spy` adds the stacks if it is
installed and allowed to read the processes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from vllm_repro_diagnosis.metrics import MetricsReading, read_metrics
from vllm_repro_diagnosis.standstill import ProcessReading, Reading, Role, Stack

_WINDOW, _TICK = 5.5, 0.5
"""Seconds from the first reading to the last, and between two readings.

vLLM closes a connection without a request after 5 s: one that stays open waits for an answer.
"""
_ANSWER = 2.0
"""Seconds for an answer of the server. `/health` of a living API server takes milliseconds."""
_STACKS, _BETWEEN = 2.0, 1.2
"""Seconds for one py-spy, which takes 0.1 s on an idle machine, and between two of a process."""
_TICKS = os.sysconf("SC_CLK_TCK")
_CHILD = ("multiprocessing.", "VLLM::")
"""Parts of the command lines of processes that vLLM started."""
_MOST_STACKS = 6
"""Processes whose stacks are read: API server, EngineCore and the first workers."""


_Sample = tuple[str, float, float, int]
"""State of the main thread as in ps; processor seconds of all threads, and of the main one; how
often that went to sleep by itself."""


def command_of(pid: int) -> str:
    """Return the command line of a process; "" if it is gone."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        return text.replace("\0", " ").strip()
    return ""


def _stat(path: str) -> list[str]:
    """Return the fields of a /proc stat file behind the process's name, the state first.

    Raises `OSError` if the process is gone.
    """
    return Path(path).read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _parent(pid: int) -> int:
    """Return the pid of a process's parent; 0 if the process is gone."""
    with contextlib.suppress(OSError, IndexError):
        return int(_stat(f"/proc/{pid}/stat")[1])
    return 0


def _sample(pid: int) -> _Sample | None:
    """Return the state, processor seconds and sleeps of a process now; None if it is gone."""
    with contextlib.suppress(OSError, IndexError, ValueError):  # it ended
        whole, main = _stat(f"/proc/{pid}/stat"), _stat(f"/proc/{pid}/task/{pid}/stat")
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        switches = int(status.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0])
        used, main_used = ((int(fields[11]) + int(fields[12])) / _TICKS for fields in (whole, main))
        return main[0], used, main_used, switches
    return None


def _sockets_at(port: int, state: str, pid: int | str = "self") -> Iterator[list[str]]:
    """Yield the /proc fields of TCP sockets at a local port, as a process sees them.

    state: as in /proc: "0A" listens, "01" is connected.
    """
    local = re.compile(rf"\s*\d+: \w+:{port:04X} \w+:\w+ {state} ")
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # ended, or no IPv6
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines():
                if local.match(line):
                    yield line.split()


def listeners(port: int) -> list[int]:
    """Return the pids on this host that listen on a TCP port, as far as this user may see them."""
    inodes = {f"socket:[{fields[9]}]" for fields in _sockets_at(port, "0A")}
    return [pid for pid in _pids() if inodes & _files_of(pid)] if inodes else []


def _clients(port: int, pid: int) -> dict[str, int]:
    """Return the addresses of a port's clients, with the bytes that each has not taken yet.

    pid: a process that sees the connections.
    """
    rows = _sockets_at(port, "01", pid)
    return {fields[2]: int(fields[4].partition(":")[0], 16) for fields in rows}


def _pids() -> list[int]:
    """Return the pids of all processes of this machine, in order."""
    return sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _files_of(pid: int) -> set[str]:
    """Return what a process has open: paths, and sockets as `socket:[INODE]`; empty if hidden."""
    links = set()
    with contextlib.suppress(OSError):  # ended, or not ours to see
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.add(str(descriptor.readlink()))
    return links


def tree_of(pid: int) -> list[int]:
    """Return the pids of the server that a process belongs to, the API server's first.

    Empty if the process is gone.
    """
    while parent := _parent(pid):
        command = command_of(pid)
        if parent == 1 and "vllm" not in command_of(1):  # in a container the server may be 1
            break
        # a fork has its parent's command line until vLLM names it
        if not any(part in command for part in _CHILD) and command != command_of(parent):
            break
        pid = parent
    tree = _descendants([pid])
    # a shell or another program may have started the API server
    engines = (each for each in tree if role_of(command_of(each)) is Role.ENGINE)
    return next((_descendants([_parent(engine)]) for engine in engines), tree)


def _descendants(pids: Sequence[int]) -> list[int]:
    """Return these pids and those of all processes below them, at any depth."""
    parents = {each: _parent(each) for each in _pids()}
    tree = [pid for pid in pids if pid in parents]
    for above in tree:
        tree += [each for each, parent in parents.items() if parent == above]
    return tree


_ROLES = {
    "VLLM::EngineCore": Role.ENGINE,
    "VLLM::Worker": Role.WORKER,
    "VLLM::A": Role.API,  # ApiServer_0, APIServer_0
}


def role_of(command: str) -> Role:
    """Return the role of a server's process, from the name that vLLM gives it."""
    return next((role for name, role in _ROLES.items() if command.startswith(name)), Role.OTHER)


def _port(url: str) -> int:
    """Return the port of a URL; 80 or 443 if it names none."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def is_local(url: str) -> bool:
    """Return True if the URL's host is this machine: only then can its address be bound."""
    with contextlib.suppress(OSError):
        host = urlsplit(url).hostname
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
            return True
    return False


def _url_of(pids: Sequence[int]) -> str:
    """Return the URL by `--host` and `--port` of the first process; "" if none listens there."""
    options = dict(re.findall(r"--(host|port|ssl-certfile)[ =](\S+)", command_of(pids[0])))
    port, host = options.get("port", "8000"), options.get("host", "")
    if not set(listeners(int(port))) & set(pids):
        return ""
    host = host if host[:1].isdigit() and host != "0.0.0.0" else "127.0.0.1"
    return f"http{'s' * ('ssl-certfile' in options)}://{host}:{port}"


# a proxy of the environment cannot reach this host
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _get(url: str) -> tuple[str, str]:
    """Get a URL within 2 s; return (HTTP status, text of the answer).

    Without an answer, the reason is in place of the status. The text of an error is "".
    """
    try:
        with _DIRECT.open(url, timeout=_ANSWER) as answer:
            return str(answer.status), answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return str(error.code), ""
    except (OSError, ValueError, http.client.HTTPException) as error:
        text = str(getattr(error, "reason", error))
        return ("no answer" if "timed out" in text else text), ""


def stacks_of(pid: int) -> tuple[Stack, ...]:
    """Return the Python stacks of a process as py-spy reads them, outermost frame first.

    It takes up to 2 s. Empty if py-spy is missing or fails.
    """
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.is_file() else shutil.which("py-spy")
    if program is None:
        return ()
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError, LookupError):
        words = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        done = subprocess.run(words, capture_output=True, timeout=_STACKS, check=False)
        return tuple(
            Stack(
                thread=thread["thread_name"] or str(thread["thread_id"]),
                frames=tuple(
                    f"{frame['short_filename'] or frame['filename']}:{frame['name']}"
                    for frame in reversed(thread["frames"])
                ),
            )
            for thread in json.loads(done.stdout)
        )
    return ()


def _metrics(url: str, readings: list[MetricsReading | None]) -> None:
    """Append a reading of the server's `/metrics` to `readings`; None if it cannot be read."""
    status, text = _get(f"{url}/metrics")
    readings.append(read_metrics(text) if status == "200" else None)


def observe(url: str = "", pids: Sequence[int] = (), waited: float = 0.0) -> Reading:
    """Watch a running server for 5.5 s: processes, Python stacks, `/health` and `/metrics`.

    url: its root; found from its processes if it is empty. pids: its processes, the API server's
    first; found from the URL if there are none. waited: seconds without an answer so far.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not pids and is_local(url):
        listening = listeners(_port(url))
        pids = tree_of(listening[0]) if listening else ()
        if not any("vllm" in command_of(pid).lower() for pid in pids):
            pids = ()
    url = url or (_url_of(pids) if pids else "")
    clients = _clients(_port(url), pids[0]) if pids and url else {}
    metrics: list[MetricsReading | None] = []
    series: dict[int, list[_Sample]] = {pid: [] for pid in pids}
    roles = {pid: role_of(command_of(pid)) for pid in pids}
    if pids and roles[pids[0]] is Role.OTHER:
        roles[pids[0]] = Role.API
    traced = [pid for pid in pids if roles[pid] is not Role.OTHER][:_MOST_STACKS]
    dumps: dict[int, list[Future[tuple[Stack, ...]]]] = {pid: [] for pid in traced}
    with ThreadPoolExecutor(2 * _MOST_STACKS) as pool:
        health, version = (pool.submit(_get, f"{url}/{path}") for path in ("health", "version"))
        page: Future[object] | None = None
        began = time.monotonic()
        while (passed := time.monotonic() - began) < _WINDOW:
            if url and (page is None or page.done()):
                page = pool.submit(_metrics, url, metrics)
            # a worker may start a compiler and wait for it
            for pid in {*series, *_descendants(pids[:1])}:
                if sample := _sample(pid):
                    series.setdefault(pid, []).append(sample)
            for pid, futures in dumps.items():
                # the next when the one before is done, at most every `_BETWEEN` seconds
                due = _BETWEEN * len(futures) <= passed < _WINDOW - _STACKS / 2
                if due and all(future.done() for future in futures):
                    futures.append(pool.submit(stacks_of, pid))
            time.sleep(_TICK)
        # the last readings, however late the loop was
        for pid, samples in series.items():
            samples += filter(None, [_sample(pid)])
        passed = time.monotonic() - began
        if url:
            _metrics(url, metrics)
    still = _clients(_port(url), pids[0]) if clients else {}
    release = ""
    with contextlib.suppress(ValueError, AttributeError):  # no answer, or of another program
        release = str(json.loads(version.result()[1]).get("version", ""))
    return Reading(
        url=url,
        seconds=passed,
        health=health.result()[0] if url else "",
        version=release,
        waited=waited,
        clients=len(clients.keys() & still.keys()),
        unread=sum(bool(number and still.get(client)) for client, number in clients.items()),
        metrics=tuple(metrics),
        command=command_of(pids[0]) if pids else "",
        processes=tuple(
            _process(
                pid,
                roles.get(pid, Role.OTHER),
                samples,
                [each.result() for each in dumps.get(pid, [])],
                passed,
            )
            for pid, samples in series.items()
            if samples
        ),
    )


def _process(
    pid: int,
    role: Role,
    samples: Sequence[_Sample],
    dumps: Iterable[tuple[Stack, ...]],
    seconds: float,
) -> ProcessReading:
    """Return the readings of a process over `seconds`, from one or more samples and its stacks."""
    (_, *before), (_, *after) = samples[0], samples[-1]
    used, main_used, switches = (
        (late - early) / seconds for early, late in zip(before, after, strict=True)
    )
    wait = ""
    with contextlib.suppress(OSError):
        wait = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii").strip("0")
    return ProcessReading(
        pid=pid,
        name=command_of(pid).split(" ")[0].rpartition("/")[2],
        role=role,
        states="".join(sample[0] for sample in samples),
        cpu=used,
        main_cpu=main_used,
        switches=switches,
        waits_in=wait,
        gpu=any(link.startswith("/dev/nvidia") for link in _files_of(pid)),
        stacks=tuple(dump for dump in dumps if dump),
    )
