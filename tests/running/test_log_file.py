"""A log that is read while it grows."""

from __future__ import annotations

import asyncio
from pathlib import Path

from vllm_repro.running.watch import follow


def lines_of(path: Path, writes: list[bytes], expected: int) -> list[str]:
    async def read() -> list[str]:
        found: list[str] = []
        async for line, written in follow(path):
            assert written > 0
            if line:
                found.append(line)
            if len(found) == expected:
                return found
            if writes:
                with path.open("ab") as file:
                    file.write(writes.pop(0))
        return found

    async def first() -> list[str]:
        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)  # the file is not there yet
        path.write_bytes(writes.pop(0))
        return await asyncio.wait_for(task, 10)

    return asyncio.run(first())


def test_lines_come_whole_however_they_were_written(tmp_path: Path) -> None:
    writes = [b"one\ntw", b"o\nthree\r25%", b"\r50%\nfour\xff\n"]
    assert lines_of(tmp_path / "log", writes, 6) == ["one", "two", "three", "25%", "50%", "four\ufffd"]


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    writes = [b"x" * 200_000, b"y" * 200_000, b"\nnext\n"]
    long, after = lines_of(tmp_path / "log", writes, 2)
    assert (len(long), after) == (65536, "next")
