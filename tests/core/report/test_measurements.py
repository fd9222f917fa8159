"""Reports of measurements, from journals that are written here."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.golden_files import assert_golden
from tests.report_examples import REHEARSAL
from vllm_repro.journal.journal import read
from vllm_repro.report.build import report_of
from vllm_repro.report.html import html_page
from vllm_repro.report.json_report import RunJson, report_dict
from vllm_repro.report.junit import junit
from vllm_repro.report.markdown import markdown
from vllm_repro.report.model import RunReport
from vllm_repro.report.summary import summary
from vllm_repro.report.tables import throughput_lines, throughput_section
from vllm_repro.verdict.output import Checks, Probe, sample_output
from vllm_repro.verdict.throughput import Load

POINT = {"prompt": 128, "output": 512, "concurrency": 4}
LOAD = Load(prompt=128, output=512, concurrency=[4], baseline="eager")


def figures(speed: float) -> dict[str, Any]:
    return {
        "wall_s": 2048 / speed,
        "requests": 4,
        "prompt_tokens": 512,
        "output_tokens": 2048,
        "output_tok_s": speed,
        "req_s": speed / 512,
        "ttft_s": 0.1,
        "tpot_s": 4 / speed,
        "itl_s": 4 / speed,
        "itl_p99_s": 8 / speed,
        "e2e_s": 2048 / speed,
        "cpu": 0.12,
        "late_s": 0.002,
    }


class Journal:
    """The example's journal with other ends of its trials."""

    def __init__(self, evidence: str, **header: Any) -> None:
        lines = (REHEARSAL / "journal.jsonl").read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines]
        self.header = next(entry for entry in entries if entry["event"] == "run-started")
        self.ended = next(
            e for e in entries if e["event"] == "trial-ended" and e["outcome"] == "clean"
        )
        names = ("reported", "eager", "graphs-off")
        arms = [arm for arm in self.header["arms"] if arm["name"] in names]
        self.header |= {
            "evidence": evidence,
            "arms": arms,
            "loads": [vars(LOAD)],
            "output": None,
            "version": "0.24.0",
            "wishes": {"throughput": True},
            **header,
        }
        self.entries = [self.header]

    def add(self, event: str, arm: str, trial: int, **fields: Any) -> None:
        self.entries.append(
            {"t": self.header["t"] + 1, "event": event, "arm": arm, "trial": trial, **fields}
        )

    def rounds(self, arm: str, trial: int, *speeds: float, counted: int | None = None) -> None:
        for number, speed in enumerate(speeds, 1):
            self.add(
                "throughput-round", arm, trial, point=POINT, round=number, figures=figures(speed)
            )
        usage = {"prompt": 3584, "output": 14336}
        seen = usage if counted is None else {**usage, "output": counted}
        self.add("throughput-point", arm, trial, point=POINT, rounds=5, usage=usage, counted=seen)

    def end(
        self, arm: str, trial: int, outcome: str = "clean", weights: str | None = "real"
    ) -> None:
        fields = {"arm": arm, "trial": trial, "outcome": outcome, "weights": weights}
        self.entries.append({**self.ended, **fields, "version": "0.24.0"})

    def of(self, event: str, *arms: str) -> list[dict[str, Any]]:
        """Return the entries of an event, of all arms unless some are named."""
        entries = [entry for entry in self.entries if entry["event"] == event]
        return [entry for entry in entries if not arms or entry["arm"] in arms]

    def report(self, folder: Path) -> RunReport:
        folder.mkdir(exist_ok=True)
        ended = {"t": self.header["t"] + 9, "event": "run-ended", "interrupted": None}
        text = "".join(json.dumps(entry) + "\n" for entry in (*self.entries, ended))
        (folder / "journal.jsonl").write_text(text, encoding="utf-8")
        report = report_of(read(folder / "journal.jsonl"), folder)
        msgspec.convert(report_dict(report), RunJson)
        return report


def measured(evidence: str = "gpu", weights: str | None = "real") -> Journal:
    """Return two boots of two arms; reported is twice as fast as eager."""
    journal = Journal(evidence)
    for trial in (1, 2):
        for arm, factor in (("reported", 2.0), ("eager", 1.0)):
            journal.rounds(arm, trial, *(factor * (100 + trial + number) for number in range(5)))
            journal.end(arm, trial, weights=weights)
    return journal


LOAD_TEXT = "128 -> 512 tokens, 4 at once"
RATES = f"| {LOAD_TEXT} | reported | 207 (204 to 210) |"


def first_trial(report: RunReport, arm: int = 0) -> Any:
    """Return the throughput of an arm's first trial."""
    return report_dict(report)["arms"][arm]["trials"][0]["throughput"]


def ratio_of(report: RunReport) -> Any:
    (ratio,) = report_dict(report)["throughput"]["ratios"]
    return ratio


def test_a_ratio_with_its_interval(tmp_path: Path) -> None:
    report = measured().report(tmp_path)
    assert report_dict(report)["throughput"]["baseline_arm"] == "eager"
    ratio, trial = ratio_of(report), first_trial(report)
    assert ratio["ratio"] == pytest.approx(2.0)
    assert 1.9 < ratio["low"] <= 2.0 <= ratio["high"] < 2.1
    facts = (ratio["arm"], ratio["n"], ratio["boots"], ratio["change"])
    assert facts == ("reported", 10, 2, "faster")
    assert (trial["output_tok_s"], trial["tpot_s"]) == pytest.approx((206.0, 4 / 206))
    assert (trial["ttft_s"], trial["rounds"], trial["concurrency"]) == (0.1, 5, 4)
    for text in (markdown(report), summary(report)):
        seen = [words in text for words in ("2.00 (", "faster", "claimed")]
        assert seen == [True, True, False]
    assert RATES in markdown(report)
    # The same journal, the same interval.
    assert report_dict(report_of(read(tmp_path / "journal.jsonl"), tmp_path)) == report_dict(report)


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [("lab", "LAB"), ("scheduler", "SCHEDULER ONLY"), ("unknown", "device of this server")],
)
def test_where_nothing_is_claimed_no_figure_is_shown(
    tmp_path: Path, evidence: str, reason: str
) -> None:
    report = measured(evidence).report(tmp_path)
    data = report_dict(report)
    assert (data["throughput"], reason in data["throughput_withheld"]) == (None, True)
    assert all(trial["throughput"] is None for arm in data["arms"] for trial in arm["trials"])
    for text in (markdown(report), summary(report)):
        assert reason in text
        # pytest numbers its folders
        assert not re.search("tok/s|207", text.replace(str(tmp_path), ""))


@pytest.mark.parametrize(
    ("evidence", "weights", "begun", "label"),
    [
        ("gpu", "real", {}, "real weights; 2 x H100"),
        ("cpu", "real", {}, "real weights; 4 CPUs"),
        ("cpu", "dummy", {"depth": [2, 32]}, "random weights, 2 of 32 layers; 4 CPUs"),
        ("gpu", "made", {"depth": [32, 32]}, "random weights, full depth; 2 x H100"),
        ("gpu", "dummy", {"weights": "dummy: 1 layer, 16 heads"}, "1 of the model's layers; 2 x"),
        ("gpu", None, {}, "unknown weights; 2 x H100"),
    ],
)
def test_figures_stand_beside_weights_and_device(
    tmp_path: Path, evidence: str, weights: str | None, begun: dict[str, Any], label: str
) -> None:
    journal = measured(evidence, weights)
    card = {"name": "H100", "memory_gb": 79.6, "driver": "580", "capability": 9.0}
    journal.header["machine"] |= {"cpus": 4, "gpus": [card, card, card]}
    fields: dict[str, Any] = {"command": "vllm serve x", "server": "process", "differences": []}
    journal.add("trial-started", "reported", 1, **fields, **begun)
    journal.add("gpus-free", "reported", 1, gpus=["0", "1"], waited_s=0.0)
    report = journal.report(tmp_path)
    assert label in report_dict(report)["throughput"]["label"]
    for text in (markdown(report), summary(report), junit(report)):
        assert label in text
        fewer = "A ratio of fewer layers is no ratio of the whole model" in text
        assert fewer is (" layers; " in label)


@pytest.mark.parametrize(
    "given", ["dummy: 1 layer, 16 heads, 4 KV heads of 256, run by vLLM's qwen3", "", None]
)
def test_a_report_names_the_served_weights(tmp_path: Path, given: str | None) -> None:
    journal = measured("gpu", "dummy")
    fields: dict[str, Any] = {"command": "vllm serve x", "server": "process", "differences": []}
    known = {} if given is None else {"weights": given}  # an older journal does not name them
    journal.add("trial-started", "reported", 1, **fields, **known)
    report = journal.report(tmp_path)
    assert report_dict(report)["arms"][0]["server"]["weights"] == (given or None)
    assert ("- Weights: dummy: 1 layer, 16 heads" in markdown(report)) is bool(given)


def test_a_client_that_came_late_has_rates_and_no_times(tmp_path: Path) -> None:
    journal = measured()
    for entry in journal.of("throughput-round", "reported"):
        entry["figures"]["slept_s"] = 0.11 * entry["figures"]["wall_s"]
    report = journal.report(tmp_path)
    trial = first_trial(report)
    assert (trial["ttft_s"], trial["quartiles"]["tpot_s"]) == (None, None)
    assert trial["output_tok_s"] == pytest.approx(206.0)
    for words in (
        (
            "| reported | 207 (204 to 210) | 0.404 (0.399 to 0.409) | - | - | - | - | - | 12 % CPU,"
            " late 2.0 ms |"
        ),
        f"`reported` has no times at {LOAD_TEXT}: the client was late in too many rounds.",
    ):
        assert words in markdown(report)


def test_a_point_at_which_the_client_was_the_limit_is_left_out(tmp_path: Path) -> None:
    journal = measured()
    rounds = journal.of("throughput-round")
    rounds[3]["figures"]["cpu"], rounds[4]["figures"]["cpu"] = 0.9, 0.95
    report = journal.report(tmp_path)
    left_out = f"reported, trial 1: {LOAD_TEXT} is left out: the client used 95 % of a core"
    assert left_out in markdown(report)
    assert (ratio_of(report)["n"], ratio_of(report)["boots"]) == (5, 1)  # of the other boot


def test_a_round_that_the_client_falsified_does_not_count(tmp_path: Path) -> None:
    journal = measured()
    rounds = journal.of("throughput-round")
    other, few = rounds[:5], rounds[5:10]
    assert {(entry["arm"], entry["trial"]) for entry in few} == {("eager", 1)}
    for entry in few[:3]:
        entry["figures"]["edge_s"] = 0.03 * entry["figures"]["wall_s"]
    # One more was measured in its place.
    spare = json.loads(json.dumps(other[0]))
    spare["figures"] |= {"output_tok_s": 1.0, "edge_s": 0.02 * other[0]["figures"]["wall_s"]}
    journal.entries.append(spare)
    report = journal.report(tmp_path)
    for words in (
        f"eager, trial 1: {LOAD_TEXT} is left out: in 3 of 5 rounds the client was late by",
        f"reported, trial 1: {LOAD_TEXT}: 1 of 6 rounds are left out: the client was late by",
    ):
        assert words in markdown(report)
    assert (ratio_of(report)["n"], ratio_of(report)["boots"]) == (5, 1)
    assert (first_trial(report)["rounds"], first_trial(report, arm=1)) == (5, None)


def test_what_the_server_counted_is_a_row_of_each_load_and_arm(tmp_path: Path) -> None:
    journal = measured("gpu")
    counted = {"prompt_tokens": 512, "generation_tokens": 2048, "kv_most": 0.5, "preemptions": 1}
    drafts = {"cache_hits": 16, "cache_queries": 512, "draft_tokens": 100, "accepted_tokens": 40}
    for trial in (1, 2):
        journal.add("counters", "reported", trial, phase="workload", counted=counted)
        for phase in ("warm-up", "rounds", "rounds"):
            fields: dict[str, Any] = {
                "phase": phase,
                "point": POINT,
                "counted": {**counted, **drafts},
            }
            journal.add("counters", "reported", trial, **fields)
    card = {
        "memory_mib": 60000.0,
        "temperature_c": 64.0,
        "power_w": None,
        "clock_mhz": 1345.0,
        "slowed": True,
    }
    fields = {"phase": "rounds", "point": POINT, "gpus": card}
    journal.add("counters", "eager", 1, **fields, counted={**counted, "kv_most": 0.75})
    report = journal.report(tmp_path)
    heads = (
        "load | arm | output tokens | KV cache in use, at most | preemptions | prompt tokens from"
        " the prefix cache"
    )
    for row in (
        (
            f"{heads} | draft tokens accepted | hottest GPU | lowest GPU clock | slowed by its"
            " hardware"
        ),
        (
            "128 -> 512 tokens, 4 at once | reported | 8,192 | 50.0 % | 4 | 64 of 2,048 | 160 of"
            " 400 | - | - | -"
        ),
        (
            "128 -> 512 tokens, 4 at once | eager | 2,048 | 75.0 % | 1 | - | - | 64 °C | 1,345 MHz"
            " | yes"
        ),
    ):
        assert f"| {row} |" in markdown(report)
        assert all(f">{escape(word)}</t" in html_page(report) for word in row.split(" | "))
    phases = report_dict(report)["arms"][0]["trials"][0]["counters"]
    assert [(one["phase"], one["concurrency"], one["preemptions"]) for one in phases] == [
        ("workload", None, 1),
        ("warm-up", 4, 1),
        ("rounds", 4, 2),
    ]
    assert report_dict(report)["arms"][1]["trials"][0]["counters"][0]["gpus"] == card
    assert "By the server's counters" not in markdown(measured("gpu").report(tmp_path))


def test_a_load_that_never_became_steady_is_left_out(tmp_path: Path) -> None:
    journal = measured()
    for point, unsteady in zip(journal.of("throughput-point"), (0.12, 0.12, 0.05), strict=False):
        point |= {"warm_ups": 5, "unsteady": unsteady}
    for number, entry in enumerate(journal.of("throughput-round")[:5]):
        entry["figures"] |= figures(100 + 40 * number)
    report = journal.report(tmp_path)
    words = "is left out: it never became steady: the last two of 5 warm-up rounds differ by 12 %"
    assert f"reported, trial 1: {LOAD_TEXT} {words}" in markdown(report)
    assert markdown(report).count("never became steady") == 1
    assert first_trial(report) is None


def test_servers_of_different_releases_are_not_compared(tmp_path: Path) -> None:
    journal = measured()
    for entry in journal.of("trial-ended", "eager"):
        entry["version"] = "0.23.0"
    report = journal.report(tmp_path)
    assert report_dict(report)["throughput"]["ratios"] == []
    different = "arms are not compared: their servers reported different releases: 0.23.0, 0.24.0"
    assert [words in markdown(report) for words in (different, RATES)] == [True, True]


def test_a_dying_engine_gives_no_figure(tmp_path: Path) -> None:
    journal = Journal("gpu")
    for arm, factor in (("eager", 1), ("reported", 2)):
        journal.rounds(arm, 1, *(factor * speed for speed in (100, 100.5, 101, 101.5, 102)))
    why = "the engine died or hung"
    journal.end("eager", 1)
    journal.add("measure-stopped", "reported", 1, doing="throughput (x)", why=why)
    journal.end("reported", 1, outcome="other-crash")
    journal.entries[-1] |= {"death": DIED, "during": "throughput (x)"}
    report = journal.report(tmp_path)
    assert "after the workload, in throughput (x)" in markdown(report)
    throughput = report_dict(report)["throughput"]
    assert (throughput["baseline_arm"], throughput["ratios"]) == ("eager", [])
    assert (throughput["bug_arm"], throughput["prices"]) == (None, [])
    assert first_trial(report) is None
    assert f"reported, trial 1: throughput (x) was not measured: {why}" in summary(report)
    assert "202" not in markdown(report).replace("2026", "")


def test_a_load_with_other_token_counts_is_left_out(tmp_path: Path) -> None:
    journal = Journal("gpu")
    journal.rounds("eager", 1, 100, 101, 102, 103, 104, counted=999)
    journal.end("eager", 1)
    report = journal.report(tmp_path)
    assert report_dict(report)["throughput"] is None
    assert [words in markdown(report) for words in ("counters 3,584 + 999", "102")] == [True, False]


@pytest.mark.parametrize(
    ("name", "evidence"), [("claimed", "gpu"), ("rehearsal", "rehearsal"), ("lab", "lab")]
)
def test_what_people_read(tmp_path: Path, name: str, evidence: str) -> None:
    report = measured(evidence).report(tmp_path)
    text = throughput_section(report)
    terminal = "\n".join(throughput_lines(report))
    assert_golden(f"throughput-{name}.txt", f"{text}\n{terminal}\n")


def test_what_earlier_versions_measured_is_left_out(tmp_path: Path) -> None:
    """Requests at a rate, the first load again, and a soak."""
    journal = measured()
    points = [entry for entry in journal.entries if "point" in entry]
    for rate, again in ((0.0, True), (4.0, False)):
        journal.entries += [
            {**entry, "again": again, "point": {**POINT, "rate": rate, "arrivals": "poisson"}}
            for entry in points
        ]
    journal.header["wishes"]["soak"] = 9.0
    soak = {"asked": 9.0, "seconds": 9.0, "tenths": [1.0] * 10}
    counted = {"prompt_tokens": 1, "generation_tokens": 2}
    journal.add("soak", "eager", 1, soak=soak)
    journal.add("counters", "eager", 1, phase="soak", counted=counted)
    journal.add("measure-stopped", "eager", 2, doing="the soak (x)", why="the engine died or hung")
    report = journal.report(tmp_path)
    now = report_dict(measured().report(tmp_path / "now"))
    assert report_dict(report) == {**now, "reproduce": report.reproduce}
    stopped = "eager, trial 2: the soak (x) was not measured: the engine died or hung"
    assert stopped in markdown(report)


def answered(weights: str = "real") -> Journal:
    output = vars(Checks(same=8, baseline="eager"))
    journal = Journal("gpu", output=output, wishes={"throughput": False})
    for arm, last in (("reported", 9), ("eager", 4), ("graphs-off", 4)):
        tokens = [1, 2, 3, last] * 16
        journal.add("output", arm, 1, said=vars(sample_output(Probe.GREEDY, tokens, str(tokens))))
        journal.end(arm, 1, weights=weights)
    return journal


def erring(journal: Journal) -> Journal:
    """Return `journal` with a reported arm whose bug is a wrong answer."""
    expected = {"reported": "errs", "eager": "lives", "graphs-off": "lives"}
    arms = [{**arm, "expected": expected[arm["name"]]} for arm in journal.header["arms"]]
    journal.header |= {"errs": True, "arms": arms, "version": "0.23.0"}
    return journal


def test_where_a_wrong_answer_is_the_bug_it_reproduces(tmp_path: Path) -> None:
    journal = erring(answered())
    for entry in journal.of("trial-ended"):
        entry["version"] = "0.23.0"
    report = journal.report(tmp_path)
    assert (report.verdict, report.as_expected) == ("reproduces", True)
    assert "reported: answered wrongly in 1 of 1 boots" in report.because
    assert "answered wrongly in 0 of 1 boots, against 1 of 1 of reported" in report.comparisons[0]
    assert "(answered wrongly in 1 of 1)" in markdown(report)


def test_an_answer_that_was_not_compared_is_not_clean(tmp_path: Path) -> None:
    report = erring(answered("dummy")).report(tmp_path)
    assert {arm.trials[0].outcome.value for arm in report.arms} == {"untriggered"}
    assert "dummy weights" in report.arms[0].trials[0].why
    alone = erring(answered())
    alone.entries = [entry for entry in alone.entries if entry.get("arm") in (None, "reported")]
    trial = alone.report(tmp_path / "alone").arms[0].trials[0]
    why = "there is no answer of eager to compare with (--arm eager)"
    assert (trial.outcome.value, trial.why) == ("untriggered", why)


DIED = {
    "detected_by": "log",
    "latency_s": 0.1,
    "exception": "AssertionError",
    "message": "Workspace is locked",
    "frames": [],
    "signature": "match",
    "channels": ["log"],
}


def died_and_loaded(outcome: str, death: dict[str, Any] | None = None) -> Journal:
    """Return a run whose first arm crashed and was booted once more for its load alone."""
    journal = Journal("gpu")
    for trial in (1, 2):
        journal.end("reported", trial, outcome="crash")
        journal.rounds("eager", trial, *(50 + number for number in range(5)))
        journal.end("eager", trial)
    journal.rounds("reported", 3, *(100 + number for number in range(5)))
    journal.end("reported", 3, outcome=outcome)
    journal.entries[-1] |= {"event": "load-ended", "death": death, "log": "logs/reported-3.log"}
    return journal


def test_an_arm_that_dies_has_the_figures_of_its_load(tmp_path: Path) -> None:
    report = died_and_loaded("untriggered").report(tmp_path)
    data = report_dict(report)
    reported, load = data["arms"][0], data["arms"][0]["load"]
    assert [trial["trial"] for trial in reported["trials"]] == [1, 2]
    assert (reported["k"], reported["n"]) == (2, 2)
    assert (load["trial"], load["outcome"], load["throughput"]["output_tok_s"]) == (
        3, "untriggered", 102.0,
    )  # fmt: skip
    assert data["arms"][1]["load"] is None
    (price,) = data["throughput"]["prices"]
    assert (data["throughput"]["bug_arm"], price["arm"], price["boots"]) == ("reported", "eager", 1)
    assert price["ratio"] == pytest.approx(52 / 102)
    said = "avoids it in 2 of 2 boots and gives 0.51 (0.50 to 0.53) of the tokens per second"
    for text in (markdown(report), summary(report), junit(report)):
        assert said in text
        assert "booted once more for the load alone: the engine lived" in text


@pytest.mark.parametrize(
    ("outcome", "death", "words"),
    [
        ("crash", DIED, "the engine died of the load, as in the bug: AssertionError: Workspace is"),
        (
            "other-crash",
            DIED | {"signature": "other", "exception": "ValueError", "message": None},
            "the engine died of the load, not as in the bug: ValueError",
        ),
        ("boot-failed", None, "boot-failed: "),
        ("hang", None, "hang: "),
    ],
)
def test_an_engine_that_dies_of_its_load_has_no_figure(
    tmp_path: Path, outcome: str, death: dict[str, Any] | None, words: str
) -> None:
    report = died_and_loaded(outcome, death).report(tmp_path)
    data = report_dict(report)
    assert (data["arms"][0]["load"]["outcome"], data["arms"][0]["load"]["throughput"]) == (
        outcome,
        None,
    )
    assert (data["arms"][0]["k"], data["throughput"]["prices"]) == (2, [])
    assert f"booted once more for the load alone: {words}" in summary(report)
    assert "gives" not in summary(report)


def test_drafts_of_random_weights_stand_beside_their_acceptance(tmp_path: Path) -> None:
    journal = measured("gpu", "dummy")
    counted = {"prompt_tokens": 512, "generation_tokens": 2048}
    for trial in (1, 2):
        for arm, drafts in (("reported", 100), ("eager", 60)):
            speculated = counted | {"draft_tokens": drafts, "accepted_tokens": 4}
            journal.add("counters", arm, trial, phase="rounds", point=POINT, counted=speculated)
    text = markdown(journal.report(tmp_path))
    assert "With these random weights 5 % of the draft tokens were accepted" in text


@pytest.mark.parametrize(
    ("weights", "experts", "told"),
    [("dummy", True, True), ("dummy", False, False), ("real", True, False)],
)
def test_experts_of_random_weights_are_named(
    tmp_path: Path, weights: str, experts: bool, told: bool
) -> None:
    journal = measured("gpu", weights)
    for entry in journal.of("trial-ended"):
        entry["boot"] = {**entry["boot"], "experts": experts}
    assert ("evenly over the experts" in markdown(journal.report(tmp_path))) is told


def test_without_a_baseline_the_first_arm_that_lives_is_one(tmp_path: Path) -> None:
    journal = died_and_loaded("untriggered")
    journal.header["loads"] = [vars(LOAD) | {"baseline": ""}]
    (ratio,) = report_dict(journal.report(tmp_path))["throughput"]["ratios"]
    assert (ratio["arm"], ratio["ratio"]) == ("reported", pytest.approx(102 / 52))
