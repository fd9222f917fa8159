"""How soon `explore --engine` finds known bugs, from several starts, on affected releases.

Nothing of a bug is told to the search: the mixes and their draws are those of the command. A start
is a first seed; each bug is searched in the mix that has its features, until it is found or
`--most` cases were played.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro_explore.draw import draw
from vllm_repro_explore.driver import Driver, driver_model
from vllm_repro_explore.finding import ENDLESS, Finding, FindingKind


@dataclass(frozen=True, kw_only=True)
class Bug:
    """shows: True for a finding of it."""

    name: str
    release: str
    mix: str
    shows: Callable[[Finding], bool]


def _death(part: str) -> Callable[[Finding], bool]:
    return lambda finding: finding.kind is FindingKind.DEATH and part in finding.site


def _stuck(site: str) -> Callable[[Finding], bool]:
    return lambda finding: (
        finding.kind is FindingKind.STUCK and finding.site == f"requests stay {site}"
    )


BUGS = (
    Bug(name="#43920", release="0.21.0", mix="grammar", shows=_death('Rule "root"')),
    Bug(
        name="reset of running requests (not reported)",
        release="0.32.0",
        mix="ops-off",
        shows=_death(".is_store"),
    ),
    Bug(name="#49118", release="0.26.0", mix="off", shows=_death("len(offload_block_ids)")),
    Bug(
        name="#43884",
        release="0.23.0",
        mix="off-crowd",
        shows=_death("num_locally_computed_tokens"),
    ),
    Bug(
        name="#46014",
        release="0.23.0",
        mix="off-busy",
        shows=_death("not req_status.transfer_jobs"),
    ),
    Bug(
        name="#42761",
        release="0.21.0",
        mix="off-crowd",
        shows=_death("KeyError in _remove_pending_job"),
    ),
    Bug(
        name="#42043",
        release="0.21.0",
        mix="pause",
        shows=lambda finding: finding.site == "wrong-token",
    ),
    Bug(
        name="#43941", release="0.23.0", mix="images", shows=lambda finding: finding.site == ENDLESS
    ),
    Bug(
        name="#35755", release="0.29.0", mix="stream", shows=_death("num_output_placeholders >= 0")
    ),
    Bug(
        name="#49250",
        release="0.33.0",
        mix="store",
        shows=lambda finding: "rejected load" in finding.site,
    ),
    Bug(
        name="#46240",
        release="0.33.0",
        mix="store-late",
        shows=_death("assert req_id in self.requests"),
    ),
    Bug(name="#45138", release="0.33.0", mix="store", shows=_stuck("RUNNING")),
    Bug(
        name="#44451",
        release="0.33.0",
        mix="mamba-events",
        shows=lambda finding: finding.site == "events-tokens",
    ),
    Bug(
        name="PR #55092",
        release="0.33.0",
        mix="events",
        shows=lambda finding: finding.site == "events-early",
    ),
    Bug(name="#53706", release="0.28.0", mix="mamba-nixl", shows=_death("num_new_tokens > 0")),
    Bug(
        name="PR #49439",
        release="0.32.0",
        mix="stream",
        shows=lambda finding: finding.kind is FindingKind.STUCK,
    ),
    Bug(name="PR #44526", release="0.32.0", mix="stream", shows=_death("num_new_tokens > 0")),
    Bug(
        name="nixl-fetch-loses-token",
        release="0.33.0",
        mix="fetch",
        shows=lambda finding: "fetched" in finding.site,
    ),
    Bug(
        name="nixl-failed-fetch-waits",
        release="0.33.0",
        mix="fetch",
        shows=_stuck("WAITING, WAITING_FOR_REMOTE_KVS"),
    ),
    Bug(
        name="nixl-failed-fetch-reserves",
        release="0.33.0",
        mix="fetch-off",
        shows=_stuck("WAITING"),
    ),
    Bug(
        name="image-resumed-without-data",
        release="0.33.0",
        mix="images",
        shows=_death("Encoder cache miss"),
    ),
    Bug(
        name="PR #43569",
        release="0.32.0",
        mix="urgent",
        shows=lambda finding: finding.site == "wrong-token",
    ),
    Bug(
        name="#42085",
        release="0.20.2",
        mix="sco-long",
        shows=_death("popleft_n (vllm/v1/core/kv_cache_utils.py)"),
    ),
)


def row(bug: Bug, starts: int, most: int) -> str:
    cases, seconds = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        Driver(
            provision(Source(release=bug.release)),
            driver_model(),
            Path(folder) / "driver.log",
            case_s=20,
        ) as driver,
    ):
        driver.play(draw(1, bug.mix))  # boots the process
        for start in range(starts):
            began = time.monotonic()
            for number in range(1, most + 1):
                worst = driver.play(draw(1 + 10_000 * start + number, bug.mix)).worst
                if worst is not None and bug.shows(worst):
                    cases.append(number)
                    seconds.append(time.monotonic() - began)
                    break
    found = f"{len(cases)} of {starts}"
    if not cases:
        return f"| {bug.name} | {bug.release} | {bug.mix} | {found} | | |"
    spread = f"{statistics.median(cases):.0f} ({min(cases)}..{max(cases)})"
    took = f"{statistics.median(seconds):.1f} ({min(seconds):.1f}..{max(seconds):.1f})"
    return f"| {bug.name} | {bug.release} | {bug.mix} | {found} | {spread} | {took} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=10, metavar="N")
    parser.add_argument("--most", type=int, default=10_000, metavar="N", help="cases of a start")
    parser.add_argument("--only", metavar="BUG", help="the bug whose name begins like this")
    given = parser.parse_args()
    print("| bug | vLLM | mix | found from | cases to the first: median (range) | seconds |")
    print("|---|---|---|---|---|---|")
    for bug in BUGS:
        if not given.only or bug.name.startswith(given.only):
            print(row(bug, given.starts, given.most), flush=True)


if __name__ == "__main__":
    main()
