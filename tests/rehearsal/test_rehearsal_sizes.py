"""The sizes of the workspace bug, against the bytes measured in vLLM's own code."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsal.defects.turboquant import TurboQuantBackend, captured_batch, continuation_buffers, decode_buffers
from rehearsal.flags import parse
from rehearsal.release import Release
from rehearsal.shape import ModelShape
from rehearsal.workspace import Workspace, WorkspaceLockedError, aligned

SEED = ModelShape(num_attention_heads=16, num_key_value_heads=4, head_dim=256)
TINY = ModelShape(
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_hidden_layers=1, full_attention_interval=1
)
ONE = ModelShape(
    num_attention_heads=1, num_key_value_heads=1, head_dim=32, num_hidden_layers=1, full_attention_interval=1
)


def locked(shape: ModelShape, batch: int, release: str = "0.21.0") -> Workspace:
    workspace = Workspace()
    TurboQuantBackend(Release.parse(release), shape, workspace, 32).warm_up_decode(batch)
    workspace.lock()
    return workspace


@pytest.mark.parametrize(
    ("shape", "batch", "size"),
    [(SEED, 2, 1_069_312), (TINY, 2, 34_560), (TINY, 8, 137_472), (ONE, 2, 8_960)],
)
def test_locked_size(shape: ModelShape, batch: int, size: int) -> None:
    assert locked(shape, batch).size == size


@pytest.mark.parametrize(("heads", "batch", "megabytes"), [(16, 2, "1.02"), (24, 4, "3.06"), (24, 1, "0.76")])
def test_locked_size_of_reports(heads: int, batch: int, megabytes: str) -> None:
    # the numbers of #41726, #43357 and #42808
    shape = ModelShape(num_attention_heads=heads, num_key_value_heads=4, head_dim=256)
    assert f"{sum(map(aligned, decode_buffers(shape, batch))) / 2**20:.2f}" == megabytes


@pytest.mark.parametrize(("cached", "block", "megabytes"), [(4096, 2048, 16.0), (2080, 32, 8.125), (4096, 128, 16.0)])
def test_asked_size_of_reports(cached: int, block: int, megabytes: float) -> None:
    assert sum(continuation_buffers(SEED, cached, block)) == megabytes * 2**20


def test_the_assertion_is_the_reported_one() -> None:
    backend = TurboQuantBackend(Release.parse("0.21.0"), SEED, locked(SEED, 2), 2048)
    with pytest.raises(WorkspaceLockedError) as caught:
        backend.prefill(4096, 3497)
    assert str(caught.value) == (
        "Workspace is locked but allocation from 'turboquant_attn.py:747:_continuation_prefill' requires 16.00 MB, "
        "current size is 1.02 MB. Workspace growth is not allowed after locking."
    )


@pytest.mark.parametrize(
    ("version", "line"),
    [("0.20.2rc1.dev35+g4845aee6b", 720), ("0.21.0", 747), ("0.23.0", 747), ("0.24.0", 786), ("0.25.1", 786),
     ("0.26.0", 792), ("0.27.1", 794), ("0.28.0", 971), ("0.29.0", 942), ("0.32.0", 942)],
)  # fmt: skip
def test_line_of_the_call(version: str, line: int) -> None:
    backend = TurboQuantBackend(Release.parse(version), TINY, locked(TINY, 0, version), 32)
    with pytest.raises(WorkspaceLockedError, match=f"turboquant_attn.py:{line}:_continuation_prefill"):
        backend.prefill(256, 129)


def test_at_most_128_tokens_never_ask() -> None:
    backend = TurboQuantBackend(Release.parse("0.21.0"), TINY, locked(TINY, 2), 32)
    backend.prefill(100_000, 128)
    backend.prefill(0, 100_000)


def test_a_bigger_batch_hides_the_bug() -> None:
    # max_num_seqs 8 locks so much that 896 = 256·3 + 128 tokens live and 897 do not
    backend = TurboQuantBackend(Release.parse("0.21.0"), TINY, locked(TINY, 8), 32)
    backend.prefill(256, 129)
    backend.prefill(512, 256)
    with pytest.raises(WorkspaceLockedError, match=r"requires 0\.19 MB, current size is 0\.13 MB"):
        backend.prefill(768, 129)


def test_reservation_of_the_fix() -> None:
    def reserve(release: str, chunked: bool, tokens: int) -> int:
        workspace = Workspace()
        backend = TurboQuantBackend(Release.parse(release), TINY, workspace, 32)
        backend.reserve(2, 4096, chunked, tokens)
        return workspace.size

    assert reserve("0.24.0", True, 256) == 1_048_576
    assert reserve("0.24.0", False, 4096) == 34_560
    assert reserve("0.24.0", True, 128) == 34_560
    assert reserve("0.23.0", True, 256) == 0


def test_unlocked_workspace_grows() -> None:
    notes: list[str] = []
    workspace = Workspace(lambda _place, text: notes.append(text))
    backend = TurboQuantBackend(Release.parse("0.21.0"), TINY, workspace, 32)
    backend.prefill(256, 129)
    assert workspace.size == 65_536
    workspace.lock()
    assert notes[0].startswith("[WORKSPACE DEBUG] Resized workspace from 'turboquant_attn.py:747:_continuation")
    assert notes[1] == "[WORKSPACE DEBUG] Workspace locked. Current sizes: [0.0625]"


@given(cached=st.integers(1, 20_000), batch=st.integers(1, 16), tokens=st.integers(129, 5_000))
@settings(max_examples=200)
def test_dies_exactly_when_it_asks_for_more_than_is_locked(cached: int, batch: int, tokens: int) -> None:
    workspace = locked(TINY, batch)
    backend = TurboQuantBackend(Release.parse("0.23.0"), TINY, workspace, 32)
    asked = 4 * 2 * 32 * (-(-cached // 32) * 32)
    if asked > workspace.size:
        with pytest.raises(WorkspaceLockedError):
            backend.prefill(cached, tokens)
    else:
        backend.prefill(cached, tokens)


def test_captured_batch_follows_vllms_sizes() -> None:
    args = parse(["serve", "m", "--max-num-seqs", "3"], Release.parse("0.23.0"))
    assert args.capture_sizes() == (1, 2, 4)
    assert captured_batch(args.capture_sizes(), 3) == 2
    many = parse(["serve", "m"], Release.parse("0.23.0"))
    assert captured_batch(many.capture_sizes(), 256) == 256


def test_turboquant_layers() -> None:
    assert ModelShape().turboquant_layers == [3, 7, 11, 15, 19, 23, 27, 31]
    assert TINY.turboquant_layers == [0]
    two = ModelShape(num_hidden_layers=2, full_attention_interval=1)
    assert two.turboquant_layers == []
    assert ModelShape(num_hidden_layers=6, full_attention_interval=1).turboquant_layers == [2, 3]
