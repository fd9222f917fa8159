"""Specification of a container with a vLLM server.

`vllm-repro show --as docker` prints a `ContainerSpec` and the docker server creates the container
from it, so that both agree. Mounts are binds that fail if the source is missing; `-v` would make an
empty folder on the host instead.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_repro.command.command import ReportedContainer, ServeCommand
from vllm_repro.command.flags import group_by_flag
from vllm_repro.errors import UsageError
from vllm_repro.secret_names import is_secret_name

CONTAINER_PORT = 8000
"""Port of the server inside the container, whatever port the report used outside."""

LOOPBACK = "127.0.0.1"

CAPABILITIES = ("CAP_DAC_OVERRIDE",)
"""Linux capabilities of a container.

This one lets the container's root read a model folder that only its owner can read.
"""
SECURITY = "no-new-privileges"

PARALLEL_SHM_BYTES = 16 * 1024**3
"""Shared memory of a multi-GPU server whose report has neither `--ipc` nor `--shm-size`.

Docker's 64 MiB are too few for NCCL.
"""

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[bkmgtp]?)(?:i?b)?", re.IGNORECASE)
_UNITS = "bkmgtp"
CDI = "nvidia.com/gpu="
_GPU_DEVICES = re.compile(r'"?(?:device|devices)=(?P<ids>[^"]+)"?')


def parse_size(text: str) -> int:
    """Return the bytes of a size as Docker writes it: `16g`, `64MB`, `512`, `10.24gb`.

    Units are powers of 1024. Raises `UsageError` for other texts.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a size", hint="write it as 16g, 512m or a number of bytes"
        )
    return int(float(match["number"]) * 1024 ** _UNITS.index(match["unit"].lower() or "b"))


@dataclass(frozen=True)
class Mount:
    """A folder or file of the host that the container sees at `target`."""

    source: str
    target: str
    readonly: bool = False

    def render(self) -> str:
        """Return the value of `--mount`, which Docker reads as one line of CSV."""
        fields = ["type=bind", f"source={self.source}", f"target={self.target}"]
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(
            [*fields, "readonly"] if self.readonly else fields
        )
        return line.getvalue()


@dataclass(frozen=True)
class Publish:
    """A port of the container, published on the loopback of this host."""

    host_port: int
    container_port: int = CONTAINER_PORT

    def render(self) -> str:
        """Return the value of `-p`: `127.0.0.1:HOST_PORT:CONTAINER_PORT`."""
        return f"{LOOPBACK}:{self.host_port}:{self.container_port}"


@dataclass(frozen=True)
class Ulimit:
    """A process limit; -1 is unlimited."""

    name: str
    soft: int
    hard: int

    @classmethod
    def parse(cls, text: str) -> Ulimit:
        """Parse `memlock=-1` or `nofile=1024:4096`. Raises `UsageError` for other texts."""
        name, _, limits = text.partition("=")
        soft, _, hard = limits.partition(":")
        try:
            return cls(name, int(soft), int(hard or soft))
        except ValueError:
            raise UsageError(
                f"{text!r} is not a ulimit", hint="write it as memlock=-1 or nofile=1024:4096"
            ) from None

    def render(self) -> str:
        """Return the value of `--ulimit`: `memlock=-1` or `nofile=1024:4096`."""
        return (
            f"{self.name}={self.soft}"
            if self.soft == self.hard
            else f"{self.name}={self.soft}:{self.hard}"
        )


@dataclass(frozen=True)
class GpuRequest:
    """GPUs of a container: a count (-1 is all) or device ids. Docker refuses both together."""

    count: int | None
    device_ids: tuple[str, ...] = ()

    @property
    def cdi(self) -> bool:
        """Return True for ids of the Container Device Interface, such as `nvidia.com/gpu=0`."""
        return any(device.startswith(CDI) for device in self.device_ids)


@dataclass(frozen=True, kw_only=True)
class ContainerSpec:
    """A container with a vLLM server, to print as `docker run` or to create."""

    image: str
    # Words after the image.
    argv: tuple[str, ...] = ()
    name: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    mounts: tuple[Mount, ...] = ()
    # Value of `--gpus`: "all", a count or `device=0,1`; None for no GPU.
    gpus: str | None = None
    # Bytes.
    shm_size: int | None = None
    ipc: str | None = None
    # Name or id of a network, or `container:NAME`; None for the default bridge.
    network: str | None = None
    # Docker's init process starts vLLM and reaps its orphans.
    init: bool = True
    publish: tuple[Publish, ...] = ()
    # None for the image's own.
    entrypoint: tuple[str, ...] | None = None
    ulimits: tuple[Ulimit, ...] = ()

    @classmethod
    def from_command(
        cls, command: ServeCommand, *, image: str, port: int, env: Mapping[str, str]
    ) -> ContainerSpec:
        """Return a container of `image` that runs a reported command.

        It is published on `port` of this host and gets `env` in addition. Kept from a reported
        container: arguments, environment, `--ipc`, `--shm-size`, ulimits, and an entrypoint that
        starts vLLM. Dropped: image, GPUs, mounts, secret variables, `--host`, `--port`, `--uds`. A
        server of several GPUs whose report states no shared memory gets 16 GiB.
        """
        reported = command.container or ReportedContainer(image="")
        variables = {
            key: value for key, value in (*reported.env, *command.env) if not is_secret_name(key)
        }
        shm = parse_size(reported.shm_size) if reported.shm_size else None
        ranks = (command.number("--tensor-parallel-size") or 1) * (
            command.number("--pipeline-parallel-size") or 1
        )
        if ranks > 1 and reported.ipc is None and shm is None:
            shm = PARALLEL_SHM_BYTES
        return cls(
            image=image,
            argv=command.without(
                *[flag for flag in ("--host", "--port", "--uds") if command.has(flag)]
            ).argv(),
            env=tuple((variables | dict(env)).items()),
            shm_size=shm,
            ipc=reported.ipc,
            publish=(Publish(port),),
            entrypoint=reported.entrypoint or None,
            ulimits=tuple(map(Ulimit.parse, reported.ulimits)),
        )

    def gpu_request(self) -> GpuRequest | None:
        """Return the parsed `gpus`, or None. Raises `UsageError` for a form unknown to Docker."""
        if self.gpus is None:
            return None
        if self.gpus == "all":
            return GpuRequest(-1)
        if self.gpus.isdecimal():
            return GpuRequest(int(self.gpus))
        match = _GPU_DEVICES.fullmatch(self.gpus)
        if match is None:
            raise UsageError(
                f"--gpus {self.gpus!r} is not understood", hint="all, a count, or device=0,1"
            )
        return GpuRequest(None, tuple(part.strip() for part in match["ids"].split(",")))

    def docker_argv(self) -> tuple[str, ...]:
        """Return the words of `docker run`.

        A secret variable is `-e NAME`: Docker takes it from the caller's environment.
        """
        return (*(word for group in self._options() for word in group), *self.argv)

    def render(self) -> str:
        """Return the `docker run` line for a POSIX shell, one option a line, without secrets."""
        first, *options = self._options()
        lines = [shlex.join(first)]
        lines += [f"  {shlex.join(group)}" for group in options]
        lines += [f"    {shlex.join(group)}" for group in group_by_flag(self.argv)]
        return " \\\n".join(lines)

    def _options(self) -> list[tuple[str, ...]]:
        """Return the words of `docker run` up to the image, one group for each option."""
        groups: list[tuple[str, ...]] = [("docker", "run")]
        if self.name:
            groups.append(("--name", self.name))
        if self.init:
            groups.append(("--init",))
        kept = (word for name in CAPABILITIES for word in ("--cap-add", name))
        groups.append(("--cap-drop", "ALL", *kept, "--security-opt", SECURITY))
        if (request := self.gpu_request()) is not None:
            cdi = [("--device", device) for device in request.device_ids] if request.cdi else []
            groups += cdi or [("--gpus", _gpus_word(request))]
        if self.ipc:
            groups.append(("--ipc", self.ipc))
        if self.shm_size is not None:
            groups.append(("--shm-size", _size_word(self.shm_size)))
        if self.network:
            groups.append(("--network", self.network))
        groups += [("-p", port.render()) for port in self.publish]
        groups += [("--ulimit", limit.render()) for limit in self.ulimits]
        groups += [("--mount", mount.render()) for mount in self.mounts]
        for key, value in self.env:
            groups.append(("-e", key if is_secret_name(key) else f"{key}={value}"))
        groups += [("--label", f"{key}={value}") for key, value in self.labels]
        if self.entrypoint:
            groups.append(("--entrypoint", self.entrypoint[0]))
        # `--entrypoint` takes one word; Docker puts the others before the arguments.
        groups.append((self.image, *(self.entrypoint or ())[1:]))
        return groups


def _gpus_word(request: GpuRequest) -> str:
    """Return requested GPUs as the value of `--gpus`: `all`, a count or `device=0`."""
    if request.device_ids:
        # Docker reads the value as CSV: without the inner quotes `device=0,1` would be two fields.
        ids = ",".join(request.device_ids)
        return f'"device={ids}"' if "," in ids else f"device={ids}"
    return "all" if request.count == -1 else str(request.count)


def _size_word(size: int) -> str:
    """Return bytes in the largest unit that divides them: `16g`, `512m`."""
    for power, unit in ((3, "g"), (2, "m"), (1, "k")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return str(size)
