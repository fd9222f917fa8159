"""The events of a trial."""

from __future__ import annotations

from tests import report_examples as examples
from tests.report_examples import report

DIED = report(examples.DIED)


def test_the_channels_of_a_death_in_the_order_of_time() -> None:
    events = DIED.timelines["reported", 1]
    assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    whats = [what for _, what, _ in events]
    assert list(dict.fromkeys(whats)) == [
        *("ready", "short chat", "long chat", "log", "stream (decisive)"),
        *("engine-process (decisive)", "health (decisive)", "process (decisive)", "end"),
    ]


def test_signs_belong_to_the_trial_that_was_open() -> None:
    whats = [what for _, what, _ in DIED.timelines["eager", 1]]
    assert list(dict.fromkeys(whats)) == ["ready", "short chat", "long chat", "canary", "end"]
