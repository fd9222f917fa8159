"""`vllm-repro threshold`: the shortest prompt that crashes."""

from __future__ import annotations

import argparse
from dataclasses import replace

from vllm_repro.cli.searches import add_search, common_fields, continued, finish, job_of_one_arm, stream_of
from vllm_repro.report.threshold import Threshold, markdown, threshold_dict
from vllm_repro.running.folders import with_out
from vllm_repro.running.resume import read_threshold
from vllm_repro.running.threshold import find_threshold, lengths_of

_EPILOG = """

exit status:
  0  the answer is known: a length, or that none or all of the prompts sent crash
  1  a surprise: a longer prompt does not crash, or the crash needs the prompts before it
  2  undecided: a limit was reached, or what is left gave no answer
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

A boot gets prompts until one crashes it. The first ones lie around the length that the scenario's trigger computes. In the
end the answer is sent alone to a fresh server, and two longer prompts. threshold.json and threshold.md in
OUT/SCENARIO/threshold/ are rewritten after each boot; --resume continues them. docs/smaller.md"""


def add(parser: argparse.ArgumentParser) -> None:
    add_search(
        parser,
        example="vllm-repro threshold tq-chunked-prefill --server lab --vllm 0.23.0",
        prints="the content of threshold.json",
        more=_EPILOG,
    )


def run(arguments: argparse.Namespace) -> int:
    unfinished = read_threshold(arguments.resume) if arguments.resume else None
    arguments = continued(arguments, unfinished)
    job = job_of_one_arm(arguments)
    lengths = lengths_of(job.scenario, job.arms[0], job.choice.kind, job.options)
    fields = common_fields("threshold", job)
    done, folder = find_threshold(
        job,
        Threshold(**fields, low=lengths.low, high=lengths.high, guess=lengths.guess),
        lengths.request,
        lambda line: print(line, file=stream_of(arguments), flush=True),
        most_boots=arguments.max_boots,
        most_seconds=arguments.max_time,
        unfinished=unfinished,
    )
    text = markdown(replace(done, reproduce=with_out(done.reproduce, job.out)))
    return finish(arguments, done, folder / "threshold.md", text, threshold_dict(done))
