"""Throughput and output check on a real release: the client counts what the server counts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.conftest import Harness
from vllm_repro.journal.journal import Recording, read
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro.report.measurements import measurements
from vllm_repro.verdict.throughput import Point, Round

pytestmark = pytest.mark.live

ARMS = """    arms=[
        arm("reported", dies),
        arm("eager", dies, with_flags("--enforce-eager")),
    ],
    throughput=[
        throughput(prompt=64, output=80, concurrency=[8], baseline="eager"),
        throughput(prompt=2000, output=20, concurrency=[4], baseline="eager"),
    ],
    output=checks(longest_run=32, distinct=0.5, same=16, needle=400, baseline="eager"),
"""


def scenario(folder: Path) -> Path:
    """Return min-tokens-stop-ids with other arms: a comparison of two servers."""
    text = (Path(__file__).parents[2] / "scenarios" / "min_tokens_stop_ids.py").read_text(
        encoding="utf-8"
    )
    text = text.replace("        --enforce-eager\n", "")
    text = text.replace(
        "    arm,\n", "    arm,\n    checks,\n    throughput,\n    with_flags,\n"
    ).replace("    untriggered,\n", "")
    begin, end = text.index("    arms=["), text.index("    related=")
    path = folder / "min_tokens_stop_ids.py"
    path.write_text(text[:begin] + ARMS + text[end:], encoding="utf-8")
    return path


@pytest.mark.alone  # compares times
def test_client_and_server_agree_with_random_weights(harness: Harness, tmp_path: Path) -> None:
    # before the run, so that its time limit does not include the install
    provision(Source(release="0.29.0"))
    done = harness(
        "run", str(scenario(tmp_path)), "--server", "process", "--vllm", "0.29.0", "--throughput"
    )
    assert done.status == 0, done.out + done.err
    report = done.report
    trials: dict[str, dict[str, Any]] = {arm["name"]: arm["trials"][0] for arm in report["arms"]}
    # Random weights repeat tokens although the engine is healthy.
    assert {name: trial["outcome"] for name, trial in trials.items()} == {
        "reported": "clean",
        "eager": "clean",
    }
    label = f"random weights, 2 of 28 layers; {os.cpu_count()} CPUs"
    assert (report["throughput"]["label"], report["throughput_withheld"]) == (label, None)
    text = (done.run / "report.md").read_text(encoding="utf-8")
    assert ("output tok/s" in text, f"Figures of {label}" in text) == (True, True)

    journal = read(done.run / "journal.jsonl")
    points = list(journal.of("throughput-point"))
    assert len(points) == 2 * 2  # two points for two arms
    for point in points:
        load = point["point"]
        requests = (point["warm_ups"] + point["rounds"]) * load["concurrency"]
        assert point["usage"] == {
            "prompt": requests * load["prompt"],
            "output": requests * load["output"],
        }
        assert point["counted"] == point["usage"], point
    assert not list(journal.of("measure-stopped"))
    found = measurements(journal)
    assert found is not None
    left_out = [text for text in found.stopped if "is left out: " in text]
    assert len(found.speeds) + len(left_out) == 4, "the client may be late on two busy cores"
    assert all(row.figures.output_tok_s.n == 5 for row in found.speeds)
    for row in found.speeds:
        figures = row.figures
        if figures.ttft_s is None or figures.tpot_s is None:
            # The engine spins on both cores, so the client may be late; the report then shows no
            # times.
            assert figures.late_s.high > 0.001
            continue
        if figures.point.prompt != 64:
            continue  # long prompts wait for each other
        # Times and rates describe the same tokens: the first token, then the others one by one.
        alone = figures.ttft_s.median + (figures.point.output - 1) * figures.tpot_s.median
        rate = figures.point.output * figures.point.concurrency / alone
        assert figures.output_tok_s.median == pytest.approx(rate, rel=0.5)
        assert figures.tpot_s.median * (figures.point.output - 1) > 0.1 * alone

    lines = [
        json.loads(line)
        for line in (done.run / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    taken = [line for line in lines if line["name"] == "throughput"]
    assert taken
    # A late API server sends the tokens of several steps in one piece.
    assert all(0 < len(line["token_times"]) <= line["usage"]["completion_tokens"] for line in taken)
    probes = [entry["said"] for entry in journal.of("output")]
    assert [probe["probe"] for probe in probes] == ["greedy"] * 2, (
        "random weights are asked for no needle"
    )
    assert all(isinstance(token, int) for probe in probes for token in probe["first"][:1])
    for name in trials:
        agree(journal, name)


def agree(journal: Recording, arm: str) -> None:
    """Check that client and server agree about the tokens of an arm."""
    rounds = [entry for entry in journal.of("throughput-round") if entry["arm"] == arm]
    assert {entry["point"]["concurrency"] for entry in rounds} == {4, 8}
    for entry in rounds:
        point, found = (
            msgspec.convert(entry["point"], Point),
            msgspec.convert(entry["figures"], Round),
        )
        assert found.output_tokens == point.concurrency * point.output
    phases = [entry for entry in journal.of("counters") if entry["arm"] == arm]
    assert phases[0]["phase"] == "workload"
    measured = [entry for entry in phases if "point" in entry.fields]
    assert len(measured) == len(phases) - 1
    for entry in measured:
        point, counted = msgspec.convert(entry["point"], Point), entry["counted"]
        tokens = (point.concurrency * point.prompt, point.concurrency * point.output)
        assert (counted["prompt_tokens"], counted["generation_tokens"]) == tokens
        assert (counted["preemptions"], counted["cache_queries"]) == (0, tokens[0])
    assert max(entry["counted"]["kv_most"] for entry in measured) > 0
