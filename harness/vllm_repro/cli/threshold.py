"""`vllm-repro threshold`: the shortest prompt that crashes."""

from __future__ import annotations

import argparse
import shlex
import time
from dataclasses import asdict, replace

from vllm_repro import __version__
from vllm_repro.cli.common import add_common, scenario_words
from vllm_repro.cli.options import add_run_options, add_server_options, job_from, server_options
from vllm_repro.cli.searches import add_limits, add_resume, continued, finish, stream_of
from vllm_repro.errors import UsageError
from vllm_repro.report.threshold import Threshold, markdown, threshold_dict
from vllm_repro.running.folders import with_out
from vllm_repro.running.job import choice_of, repeat_command
from vllm_repro.running.resume import read_threshold
from vllm_repro.running.threshold import find_threshold, lengths_of
from vllm_repro.scenario.catalogue import find, find_arms

_EPILOG = """

exit status:
  0  the answer is known: a length, or that none or all of the prompts sent crash
  1  a surprise: a longer prompt does not crash, or the crash needs the prompts before it
  2  undecided: a limit was reached, or what is left gave no answer
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

A boot gets prompts until one crashes it. The first ones lie around the length that the scenario's trigger computes. In the
end the answer is sent alone to a fresh server, and two longer prompts. threshold.json and threshold.md in
OUT/SCENARIO/threshold/ are rewritten after each boot; --resume continues them. docs/threshold.md"""


def add(parser: argparse.ArgumentParser) -> None:
    add_common(
        parser,
        example="vllm-repro threshold tq-chunked-prefill --server lab --vllm 0.23.0",
        prints="the content of threshold.json",
        more=_EPILOG,
    )
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="may be left out with --resume")
    add_limits(parser)
    add_server_options(parser, which=("server", "image", "vllm", "model", "weights", "port"))
    add_run_options(parser, arm="this arm instead of the first", trials=False)
    add_resume(parser, "search")


def run(arguments: argparse.Namespace) -> int:
    unfinished = read_threshold(arguments.resume) if arguments.resume else None
    arguments = continued(arguments, unfinished)
    if not arguments.scenario:
        raise UsageError("no SCENARIO is named", hint="vllm-repro list names them; vllm-repro threshold --help")
    scenario = find(arguments.scenario)
    arms = find_arms(scenario, arguments.arm or [scenario.arms[0].name])
    if len(arms) != 1:
        raise UsageError(f"{len(arms)} arms are named, and this follows one", hint="give --arm once")
    options = server_options(arguments)
    choice = choice_of(scenario, options)
    if not choice.kind.facts.started:
        raise UsageError(
            "a running server is not booted again after a crash", hint="--server process, docker or lab starts its own"
        )
    options = replace(options, server=choice.kind.value)  # boots of different kinds of server are not comparable
    job = job_from(arguments, name=arguments.scenario, scenario=scenario, options=options, choice=choice, arms=arms)
    job = replace(job, named_arms=[arms[0].name])
    repeat = repeat_command("run", job, choice.kind, ("--vllm", options.vllm))
    repeat = shlex.join([*shlex.split(with_out(repeat, job.out)), *scenario_words(arguments)])
    lengths = lengths_of(scenario, arms[0], choice.kind, options, repeat)
    plan = Threshold(
        scenario=scenario.id,
        issue=scenario.issue,
        title=scenario.title,
        status=asdict(scenario.status),
        arm=arms[0].name,
        server=choice.kind.value,
        evidence=choice.kind.facts.evidence,
        version=None,
        low=lengths.low,
        high=lengths.high,
        guess=lengths.guess,
        harness_version=__version__,
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        duration_s=0.0,
        reproduce=repeat_command("threshold", job, choice.kind, ("--vllm", options.vllm or job.version(choice.kind))),
    )
    done, folder = find_threshold(
        job,
        plan,
        lengths.request,
        lambda line: print(line, file=stream_of(arguments), flush=True),
        most_boots=arguments.max_boots,
        most_seconds=arguments.max_time,
        unfinished=unfinished,
    )
    text = markdown(replace(done, reproduce=with_out(done.reproduce, job.out)))
    return finish(arguments, done, folder / "threshold.md", text, threshold_dict(done))
