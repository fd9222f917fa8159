"""The events of a trial."""

from __future__ import annotations

import pytest

from tests.report_examples import DIED, report


@pytest.mark.parametrize(
    ("arm", "events"),
    [
        (
            "reported",
            [
                *("ready", "short chat", "long chat", "log", "stream (decisive)"),
                *("engine-process (decisive)", "health (decisive)", "process (decisive)", "end"),
            ],
        ),
        ("eager", ["ready", "short chat", "long chat", "canary", "end"]),
    ],
)
def test_the_events_of_a_trial_in_the_order_of_time(arm: str, events: list[str]) -> None:
    timeline = report(DIED).timelines[arm, 1]
    assert [at for at, _, _ in timeline] == sorted(at for at, _, _ in timeline)
    assert list(dict.fromkeys(what for _, what, _ in timeline)) == events
