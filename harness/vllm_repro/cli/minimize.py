"""`vllm-repro minimize`: the smallest part of the reported command that crashes."""

from __future__ import annotations

import argparse
from dataclasses import replace

from vllm_repro.cli.searches import add_search, common_fields, continued, finish, job_of_one_arm, stream_of
from vllm_repro.report.minimize import Minimization, markdown, minimization_dict
from vllm_repro.running.folders import with_out
from vllm_repro.running.minimize import minimize, reducible
from vllm_repro.running.resume import read_minimization

_EPILOG = """

exit status:
  0  the answer is known: without any one of what is left, it does not crash
  1  a surprise: the reported command does not crash
  2  undecided: a limit was reached, or vLLM refuses the reported command
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

The first boot is the whole command. The following ones leave out requests, flags or environment variables, many at a time
and then one by one. What vLLM refuses to start without is kept. minimize.json and minimize.md in OUT/SCENARIO/minimize/
are rewritten after each boot; --resume continues them. docs/smaller.md"""


def add(parser: argparse.ArgumentParser) -> None:
    add_search(
        parser,
        example="vllm-repro minimize tq-mtp-cudagraphs --server lab",
        prints="the content of minimize.json",
        more=_EPILOG,
    )


def run(arguments: argparse.Namespace) -> int:
    unfinished = read_minimization(arguments.resume) if arguments.resume else None
    arguments = continued(arguments, unfinished)
    job = job_of_one_arm(arguments)
    parts = reducible(job.scenario, job.arms[0], job.choice.kind, job.options)
    done, folder = minimize(
        job,
        Minimization(**common_fields("minimize", job), units=parts.units, untried=parts.untried),
        parts,
        lambda line: print(line, file=stream_of(arguments), flush=True),
        most_boots=arguments.max_boots,
        most_seconds=arguments.max_time,
        unfinished=unfinished,
    )
    text = markdown(replace(done, reproduce=with_out(done.reproduce, job.out)))
    return finish(arguments, done, folder / "minimize.md", text, minimization_dict(done))
