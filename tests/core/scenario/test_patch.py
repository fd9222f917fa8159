"""Patches of vLLM source, and diffs as people make them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_repro.errors import Unsupported, UsageError
from vllm_repro.scenario.patch import Patch, read_diff

FILE = "vllm/v1/core/block_pool.py"
DIFF = """\
diff --git a/vllm/v1/core/block_pool.py b/vllm/v1/core/block_pool.py
--- a/vllm/v1/core/block_pool.py
+++ b/vllm/v1/core/block_pool.py
@@ -1,3 +1,4 @@
 def free(blocks):
-    for block in blocks:
+    for block in set(blocks):
+        assert block
         block.count -= 1
"""


@pytest.mark.parametrize(
    ("file", "was", "now", "message"),
    [
        *(
            (file, "a", "b", "no file of vLLM's")
            for file in (
                "block_pool.py",
                "/vllm/a.py",
                "vllm/../../a.py",
                "vllm/a.so",
                "torch/a.py",
            )
        ),
        (FILE, "", "x", "changes nothing"),
        (FILE, "x", "x", "changes nothing"),
    ],
)
def test_a_change_is_of_a_file_of_vllm_and_changes_it(
    file: str, was: str, now: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Patch(file, was, now)


@given(st.text(), st.text(min_size=1), st.text(), st.text())
def test_exactly_the_text_that_is_there_once_is_replaced(
    before: str, was: str, after: str, now: str
) -> None:
    text = before + was + after
    assume(was != now and text.count(was) == 1)
    assert Patch(FILE, was, now).apply(text) == before + now + after


@pytest.mark.parametrize(
    ("text", "times"), [("nothing of the kind", "nowhere"), ("count -= 1; count -= 1", "2 times")]
)
def test_a_patch_that_does_not_fit_is_unsupported(text: str, times: str) -> None:
    with pytest.raises(
        Unsupported, match=f"has the text of the change {times}; it begins with 'count -= 1'"
    ):
        Patch(FILE, "count -= 1", "count = 0").apply(text)


def test_a_line_of_a_diff_is_not_the_end_of_another_line(tmp_path: Path) -> None:
    path = tmp_path / "fix.diff"
    path.write_text(
        f"--- a/{FILE}\n+++ b/{FILE}\n@@ -3 +3 @@\n-count = 1\n+count = 2\n", encoding="utf-8"
    )
    (patch,) = read_diff(path)
    assert patch.apply("a = 0\ncount = 1\nself.count = 1\n") == "a = 0\ncount = 2\nself.count = 1\n"
    with pytest.raises(Unsupported, match=r"has the text of hunk 1 of fix\.diff nowhere"):
        patch.apply("self.count = 1\n")


def test_a_diff_is_its_hunks_wherever_the_lines_have_moved(tmp_path: Path) -> None:
    path = tmp_path / "fix.diff"
    path.write_text(DIFF, encoding="utf-8")
    (patch,) = read_diff(path)
    assert (patch.file, patch.why) == (FILE, "hunk 1 of fix.diff")
    moved = "import os\n\n\ndef free(blocks):\n    for block in blocks:\n        block.count -= 1\n"
    assert patch.apply(moved).splitlines()[3:] == [
        "def free(blocks):",
        "    for block in set(blocks):",
        "        assert block",
        "        block.count -= 1",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no unified diff that changes anything"),
        ("hello", "no unified diff that changes anything"),
        (DIFF.replace("vllm/v1", "docs/v1"), "no file of vLLM's"),
        (DIFF.replace("@@ -1,3 +1,4 @@", "@@ -1,9 +1,4 @@"), "no unified diff"),
        (
            "--- /dev/null\n+++ b/vllm/new.py\n@@ -0,0 +1 @@\n+x\n",
            "adds, removes or renames vllm/new.py",
        ),
        # Each beside a hunk that fits: half of a patch is another patch.
        (
            DIFF + "diff --git a/vllm/b.py b/vllm/c.py\nsimilarity index 100%\nrename from"
            " vllm/b.py\nrename to vllm/c.py\n",
            "c.py",
        ),
        (
            DIFF + "diff --git a/vllm/b.so b/vllm/b.so\nBinary files a/vllm/b.so and b/vllm/b.so"
            " differ\n",
            "b.so, or changes one",
        ),
    ],
)
def test_what_is_no_diff_of_vllm_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fix.diff"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_diff(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_diff(tmp_path / "absent.diff")
