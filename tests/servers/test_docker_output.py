from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import requests.exceptions
from hypothesis import HealthCheck, given, settings
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


def test_lines_of_two_streams_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = WholeLines(path.open("wb", buffering=0))
    lines.write(STDOUT, b"first\nhalf of a ")
    assert path.read_bytes() == b"first\n"
    lines.write(STDERR, b"Traceback\n")
    lines.write(STDOUT, b"line\n10%\r20")
    assert path.read_bytes() == b"first\nTraceback\nhalf of a line\n10%\r"
    lines.write(STDERR, b"the end")
    assert lines.received == [29, 17]
    lines.close()
    assert path.read_bytes() == b"first\nTraceback\nhalf of a line\n10%\r20the end"


@given(st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.lists(st.integers(0, 40), min_size=1)), max_size=8))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_stream_comes_out_as_it_went_in(tmp_path: Path, plan: list[tuple[int, list[int]]]) -> None:
    """Each stream is cut at arbitrary places; whole lines of each come out in order, none within another."""
    texts = [b"".join(b"%s %d\n" % (name, i) for i in range(30)) for name in (b"out", b"err")]
    cuts: list[list[int]] = [[], []]
    for stream, places in plan:
        cuts[stream] += places
    pieces: list[tuple[int, bytes]] = []
    for stream, text in enumerate(texts):
        edges = sorted({0, len(text), *(place * 5 % len(text) for place in cuts[stream])})
        pieces += [(stream, text[start:end]) for start, end in pairwise(edges)]
    pieces.sort(key=lambda piece: len(piece[1]))
    in_order = [[piece for piece in pieces if piece[0] == stream] for stream in (STDOUT, STDERR)]
    sent = [b"".join(chunk for _, chunk in of_stream) for of_stream in in_order]

    path = tmp_path / "log"
    lines = WholeLines(path.open("wb", buffering=0))
    for stream, chunk in pieces:
        lines.write(stream, chunk)
    assert lines.received == [len(sent[STDOUT]), len(sent[STDERR])]
    lines.close()
    written = path.read_bytes()
    assert len(written) == len(sent[STDOUT]) + len(sent[STDERR])
    for stream in (STDOUT, STDERR):
        for line in sent[stream].splitlines(keepends=True)[:-1]:
            assert line in written


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
