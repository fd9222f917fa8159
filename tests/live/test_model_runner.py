"""Worker of `explore --engine` and the release's CPU model runner: equal steps, seen faults."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.explore.driver_faults import FAULTS, SECOND, plant
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro_explore import driver as module
from vllm_repro_explore.draw import MIXES, draw
from vllm_repro_explore.driver import Driver, driver_model

pytestmark = [pytest.mark.live, pytest.mark.depends("search")]

RELEASE = "0.32.0"
UNLIKE = "unlike-the-model-runner"


@pytest.mark.parametrize("version", [RELEASE, "0.33.0"])
def test_each_step_is_that_of_the_model_runner(version: str, tmp_path: Path) -> None:
    with Driver(
        provision(Source(release=version)), driver_model(), tmp_path / "driver.log"
    ) as driver:
        compared = 0
        for seed in range(1, 12):
            for mix in MIXES:
                result = driver.play(draw(seed, mix), "both")
                if any(one.site.startswith("schedules-unknown-token") for one in result.findings):
                    continue  # the runner reads what lies in its row
                assert [one.detail for one in result.findings if one.site == UNLIKE] == [], (
                    seed,
                    mix,
                )
                compared += not result.invalid
    assert compared > 80


@pytest.fixture
def program(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Yield the folder of a copy of the program that plays the cases.

    It is always in the same place: Numba keeps compiled functions by their file's path.
    """
    copy = tmp_path_factory.getbasetemp() / "program"
    shutil.copytree(module.PROGRAM, copy)
    monkeypatch.setattr(module, "PROGRAM", copy)
    yield copy / "vllm_repro_driver"
    shutil.rmtree(copy)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_rule_is_seen(fault: str, program: Path, tmp_path: Path) -> None:
    mix = plant(program, *FAULTS[fault])
    with Driver(
        provision(Source(release=RELEASE)), driver_model(), tmp_path / "driver.log"
    ) as driver:
        results = (driver.play(draw(seed, mix), "both") for seed in range(1, 301))
        assert any(one.site == UNLIKE for result in results for one in result.findings)


@pytest.mark.parametrize("fault", SECOND)
def test_a_fault_in_a_rule_of_the_second_runner_is_a_finding(
    fault: str, program: Path, tmp_path: Path
) -> None:
    mix, release = SECOND[fault][0], provision(Source(release=RELEASE))
    with (
        Driver(release, driver_model(), tmp_path / "sound.log") as sound,
        Driver(release, driver_model(), tmp_path / "driver.log") as driver,
    ):
        sound.play(draw(1, mix))  # it has begun before the fault is there
        plant(program, *SECOND[fault])
        pairs = (
            (driver.play(draw(seed, mix)).worst, sound.play(draw(seed, mix)).worst)
            for seed in range(1, 401)
        )
        assert any(one is not None and other is None for one, other in pairs)
