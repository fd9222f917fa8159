"""`vllm-repro threshold`: the shortest prompt that crashes."""

from __future__ import annotations

import argparse

from vllm_repro.running.folders import with_out
from vllm_repro.running.job import repeat_command
from vllm_repro_search.options import add_search, begun, common_fields, job_of_one_arm, run_search
from vllm_repro_search.threshold.boots import ThresholdSearch, lengths_of
from vllm_repro_search.threshold.record import Threshold

_EPILOG = """

exit status:
  0  the answer is known: a length, or that none or all of the prompts sent crash
  1  a surprise: a longer prompt does not crash, or the crash needs the prompts before it
  2  undecided: a limit was reached, or what is left gave no answer
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

A boot gets prompts until one crashes it. The first ones lie around the length that the \
scenario's trigger computes. In the
end the answer is sent alone to a fresh server, and two longer prompts. threshold.json and \
threshold.md in
OUT/SCENARIO/threshold/ are rewritten after each boot; --resume continues them. docs/smaller.md"""


def add(parser: argparse.ArgumentParser) -> None:
    add_search(
        parser,
        example="vllm-repro threshold tq-chunked-prefill --server lab --vllm 0.23.0",
        prints="the content of threshold.json",
        more=_EPILOG,
    )


def run(arguments: argparse.Namespace) -> int:
    arguments, unfinished = begun(arguments, Threshold)
    job = job_of_one_arm(arguments, "threshold")
    shown = with_out(
        repeat_command("run", job, job.choice.kind, ("--vllm", job.options.vllm)), job.out
    )
    lengths = lengths_of(job.scenario, job.arms[0], job.choice.kind, job.options, shown)
    record = Threshold(
        **common_fields(job, job.reproduce),
        arm=job.arms[0].name,
        low=lengths.low,
        high=lengths.high,
        guess=lengths.guess,
    )
    return run_search(arguments, ThresholdSearch(job, record, lengths.request), unfinished)
