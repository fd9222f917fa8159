from __future__ import annotations

import io
from pathlib import Path

import pytest
import requests.exceptions
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.servers.docker_output import STDERR, STDOUT, WholeLines, chunks, demuxed, without_first


class Stream:
    """A stream of the SDK: pieces, and then an end of some kind."""

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
    """A file whose content can be read after it was closed."""

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
