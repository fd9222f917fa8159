"""Search with a fake driver; the driver's process with fake programs."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.fake_package import fake_release
from tests.golden_files import assert_golden
from vllm_repro.errors import HarnessBug, InfraError, Unsupported
from vllm_repro.scenario.reader import read
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.scenario.workload import Rest
from vllm_repro.verdict.verdict import Expected
from vllm_repro_explore import driver as driver_module
from vllm_repro_explore.case import Case, Request, Setup
from vllm_repro_explore.draft import draft, draft_id, unlike_live
from vllm_repro_explore.driver import Driver
from vllm_repro_explore.finding import Finding, FindingKind, PlayResult, known, result_from
from vllm_repro_explore.scenario_setup import draw_for
from vllm_repro_explore.search import Found, Tally, search
from vllm_repro_explore.summary import SearchSummary, as_json, terminal

POPLEFT = {
    "kind": "death",
    "exception": "AssertionError",
    "message": "",
    "file": "vllm/v1/core/kv_cache_utils.py",
    "function": "popleft_n",
    "source": "assert curr_block is not None",
    "frames": ["schedule", "allocate_slots", "<genexpr>", "get_new_blocks", "popleft_n"],
}
TWICE = {
    "invariant": "store-listed-twice",
    "detail": "a store lists 80 blocks, 54 distinct",
    "step": 6,
    "wave": 1,
}
LEAK = {"invariant": "gpu-leak", "detail": "3 of 9 blocks", "step": 9, "wave": 1}
STUCK = {"kind": "stuck", "detail": "w1r1 WAITING 0 of 9", "states": "WAITING"}


def test_an_outcome_is_as_bad_as_its_worst() -> None:
    outcome = result_from(
        {"steps": 9, "broken": [TWICE, LEAK], "death": POPLEFT, "preempted": 2, "ms": 3}
    )
    death, *others = outcome.findings
    assert [finding.kind.value for finding in others] == ["corrupted", "leak"]
    assert (outcome.worst, death.kind.value) == (death, "death")
    assert (
        death.site
        == "AssertionError in popleft_n (vllm/v1/core/kv_cache_utils.py): assert curr_block is not"
        " None"
    )
    assert known(death) == "vllm-project/vllm#42085"
    assert outcome.counts == {"preempted": 2}
    stuck = result_from({"broken": [TWICE], "death": STUCK}).worst
    assert (stuck and stuck.kind, stuck and stuck.site) == (
        FindingKind.STUCK,
        "requests stay WAITING",
    )
    assert result_from({"steps": 3}).worst is None
    assert result_from({"invalid": "ValueError: no"}).invalid == "ValueError: no"


def test_crashes_in_one_place_are_one_finding() -> None:
    def death(message: str) -> Finding | None:
        return result_from({"death": POPLEFT | {"message": message}}).worst

    assert death("wanted 12 blocks, have 7") == death("wanted 9 blocks, have 8")
    assert death("wanted 12 blocks") != death("no such request")


def fakes(case: Case) -> PlayResult:
    """Die of a prompt over 50 tokens; list blocks twice from 20 tokens on."""
    longest = max(ask.prompt for ask in case.asks)
    broken = [TWICE] if longest >= 20 else []
    return result_from(
        {"steps": 5, "broken": broken, "hits": 1, **({"death": POPLEFT} if longest > 50 else {})}
    )


def run(cases: list[Case], players: int = 1, **more: Any) -> tuple[Tally, list[Found]]:
    kept: list[Found] = []
    options: dict[str, Any] = {
        "go_on": lambda: True,
        "keep": kept.append,
        "progress": lambda _: None,
    } | more
    return search([fakes] * players, enumerate(cases, 1), **options), kept


def alone(prompt: int) -> Case:
    return Case(Setup(max_len=prompt + 8), ((Request(prompt, 8),),), 1)


def test_the_first_of_each_finding_is_shrunk() -> None:
    tally, kept = run([alone(10), alone(60), alone(30), alone(70), alone(90)])
    assert (tally.trials, tally.reached) == (5, {"hits": 5})
    assert [(found.finding.kind, found.seed, found.times) for found in tally.findings] == [
        (FindingKind.DEATH, 2, 3),
        (FindingKind.CORRUPTED, 3, 1),
    ]
    assert [found.shrunk.asks for found in kept] == [(Request(51, 1),), (Request(20, 1),)]
    assert [other.site for other in kept[0].others] == ["store-listed-twice"]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"death": POPLEFT}, "the same"),
        ({"broken": [TWICE]}, "corrupted: store-listed-twice"),
        ({}, "nothing"),
        (
            {"invalid": "its model runner: ImportError: no cpu_worker"},
            "not tried: its model runner: ImportError: no cpu_worker",
        ),
    ],
)
def test_the_smallest_case_is_played_over_the_model_runner(
    result: dict[str, Any], said: str
) -> None:
    asked: list[Case] = []

    def on_runner(case: Case) -> PlayResult:
        asked.append(case)
        return result_from(result)

    _, (found,) = run([alone(60), alone(70)], on_runner=[on_runner])
    assert asked == [found.shrunk]
    assert (found.on_runner, found.as_json()["model_runner"]) == (said, said)
    tally = Tally(trials=1, hits={(found.finding.kind, found.finding.site): found})
    text = terminal(replace(account(), tally=tally, live=["none"], tests=[None]))
    assert f"  over the release's own CPU model runner: {said}\n" in text


def test_players_share_the_cases_while_one_shrinks() -> None:
    cases, gone_on = [alone(60), *[alone(10)] * 20, alone(70)], threading.Event()
    played: list[Case] = []

    def play(case: Case) -> PlayResult:
        played.append(case)
        if len(played) > 20:
            gone_on.set()
        if case not in cases:  # it is shrinking
            assert gone_on.wait(30)
        return fakes(case)

    tally = search(
        [play, play],
        enumerate(cases, 1),
        go_on=lambda: True,
        keep=lambda _: None,
        progress=lambda _: None,
    )
    (found,) = tally.findings
    assert (tally.trials, tally.first, tally.last) == (22, 1, 22)
    assert (found.times, found.shrunk.asks) == (2, (Request(51, 1),))


def test_a_player_that_fails_ends_the_search() -> None:
    def broken(_: Case) -> PlayResult:
        raise InfraError("the process was killed")

    with pytest.raises(InfraError, match="was killed"):
        search(
            [fakes, broken],
            enumerate([alone(10)] * 10**6, 1),
            go_on=lambda: True,
            keep=print,
            progress=lambda _: None,
        )


def test_an_interrupted_search_keeps_what_it_had() -> None:
    tally = Tally()

    def interrupted(candidate: Case) -> PlayResult:
        if tally.trials == 1:
            raise KeyboardInterrupt
        return fakes(candidate)

    with pytest.raises(KeyboardInterrupt):
        search(
            [interrupted],
            enumerate([alone(60)], 1),
            go_on=lambda: True,
            keep=print,
            progress=print,
            tally=tally,
        )
    (found,) = tally.findings
    assert (found.finding.kind, found.case, found.shrunk) == (
        FindingKind.DEATH,
        alone(60),
        alone(60),
    )


@pytest.mark.usefixtures("sigint")
def test_a_signal_that_a_player_gets_ends_the_search() -> None:
    began = time.monotonic()

    def signalled(candidate: Case) -> PlayResult:
        time.sleep(0.1)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return fakes(candidate)

    with pytest.raises(KeyboardInterrupt):
        search(
            [signalled],
            ((seed, alone(10)) for seed in count(1)),
            go_on=lambda: time.monotonic() - began < 10,
            keep=print,
            progress=lambda _: None,
        )
    assert time.monotonic() - began < 8


def test_time_that_is_up_ends_the_search() -> None:
    left = iter([True, True, False])
    tally, _ = run([alone(10)] * 9, go_on=lambda: next(left))
    assert (tally.trials, tally.first, tally.last) == (2, 1, 2)


def account() -> SearchSummary:
    tally, _ = run(
        [
            alone(60),
            alone(30),
            Case(Setup(connector="OffloadingConnector"), ((Request(9, 2, 4, 1, 3),) * 2,), 1),
        ]
    )
    live = [
        "vllm-repro run explored_popleft_n_0_20_2.py --server lab --vllm 0.20.2",
        "none: a server would live",
    ]
    again = "vllm-repro explore --engine --mix plain,v2 --seeds 3"
    return SearchSummary(
        version="0.20.2",
        start="general",
        mixes=("plain",),
        tally=tally,
        live=live,
        tests=["reports/explore/1/test_explored_popleft_n_0_20_2.py", None],
        duration_s=12.3456,
        again=again,
    )


def test_the_account_of_a_search() -> None:
    assert_golden("explore.txt", terminal(account()) + "\n", "explore")
    given = as_json(account())
    assert given["seeds"] == [1, 3]
    assert [one["kind"] for one in given["findings"]] == ["death", "corrupted"]
    assert given["findings"][0]["live"].startswith("vllm-repro run")
    empty = replace(account(), tally=Tally(2, first=1, last=2), live=[], tests=[])
    assert "nothing in 2 cases" in terminal(empty)


def drafted(found: Found, release: str) -> Scenario:
    """Return the scenario of a draft, in which `check` finds nothing wrong."""
    name = draft_id(found.finding, release).replace("-", "_")
    scenario, problems = read(Path(f"{name}.py"), draft(found, release))
    assert problems == []
    assert scenario is not None
    return scenario


@pytest.mark.parametrize(
    ("death", "shows", "looks"),
    [
        (STUCK, Expected.HANGS, False),
        ({"kind": "restless", "detail": "400 stores", "states": ""}, Expected.SPINS, True),
        (POPLEFT, Expected.DIES, False),
    ],
)
def test_a_draft_expects_what_a_server_would_show(
    death: dict[str, Any], shows: Expected, looks: bool
) -> None:
    scenario = drafted(found(alone(60), result_from({"death": death})), "0.32.0")
    assert scenario.arms[0].expected is shows
    assert isinstance(scenario.workload[-1], Rest) is looks
    assert (scenario.signature is None) is (shows is not Expected.DIES)


def test_a_draft_names_the_release_without_exchanged_packages() -> None:
    scenario = drafted(found(alone(60)), "0.32.0 with a==1")
    assert (scenario.status.bad, scenario.try_with) == ("==0.32.0", "0.32.0")


def found(case: Case, outcome: PlayResult | None = None) -> Found:
    finding = (outcome or result_from({"death": POPLEFT})).worst
    assert finding is not None
    return Found(finding=finding, seed=7, case=case, shrunk=case, tried=0)


@pytest.mark.parametrize("seed", range(12))
def test_every_draft_is_a_scenario_file_without_a_mistake(seed: int) -> None:
    message = 'no {block} of "9" \\ left'
    death = result_from({"death": POPLEFT | {"message": message}}) if seed % 2 else None
    setup = Setup(connector="SimpleCPUOffloadConnector" if seed % 3 else "")
    case = draw_for(setup, seed)
    scenario = drafted(found(case, death), "0.20.2")
    assert len(scenario.workload) == len(case.waves)
    assert scenario.lab is not None
    assert scenario.lab.layers == case.setup.layers
    command = scenario.command_in_lab(scenario.arms[0])
    assert command.number("--num-gpu-blocks-override") == case.setup.blocks


def test_what_a_live_server_cannot_be_told_is_said() -> None:
    assert unlike_live(alone(9)) == ()
    odd = Case(
        Setup(connector="SimpleCPUOffloadConnector", asynchronous=True, runner=2, store_polls=5),
        ((Request(9, 1, after=1, abort=2),),),
        1,
    )
    assert len(unlike_live(odd)) == 5
    assert (
        unlike_live(Case(Setup(connector="MultiConnector"), odd.waves, 1))[0]
        == "the lab has no copies for MultiConnector"
    )


# --- the process
# --------------------------------------------------------------------------------------------------

ECHO = """
import json, os, signal, sys, time
print(json.dumps({"version": "1.2.3"}), flush=True)
for line in sys.stdin:
    case = json.loads(line)
    seed = case["seed"]
    if seed == 1: os.kill(os.getpid(), signal.SIGSEGV)
    if seed == 4: raise KeyError("w1r1")
    if seed == 5: os.kill(os.getpid(), signal.SIGKILL)
    if seed == 2: time.sleep(60)
    print(json.dumps({"steps": seed, "layers": case["layers"]}), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """Replace the driver's program by one file, on this interpreter."""

    def put(text: str, **options: Any) -> Driver:
        (tmp_path / "vllm_repro_driver").mkdir()
        (tmp_path / "vllm_repro_driver" / "__main__.py").write_text(text, encoding="utf-8")
        monkeypatch.setattr(driver_module, "PROGRAM", tmp_path)
        release = replace(fake_release("1.2.3", tmp_path), python=Path(sys.executable))
        return Driver(release, tmp_path, tmp_path / "errors.log", **options)

    return put


def test_a_crash_or_hang_of_the_driver_is_a_finding(
    program: Callable[..., Driver],
) -> None:
    with program(ECHO, case_s=0.5) as driver:
        cases = {seed: Case(Setup(), ((Request(9, 1),),), seed) for seed in (1, 2, 3)}
        assert driver.play(cases[3]).steps == 3
        dead, hung = driver.play(cases[1]).worst, driver.play(cases[2]).worst
        assert driver.play(cases[3]).steps == 3
    assert (dead and dead.kind, dead and dead.site) == (
        FindingKind.DEATH,
        "the process ended by SIGSEGV",
    )
    assert (hung and hung.kind, hung and hung.site) == (FindingKind.STUCK, "one step never ends")


@pytest.mark.parametrize(("seed", "error"), [(4, HarnessBug), (5, InfraError)])
def test_a_fault_of_the_driver_and_a_kill_are_no_findings(
    program: Callable[..., Driver], seed: int, error: type[Exception]
) -> None:
    with program(ECHO) as driver, pytest.raises(error):
        driver.play(Case(Setup(), ((Request(9, 1),),), seed))


def test_a_release_that_lacks_a_name_is_unsupported(tmp_path: Path) -> None:
    """Run the real program on an interpreter without vLLM."""
    release = replace(fake_release("1.2.3", tmp_path), python=Path(sys.executable))
    with (
        Driver(release, tmp_path, tmp_path / "errors.log") as driver,
        pytest.raises(Unsupported) as error,
    ):
        driver.play(alone(9))
    assert "vLLM 1.2.3 cannot be explored: ModuleNotFoundError: No module named" in str(error.value)


def test_a_driver_that_does_not_start_is_trouble_of_this_machine(
    program: Callable[..., Driver],
) -> None:
    with program("raise SystemExit(3)") as driver, pytest.raises(InfraError, match="did not start"):
        driver.play(alone(9))
