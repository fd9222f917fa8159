"""`vllm-repro bisect --component` with made-up runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.conftest import Harness
from tests.golden_files import assert_refused, missing
from tests.report_examples import run_of
from tests.search.conftest import MadeUp, record_in, releases_of
from vllm_repro.cli import main
from vllm_repro.errors import Unsupported
from vllm_repro.releases.provision import Release
from vllm_repro.releases.sources import Source
from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job
from vllm_repro.verdict.outcome import Outcome

GRAMMAR = ("bisect", "grammar-after-valid", "--server", "process")
VLLM = "vllm=0.24.0..0.28.0"
XGRAMMAR = "xgrammar=0.2.3,0.2.5,0.2.6,0.2.8,0.2.9"


def words(*components: str) -> list[str]:
    return [word for text in components for word in ("--component", text)]


def bisected(out: Path, *more: str, status: int = 0) -> dict[str, Any]:
    assert main([*GRAMMAR, *more, "--out", str(out)]) == status
    return record_in(out, "bisect")


def by(fails: Callable[[str, str], bool], unfit: Sequence[str] = ()) -> Callable[[Job], RunReport]:
    """Return runs that crash if the release and the version of xgrammar `fails`."""

    def answer(job: Job) -> RunReport:
        assert job.options.vllm
        release, _, package = f"{job.options.vllm}".partition(" with ")
        if f"{job.options.vllm}" in unfit:
            raise Unsupported("xgrammar does not fit", hint="--with adds it")
        outcome = Outcome.CRASH if fails(release, package.partition("==")[2]) else Outcome.CLEAN
        return run_of("0.24.0", [outcome], reported=job.options.vllm.version)

    return answer


def test_the_guilty_package_is_found_and_resumed(
    made_up: MadeUp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = made_up(by(lambda _, package: package >= "0.2.6"))
    more = words(VLLM, XGRAMMAR)
    cut = bisected(tmp_path, *more, "--max-boots", "3", status=2)
    assert releases_of(asked)[:2] == [
        "0.28.0 with xgrammar==0.2.9",
        "0.24.0 with xgrammar==0.2.3",
    ]
    assert cut["reading"].startswith("Undecided. Possible cause")
    (folder,) = tmp_path.glob("*/bisect/latest")
    assert main(["bisect", "--resume", str(folder)]) == 0
    record = record_in(tmp_path, "bisect")
    assert record["steps"][:3] == cut["steps"]
    assert record["answer"] == [
        {"component": "xgrammar", "first_bad": "xgrammar 0.2.6", "last_good": "xgrammar 0.2.5"}
    ]
    assert len(set(releases_of(asked))) == len(asked) == len(record["steps"]) <= 7
    reading = "The guilty component is xgrammar: the first bad one is xgrammar 0.2.6. "
    assert record["reading"].startswith(reading)
    again = f"again:    vllm-repro {' '.join((*GRAMMAR, *words(VLLM)))}"
    assert missing(capsys.readouterr().out, reading, again, f"--component {XGRAMMAR}") == []
    text = (folder / "bisection.md").read_text(encoding="utf-8")
    assert missing(text, f"**{reading}", "boots among 7 x 5 combinations") == []
    assert main(["bisect", "--resume", str(folder), *words(VLLM)]) == 64


@pytest.mark.parametrize(
    ("fails", "status", "reading"),
    [
        (
            lambda release, package: release >= "0.26.0" and package >= "0.2.8",
            0,
            (
                "It needs two together: vllm 0.26.0 or newer and xgrammar 0.2.8 or newer. Neither"
                " failed alone. 0.26.0 with xgrammar==0.2.9 died in 1 of 1 boots;"
            ),
        ),
        (
            lambda release, package: release >= "0.26.0" or package >= "0.2.8",
            0,
            "Several alone are enough: vllm 0.26.0 or newer, and xgrammar 0.2.8 or newer.",
        ),
        (
            lambda *_: True,
            1,
            (
                "Born red: 0.24.0 with xgrammar==0.2.3, the good versions, died in 1 of 1 boots:"
                " they have the bug too."
            ),
        ),
        (
            lambda *_: False,
            1,
            "No answer: 0.28.0 with xgrammar==0.2.9, all bad versions together, lived in 1 of 1",
        ),
    ],
)
def test_other_answers(
    made_up: MadeUp,
    tmp_path: Path,
    fails: Callable[[str, str], bool],
    status: int,
    reading: str,
) -> None:
    made_up(by(fails))
    assert bisected(tmp_path, *words(VLLM, XGRAMMAR), status=status)["reading"].startswith(reading)


def test_combinations_that_do_not_fit_are_skipped(made_up: MadeUp, tmp_path: Path) -> None:
    unfit = ["0.28.0 with xgrammar==0.2.3", "0.24.0 with xgrammar==0.2.9"]
    made_up(by(lambda release, _: release >= "0.26.0", unfit))
    record = bisected(tmp_path, *words(VLLM, XGRAMMAR))
    assert [one["first_bad"] for one in record["answer"]] == ["vllm 0.26.0"]
    unfit += ["0.26.0 with xgrammar==0.2.3", "0.25.1 with xgrammar==0.2.9"]
    made_up(by(lambda release, _: release >= "0.26.0", unfit))
    ends = words("vllm=0.25.1,0.26.0", "xgrammar=0.2.3,0.2.9")
    reading = bisected(tmp_path / "stuck", *ends, status=2)["reading"]
    assert missing(reading, "Undecided. ", "vllm 0.26.0; ", "tried: 0.26.0 with x") == []


def test_without_vllm_the_fix_is_sought_in_the_release_of_the_scenario(
    made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = "xgrammar (0.2.9)\nAvailable versions: 0.2.9, 0.2.8, 0.2.5.post1, 0.2.5, 0.2.3, 0.2.0"
    listed = CompletedProcess([], 0, f"{printed}\n", "")
    monkeypatch.setattr(
        "vllm_repro_search.bisect.components.subprocess.run", lambda *_, **__: listed
    )
    asked = made_up(by(lambda _, package: package < "0.2.8"))
    more = ["--find-fix", *words("XGrammar=0.2.9..0.2.3")]
    record = bisected(tmp_path, *more)
    assert record["packages"] == {"xgrammar": ["0.2.3", "0.2.5", "0.2.5.post1", "0.2.8", "0.2.9"]}
    assert releases_of(asked)[0] == "0.25.1 with xgrammar==0.2.3"
    assert record["reading"].startswith(
        "The guilty component is xgrammar: the first fixed one is xgrammar 0.2.8."
    )
    assert "--component xgrammar=0.2.9,0.2.8,0.2.5.post1,0.2.5,0.2.3" in record["reproduce"]
    listed.stdout = ""
    assert main([*GRAMMAR, *more]) == 64


def test_a_script_answers_for_combinations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def provision(_: object, source: Source, _progress: object) -> Release:
        assert source.packages
        return Release(
            source=source,
            version="",
            torch="",
            python=tmp_path,
            packages=tmp_path,
            executable=tmp_path,
        )

    monkeypatch.setattr("vllm_repro_search.bisect.boots.ReleaseCache.provision", provision)
    script = "case $VLLM_REPRO_SOURCE in *==0.2.[89]) exit 1;; esac"
    more = ("--out", str(tmp_path), *words(XGRAMMAR))
    assert main(["bisect", "grammar-after-valid", "--script", script, *more]) == 0
    assert record_in(tmp_path, "bisect")["answer"][0]["first_bad"] == "xgrammar 0.2.8"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (words("vllm"), "--component vllm has no good and bad version"),
        (words("xgrammar=0.2.5.."), "has no good and bad version"),
        (words("xgrammar==0.2.5,0.2.6"), "'xgrammar===0.2.5' is no package beside vLLM"),
        (words("torch=2.10.0,2.11.0"), "--with cannot exchange torch"),
        (words(VLLM, VLLM), "--component names vllm twice"),
        (words("vllm=0.28.0..0.24.0"), "--bad 0.24.0 is older than --good 0.28.0"),
        (words("xgrammar=0.2.8,0.2.3"), "xgrammar's bad 0.2.3 is older than xgrammar's good 0.2.8"),
        (words("a=1,3,2,4"), "the versions of a are not in order, from good to bad"),
        ([*words(VLLM), "--bad", "0.28.0"], "either --bad and --good, or --component"),
        ([*words(XGRAMMAR), "--versions", "0.28.0"], "have no meaning without --component vllm"),
        ([*words(VLLM, XGRAMMAR), "--server", "docker"], "docker"),
    ],
)
def test_wrong_usage(harness: Harness, more: list[str], message: str) -> None:
    assert_refused(harness(*GRAMMAR, *more), message, "next:")
