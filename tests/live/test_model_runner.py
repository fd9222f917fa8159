"""Worker of `explore --engine` and the release's CPU model runner: equal steps, seen faults."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro_explore import driver as module
from vllm_repro_explore.draw import MIXES, draw
from vllm_repro_explore.driver import Driver, driver_model

pytestmark = [pytest.mark.live, pytest.mark.depends("search")]

RELEASE = "0.32.0"
UNLIKE = "unlike-the-model-runner"

FAULTS: dict[str, tuple[str, str, str]] = {
    "a resumed request keeps its blocks": (
        "plain",
        "known.blocks = [list(group) for group in blocks]",
        "[mine.extend(more) for mine, more in zip(known.blocks, blocks)]",
    ),
    "a resumed request keeps all its tokens": (
        "ops",
        "            del known.tokens[known.prompt + answered :]\n",
        "",
    ),
    "rejected drafts stay computed": ("async", "computed[name] = self._reached[name]", "pass"),
    "placeholders are read as drafts": (
        "async",
        "drafts = (known.drafts + [1] * len(drafts))[: len(drafts)]",
        "pass",
    ),
    "a partial prefill has a token": (
        "plain",
        "if row.start + len(row.tokens) < len(known.tokens):",
        "if False:",
    ),
    "a bitmask has one row for each request": ("grammar", "at += counts[place]", "at += 1"),
    "each draft has the first row of the bitmask": (
        "grammar",
        "[rows[name] + place] if",
        "[rows[name]] if",
    ),
    "every draft is accepted": ("spec", "new[-1] != drafts[place] or place", "place"),
    "drafts end beyond the longest request": (
        "spec",
        'self.case["draft"] <= self.case["max_len"]',
        "0 < 1e9",
    ),
    "loads do not begin": ("off", "half.start()", "self._pending"),
    "a state stays in its block": ("mamba", "if before not in (-1, now):", "if False:"),
    "a step starts from the first state": (
        "mamba",
        "return self.slot(name) + right - 1",
        "return self.slot(name)",
    ),
    "a request that was left out keeps its count": (
        "mamba-ops",
        "for name in stepped if name in self._next",
        "for name in self._next",
    ),
    "a state at the end of a block is not kept": (
        "mamba-off",
        "if whole * self._block < first:",
        "if whole >= 0:",
    ),
    "recomputed outputs are a prefill": (
        "mamba-ops",
        "found = count <= 1 + (",
        "found = count == 1 + drafts + (0 * ",
    ),
    "encoder outputs stay": ("images", "self._encoded.pop(image, None)", "pass"),
    "each part of an image is its first": (
        "images",
        "found[low - first : high - first]",
        "found[: high - low]",
    ),
    "placeholders after a prompt are a prefill": (
        "mamba",
        "((_TAILS or self._second) and",
        "(False and",
    ),
}
"""Mix, and text of the program with what replaces it."""
SECOND: dict[str, tuple[str, str, str]] = {
    "the scheduler's count is taken": (
        "v2",
        "                computed[name] = known.reached\n",
        "",
    ),
    "a request that was left out keeps no count": (
        "v2-mamba",
        "self._right = dict(self._next)",
        "self._right = {name: self._next[name] for name in stepped if name in self._next}",
    ),
    "recomputed outputs are no prefill": ("v2-mamba", "len(tokens) if second else len", "len"),
}
"""The same of the second model runner, which needs a GPU: a fault in its rules is a finding."""


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


def plant(program: Path, mix: str, was: str, now: str) -> str:
    texts = {
        file: (program / file).read_text(encoding="utf-8") for file in ("executor.py", "mamba.py")
    }
    (file,) = (file for file, text in texts.items() if text.count(was) == 1)
    (program / file).write_text(texts[file].replace(was, now), encoding="utf-8")
    return mix


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
