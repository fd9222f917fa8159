from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.budgets import BUDGETS, statements, table, too_many

MODULE = '''"""Docstring."""
import os
LIMIT = 3
"""What it limits."""
class Record:
    """Docstring."""
    # comment
    name: str
    """What it names."""
def double(x: int) -> int:
    """Docstring."""
    if x: x *= 2
    return x
'''


def test_strings_alone_do_not_count() -> None:
    assert statements(MODULE) == 8


def test_a_package_counts_for_its_folder(tmp_path: Path) -> None:
    for name in ("harness/vllm_repro/a.py", "harness/vllm_repro_b/c/d.py", "tests/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(MODULE, encoding="utf-8")
    counts = {"harness": 16, "harness/vllm_repro": 8, "harness/vllm_repro_b": 8, "tests": 8}
    assert table(tmp_path) == counts


def test_each_budget_is_held() -> None:
    full = Counter(BUDGETS)
    assert not list(too_many(full))
    for folder in BUDGETS:
        assert [sentence.partition(":")[0] for sentence in too_many(full + Counter([folder]))] == [
            folder
        ]
