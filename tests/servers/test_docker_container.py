"""Container specs and the Docker SDK."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import requests.exceptions
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.command.container import ContainerSpec, GpuRequest, Mount, Publish
from vllm_repro.servers.docker_container import (
    STDERR,
    STDOUT,
    WholeLines,
    chunks,
    create_arguments,
    demuxed,
    exit_of,
    without_first,
)


def test_a_spec_reaches_the_sdk() -> None:
    arguments = create_arguments(
        ContainerSpec(
            image="vllm/vllm-openai:v0.20.2",
            argv=("model", "--flag"),
            name="n",
            env=(("A", "1"),),
            labels=(("l", "v"),),
            mounts=(Mount("/cache", "/root/.cache", readonly=True),),
            gpus="device=1,3",
            shm_size=1 << 30,
            ipc="host",
            publish=(Publish(18000),),
        )
    )
    assert arguments["image"] == "vllm/vllm-openai:v0.20.2"
    assert arguments["command"] == ["model", "--flag"]
    assert arguments["init"] is True
    assert arguments["ports"] == {"8000/tcp": ("127.0.0.1", 18000)}
    assert arguments["ipc_mode"] == "host"
    assert arguments["shm_size"] == 1 << 30
    assert "volumes" not in arguments, "of a missing source they make an empty folder on the host"
    assert "auto_remove" not in arguments, "the engine would remove the evidence"
    assert "entrypoint" not in arguments, "the image's own"
    assert arguments["mounts"][0]["Type"] == "bind"
    assert arguments["mounts"][0]["ReadOnly"] is True
    assert arguments["device_requests"][0]["DeviceIDs"] == ["1", "3"]
    assert "tty" not in arguments


@pytest.mark.parametrize(("gpus", "expected"), [("all", GpuRequest(-1)), ("2", GpuRequest(2))])
def test_gpus_by_count(gpus: str, expected: GpuRequest) -> None:
    (request,) = create_arguments(ContainerSpec(image="i", gpus=gpus))["device_requests"]
    assert (request["Count"], request["DeviceIDs"]) == (expected.count, [])
    assert request["Capabilities"] == [["gpu"]]


def test_without_gpus_none_are_asked_for() -> None:
    assert "device_requests" not in create_arguments(ContainerSpec(image="i"))


@pytest.mark.parametrize(
    ("state", "code", "detail", "oom_killed", "lost"),
    [
        ({"ExitCode": 0, "OOMKilled": False, "Error": ""}, 0, "container exited 0", False, False),
        ({"ExitCode": 137, "OOMKilled": True}, 137, "container exited 137, OOM killed", True, False),
        ({"ExitCode": 3, "OOMKilled": True}, 3, "container exited 3, OOM killed", True, False),
        ({"ExitCode": 128, "Error": "no\nluck"}, 128, "container exited 128: no luck", False, False),
        ({}, None, "the container was removed by somebody else", False, False),
        (
            None,
            None,
            "the Docker Engine does not answer, so nothing is known about the container",
            False,
            True,
        ),
    ],
)
def test_how_a_server_ended(
    state: dict[str, Any] | None, code: int | None, detail: str, oom_killed: bool, lost: bool
) -> None:
    ended = exit_of(state, 12.5)
    assert (ended.code, ended.detail, ended.oom_killed, ended.lost, ended.at) == (
        code,
        detail,
        oom_killed,
        lost,
        12.5,
    )


class Stream:
    """SDK stream of pieces that ends in some way."""

    def __init__(self, pieces: list[object], end: Exception | None = None) -> None:
        self._pieces = iter(pieces)
        self._end = end
        self.closed = 0

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> object:
        for piece in self._pieces:
            return piece
        raise self._end or StopIteration

    def close(self) -> None:
        self.closed += 1


class Kept(io.BytesIO):
    """File whose content can be read after closing."""

    kept = b""

    def close(self) -> None:
        if not self.closed:
            self.kept = self.getvalue()
        super().close()


def test_lines_of_two_streams_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = WholeLines(path.open("wb", buffering=0))
    lines.write(STDOUT, b"first\nhalf of a ")
    assert path.read_bytes() == b"first\n"
    lines.write(STDERR, b"Traceback\n")
    lines.write(STDOUT, b"line\n10%\r20")
    assert path.read_bytes() == b"first\nTraceback\nhalf of a line\n10%\r"
    lines.write(STDERR, b"the end")
    assert lines.received == [27, 17]
    lines.close()
    assert path.read_bytes() == b"first\nTraceback\nhalf of a line\n10%\r20the end"


pieces_of_two = st.lists(
    st.one_of(
        st.tuples(st.just(STDOUT), st.text("a\n", max_size=6)),
        st.tuples(st.just(STDERR), st.text("b\n", max_size=6)),
    )
)


@given(pieces_of_two)
@settings(max_examples=50)
def test_no_line_is_of_two_streams(pieces: list[tuple[int, str]]) -> None:
    file = Kept()
    lines = WholeLines(file)
    for stream, text in pieces:
        lines.write(stream, text.encode())
    written = file.getvalue().decode()
    assert written.endswith("\n") or not written
    assert all(len(set(line)) <= 1 for line in written.splitlines())
    lines.close()
    assert sorted(file.kept.decode()) == sorted("".join(text for _, text in pieces)), "nothing is lost"


@pytest.mark.parametrize("end", [None, requests.exceptions.ChunkedEncodingError("ended prematurely")])
def test_however_a_stream_ends_it_is_closed(end: Exception | None) -> None:
    stream = Stream([b"a", b"b"], end)
    assert list(chunks(stream)) == [b"a", b"b"]
    assert stream.closed == 1


def test_a_fault_of_ours_is_not_the_end_of_a_stream() -> None:
    with pytest.raises(ZeroDivisionError):
        list(chunks(Stream([b"a"], ZeroDivisionError())))


def test_streams_are_told_apart() -> None:
    pieces: list[object] = [(b"a", None), (None, b"b"), (b"c", b"d")]
    assert list(demuxed(Stream(pieces))) == [(STDOUT, b"a"), (STDERR, b"b"), (STDOUT, b"c"), (STDERR, b"d")]


@given(st.lists(st.binary(max_size=5)), st.integers(0, 40))
def test_going_on_where_it_ended(pieces: list[bytes], count: int) -> None:
    assert b"".join(without_first(count, iter(pieces))) == b"".join(pieces)[count:]
