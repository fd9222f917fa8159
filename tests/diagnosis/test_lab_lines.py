from __future__ import annotations

from vllm_repro.diagnosis.lab_lines import Observed, observed
from vllm_repro.diagnosis.log_text import read_lines

LOG = """\
(EngineCore pid=7) INFO 11-21 20:22:35 [offload.py:9] LAB observed store {"event": 3, "blocks": 80, "distinct": 54}
(EngineCore pid=7) INFO 11-21 20:22:35 [core.py:9] something else
(EngineCore pid=7) INFO 11-21 20:22:36 [offload.py:9] LAB observed store {"event": 4, "blo
(EngineCore pid=7) INFO 11-21 20:22:37 [offload.py:9] LAB observed free_list {"counter": 106}
"""


def test_observations_come_in_order_and_a_line_that_was_cut_is_left_out() -> None:
    assert observed(read_lines(LOG)) == (
        Observed("store", {"event": 3, "blocks": 80, "distinct": 54}),
        Observed("free_list", {"counter": 106}),
    )


def test_a_day_of_observations_stays_small() -> None:
    line = 'INFO x] LAB observed store {"event": 1}\n'
    assert len(observed(read_lines(line * 10_050))) == 10_000
