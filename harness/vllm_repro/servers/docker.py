"""A vLLM in a container, through the Docker SDK.

The container is created from the same `ContainerSpec` that prints the `docker run` line. The Docker
Engine never removes it by itself, because that would destroy evidence. A thread copies its log. The
end of that log proves nothing, because a killed dockerd ends it too. The state of the container
always comes from the Docker Engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker.errors
import psutil
import urllib3.exceptions
from docker.types import Mount, Ulimit
from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_delay,
    stop_when_event_set,
    wait_fixed,
)

from vllm_repro.command.container import CAPABILITIES, LOOPBACK, SECURITY, ContainerSpec
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.host.lease import Lease
from vllm_repro.secret_names import is_recorded
from vllm_repro.servers.base import Exit, Server, ServerFacts
from vllm_repro.servers.docker_engine import (
    LEASE_LABEL,
    RUN_LABEL,
    Engine,
    ImageFacts,
    close,
    connect,
    device_request,
    engine_errors,
    explain,
    image_facts,
    remove_container,
)
from vllm_repro.servers.kinds import ServerKind
from vllm_repro_diagnosis.evidence import Evidence

_log = logging.getLogger(__name__)

_POLL_S = 0.02
"""Seconds between two looks at the container."""
_RETRY_S = 5.0
"""Seconds without the Docker Engine after which it counts as lost.

A restart with `live-restore` takes 1 to 2 s.
"""
_THREAD_END_S = 10.0
"""Seconds to wait for the end of the thread that copies the log."""
_BROKEN = (*engine_errors(), urllib3.exceptions.HTTPError)
"""Errors from reading a stream of the Docker Engine if the connection breaks."""


class DockerServer(Server):
    """A vLLM server in a Docker container that is made from `spec`."""

    log_path: Path

    def __init__(
        self,
        spec: ContainerSpec,
        *,
        log: Path,
        # id of the run, for the labels
        run: str,
        evidence: Evidence,
        # on 127.0.0.1; published by `spec` or by the container whose network it joins
        port: int,
        # seconds between SIGTERM and SIGKILL
        grace: float = 15.0,
        engine: Callable[[], Engine] = connect,
        # sha256 of each file that `spec` mounts over vLLM's source, by its name below site-packages
        patched: Mapping[str, str] | None = None,
    ) -> None:
        self.spec = replace(spec, labels=((RUN_LABEL, run),))
        self._run = run
        self.base_url = f"http://{LOOPBACK}:{port}"
        self.log_path = log
        self.evidence = evidence
        self.grace = grace
        self.patched = dict(patched or {})
        self._connect = engine
        self._engine: Engine | None = None
        self._container: str | None = None
        self._first_pid = 0
        self._exit: Exit | None = None
        self._lease: Lease | None = None
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._follower: threading.Thread | None = None

    async def start(self) -> ServerFacts:
        """Create and start the container, and copy its log; return its command, image and id."""
        return await asyncio.to_thread(self._launch)

    async def exited(self) -> Exit:
        """Wait until the container has ended, and return how.

        Raises `InfraError` if it was never started.
        """
        if self._container is None:
            raise InfraError("the server was never started")
        while self._exit is None:
            await asyncio.sleep(_POLL_S)
        return self._exit

    async def stop(self) -> None:
        """End the container with SIGTERM, then SIGKILL, and remove it; return when it is gone."""
        # Shielded: a cancelled run must still wait until the container is gone.
        await asyncio.shield(asyncio.to_thread(self._stop_and_remove))

    def processes(self) -> tuple[int, ...]:
        """Return the host's pids of the container's processes; empty if they cannot be seen."""
        if self._first_pid == 0 or self._exit is not None:
            return ()
        try:
            first = psutil.Process(self._first_pid)
            below = tuple(process.pid for process in first.children(recursive=True))
        except psutil.Error:
            return ()
        # With --init the first process is Docker's init, and the API server its child.
        return below if self.spec.init else (first.pid, *below)

    def _launch(self) -> ServerFacts:
        """Check the image, then create and start the container; leave nothing behind on failure.

        Raises `InfraError` or `Unsupported`, also if it was started or stopped before.
        """
        with self._lock:  # a concurrent `stop` waits, and then removes the container
            if self._stopped.is_set() or self._container is not None:
                raise InfraError("the server was started or stopped before")
            self._engine = engine = self._connect()
            try:
                image = self._check_image(engine)
                self._lease = Lease(f"the run {self._run}")
                self._create_and_start(engine, self._lease)
            except BaseException as error:
                self._remove(engine)
                if isinstance(error, engine_errors()):
                    raise explain(error) from error
                raise
        return ServerFacts(
            kind=ServerKind.DOCKER,
            evidence=self.evidence,
            argv=self.spec.docker_argv(),
            env={key: value for key, value in self.spec.env if is_recorded(key)},
            image=self.spec.image,
            digest=image.digest,
            container_id=self._container,
        )

    def _check_image(self, engine: Engine) -> ImageFacts:
        """Return the image's facts.

        Raises `Unsupported` if Docker is on another machine, and `InfraError` if the image is
        missing, or if just one of run and image is a rehearsal, which imitates vLLM.
        """
        if not engine.local:
            raise Unsupported(
                f"the Docker Engine at {engine.host} is on another machine, and only {LOOPBACK} is"
                " used",
                hint="Run vllm-repro on that machine.",
            )
        image = image_facts(engine, self.spec.image)
        # A simulation must never pass for a real vLLM, and a real vLLM never for a simulation.
        if image.rehearsal is not (self.evidence is Evidence.REHEARSAL):
            holds = "the rehearsal engine" if image.rehearsal else "no rehearsal engine"
            raise InfraError(
                f"the image {image.name} holds {holds}, but the evidence of the run is"
                f" {self.evidence}"
            )
        return image

    def _create_and_start(self, engine: Engine, lease: Lease) -> None:
        """Create and start the container, and the thread that copies its log.

        Raises `InfraError` if the log cannot be written, and the Docker SDK's own errors.
        """
        try:
            self.log_path.touch()
        except OSError as error:
            raise InfraError(f"cannot write the server's log: {error}") from error
        spec = replace(self.spec, labels=(*self.spec.labels, (LEASE_LABEL, lease.path.name)))
        container = engine.client.containers.create(**create_arguments(spec))
        assert container.id is not None
        self._container = container.id
        container.start()
        self._first_pid = _host_pid(container.id, self._state(engine, container.id) or {})
        self._follower = threading.Thread(
            target=self._follow, args=(engine, container.id), daemon=True
        )
        self._follower.start()

    def _follow(self, engine: Engine, container: str) -> None:
        """Copy the container's log as it grows; then set `_exit` to how the container ended.

        Runs in its own thread until the container ends or Docker is lost.
        """
        whole = True
        while (state := self._state(engine, container)) and state.get("Running"):
            whole = whole and self._copy_log(engine, container, follow=True)
            time.sleep(_POLL_S)
        seen = time.time()
        self._copy_log(engine, container, follow=False)
        self._exit = exit_of(state, seen)

    def _copy_log(self, engine: Engine, container: str, *, follow: bool) -> bool:
        """Append new bytes of the container's log to `log_path` until the connection ends.

        follow: also wait for further ones. Return False if `log_path` cannot be written, such as on
        a full disk.
        """
        stream: Any = None
        try:
            with contextlib.suppress(*_BROKEN), self.log_path.open("ab", buffering=0) as log:
                try:
                    skip = log.tell()
                    stream = engine.client.api.logs(container, stream=True, follow=follow)
                    for chunk in stream:
                        log.write(chunk[skip:])
                        skip = max(0, skip - len(chunk))
                finally:
                    close(stream)
        except OSError as error:
            _log.warning("the log of container %s is cut short: %s", container[:12], error)
            return False
        return True

    def _state(self, engine: Engine, container: str) -> dict[str, Any] | None:
        """Return the container's `State`; empty if it is gone, None if Docker does not answer.

        Retry for five seconds, but not after `stop`: dockerd may be restarting.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(engine_errors())
            & retry_if_not_exception_type(docker.errors.NotFound),
            stop=stop_after_delay(_RETRY_S) | stop_when_event_set(self._stopped),
            wait=wait_fixed(0.2),
            reraise=True,
        )
        try:
            state: dict[str, Any] = retrying(engine.client.api.inspect_container, container)[
                "State"
            ]
        except docker.errors.NotFound:
            return {}
        except engine_errors():
            return None
        return state

    def _stop_and_remove(self) -> None:
        """Stop the container, copy the rest of its log, record how it ended, and remove it.

        Do nothing if it was not started or is removed.
        """
        self._stopped.set()
        with self._lock:
            if self._engine is None:
                return
            if self._container is not None:
                # If this fails, the removal below kills the container and reports the error.
                with contextlib.suppress(*engine_errors()):
                    self._engine.client.api.stop(self._container, timeout=round(self.grace))
                self._join_log_thread()
                if (
                    self._follower is not None and self._follower.is_alive()
                ):  # Docker before 20 stops sending after a rotation
                    self._copy_log(self._engine, self._container, follow=False)
                if self._exit is None:
                    self._exit = exit_of(self._state(self._engine, self._container), time.time())
            self._remove(self._engine)

    def _remove(self, engine: Engine) -> None:
        """Remove the container, release its lease, and close the connection.

        If the removal fails, log the error and keep the lease: `vllm-repro clean` finds the
        container by it.
        """
        if self._lease is not None:
            try:
                if self._container is not None:
                    remove_container(engine, self._container)
                self._lease.release()
            except (*engine_errors(), InfraError) as error:
                # Do not raise it: that would hide how the server exited.
                _log.warning(
                    "container %s may be left for `vllm-repro clean`: %s",
                    str(self._container)[:12],
                    error,
                )
                self._lease.free()
        self._join_log_thread()
        engine.close()
        self._engine = None

    def _join_log_thread(self) -> None:
        """Wait up to 10 s for the end of the thread that copies the log."""
        if self._follower is not None:
            self._follower.join(_THREAD_END_S)  # it ends with the container


def _host_pid(container: str, state: dict[str, Any]) -> int:
    """Return the host's pid of the container's first process.

    Return 0 if the Docker Engine runs in a virtual machine or another pid namespace.
    """
    pid = int(state.get("Pid") or 0)
    try:
        return pid if container in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8") else 0
    except OSError:
        return 0


def create_arguments(spec: ContainerSpec) -> dict[str, Any]:
    """Return the arguments of `DockerClient.containers.create` for the container of `spec`."""
    # `--entrypoint` takes one word, so the others come before the arguments, as in `docker run`.
    entrypoint = spec.entrypoint or ()
    arguments: dict[str, Any] = {
        "image": spec.image,
        "command": [*entrypoint[1:], *spec.argv],
        "environment": dict(spec.env),
        "labels": dict(spec.labels),
        "init": spec.init,
        "cap_drop": ["ALL"],
        "cap_add": list(CAPABILITIES),
        "security_opt": [SECURITY],
        # Mounts, not volumes: for a missing source a volume creates an empty folder on the host.
        "mounts": [
            Mount(m.target, m.source, type="bind", read_only=m.readonly) for m in spec.mounts
        ],
        "ulimits": [Ulimit(name=u.name, soft=u.soft, hard=u.hard) for u in spec.ulimits],
        "ports": {f"{p.container_port}/tcp": (LOOPBACK, p.host_port) for p in spec.publish},
    }
    if (request := spec.gpu_request()) is not None:
        arguments["device_requests"] = [device_request(request)]
    optional: dict[str, Any] = {
        "name": spec.name,
        "network_mode": spec.network,
        "shm_size": spec.shm_size,
        "ipc_mode": spec.ipc,
        "entrypoint": list(entrypoint[:1]) or None,
    }
    return arguments | {key: value for key, value in optional.items() if value is not None}


def exit_of(state: dict[str, Any] | None, at: float) -> Exit:
    """Return how a container ended, from its `State` in the Docker Engine.

    state: from the engine; empty if the container is gone, None if no engine answers. at: when
    this was noticed, in epoch seconds.
    """
    if state is None:
        detail = "the Docker Engine does not answer, so nothing is known about the container"
        return Exit(code=None, detail=detail, at=at, lost=True)
    if not state:
        return Exit(code=None, detail="the container was removed by somebody else", at=at)
    code = int(state["ExitCode"])
    oom_killed = bool(state.get("OOMKilled"))
    error = " ".join(str(state.get("Error") or "").split())
    detail = (
        f"container exited {code}"
        + (", OOM killed" if oom_killed else "")
        + (f": {error}" if error else "")
    )
    return Exit(code=code, detail=detail, at=at, oom_killed=oom_killed)
