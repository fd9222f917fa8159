"""A vLLM in a container, through the Docker SDK.

The container is created from the same `ContainerSpec` that prints the `docker run` line. Its output is
attached before it starts, so the first line is there too, and it is never removed by the engine itself, which
would take the evidence of a death with it. The end of the output proves nothing, since a killed dockerd ends
it as well: what became of the server is always asked of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker.errors
import psutil

from vllm_repro.command.container import LOOPBACK, ContainerSpec
from vllm_repro.errors import HarnessBug, InfraError, Unsupported
from vllm_repro.evidence import Evidence
from vllm_repro.secret_names import is_recorded
from vllm_repro.servers.base import Exit, Patched, Server, ServerFacts
from vllm_repro.servers.docker_engine import Engine, ImageFacts, connect, image_facts, our_labels
from vllm_repro.servers.docker_errors import ENGINE_ERRORS, explain
from vllm_repro.servers.docker_orphans import remove_container
from vllm_repro.servers.docker_output import STDERR, STDOUT, WholeLines, chunks, close, demuxed, without_first
from vllm_repro.servers.docker_source import hashes_inside
from vllm_repro.servers.docker_words import create_arguments, exit_of
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.overlay import Laid
from vllm_repro.servers.witness import witnessed

__all__ = ["DockerServer"]

_log = logging.getLogger(__name__)

_POLL_S = 0.02
_ENGINE_PATIENCE_S = 5.0
"""How long the engine may be away before it is lost; a restart with `live-restore` takes a second or two."""
_THREAD_END_S = 10.0


class DockerServer(Server):
    """Runs the container of `spec`.

    spec: must publish a port on 127.0.0.1, or use the host's network and have `port` said. run: id of the
    run, for the labels. grace: seconds between SIGTERM and SIGKILL at the end. engine: how to reach one. laid: the changes of vLLM's
    source that `spec` mounts over the image's own.
    """

    log_path: Path

    def __init__(
        self,
        spec: ContainerSpec,
        *,
        log: Path,
        run: str,
        evidence: Evidence,
        port: int | None = None,
        grace: float = 15.0,
        engine: Callable[[], Engine] = connect,
        laid: Laid | None = None,
    ) -> None:
        if any(publish.host_ip != LOOPBACK for publish in spec.publish):
            raise HarnessBug(f"a container would be published beyond {LOOPBACK}")
        if port is None:
            if not spec.publish:
                raise HarnessBug("a container that publishes nothing needs a port to be reached at")
            port = spec.publish[0].host_port
        self.spec = replace(spec, labels=tuple({**dict(spec.labels), **our_labels(run)}.items()))
        """What is really created: `spec` with the labels by which a later run finds it."""
        self.base_url = f"http://{LOOPBACK}:{port}"
        self.log_path = log
        self.evidence = evidence
        self.grace = grace
        self.laid = laid
        self._connect = engine
        self._engine: Engine | None = None
        self._container: str | None = None
        self._first_pid = 0
        self._exit: Exit | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    async def start(self) -> ServerFacts:
        return await asyncio.to_thread(self._launch)

    def booted(self, facts: ServerFacts, *, ready: bool) -> ServerFacts:
        if self.laid is None:
            return facts
        log = self.log_path.read_text(encoding="utf-8", errors="replace")
        seen = witnessed(log, self.laid.digests, ready=ready)
        return replace(facts, patched=self._read_inside(self.laid, seen) if ready else seen)

    async def exited(self) -> Exit:
        if self._container is None:
            raise InfraError("the server was never started")
        while self._exit is None:
            await asyncio.sleep(_POLL_S)
        return self._exit

    async def stop(self) -> None:
        # Shielded: a run that is being cancelled must still see the container go.
        await asyncio.shield(asyncio.to_thread(self._end))

    def processes(self) -> tuple[int, ...]:
        if self._first_pid == 0 or self._exit is not None:
            return ()
        try:
            first = psutil.Process(self._first_pid)
            below = tuple(process.pid for process in first.children(recursive=True))
        except psutil.Error:
            return ()
        # Docker's init stands before the API server; without it the API server is the first process.
        return below if self.spec.init else (first.pid, *below)

    def _read_inside(self, laid: Laid, seen: tuple[Patched, ...]) -> tuple[Patched, ...]:
        """What the server's processes said, held against what a program finds that is run in their container."""
        engine, container, inside = self._engine, self._container, laid.inside
        if engine is None or container is None or inside is None:
            return seen
        paths = [inside.paths[one.file] for one in seen]
        try:
            hashes = hashes_inside(engine, container, inside.python, paths)
        except InfraError:
            if self._runs(engine, container):
                raise
            return seen  # it died meanwhile, which says more
        for one, path, found in zip(seen, paths, hashes, strict=True):
            if found != one.sha256:
                raise InfraError(
                    f"{path} in the running container has sha256 {found}, and is not the patched {one.file}"
                )
        return tuple(replace(one, inside=path) for one, path in zip(seen, paths, strict=True))

    # ── start ───────────────────────────────────────────────────────────────────────────────────────────

    def _launch(self) -> ServerFacts:
        with self._lock:  # so that a `stop` that comes meanwhile waits, and then removes what was made
            if self._stopped or self._container is not None:
                raise InfraError("the server was started or stopped before")
            self._engine = engine = self._connect()
            try:
                image = self._check(engine)
                self._create_and_start(engine)
            except ENGINE_ERRORS as error:
                self._remove(engine)
                raise explain(error, self.spec.image) from error
            except BaseException:
                self._remove(engine)
                raise
        return ServerFacts(
            ServerKind.DOCKER,
            self.evidence,
            self.spec.docker_argv(),
            {key: value for key, value in self.spec.env if is_recorded(key)},
            image=self.spec.image,
            digest=image.digest,
            container_id=self._container,
        )

    def _check(self, engine: Engine) -> ImageFacts:
        if not engine.local:
            raise Unsupported(
                f"the Docker Engine at {engine.host} is on another machine, and only {LOOPBACK} is used",
                hint="Run vllm-repro on that machine.",
            )
        image = image_facts(engine, self.spec.image)
        # A simulated figure must never pass for a real one, nor the other way round.
        if image.rehearsal is not (self.evidence is Evidence.REHEARSAL):
            holds = "the rehearsal engine" if image.rehearsal else "no rehearsal engine"
            raise InfraError(f"the image {image.name} holds {holds}, but the run is about {self.evidence}")
        return image

    def _create_and_start(self, engine: Engine) -> None:
        container = engine.client.containers.create(**create_arguments(self.spec))
        assert container.id is not None
        self._container = container.id
        try:
            lines = WholeLines(self.log_path.open("ab", buffering=0))
        except OSError as error:
            raise InfraError(f"cannot write the server's log: {error}") from error
        with contextlib.ExitStack() as unless_handed_over:
            unless_handed_over.callback(lines.close)
            output = engine.client.api.attach(container.id, stream=True, demux=True)
            self._thread(self._copy_output, engine, container.id, output, lines)
            unless_handed_over.pop_all()
        container.start()
        self._first_pid = _host_pid(container.id, self._state(engine, container.id) or {})
        self._thread(self._await_end, engine, container.id)

    def _thread(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name=f"docker{target.__name__}", daemon=True)
        thread.start()
        self._threads.append(thread)

    # ── while it runs, in threads ───────────────────────────────────────────────────────────────────────

    def _copy_output(self, engine: Engine, container: str, output: Any, lines: WholeLines) -> None:
        """Writes what the server prints; where the connection ends first, goes on from the engine's own log."""
        try:
            for stream, chunk in demuxed(output):
                lines.write(stream, chunk)
            if self._runs(engine, container):
                follower = threading.Thread(target=self._follow, args=(engine, container, STDERR, lines), daemon=True)
                follower.start()
                self._follow(engine, container, STDOUT, lines)
                follower.join()
        except OSError as error:
            # The disk is full. An output that is held and not read would block the server at its next line.
            close(output)
            _log.warning("the log of container %s is cut short: %s", container[:12], error)
        finally:
            with contextlib.suppress(OSError):  # what the full disk did not take is lost
                lines.close()

    def _follow(self, engine: Engine, container: str, stream: int, lines: WholeLines) -> None:
        """One stream from the engine's log, without what came before, until the server has ended."""
        while True:
            with contextlib.suppress(*ENGINE_ERRORS):  # cut off: the state below says whether to ask again
                whole = engine.client.api.logs(
                    container, stdout=stream == STDOUT, stderr=stream == STDERR, stream=True, follow=True
                )
                for chunk in without_first(lines.received[stream], chunks(whole)):
                    lines.write(stream, chunk)
            if not self._runs(engine, container):
                return
            time.sleep(_POLL_S)

    def _runs(self, engine: Engine, container: str) -> bool:
        """Whether the container runs; if not, or if nobody knows, that is how it ended."""
        state = self._state(engine, container)
        if state is not None and state.get("Running"):
            return True
        self._conclude(state)
        return False

    def _await_end(self, engine: Engine, container: str) -> None:
        while self._exit is None:
            # An answer cut short, as by a restart of dockerd, is as good as none: the state is what counts.
            with contextlib.suppress(*ENGINE_ERRORS):
                engine.client.api.wait(container, timeout=None)
            if self._runs(engine, container):
                time.sleep(_POLL_S)

    def _state(self, engine: Engine, container: str) -> dict[str, Any] | None:
        """The container's `State`; empty where the container is gone, None where no engine answers."""
        deadline = time.monotonic() + _ENGINE_PATIENCE_S
        while True:
            try:
                state: dict[str, Any] = engine.client.containers.get(container).attrs["State"]
            except docker.errors.NotFound:
                return {}
            except ENGINE_ERRORS:
                if self._stopped or time.monotonic() > deadline:
                    return None
                time.sleep(0.2)
            else:
                return state

    def _conclude(self, state: dict[str, Any] | None) -> None:
        """Takes the first word on how the server ended; a container that never ran did not end."""
        if self._exit is None and (state is None or state.get("Status") != "created"):
            self._exit = exit_of(state, time.time())

    # ── end ─────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self) -> None:
        self._stopped = True
        with self._lock:
            if self._engine is None:
                return
            if self._container is not None:
                # A refusal is not lost: the removal kills as well, and says what the engine refuses.
                with contextlib.suppress(*ENGINE_ERRORS):
                    self._engine.client.api.stop(self._container, timeout=round(self.grace))
                self._conclude(self._state(self._engine, self._container))
            self._remove(self._engine)

    def _remove(self, engine: Engine) -> None:
        """Removes the container, if there is one, and ends threads and connection; raises nothing."""
        if self._container is not None:
            try:
                remove_container(engine, self._container)
            except (*ENGINE_ERRORS, InfraError) as error:
                # Not raised: it would take the place of what was learnt about the server.
                _log.warning("container %s may be left for `vllm-repro clean`: %s", self._container[:12], error)
            for thread in self._threads:  # with the container its output ends, and so do they
                thread.join(_THREAD_END_S)
        self._threads.clear()
        engine.close()
        self._engine = None


def _host_pid(container: str, state: dict[str, Any]) -> int:
    """The pid of the container's first process where this process sees it too, else 0.

    An engine in a virtual machine or another pid namespace names pids that are somebody else's here.
    """
    pid = int(state.get("Pid") or 0)
    try:
        return pid if container in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8") else 0
    except OSError:
        return 0
