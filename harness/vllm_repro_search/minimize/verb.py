"""`vllm-repro minimize`: the smallest part of the reported command that crashes."""

from __future__ import annotations

import argparse

from vllm_repro_search.minimize.boots import MinimizationSearch, reducible
from vllm_repro_search.minimize.record import Minimization
from vllm_repro_search.options import add_search, begun, common_fields, job_of_one_arm, run_search

_EPILOG = """

exit status:
  0  the answer is known: if one of the parts that are left is left out, this crash does not occur
  1  a surprise: the reported command does not crash
  2  undecided: a limit was reached, or vLLM refuses the reported command
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

The first boot is the whole command. The following ones leave out requests, flags or environment \
variables, many at a time
and then one by one. What vLLM refuses to start without is kept. minimize.json and minimize.md in \
OUT/SCENARIO/minimize/
are rewritten after each boot; --resume continues them. docs/smaller.md"""


def add(parser: argparse.ArgumentParser) -> None:
    add_search(
        parser,
        example="vllm-repro minimize tq-mtp-cudagraphs --server lab",
        prints="the content of minimize.json",
        more=_EPILOG,
    )


def run(arguments: argparse.Namespace) -> int:
    arguments, unfinished = begun(arguments, Minimization)
    job = job_of_one_arm(arguments, "minimize")
    parts = reducible(job.scenario, job.arms[0], job.choice.kind, job.options)
    record = Minimization(
        **common_fields(job, job.reproduce),
        arm=job.arms[0].name,
        units=parts.units,
        untried=parts.untried,
        rest=parts.rest,
    )
    return run_search(arguments, MinimizationSearch(job, record, parts), unfinished)
