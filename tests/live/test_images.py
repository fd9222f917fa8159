"""Real releases with a tiny model for images: a crash by an image, and a lost image."""

from __future__ import annotations

import pytest

from tests.conftest import Harness

pytestmark = pytest.mark.live


def test_an_image_larger_than_the_cache_ends_the_boot(harness: Harness) -> None:
    done = harness(
        "run",
        "image-larger-than-cache",
        "--server",
        "process",
        "--vllm",
        "0.28.0",
        "--arm",
        "reported",
    )
    assert done.status == 0, done.out + done.err
    (trial,) = done.report["arms"][0]["trials"]
    death = trial["death"]
    assert (trial["outcome"], trial["phase"], death["signature"]) == ("crash", "boot", "match")
    assert "not reached: died at boot" in done.out


@pytest.mark.by_hand
@pytest.mark.parametrize(
    ("scenario", "vllm", "arm", "outcome"),
    [
        ("image-larger-than-cache", "0.28.0", "larger-cache", "clean"),
        ("image-larger-than-cache", "0.29.0", "reported", "clean"),
        ("image-of-refused-request", "0.32.0", "reported", "wrong-output"),
        ("image-of-refused-request", "0.32.0", "other-image", "clean"),
        ("image-of-refused-request", "0.32.0", "no-cache", "clean"),
    ],
)
def test_what_lives(harness: Harness, scenario: str, vllm: str, arm: str, outcome: str) -> None:
    done = harness(
        "run", scenario, "--server", "process", "--no-throughput", "--vllm", vllm, "--arm", arm
    )
    (trial,) = done.report["arms"][0]["trials"]
    assert (trial["outcome"], done.status) == (outcome, 0), done.out + done.err
