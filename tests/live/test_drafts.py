"""The diffs of the kept drafts, against the source of the release that the run was of."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.report_examples import EXAMPLES, replace, report
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro.report.files import write_diffs

pytestmark = [pytest.mark.live, pytest.mark.depends("all")]

PATCHED = [folder for folder in EXAMPLES if list(folder.glob("*.diff"))]


@pytest.mark.parametrize("folder", PATCHED, ids=lambda folder: folder.name)
def test_git_applies_every_diff_of_a_draft_to_its_release(folder: Path, tmp_path: Path) -> None:
    made = report(folder)
    packages = provision(Source(release=made.vllm_version or "")).packages
    body = (folder / "issue.md").read_text(encoding="utf-8")
    reason = r"(?:(?!```)[^\n]+\n\n)*"
    shown = re.findall(rf"for git apply</summary>\n\n{reason}```diff\n(.*?)\n```", body, re.S)
    assert shown
    assert "by hand" not in body
    for diff in shown:
        for file in re.findall(r"^--- a/(\S+)$", diff, re.M):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(packages / file, tmp_path / file)
        subprocess.run(
            ["git", "apply", "--check", "-"],
            cwd=tmp_path,
            input=f"{diff}\n",
            text=True,
            check=True,
            capture_output=True,
        )
    out = tmp_path / "run"
    out.mkdir()
    again = write_diffs(replace(made, folder=out))
    assert {path.name: path.read_text(encoding="utf-8") for path in again} == {
        path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.diff")
    }
