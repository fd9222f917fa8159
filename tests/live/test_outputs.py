"""Wrong answers of real releases, by `alike=` and by `--outputs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Harness

pytestmark = pytest.mark.live

BY_HAND = pytest.mark.by_hand
SCENARIO = "tq-shared-step-loses-prefix"
FILE = Path(__file__).parents[2] / "scenarios" / "tq_shared_step_loses_prefix.py"


def trial_of(harness: Harness, name: str, release: str, arm: str, *words: str) -> dict[str, Any]:
    done = harness(
        "run", name, "--server", "lab", "--vllm", release, "--arm", arm, "--expect", "any", *words
    )
    (trial,) = done.report["arms"][0]["trials"]
    assert trial["outcome"] in ("wrong-output", "clean"), done.out + done.err
    found: dict[str, Any] = trial
    return found


@pytest.mark.parametrize(
    ("release", "arm", "outcome"),
    [
        ("0.32.0", "reported", "wrong-output"),
        pytest.param("0.24.0", "reported", "wrong-output", marks=BY_HAND),
        pytest.param("0.32.0", "one-token-shorter", "clean", marks=BY_HAND),
        pytest.param("0.32.0", "patched", "clean", marks=BY_HAND),
    ],
)
def test_a_prefix_is_lost_to_a_long_prompt_in_the_same_step(
    harness: Harness, release: str, arm: str, outcome: str
) -> None:
    trial = trial_of(harness, SCENARIO, release, arm)
    assert (trial["outcome"], trial["trigger"]["crossed"]) == (outcome, True), trial["why"]
    if outcome == "wrong-output":
        assert (
            trial["why"]
            == "the equal requests 'alone' and 'beside it' were answered differently after 0 tokens"
        )


@pytest.mark.parametrize(
    ("arm", "outcome"),
    [
        ("reported", "wrong-output"),
        pytest.param("one-token-more", "clean", marks=BY_HAND),
        pytest.param("patched", "clean", marks=BY_HAND),
    ],
)
def test_a_fetched_prompt_loses_a_token(harness: Harness, arm: str, outcome: str) -> None:
    trial = trial_of(harness, "nixl-fetch-loses-token", "0.33.0", arm)
    assert (trial["outcome"], trial["trigger"]["crossed"]) == (outcome, True), trial["why"]
    if outcome == "wrong-output":
        assert (
            trial["why"]
            == "the equal requests 'alone' and 'fetched' were answered differently after 0 tokens"
        )


def unaware(folder: Path) -> str:
    """Return a copy of the scenario without its check, with requests that share no step."""
    text = FILE.read_text(encoding="utf-8")
    for old, new in (
        ('    output=checks(alike=[("alone", "beside it")]),\n', ""),
        (SCENARIO, "unaware"),
        (
            'together(BUSY, completion(name="new", prompt=1000, starts_after=0.05), BESIDE),\n',
            "\n",
        ),
        (' & prefilled_together("new", "beside it")', ""),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "unaware.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


@BY_HAND
def test_the_lost_prefix_is_found_without_a_declaration(harness: Harness, tmp_path: Path) -> None:
    trial = trial_of(harness, unaware(tmp_path), "0.32.0", "reported", "--outputs")
    assert trial["outcome"] == "wrong-output", trial["why"]
    assert "answered differently beside others and alone after 0 tokens" in trial["why"]


def with_made_weights(name: str, folder: Path) -> str:
    """Return a copy of a scenario whose lab makes weights that answers can be compared with."""
    path = folder / f"{name.replace('-', '_')}.py"
    text = (FILE.parent / path.name).read_text(encoding="utf-8")
    assert text.count("lab=Lab(") == 1
    path.write_text(text.replace("lab=Lab(", 'lab=Lab(weights="made", '), encoding="utf-8")
    return str(path)


@BY_HAND
@pytest.mark.parametrize(
    ("name", "release"),
    [("tq-chunked-prefill", "0.24.0"), ("sco-hybrid", "0.24.0")],
)
def test_a_healthy_engine_answers_as_alone(
    harness: Harness, tmp_path: Path, name: str, release: str
) -> None:
    trial = trial_of(harness, with_made_weights(name, tmp_path), release, "reported", "--outputs")
    assert (trial["outcome"], trial["output"]) == ("clean", "as alone"), trial["why"]
