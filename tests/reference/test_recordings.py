"""Every row of every reference table, on the rehearsal engine: it does what the release did, with the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from reference.pools import rehearsed as played
from reference.servers import rehearsed
from reference.table import Answered, Boot, Recording, Shown, read, write
from reference.tables import TABLES

from tests.reference.recorded import recording
from vllm_repro.releases.knowledge import release_version
from vllm_repro.scenario.catalogue import find

BOOTS = [(name, boot) for name, table in TABLES.items() for boot in table.drawn()[0]]
POOLS = [
    (name, release) for name, table in TABLES.items() for release in sorted({pool.release for pool in table.drawn()[1]})
]


@pytest.mark.parametrize("name", TABLES)
def test_a_recording_is_of_what_the_seed_draws(name: str) -> None:
    table, found = TABLES[name], recording(name)
    assert (found.scenario, found.seed) == (table.scenario, table.seed)
    assert (tuple(found.boots), tuple(found.pools), tuple(found.sizes)) == table.drawn()
    assert table.drawn() == table.drawn()
    assert replace(table, seed=table.seed + 1).drawn() != table.drawn()
    tried = {boot.release for boot in found.boots} | {pool.release for pool in found.pools}
    tried |= {sized.release for sized in found.sizes}
    assert tried == set(found.recorder["releases"]) == set(map(release_version, tried))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_enough_of_both_outcomes(name: str) -> None:
    found = recording(name)
    never_served = [shown for shown in found.boots.values() if not shown.answers]
    assert len(found.rows) + len(never_served) + len(found.pools) >= 20
    died = sum(shown.died for shown in found.boots.values()) + sum(bool(fate.dies) for fate in found.pools.values())
    assert died >= 5
    assert any(not shown.died for shown in found.boots.values())
    assert all(shown.answers or shown.phase == "warmup" for shown in found.boots.values())


@pytest.mark.parametrize(("name", "boot"), BOOTS, ids=[f"{name}-{boot.release}" for name, boot in BOOTS])
def test_the_rehearsal_engine_does_what_the_release_did(name: str, boot: Boot, tmp_path: Path) -> None:
    shown, played = recording(name).boots[boot], rehearsed(find(name), boot, tmp_path / "run")
    if boot.together:
        # Who came into the step that died, and so what it asked for, is chance.
        shown, played = (replace(one, step=(), message=None) for one in (shown, played))
    assert played == replace(shown, twice=0, lost=None, prefills=())


@pytest.mark.parametrize(("name", "release"), POOLS)
def test_its_scheduler_does_what_the_releases_scheduler_did(name: str, release: str) -> None:
    fates = {pool: fate for pool, fate in recording(name).pools.items() if pool.release == release}
    assert {pool: played(pool) for pool in fates} == fates


def test_a_recording_reads_as_it_was_written(tmp_path: Path) -> None:
    boot = Boot("0.21.0", ("--max-num-seqs 2",), ())
    shown = Shown("crash", (Answered(200, 0), Answered(500)), message="m", step=((4, 5),), lost=(3, 2, 1))
    found = Recording("some", 1, {"command": "c"}, {boot: shown}, {})
    write(found, tmp_path / "some.json")
    assert read(tmp_path / "some.json") == found
    for name in TABLES:
        write(recording(name), tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == TABLES[name].path.read_bytes()
