"""Kept runs of real vLLM: judged with today's code, found only while their inputs are the same."""

from __future__ import annotations

import lzma
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from tests.conftest import Done
from tests.live import inputs, kept
from tests.live.kept import COMMITTED, KeptRun, canaries, compare, judge, load, save
from tests.report_examples import DIED, LIVED

FILES = sorted(COMMITTED.glob("*.json.xz"))
MADE = [
    kept.keep(
        ["run", "tq-chunked-prefill", "--vllm", folder.name[-6:]],
        sha256(folder.name.encode()).hexdigest(),
        Done(0, "LAB: a run", "", folder),
    )
    for folder in (DIED, LIVED)
]
"""Two kept runs, made of example runs."""
RUNS = [*MADE, *(load(path) for path in FILES)]
PRIVATE = re.compile(r"(?<![\w.])/(?:root|work|farm|tmp/pytest-of)\b|pytest-of-")


@pytest.mark.parametrize("run", RUNS, ids=[f"{run.scenario}-{run.key[:12]}" for run in RUNS])
def test_todays_code_judges_a_kept_run_as_expected(run: KeptRun, tmp_path: Path) -> None:
    done = judge(run, tmp_path)
    assert done.report["arms"][0]["server"]["vllm_version"] == run.release
    assert kept.endings(done.report)
    names = {name: PRIVATE.search(text) for name, text in run.files.items()}
    assert not any(names.values()), names


def test_a_run_that_ends_otherwise_is_found(tmp_path: Path) -> None:
    run = MADE[0]
    text = run.files["journal.jsonl"].replace("AssertionError", "IndexError")
    wrong = replace(run, files={**run.files, "journal.jsonl": text})
    booted = judge(run, tmp_path / "booted")
    compare(run, booted, tmp_path / "same")
    with pytest.raises(AssertionError, match=r"the kept run of `run .*` is wrong"):
        compare(wrong, booted, tmp_path / "wrong")


def test_canaries_are_of_different_releases_and_change_with_the_commit() -> None:
    runs = [replace(run, key=f"{run.key}-{number}") for run in MADE for number in range(3)]
    chosen = {seed: canaries(runs, seed) for seed in map(str, range(20))}
    for some in chosen.values():
        assert len({run.release for run in some}) == kept.CANARIES
    assert len({tuple(run.key for run in some) for some in chosen.values()}) > kept.CANARIES


def test_a_damaged_file_names_the_remedy(tmp_path: Path) -> None:
    path = save(RUNS[0], tmp_path)
    assert load(path) == RUNS[0]
    text = lzma.decompress(path.read_bytes()).replace(b"crash", b"clean")
    path.write_bytes(lzma.compress(text))
    with pytest.raises(ValueError, match="was changed since it was kept: remove it"):
        load(path)


def test_a_newer_run_of_a_command_replaces_the_older(tmp_path: Path) -> None:
    first = save(RUNS[0], tmp_path)
    second = save(replace(RUNS[0], key="0" * 64), tmp_path)
    assert (first.exists(), second.exists()) == (False, True)


@pytest.mark.parametrize(
    ("subject", "counted", "left_out"),
    [
        ("boot", "vllm_repro/running/watch.py", "vllm_repro/report/html.py"),
        ("boot", "vllm_repro/servers/witness/plugin", "vllm_repro/report/runs.py"),
        ("boot", "vllm_repro_lab/memory.py", "vllm_repro_explore/search.py"),
        ("boot", "vllm_repro/cli/run.py", "vllm_repro_nights/night_result.py"),
        ("search", "vllm_repro_explore/search.py", "vllm_repro/running/watch.py"),
        ("both", "vllm_repro_explore/causes.py", "vllm_repro_intake/text.py"),
    ],
)
def test_what_a_live_test_depends_on(subject: str, counted: str, left_out: str) -> None:
    names = [
        f"{path.relative_to(inputs.HARNESS)}"
        for path in inputs.files(subject)
        if "harness" in path.parts
    ]
    assert any(name.startswith(counted) for name in names)
    assert (inputs.HARNESS / left_out).is_file()
    assert left_out not in names


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("x = 1  # one\n\n\nclass A:\n    # a\n    y = 'two'\n", True),
        ("'Text.'\nx = 1\n'Text.'\nclass A:\n    'Text.'\n    y = ('t'\n 'wo')\n", True),
        ("x = 2\nclass A:\n    y = 'two'\n", False),
        ("x = 1\nclass A:\n    y = 'two.'\n", False),
    ],
)
def test_comments_and_docstrings_do_not_count(tmp_path: Path, text: str, same: bool) -> None:
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text("x = 1\nclass A:\n    y = 'two'\n", encoding="utf-8")
    after.write_text(text, encoding="utf-8")
    assert (inputs.meaning(before) == inputs.meaning(after)) == same


def test_all_that_is_left_out_exists() -> None:
    """A folder that moved would else be counted under its new name, and under no name be missed."""
    for names in (inputs.AFTER_A_RUN, *inputs.NOT_FOR.values()):
        assert [name for name in names if not (inputs.HARNESS / name).exists()] == []


def test_the_key_changes_with_the_command_and_the_scenario(tmp_path: Path) -> None:
    file = tmp_path / "made.py"
    file.write_text("scenario = 1", encoding="utf-8")
    words = ["run", str(file), "--server", "lab", "--vllm", "0.23.0"]
    keys = [kept.key_of(words), kept.key_of([*words, "--outputs"])]
    file.write_text("scenario = 2", encoding="utf-8")
    keys.append(kept.key_of(words))
    assert None not in keys
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    "words", ["causes made.py", "run x --server attach --url u", "run x --on local"]
)
def test_what_is_not_kept(words: str) -> None:
    assert kept.key_of(words.split()) is None
