"""Attached server: a run watches it, but neither starts nor stops it.

Only its log names the cause of a crash. It is the file that the listening process writes its output
to, or the log of the container that publishes the port. `--log FILE` names it if neither is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from vllm_repro.client.client import Client, HTTPError, is_rehearsal, release_of
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.base import Exit, Server, ServerFacts
from vllm_repro.servers.docker_engine import Engine, close, connect, engine_errors
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import Notify, Offer, Site
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_diagnosis.boot_facts import evidence_in
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_diagnosis.live import listeners
from vllm_repro_diagnosis.log_text import read_lines

_BOOT_LINES = (b"vLLM API server version ", b"non-default args: ")
"""Texts of the lines with which a boot of vLLM's API server begins."""
_BOOT_BYTES = 4_000_000
"""Bytes of the log that are read to find what the server runs on."""
_LOCAL = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}


def _local_port(url: str) -> int | None:
    """Return the URL's port; None if it names none, or a host that is not this one."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return port if parts.hostname in _LOCAL else None


def find_process(url: str) -> int | None:
    """Return the pid that listens on the URL's port; None if this user cannot see one here."""
    port = _local_port(url)
    return next(iter(listeners(port)), None) if port else None


def find_log(pid: int | None) -> Path | None:
    """Return the regular file that a process writes its output to.

    Return None without a process, or if it has none that this user can read.
    """
    if pid is None:
        return None
    for descriptor in (2, 1):
        with contextlib.suppress(OSError):  # ended, or not ours to see
            target = Path(f"/proc/{pid}/fd/{descriptor}").readlink()
            if target.is_file() and os.access(target, os.R_OK):
                return target
    return None


def own_lines_begin(source: Path, pid: int | None) -> int:
    """Return the byte offset of this server's first line in a log that others may have used.

    It is the first line of the last boot with `pid`, else the first line with `pid`, else the first
    line of the last boot. Without any of these the writer of the file is unknown, so only new lines
    count: return the file's size.
    """
    mark = f"pid={pid})".encode()
    offset = 0
    first_own = last_boot = own_boot = None
    with source.open("rb") as file:
        for line in file:
            boots = any(words in line for words in _BOOT_LINES)
            last_boot = offset if boots else last_boot
            if mark in line:
                first_own = offset if first_own is None else first_own
                own_boot = offset if boots else own_boot
            offset += len(line)
    begins = (own_boot, first_own, last_boot)
    return next((begin for begin in begins if begin is not None), offset)


async def identify(url: str) -> tuple[str, bool]:
    """Return the version of the vLLM at `url`, and True if it is the rehearsal, an imitation.

    Raises `UsageError` if it is no vLLM or a run cannot watch it, and `InfraError` if no server
    responds.
    """
    hint = "name the server's root, such as --url http://127.0.0.1:8000"
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UsageError(f"{url!r} is not an http URL", hint=hint)
    async with Client(url) as client:
        try:
            response = await client.get("/version", timeout=30.0)
        except (HTTPError, OSError) as error:
            raise InfraError(
                f"no server responds at {url}: {error}", hint="is the server up? " + hint
            ) from error
        try:
            version = release_of(response)
            models = await client.get("/v1/models", timeout=30.0)
            if models.status_code not in (200, 401) or response.status_code != 200:
                raise ValueError(models.status_code)
        except (ValueError, KeyError, TypeError, HTTPError) as error:
            raise UsageError(
                f"{url} responds, but it is not a vLLM: /version gave {response.status_code}"
                f" {response.text[:80]!r}",
                hint=hint,
            ) from error
        with contextlib.suppress(HTTPError):  # a dead engine: the run shows it
            health = (await client.get("/health", timeout=30.0)).status_code
            if 400 <= health < 500:
                text = (
                    f"{url} answers {health} to /health, by which a run sees whether the engine"
                    " lives"
                )
                raise UsageError(text, hint="name the vLLM itself, not a gateway before it")
        return version, is_rehearsal(response)


class AttachServer(Server):
    """A server that already runs at `url`: a trial only watches it and copies its log.

    log: file of the server's log, in which older lines may be about other clients' requests; None
    to find it. copy_to: the log of the trial.
    """

    def __init__(self, url: str, *, log: Path | None, copy_to: Path, evidence: Evidence) -> None:
        self.base_url = url.rstrip("/")
        self.evidence = evidence
        self.pid = find_process(url)
        self.source = log or find_log(self.pid)
        self.log_path = copy_to
        self._stop = threading.Event()
        self._copier: threading.Thread | None = None
        self._process = psutil.Process(self.pid) if self.pid else None

    async def start(self) -> ServerFacts:
        """Begin to copy the log of the running server for the trial, and return its pid."""
        assert self.log_path is not None
        self.log_path.touch()
        if self.source is not None:
            chunks = self._growth(self.source)
        else:
            chunks = await asyncio.to_thread(_container_log, self.base_url, follow=True)
        self._copier = threading.Thread(
            target=self._copy, args=(chunks, self.log_path), daemon=True
        )
        self._copier.start()
        return ServerFacts(kind=ServerKind.ATTACH, evidence=self.evidence, argv=(), pid=self.pid)

    def _copy(self, chunks: Iterator[bytes], log: Path) -> None:
        """Write the `chunks` of the server's log to the trial's `log`, until the trial stops."""
        with log.open("ab", buffering=0) as write:
            for chunk in chunks:
                write.write(chunk)
                if self.source is None and self._stop.is_set():
                    return

    def _growth(self, source: Path) -> Iterator[bytes]:
        """Yield this server's part of the log file, then what is appended, until `stop`."""
        with source.open("rb") as read:
            read.seek(own_lines_begin(source, self.pid))
            while True:
                stopping = self._stop.is_set()
                if chunk := read.read(1_000_000):
                    yield chunk
                elif os.fstat(read.fileno()).st_size < read.tell():
                    read.seek(0)  # the file was truncated, for example by logrotate
                elif stopping:
                    return
                else:
                    time.sleep(0.02)

    async def exited(self) -> Exit:
        """Return when the server's process is gone; never if no process is seen on this host."""
        while self._process is None:
            await asyncio.sleep(3600)  # no process to watch on this host, only HTTP
        with contextlib.suppress(psutil.Error):  # it has ended
            while self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.05)
        return Exit(
            code=None, detail=f"the server's process (pid {self.pid}) is gone", at=time.time()
        )

    async def stop(self) -> None:
        """End the copy of the log within two seconds; the server itself keeps running."""
        self._stop.set()
        if self._copier is not None:
            await asyncio.shield(asyncio.to_thread(self._copier.join, 2.0))

    def processes(self) -> tuple[int, ...]:
        """Return the server's pids, the listening one first; empty if none is seen on this host."""
        if self._process is None:
            return ()
        with contextlib.suppress(psutil.Error):  # it has ended
            return (
                self._process.pid,
                *(child.pid for child in self._process.children(recursive=True)),
            )
        return ()


def _container_log(url: str, *, follow: bool) -> Iterator[bytes]:
    """Return, in pieces, the log of the container that publishes the URL's port.

    Empty if none does or no Docker Engine answers. follow: go on with what is logged later.
    """
    port = _local_port(url)
    if port is None:
        return iter(())
    try:
        engine = connect()
    except InfraError:
        return iter(())
    return _read_container(engine, port, follow=follow)


def _read_container(engine: Engine, port: int, *, follow: bool) -> Iterator[bytes]:
    """Yield, in pieces, the log of the container that publishes `port`, since its last start.

    If the Docker Engine closes the stream, only the log ends: HTTP still shows the server's state.
    """
    stream = None
    with contextlib.closing(engine), contextlib.suppress(*engine_errors()):
        try:
            for container in engine.client.containers.list(filters={"publish": str(port)})[:1]:
                # A restarted container keeps the log of its earlier starts, crashes included.
                started = datetime.fromisoformat(container.attrs["State"]["StartedAt"]).timestamp()
                stream = container.logs(stream=True, follow=follow, since=started)
                yield from stream
        finally:
            close(stream)


def _boot_text(url: str, log: Path | None) -> str:
    """Return the first 4 MB of the server's log since its boot; empty if there is no log."""
    pid = find_process(url)
    source = log or find_log(pid)
    if source is not None:
        with source.open("rb") as file:
            file.seek(own_lines_begin(source, pid))
            return file.read(_BOOT_BYTES).decode(errors="replace")
    text = b""
    for chunk in _container_log(url, follow=False):
        text += chunk
        if len(text) > _BOOT_BYTES:
            break
    return text.decode(errors="replace")


def evidence_of(version: str | None, log: str) -> Evidence:
    """Return the kind of evidence (GPU, CPU, lab …) of a running server, by its log or version.

    Return `Evidence.UNKNOWN` if neither shows it. The needs of the scenario do not count: the
    server may run elsewhere.
    """
    seen = evidence_in(read_lines(log))
    return Evidence.CPU if seen is Evidence.UNKNOWN and "+cpu" in (version or "") else seen


class AttachSite(Site):
    """The server of `--server attach`: it runs already, and every trial of the run uses it.

    Opening it asks the server what it is, so that a rehearsal cannot pass for vLLM, and reads its
    log. rehearsal: True if it is one; None to ask it.

    Raises `UsageError` without a URL, and like `identify`.
    """

    kind = ServerKind.ATTACH
    unchangeable = (
        "the source of a server that already runs cannot be changed: an arm that does so needs"
        " docker, process or the lab"
    )

    def __init__(
        self,
        options: ServerOptions,
        scenario: Scenario,
        notify: Notify = lambda _: None,
        *,
        rehearsal: bool | None = None,
    ) -> None:
        if not options.url:
            raise UsageError("--server attach needs a URL", hint="--url http://127.0.0.1:8000")
        self._url = options.url
        self._log = options.log
        if rehearsal is None:
            self.version, rehearsal = asyncio.run(identify(options.url))
        self.evidence = (
            Evidence.REHEARSAL
            if rehearsal
            else evidence_of(self.version, _boot_text(options.url, options.log))
        )

    @classmethod
    def offer(
        cls, scenario: Scenario, options: ServerOptions, *, missing: str, download: bool
    ) -> Offer:
        """Accept the scenario for `--server auto` if a URL was given."""
        return Offer(bool(options.url), "a URL was given" if options.url else "")

    def launch(
        self, scenario: Scenario, arm: Arm, port: int, *, run: str = "", number: int = 1
    ) -> Launch:
        """Return the arm's command for the report; the running server may have another one."""
        return Launch(
            kind=self.kind,
            evidence=self.evidence,
            command=scenario.command_of(arm),
            differences=(
                (
                    f"the server was already running at {self._url}: its flags are not known to"
                    " this report"
                ),
            ),
        )

    def _server(
        self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str
    ) -> tuple[Launch, Server]:
        """Return the launch of one trial, and the object that watches the running server."""
        server = AttachServer(self._url, log=self._log, copy_to=log, evidence=self.evidence)
        return self.launch(scenario, arm, 0), server

    def ends_after(self, outcome: Outcome, *, launched: bool) -> bool:
        """Return True if the server is not alive after this outcome: no later trial can use it."""
        return not outcome.facts.alive
