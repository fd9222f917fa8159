"""Each log of `tests/data` has the diagnosis of its header. `UPDATE_GOLDEN=1` rewrites headers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.diagnosis.logs import LOGS, header_of, split
from vllm_repro_diagnosis.diagnosis import diagnose

PRIVATE = re.compile(r"(?<![\w.])/(?:root|work|home/(?!someone)|tmp/pytest)\b|\bhf_\w{10}")


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_log_has_the_diagnosis_of_its_header(path: Path) -> None:
    header, text = split(path)
    diagnosed = header_of(diagnose(text))
    if os.environ.get("UPDATE_GOLDEN") and not os.environ.get("CI"):
        path.write_bytes(f"{diagnosed}\n\n".encode() + path.read_bytes().partition(b"\n\n")[2])
    assert diagnosed == header
    assert not PRIVATE.search(text)
