"""DeepSeek-V4's prefill in the branch behind #41700, against bytes measured in vLLM's own code."""

from __future__ import annotations

import pytest
from rehearsal.defects.deepseek import ARCHITECTURE, DeepseekBackend, indexer_buffers
from rehearsal.release import Release
from rehearsal.shape import ModelShape
from rehearsal.workspace import Workspace, WorkspaceLockedError

BRANCH = "0.20.1rc1.dev12+g363ffa145"
FLASH = ModelShape(
    num_attention_heads=64, num_key_value_heads=1, head_dim=512, num_hidden_layers=43, full_attention_interval=1,
    architecture=ARCHITECTURE,
)  # fmt: skip


def backend(
    version: str = BRANCH,
    *,
    source: str = "",
    shape: ModelShape = FLASH,
    max_model_len: int = 16_384,
    batch: int = 8192,
    ranks: int = 2,
    lock: bool = True,
) -> DeepseekBackend:
    made = DeepseekBackend(Release.parse(version, source), shape, Workspace(), ranks, max_model_len, batch)
    made.warm_up()
    if lock:
        made.workspace.lock()
    return made


@pytest.mark.parametrize(("max_model_len", "size"), [(16_384, 22_675_456), (8_192, 11_862_016)])
def test_locked_size(max_model_len: int, size: int) -> None:
    assert sum(indexer_buffers(max_model_len)) == size
    assert backend(max_model_len=max_model_len).workspace.size == size


@pytest.mark.parametrize(
    ("tokens", "asked"), [(760, "21.63"), (1265, "21.63"), (1304, "21.80"), (2007, "24.89")]
)  # as the branch's shapes asked in vLLM 0.32.0, alone and over two ranks
def test_asked_size(tokens: int, asked: str) -> None:
    with pytest.raises(WorkspaceLockedError) as caught:
        backend().prefill([(0, tokens)])
    assert str(caught.value) == (
        f"Workspace is locked but allocation from 'deepseek_v4_attention.py:1457:_forward_prefill' requires {asked} MB, "
        "current size is 21.62 MB. Workspace growth is not allowed after locking."
    )


def test_759_tokens_fit() -> None:
    backend().prefill([(0, 759)])


def test_an_unlocked_workspace_grows() -> None:
    grown = backend(lock=False)
    grown.prefill([(0, 1304)])
    assert grown.workspace.size > 22_856_960


@pytest.mark.parametrize("version", ["0.20.0", "0.20.2", "0.20.1rc1.dev12+g000000000", "0.21.0", "0.32.0"])
def test_no_release_asks_for_more_than_it_reserved(version: str) -> None:
    backend(version).prefill([(0, 8192)])


def test_another_model_has_no_part_in_it() -> None:
    assert backend(shape=ModelShape()).workspace.size == 0


def test_what_a_release_reserves() -> None:
    assert backend("0.32.0").workspace.size == 71_860_224


@pytest.mark.parametrize(("source", "fits"), [("unreserved", 1306), ("branch", 759)])
def test_a_release_with_changed_source(source: str, fits: int) -> None:
    changed = backend("0.32.0", source=source)
    assert changed.workspace.size == 22_675_456
    changed.prefill([(0, fits)])
    with pytest.raises(WorkspaceLockedError, match=r"flashmla.py:319:_forward_prefill' requires 21.63 MB"):
        changed.prefill([(0, fits + 1)])


def test_a_last_token_alone_is_decoded() -> None:
    none = backend("0.32.0", source="unreserved", max_model_len=2048, batch=2048)
    none.prefill([(2048, 1)])
    with pytest.raises(WorkspaceLockedError):
        none.prefill([(2048, 2)])


def test_a_change_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="none of them"):
        Release.parse("0.32.0", "none of them")
