"""Searches in reports/examples: their files stay readable, and their answers stay the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report_examples import without_run_links
from vllm_repro.conversion import convert
from vllm_repro_search.bisect.record import Bisection
from vllm_repro_search.minimize.record import Minimization
from vllm_repro_search.record import SearchRecord, markdown
from vllm_repro_search.threshold.record import Threshold

EXAMPLES = Path(__file__).parents[2] / "reports" / "examples"
KEPT = [
    (kind, path)
    for kind in (Bisection, Threshold, Minimization)
    for path in sorted(EXAMPLES.glob(f"{kind.verb}/*/*.json"))
]


@pytest.mark.parametrize(
    ("kind", "path"), KEPT, ids=[f"{path.parts[-3]}-{path.parts[-2]}" for _, path in KEPT]
)
def test_a_kept_record_renders_as_it_was_written(kind: type[SearchRecord], path: Path) -> None:
    kept = json.loads(path.read_text(encoding="utf-8"))
    record = convert(kept, kind)
    again = json.loads(json.dumps(record.as_dict()))
    assert again == {name: kept[name] for name in again}
    assert without_run_links(markdown(record)) == path.with_suffix(".md").read_text(
        encoding="utf-8"
    )


ANSWERS = {
    "bisect/min-tokens-stop-ids": ("0.29.0", 0),
    "bisect/sco-hybrid": ("92397ca17c40", 0),
    "bisect/sco-hybrid-branches": ("b4c904394063", 0),
    "bisect/tq-chunked-prefill": ("71672a27ecf3", 0),
    # The parts of the fix are the first, the third and the last one of those left; the others do
    # not boot.
    "bisect/tq-chunked-prefill-parts": (None, 2),
    "threshold/tq-chunked-prefill": (4225, 0),
    "minimize/tq-mtp-cudagraphs": (
        [
            "--kv-cache-dtype turboquant_k8v4",
            """--speculative-config '{"method":"mtp","num_speculative_tokens":3}'""",
        ],
        0,
    ),
}


def test_each_kept_search_has_its_answer() -> None:
    records = {
        f"{path.parts[-3]}/{path.parts[-2]}": convert(json.loads(path.read_bytes()), kind)
        for kind, path in KEPT
    }
    assert {
        name: (record.as_dict()["answer"], record.exit_status) for name, record in records.items()
    } == ANSWERS
