from __future__ import annotations

import pytest

from vllm_repro.report.version_strip import version_strip
from vllm_repro.scenario.scenario import Status


@pytest.mark.parametrize(
    ("bad", "good", "ran", "shown"),
    [
        (">=0.21.0,<0.24.0", ">=0.24.0", "0.23.0", "0.21.0 bad, 0.23.0 bad!, 0.24.0 good"),
        (">=0.21.0,<0.24.0", ">=0.24.0", "0.24.0+cpu", "0.21.0 bad, 0.24.0+cpu good!"),
        (">=0.20.0,<0.22.0", ">=0.24.0", "0.9.2", "0.9.2 declared!, 0.20.0 bad, 0.22.0 declared, 0.24.0 good"),
        (">=0.24.0", "", "unversioned", "0.24.0 bad, unversioned declared!"),
        ("==0.20.1rc1", ">=0.20.0,!=0.20.1rc1", "0.20.0", "0.20.0 good!, 0.20.1rc1 bad"),
    ],
)
def test_releases_at_which_the_status_changes_and_those_that_ran(bad: str, good: str, ran: str, shown: str) -> None:
    strip = version_strip(Status(bad, good), {ran: ("lives", "good")})
    words = (f"{one.version} {one.declared[0].split()[-1]}{'!' if one.seen else ''}" for one in strip)
    assert ", ".join(words) == shown
