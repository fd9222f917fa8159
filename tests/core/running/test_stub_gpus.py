"""Runs on four stub cards: stubs of nvidia-smi and of a vllm with GPUs (fixtures/gpu_stubs).

They say nothing about a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.commands import WITH_SHORT_WAITS, until
from tests.conftest import GPU_STUBS, Harness, StubGpus
from tests.golden_files import assert_golden
from tests.patched_rehearsal import Diffs
from tests.report_examples import DIED, LIVED, replace, report
from tests.scenario_texts import text_of
from vllm_repro.cli import main
from vllm_repro.journal.journal import Entry, read
from vllm_repro.report.build import build, report_of
from vllm_repro.report.files import render
from vllm_repro.report.json_report import PatchedFile
from vllm_repro.report.model import ArmReport, arm_fields
from vllm_repro.report.patches import compared_patches
from vllm_repro.report.summary import summary
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.scenario import Arm
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected, arm_result


@pytest.fixture
def suite(
    tmp_path: Path, stub_gpus: StubGpus, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return a function that writes a scenario; the stub vllm is on PATH."""
    assert stub_gpus.servers.is_dir()
    monkeypatch.setenv("PATH", str(GPU_STUBS), prepend=":")
    monkeypatch.setenv("VLLM_REPRO_REPORTS", str(tmp_path / "reports"))
    folder = tmp_path / "scenarios"
    folder.mkdir()

    def write(name: str, seconds: float = 0.5, gpus: int = 1) -> None:
        text = text_of("min_tokens_stop_ids.py").replace("Qwen/Qwen3-0.6B", f"org/boot-{seconds}s")
        text = text.replace('id="min-tokens-stop-ids"', f'id="{name}"')
        text = text.replace("Needs(memory_gb=6)", f"Needs(gpus={gpus})")
        (folder / f"{name}.py").write_text(text, encoding="utf-8")

    return write


def scenarios_with(workers: int, tmp_path: Path) -> subprocess.Popen[str]:
    """Start `pytest scenarios -n WORKERS` on the stub vllm."""
    (tmp_path / "conftest.py").write_text(WITH_SHORT_WAITS, encoding="utf-8")
    words = "scenarios -k near-miss --scenario-server process --scenario-weights real"
    words += " --scenario-no-throughput"
    options = f"-n {workers} -p no:cacheprovider -rA"
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *words.split(), *options.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


def servers(stub_gpus: StubGpus) -> list[dict[str, Any]]:
    """Return what each server wrote about itself."""
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in stub_gpus.servers.glob("*.json")
    ]


def shared(served: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Return the pairs of servers that used a card at the same time."""
    return [
        (one, other)
        for one, other in combinations(sorted(served, key=lambda server: server["start"]), 2)
        if set(one["cards"]) & set(other["cards"]) and other["start"] < one["end"]
    ]


def test_workers_share_no_card_and_a_killed_one_frees_its_card(
    suite: Callable[..., None], stub_gpus: StubGpus, tmp_path: Path
) -> None:
    stub_gpus.say(cards=[{}, {}])
    suite("a-killed", seconds=600)
    suite("b-two-cards", gpus=2)  # waits for the card of the killed one
    suite("c-one-card")
    suite("d-one-card")
    run = scenarios_with(2, tmp_path)

    def beside_it() -> list[dict[str, Any]]:
        return [server for server in servers(stub_gpus) if "boot-600s" not in server["model"]]

    until(lambda: len(servers(stub_gpus)) > len(beside_it()) > 0, seconds=200)
    (killed,) = (server for server in servers(stub_gpus) if "boot-600s" in server["model"])
    assert killed["cards"] != beside_it()[0]["cards"], "they ran side by side"
    os.kill(killed["harness"], signal.SIGKILL)
    killed_at = time.time()
    out, _ = run.communicate(timeout=400)
    assert "1 failed, 3 passed" in out, out
    assert "crashed while running 'scenarios/a-killed.py::a-killed[near-miss]'" in out
    served = [server | {"end": server.get("end", killed_at)} for server in servers(stub_gpus)]
    assert (sorted(len(server["cards"]) for server in served), shared(served)) == ([1, 1, 1, 2], [])


def test_a_card_that_is_not_free_between_boots_is_infra(
    suite: Callable[..., None],
    stub_gpus: StubGpus,
    harness: Harness,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_repro.host.gpu_lease._DRAIN_S", 4.0)
    suite("leaks", seconds=0)
    stub_gpus.say(cards=[{"memory.used": [4, 4, 50000, 4, 60000]}])
    words = "--server process --weights real --arm near-miss --trials 3 --no-throughput"
    done = harness("run", str(tmp_path / "scenarios" / "leaks.py"), *words.split())
    assert done.status == 2, done.out + done.err
    assert done.outcomes == {"near-miss": [*["untriggered"] * 2, *["infra"] * 2]}
    why = done.report["arms"][0]["trials"][-1]["why"]
    assert "GPU 0 (stub of an H200) is busy: 60,000 MiB of it are in use" in why
    assert "vllm-repro clean" in why
    waited = [event["waited_s"] for event in read(done.run / "journal.jsonl").of("gpus-free")]
    assert (len(waited), [server["cards"] for server in servers(stub_gpus)]) == (2, [["0"], ["0"]])


TQ = ("tq-chunked-prefill", "--server", "rehearsal")
DIED_HERE = "AssertionError in _ensure_workspace_size"


def test_patches_are_compared_with_the_release_as_it_is(harness: Harness, diffs: Diffs) -> None:
    done = harness("run", *TQ, "--vllm", "0.23.0", *diffs("fix", "hide", "misfit"))
    # A patch with which it dies is a surprise.
    assert (done.status, done.report["verdict"]) == (1, "reproduces")
    made = build(done.run)
    section = render(made, "md").partition("## Patches compared\n\n")[2]
    assert_golden("patches.md", section.partition("\n\n")[0] + "\n")
    shown = done.out.partition("\npatch ")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in shown[1:4]] == ["reported", "fix", "hide"]
    assert "still failing" in shown[3]
    assert '<caption class="unseen">Patches compared</caption>' in render(made, "html")
    patched = {"fix": ["clean"], "hide": ["crash"], "misfit": ["unsupported"]}
    assert done.outcomes.items() >= patched.items()
    assert [
        (row["arm"], row["failed"], row["boots"], row["requests"])
        for row in done.report["compared_patches"]
    ] == [
        ("reported", 1, 1, ["long chat"]),
        ("fix", 0, 1, []),
        ("hide", 1, 1, ["long chat"]),
        ("misfit", 0, 0, []),
    ]
    assert done.report["reproduce"].count("--patch") == 3
    alone = harness("run", *TQ, "--vllm", "0.23.0", "--arm", "reported", *diffs("fix"))
    assert [*alone.report["compared_patches"]] == []


def test_every_patch_is_to_live_and_the_release_to_die(harness: Harness, diffs: Diffs) -> None:
    pair = diffs("fix", "fix-2")
    done = harness("run", *TQ, "--vllm", "0.23.0", *pair)
    assert done.status == 0
    journal = done.run / "journal.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    last = max(at for at, line in enumerate(lines) if '"event": "trial-started"' in line)
    journal.write_text("".join(lines[: last + 1]), encoding="utf-8")
    resumed = harness("run", "--resume", str(done.run))
    assert resumed.status == 0
    assert [(one["arm"], one["boots"]) for one in resumed.report["compared_patches"]] == [
        ("reported", 1), ("fix", 1), ("fix-2", 1),
    ]  # fmt: skip
    sound = harness("run", *TQ, "--vllm", "0.24.0", *pair)
    assert sound.status == 1
    assert "does not fail, so there is nothing to compare" in sound.out


@pytest.mark.parametrize(
    ("words", "names", "message"),
    [
        (("run", *TQ), ("fix", "fix"), "two arms would have the name fix"),
        (("run", *TQ), ("eager", "fix"), "two arms would have the name eager"),
        (("show", TQ[0]), ("fix", "hide"), "vllm-repro run compares several"),
    ],
)
def test_what_several_patches_cannot_be(
    diffs: Diffs,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    names: tuple[str, ...],
    message: str,
) -> None:
    assert main([*words, *diffs(*names)]) == 64
    assert message in capsys.readouterr().err


def test_a_patched_arm_has_a_server_of_its_own_to_measure() -> None:
    scenario = find("tq-chunked-prefill")
    assert scenario.has_own_server(
        Arm("fix", Expected.LIVES, patches=(Patch("vllm/a.py", "a", "b"),))
    )
    assert not scenario.has_own_server(Arm("none", Expected.LIVES))


def arm(
    name: str, outcome: Outcome, *, like: ArmReport, boots: int = 1, imported: bool = True
) -> ArmReport:
    trial = replace(like.trials[0], outcome=outcome, why="it is so")
    file = PatchedFile(file="vllm/a.py", sha256="0", imported=imported)
    return replace(
        like,
        **arm_fields(arm_result(name, Expected.LIVES, [outcome] * boots)),
        trials=(trial,) * boots,
        patches=(Patch("vllm/a.py", "a", name),),
        server=replace(like.server, patched=(file,)),
    )


@pytest.mark.parametrize(
    ("outcome", "boots", "imported", "reading"),
    [
        (Outcome.CLEAN, 1, True, "does not fail; too few boots to call it fixed"),
        (Outcome.CLEAN, 58, True, "does not fail; too few boots to call it fixed"),
        (Outcome.CLEAN, 59, True, "fixed"),
        (Outcome.CLEAN, 59, False, "not tested: no process ran the patch"),
        (Outcome.CRASH, 1, False, "not tested: no process ran the patch"),
        (Outcome.CRASH, 1, True, "still failing"),
        (Outcome.OTHER_CRASH, 1, True, "newly failing: RuntimeError in get_simultaneous"),
        (Outcome.BOOT_FAILED, 1, True, "newly failing: boot: no cause in the log"),
        (Outcome.WRONG_OUTPUT, 1, True, "newly failing: wrong output"),
        (Outcome.HANG, 1, True, "newly failing: hang"),
        (Outcome.UNTRIGGERED, 1, True, "undecided: untriggered: it is so"),
    ],
)
def test_what_a_patch_did_in_a_word(
    outcome: Outcome, boots: int, imported: bool, reading: str
) -> None:
    released, lived = report(DIED).arms[0], report(LIVED).arms[0]
    death = released.trials[0].death
    assert death is not None
    other = replace(
        death, exception="RuntimeError", frames=("vllm/v1/worker/workspace.py:get_simultaneous",)
    )
    like = {
        Outcome.CRASH: released,
        Outcome.OTHER_CRASH: replace(lived, trials=(replace(lived.trials[0], death=other),)),
    }
    made = arm("x", outcome, like=like.get(outcome, lived), boots=boots, imported=imported)
    first, row = compared_patches((released, made))
    assert (first.reading, row.reading, row.boots) == (f"fails: {DIED_HERE}", reading, boots)


@pytest.mark.parametrize(
    ("outcome", "first_reading", "reading"),
    [
        (
            Outcome.INFRA,
            "undecided: infra: it is so",
            "not compared: the release as it is was not tested",
        ),
        (
            Outcome.WRONG_OUTPUT,
            "fails: wrong output",
            "does not fail; the release did not show this bug, so no number of boots is enough",
        ),
        (Outcome.CLEAN, "does not fail, so there is nothing to compare", "does not fail either"),
    ],
)
def test_a_release_that_did_not_show_the_bug(
    outcome: Outcome, first_reading: str, reading: str
) -> None:
    lived = report(LIVED).arms[0]
    released = replace(arm("reported", outcome, like=lived), patches=())
    made = (released, arm("x", Outcome.CLEAN, like=lived, boots=200))
    assert [one.reading for one in compared_patches(made)] == [first_reading, reading]


def test_a_patch_that_ran_in_part_is_reported_so() -> None:
    released, lived = report(DIED).arms[0], report(LIVED).arms[0]
    made = arm("x", Outcome.CLEAN, like=lived, boots=59)
    other = PatchedFile(file="vllm/b.py", sha256="0", imported=False)
    made = replace(made, server=replace(made.server, patched=(*made.server.patched, other)))
    _, row = compared_patches((released, made))
    assert row.reading == "fixed; part of the patch did not run"


@pytest.mark.parametrize("imported", [["vllm/a.py"], []])
def test_a_patch_that_no_process_imported_does_not_help(imported: list[str]) -> None:
    """Beside an arm that dies, as in every comparison."""
    file = {"file": "vllm/a.py", "sha256": "0" * 64}

    def patched(entry: Entry) -> Entry:
        fields = json.loads(json.dumps(dict(entry.fields)))
        if entry.event == "run-started":
            fields["arms"][1]["patches"] = [{"file": "vllm/a.py", "was": "a", "now": "b"}]
            fields["expect"] = "declared"
        if fields.get("arm") == "eager" and "facts" in fields:
            fields["facts"]["patched"] = [file]
        if entry.event == "trial-ended" and fields["arm"] == "eager":
            fields["imported"] = imported
        return replace(entry, fields=fields)

    recording = read(DIED / "journal.jsonl")
    made = report_of(replace(recording, entries=tuple(map(patched, recording.entries))), DIED)
    assert made.arms[0].k
    assert made.as_expected is (True if imported else None)
    assert len(made.comparisons) == len(imported)
    assert ("0 of 1 boots, against 1 of 1 of reported" in summary(made)) is bool(imported)
