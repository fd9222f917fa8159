"""`vllm-repro gate` with made trees and with players that are functions."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_package import fake_release
from vllm_repro.cli import main
from vllm_repro.errors import UsageError
from vllm_repro.releases.provision import Release
from vllm_repro.releases.sources import Source
from vllm_repro_explore.case import Case, Request, Setup, least_blocks
from vllm_repro_explore.draw import MIXES, draw
from vllm_repro_explore.driver import PROGRAM, Driver
from vllm_repro_explore.finding import Finding, FindingKind, PlayResult
from vllm_repro_explore.gate import change as change_module
from vllm_repro_explore.gate import verb
from vllm_repro_explore.gate.change import UnfitError, read_change
from vllm_repro_explore.gate.choose import Chooser, Start
from vllm_repro_explore.gate.judge import Answer, Drawn, Pairs, Score, cost_of, key_of
from vllm_repro_explore.gate.lines import changed_places, function_places, meaning
from vllm_repro_explore.gate.play import Gating, Player
from vllm_repro_explore.gate.starts import _draw_mix
from vllm_repro_explore.gate.vary import vary

BEFORE = '''"""Text."""
LIMIT = 3


class Pool:
    """Pool."""

    def take(self, number):
        """Take."""
        if number > LIMIT:
            return None
        elif number == 0:
            number = 1
        try:
            return self.blocks[number]
        except KeyError:
            return -1
'''
FILE = "vllm/v1/core/pool.py"
SCHEMA = Path(__file__).parents[2] / "docs" / "gate.schema.json"
OTHER = "vllm/entrypoints/serve.py"


def diff_of(before: str, after: str, file: str = FILE) -> str:
    lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(*lines, f"a/{file}", f"b/{file}"))


@pytest.mark.parametrize(
    ("was", "now", "old", "new"),
    [
        ("number > LIMIT", "number >= LIMIT", {10}, {10}),
        ("number == 0", "number == 1", {12}, {12}),
        (
            "            number = 1\n",
            "            number = 1\n            number = 2\n",
            {14},
            {14},
        ),
        ("            number = 1\n", "            pass\n", {13}, {13}),
        ("except KeyError", "except IndexError", {17}, {17}),
        ("def take(self, number)", "def take(self, number, more=0)", {10}, {10}),
        ("LIMIT = 3", "LIMIT = 4", {2}, {2}),
        ('"""Take."""', '"""Give."""', {10}, {10}),
    ],
)
def test_the_statements_of_a_change(was: str, now: str, old: set[int], new: set[int]) -> None:
    before, after = changed_places(FILE, BEFORE, BEFORE.replace(was, now, 1))
    assert ({place.line for place in before}, {place.line for place in after}) == (old, new)
    assert {place.function for place in after} == ({""} if "LIMIT =" in was else {"Pool.take"})
    assert {place.at_import for place in after} == {"LIMIT =" in was}


def test_words_have_no_meaning() -> None:
    assert meaning(BEFORE) == meaning(BEFORE.replace("Take.", "Give.") + "# more\n")
    assert meaning(BEFORE) != meaning(BEFORE.replace("LIMIT = 3", "LIMIT = 4"))
    assert [(one.function, one.line) for one in function_places(FILE, BEFORE)] == [
        ("Pool.take", 10)
    ]


def test_a_probe_counts_statements_and_moves_no_line(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "pool.py").write_text(
        "from __future__ import annotations\n\ndef take(number):\n    if number > 1:\n"
        "        raise KeyError(number)\n    elif number:\n        number = 5\n    return number\n"
    )
    probes = {"vllm/pool.py": [[1, 9], [4, 0], [5, 1], [6, 2], [7, 3]]}
    (tmp_path / "probes.json").write_text(json.dumps(probes))
    script = (
        "import sys, traceback; sys.path[:0] = sys.argv[1:]\n"
        "import vllm_repro_driver.probe as probe; probe.register()\n"
        "from vllm.pool import take\n"
        "print([take(0), take(1)])\n"
        "try: take(2)\n"
        "except KeyError as error: print(traceback.extract_tb(error.__traceback__)[-1].lineno)\n"
        "print(sorted(probe.take_counts().items()), probe.take_counts())\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script, str(PROGRAM), str(tmp_path)],
        env={"REPRO_PROBE": str(tmp_path / "probes.json")},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert printed == ["[0, 5]", "5", "[(0, 3), (1, 1), (2, 2), (3, 1)] {}"]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a made vLLM, and let nothing be installed. Return the folder for diffs."""
    release = fake_release("0.33.0", tmp_path)
    for name, text in ((FILE, BEFORE), (OTHER, "PORT = 1\n"), ("vllm/__init__.py", "")):
        (release.packages / name).parent.mkdir(parents=True, exist_ok=True)
        (release.packages / name).write_text(text)
    monkeypatch.setattr(change_module, "provision", lambda *_: release)
    monkeypatch.setattr(change_module, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setenv("VLLM_REPRO_REPORTS", str(tmp_path / "reports"))
    (tmp_path / "cache").mkdir()
    return tmp_path


def put(tree: Path, text: str) -> str:
    (tree / "my.diff").write_text(text)
    return str(tree / "my.diff")


def test_a_diff_finds_its_place_in_lines_that_moved(tree: Path) -> None:
    moved = "# one\n# two\n" + BEFORE
    text = diff_of(moved, moved.replace("number = 1\n", "number = 2\n"))
    change = read_change(put(tree, text), None, print)
    (file,) = change.files
    assert file.after == BEFORE.replace("number = 1\n", "number = 2\n")
    assert (change.changed.packages / FILE).read_text() == file.after
    assert (change.changed.packages / OTHER).is_symlink()
    assert not change.only_words


def test_each_commit_of_a_series_counts(tree: Path) -> None:
    texts = [BEFORE, BEFORE.replace("number = 1", "number = 2"), "# new\n" + BEFORE]
    texts[2] = texts[2].replace("number = 1", "number = 2")
    change = read_change(put(tree, "".join(map(diff_of, texts, texts[1:]))), None, print)
    assert [(file.before, file.after) for file in change.files] == [(BEFORE, texts[2])]
    assert (change.changed.packages / FILE).read_text() == texts[2]
    added = diff_of("", "X = 1\n").replace(f"--- a/{FILE}", "--- /dev/null")
    with pytest.raises(UnfitError, match=f"already has {FILE}"):
        read_change(put(tree, added), None, print)


def test_added_removed_and_other_files_of_a_diff(tree: Path) -> None:
    text = (
        diff_of("", "X = 1\n", "vllm/new.py").replace("--- a/vllm/new.py", "--- /dev/null")
        + diff_of("PORT = 1\n", "", OTHER).replace(f"+++ b/{OTHER}", "+++ /dev/null")
        + diff_of("a\n", "b\n", "csrc/cache.cu")
        + diff_of("a\n", "b\n", "tests/test_pool.py")
    )
    change = read_change(put(tree, text), None, print)
    assert [(file.name, file.before, file.after) for file in change.files] == [
        ("vllm/new.py", None, "X = 1\n"),
        (OTHER, "PORT = 1\n", None),
    ]
    assert not (change.changed.packages / OTHER).exists()
    assert list(change.unplayed) == ["csrc/cache.cu", "tests/test_pool.py"]


@pytest.mark.parametrize(
    ("was", "now", "file", "broken"),
    [
        ("LIMIT = 5\n", "LIMIT = 6\n", FILE, False),
        ("A = 1\n", "A = 2\n", "vllm/gone.py", False),
        (BEFORE, BEFORE.replace("LIMIT = 3", "LIMIT = ("), FILE, True),
    ],
)
def test_a_diff_that_cannot_be_played(
    tree: Path, was: str, now: str, file: str, broken: bool, capsys: Any
) -> None:
    name = put(tree, diff_of(was, now, file))
    with pytest.raises(UnfitError) as error:
        read_change(name, None, print)
    assert error.value.broken is broken
    assert main(["gate", name, "--json"]) == (1 if broken else 2)
    answer = json.loads(capsys.readouterr().out)
    assert answer["answer"] == ("breaks" if broken else "cannot tell")
    assert file in answer["why"]


def test_both_vllms_get_the_exchanged_packages(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[str] = []

    def provision(source: Source, _: object) -> Release:
        asked.append(f"{source}")
        return fake_release("0.33.0", tree)

    monkeypatch.setattr(change_module, "provision", provision)
    name = put(tree, diff_of(BEFORE, BEFORE.replace("Take.", "Give.")))
    words = ["--with", "x==1", "--with", "y==2"]
    assert main(["gate", name, *words, "--json"]) == 0
    assert " ".join(words) in json.loads(capsys.readouterr().out)["reproduce"]
    with pytest.raises(UsageError, match="changes nothing"):
        read_change("0.32.0", Source(release="0.31.0"), print, ["x==1"])
    assert asked == ["0.33.0 with x==1 with y==2", "0.31.0 with x==1", "0.32.0 with x==1"]


def test_only_words_and_files_without_code_make_no_difference(tree: Path, capsys: Any) -> None:
    text = diff_of(BEFORE, BEFORE.replace("Take.", "Give.")) + diff_of("a\n", "b\n", "docs/x.md")
    name = put(tree, text)
    assert main(["gate", name, "--junit", str(tree / "junit.xml")]) == 0
    assert main(["gate", name, "--strict"]) == 2
    assert "answer:   no difference seen: only comments" in capsys.readouterr().out
    assert 'tests="1"' in (tree / "junit.xml").read_text()


def test_no_change_and_no_diff_are_wrong_usage(tree: Path, capsys: Any) -> None:
    assert main(["gate", put(tree, "nothing\n")]) == 64
    assert main(["gate", str(tree / "missing.diff")]) == 64
    assert main(["gate", "0.33.0"]) == 64
    assert "--base names the other one" in capsys.readouterr().err


@given(seed=st.integers(1, 10_000), mix=st.sampled_from(sorted(MIXES)), far=st.booleans())
def test_a_varied_case_keeps_the_rules_of_a_case(seed: int, mix: str, far: bool) -> None:
    case = draw(seed, mix, 0.3 if far else 0)
    varied = vary(case, Random(seed), far=far)
    assert varied == vary(case, Random(seed), far=far)
    assert varied.asks
    assert varied.setup.blocks >= least_blocks(varied.setup)
    # with `cut`, the model's length ends an answer
    least = max(ask.prompt + (1 if varied.setup.cut else ask.answer) for ask in varied.asks)
    assert varied.setup.max_len >= least
    assert all(ask.shared <= ask.prompt and ask.prompt > 0 for ask in varied.asks)
    ends = {offset + size <= ask.prompt for ask in varied.asks for offset, size, _ in ask.images}
    assert ends <= {True}
    assert Case.from_json(json.loads(json.dumps(varied.as_json()))) == varied


def result(*findings: str, kind: FindingKind = FindingKind.CORRUPTED, **more: Any) -> PlayResult:
    made = tuple(Finding(kind=kind, site=site) for site in findings)
    return PlayResult(findings=made, steps=10, vllm_us=100.0, **more)


def drawn(number: int = 1, **setup: Any) -> Drawn:
    case = Case(Setup(**setup), ((Request(10, number),),), number)
    return Drawn(case=case, origin="plain", seed=number)


def counted(pairs: list[tuple[PlayResult, PlayResult]]) -> Score:
    score = Score()
    for number, (before, after) in enumerate(pairs, 1):
        score.count(drawn(number), before, after)
    return score


def test_a_failure_that_ends_in_all_its_cases_is_fixed() -> None:
    ends, stays, other = (
        (result("a"), result()),
        (result("a"), result("a")),
        (result("a"), result("b")),
    )
    key = key_of(Finding(kind=FindingKind.CORRUPTED, site="a"), drawn().case)
    assert counted([ends] * 10).fixed == [key]
    assert counted([ends] * 9).fixed == []
    near = counted([ends] * 2)
    for number in range(20):  # all near two cases
        near.count(replace(drawn(number), varied=True), *ends)
    assert (near.fixed, near.partly) == ([], [])
    moved = counted([ends] * 10)
    moved.count(drawn(11, asynchronous=True), result(), result("a"))
    assert (moved.fixed, moved.partly) == ([], [key])
    half = counted([ends] * 40 + [stays] * 3)
    assert (half.fixed, half.partly) == ([], [key])
    hidden = counted([other] * 6)
    assert (hidden.fixed, hidden.partly) == ([], [key])


def test_another_order_moves_a_known_failure_and_breaks_nothing() -> None:
    moved = [(result("a"), result()), (result(), result("a"))] * 30
    (pairs,) = counted(moved).pairs.values()
    assert not pairs.worse
    assert not pairs.better
    (pairs,) = counted([(result(), result("a"))] * 12).pairs.values()
    assert pairs.worse
    stays = [(result("a"), result("a"))] * 60
    (pairs,) = counted([*stays, *[moved[1]] * 20]).pairs.values()
    assert pairs.worse
    (pairs,) = counted([*stays, *moved[:20], *[moved[1]] * 10]).pairs.values()
    assert not pairs.worse
    # variations of one case that was chosen since it fails newly
    assert not Pairs(new=30, fresh_new=1).worse
    assert Pairs(new=30, fresh_new=4, ended=2).worse


def test_a_start_that_only_the_change_refuses_is_a_failure() -> None:
    score = Score()
    found = score.count(drawn(), result(), PlayResult(invalid="ValueError: no"))
    assert found is not None
    assert found.site == "refused at start: ValueError: no"


def test_the_cost_of_a_step_and_other_choices() -> None:
    same = cost_of([(10, 100.0, 10, 100.0 + one % 3) for one in range(40)])
    assert not same.slower
    assert same.low <= same.ratio <= same.high
    assert cost_of([(10, 100.0, 10, 125.0 + one % 3) for one in range(40)]).slower
    score = counted([(result(cached_tokens=64), result(cached_tokens=32))] * 20)
    (text,) = score.differences()
    assert text.startswith("640 prompt tokens from the cache in place of 1,280")


class Tree(Driver):
    """A player of one tree: a function of the case."""

    def __init__(self, play: Callable[[Case], PlayResult]) -> None:
        self._play = play

    def play(self, case: Case, worker: str = "") -> PlayResult:
        return self._play(case)


def gated(base: Callable[[Case], PlayResult], changed: Callable[[Case], PlayResult]) -> Gating:
    """Gate two functions for at most a second, with cases of two mixes."""
    places = changed_places(FILE, BEFORE, BEFORE.replace("number = 1", "number = 2"))
    starts = [Start(name=mix, draw=partial(_draw_mix, mix)) for mix in ("plain", "off")]
    gating = Gating(
        change=SimpleNamespace(  # type: ignore[arg-type]  # all that a gate reads of a change
            before=places[0], after=places[1]
        ),
        chooser=Chooser(starts),
        until=time.monotonic() + 1,
        progress=lambda _: None,
        imported=lambda: {FILE},
    )
    gating.run([Player(base=Tree(base), changed=Tree(changed))])
    return gating


def test_a_new_failure_is_shrunk_and_ends_the_gate() -> None:
    def dies(case: Case) -> PlayResult:
        long = any(ask.prompt > 40 for ask in case.asks)
        return result(*(["x"] if long else []), reached={0: 2})

    gating = gated(lambda _: result(), dies)
    (proof,) = gating.proofs.values()
    assert [ask.prompt for ask in proof.failure.shrunk.asks] == [41]
    assert proof.ran == gating.change.after
    assert proof.neighbours > 40
    assert gating.score.trials < 200


def test_a_failure_that_takes_long_is_shrunk_as_far_as_time_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hangs(case: Case) -> PlayResult:
        time.sleep(0.05)
        return result(*(["x"] if any(ask.prompt > 40 for ask in case.asks) else []))

    monkeypatch.setattr("vllm_repro_explore.gate.play._SHRINK_S", 0.3)
    (proof,) = gated(lambda _: result(), hangs).proofs.values()
    assert sum(ask.prompt for ask in proof.failure.shrunk.asks) > 41


def test_a_failure_that_the_base_has_near_it_is_not_new() -> None:
    def failing(rest: int) -> Callable[[Case], PlayResult]:
        return lambda case: result(*(["x"] if case.seed % 2 == rest else []))

    gating = gated(failing(1), failing(0))
    assert not gating.proofs
    assert gating.score.trials > 20


def test_starts_that_reach_the_change_are_preferred() -> None:
    starts = [Start(name=mix, draw=partial(_draw_mix, mix)) for mix in MIXES]
    chooser, counts = Chooser(starts), dict.fromkeys(MIXES, 0)
    for _ in range(2_000):
        one = chooser.choose()
        counts[one.origin] += 1
        chooser.note(one, {0: 1} if one.origin == "urgent" else {}, 0.01, hot=False)
    assert counts["urgent"] > 500
    assert min(counts.values()) >= 2


def test_exit_statuses() -> None:
    loose = {answer: verb.exit_status(answer, strict=False) for answer in Answer}
    assert list(loose.values()) == [0, 1, 0, 2]
    assert verb.exit_status(Answer.NO_DIFFERENCE, strict=True) == 2


def test_the_whole_command(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken(case: Case) -> PlayResult:
        return result(*(["wrong-token"] if case.setup.connector else []), reached={0: 1})

    @contextmanager
    def fakes(*_: object) -> Iterator[list[Player]]:
        yield [Player(base=Tree(lambda _: result()), changed=Tree(broken))]

    monkeypatch.setattr(verb, "players", fakes)
    name = put(tree, diff_of(BEFORE, BEFORE.replace("number = 1", "number = 2")))
    # neither imported nor in the recorded map
    assert main(["gate", name, "--for", "600"]) == 2
    assert "answer:   cannot tell: none of the changed code" in capsys.readouterr().out
    monkeypatch.setattr(verb, "read_map", lambda _: {f"{FILE}::Pool.take": {}})
    assert main(["gate", name, "--for", "20", "--json"]) == 1
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    jsonschema.validate(answer, json.loads(SCHEMA.read_text()))
    assert answer["answer"] == "breaks"
    (new,) = answer["new_failures"]
    assert new["changed_lines"] == [f"{FILE}:13"]
    assert new["site"] == "wrong-token"
    assert answer["functions"][0]["name"] == f"{FILE}::Pool.take"
    folder = (tree / "reports" / "gate" / "latest").resolve()
    assert json.loads((folder / "gate.json").read_text()) == answer
    assert (folder / "gate.md").read_text().startswith("# gate: breaks\n")
    assert main(["gate", name, "--for", "1", "--fixes", str(folder)]) == 1
    assert main(["gate", name, "--for", "1", "--fixes", "min-tokens-stop-ids"]) == 64


def test_the_recorded_map_names_starts_of_today() -> None:
    from vllm_repro_explore.gate.coverage import read_map, shares

    known = read_map("0.34.0")
    allocate = "vllm/v1/simple_kv_offload/manager.py::SimpleCPUOffloadScheduler.request_finished"
    best = max(shares(known, [allocate]).items(), key=lambda row: row[1])[0]
    assert best.startswith(("sco", "mamba-sco", "v2-sco", "multi", "fetch-off"))
