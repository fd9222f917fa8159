"""`vllm-repro bisect`: the first bad or the first fixed vLLM."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs
from packaging.version import Version

from vllm_repro.cli.common import add_common
from vllm_repro.cli.options import add_run_options, job_from
from vllm_repro.cli.server_options import add_server_options, server_options
from vllm_repro.errors import UsageError
from vllm_repro.releases.known import CPU_BUILDS
from vllm_repro.releases.sources import WITH, Source
from vllm_repro.running.job import Job, choice_of, refuse_unused_options, repeat_command
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import ServerChoice
from vllm_repro_search.bisect.boots import Bisection, BisectionSearch, ScriptSearch
from vllm_repro_search.bisect.candidates import Candidate, commits_between, refuse_wrong_order
from vllm_repro_search.bisect.components import VLLM, ComponentBisection, parse_components
from vllm_repro_search.boot_search import (
    UnfinishedSearch,
    add_limits,
    common_fields,
    run_search,
    with_resumed,
)
from vllm_repro_search.versions.verb import (
    for_release,
    job_of_releases,
    published_release,
    releases,
)

_EPILOG = """

exit status:
  0  the answer is known
  1  a surprise: the bad end lives, the good one dies, or there is more than one change; with
     --component: three or more are involved
  2  undecided: a limit was reached, or what is left cannot be tried
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

Both ends are booted first. Each boot is a run with a folder of its own. A boot that fails, dies of
something else or does not cross the boundary is skipped, and its result is shown. bisection.json
and bisection.md in OUT/SCENARIO/bisect/ are rewritten after each boot; --resume continues them.
vllm_repro_search/docs/bisect.md"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm-repro bisect`."""
    add_common(
        parser,
        example=(
            "vllm-repro bisect min-tokens-stop-ids --server process --bad 0.27.0 --good 0.32.0"
            " --find-fix"
        ),
        prints="the content of bisection.json",
        more=_EPILOG,
    )
    parser.add_argument(
        "scenario", nargs="?", metavar="SCENARIO", help="may be left out with --resume"
    )
    parser.add_argument(
        "--bad", metavar="S", help="a release, or with --repo a commit, that has the bug"
    )
    parser.add_argument("--good", metavar="S", help="one that does not have it")
    parser.add_argument(
        "--find-fix",
        action="store_true",
        help="--bad is the older one: find the first release without the bug",
    )
    parser.add_argument(
        "--component",
        action="append",
        metavar="NAME=GOOD..BAD",
        help=(
            "instead of --good and --bad: search vllm and its packages together; repeat it for"
            " each. GOOD..BAD takes all versions between, which pip lists for a package;"
            " NAME=A,B,C names them, from good to bad. Without vllm= it is the scenario's release"
        ),
    )
    parser.add_argument(
        "--repo",
        type=Path,
        metavar="CHECKOUT",
        help="search the commits of this git checkout of vLLM instead of releases",
    )
    parser.add_argument(
        "--script",
        metavar="CMD",
        help=(
            "ask this shell command instead of booting servers: exit status 0 is good, 1 bad, 125 a"
            " skip, any other stops; VLLM_REPRO_TREE is the folder that holds vllm/,"
            " VLLM_REPRO_PYTHON runs it, VLLM_REPRO_SOURCE names it"
        ),
    )
    parser.add_argument(
        "--versions",
        metavar="A,B,...",
        help="the releases to choose from (default: those with a CPU build)",
    )
    parser.add_argument(
        "--rate",
        type=_share,
        default=1.0,
        metavar="R",
        help=(
            "in what share of boots a bad release dies (default: 1); below 1 releases are booted"
            " again"
        ),
    )
    add_limits(parser)
    add_server_options(parser, names=("server", "model", "weights"))
    parser.add_argument(
        "--image",
        metavar="I",
        help="the image to run, with {version} in place of the release (default: the official one)",
    )
    add_run_options(
        parser,
        arm="this arm instead of the first",
        trials=False,
        on="boots that may be needed next run side by side",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `vllm-repro bisect`: search the change by boots or a script; return the exit status."""
    # A script is named again: a record may come from somebody else.
    arguments, unfinished = with_resumed(
        arguments, Bisection, beside=("max_boots", "max_time", "script")
    )
    if unfinished and unfinished.head.get("script") and not arguments.script:
        raise UsageError(
            f"the bisection in {unfinished.folder} asks a script, and a command is never taken from"
            " a record",
            hint=(
                f"give it again: vllm-repro bisect --resume {shlex.quote(str(arguments.resume))}"
                " --script CMD"
            ),
        )
    ends = [end for end in (arguments.bad, arguments.good) if end]
    if not arguments.scenario or (bool(ends) if arguments.component else len(ends) < 2):
        raise UsageError(
            "bisect needs a SCENARIO and either --bad and --good, or --component",
            hint="vllm-repro bisect --help; vllm-repro list names scenarios",
        )
    scenario = find(arguments.scenario)
    if arguments.script:
        return _by_script(arguments, scenario, unfinished)
    space = _space(arguments, scenario)
    first = space.first
    job = job_of_releases(arguments, scenario, server_options(arguments), [first])
    targets = [arm for arm in job.arms if arm.expected.has_bug]
    if len(targets) != 1:
        raise UsageError(
            f"{len(targets) or 'no'} arms that show the bug are named"
            f" ({', '.join(job.named_arms)}), and bisect follows one",
            hint=(
                "--arm with one of"
                f" {', '.join(arm.name for arm in scenario.arms if arm.expected.has_bug)}"
            ),
        )
    refuse_unused_options(for_release(job.options, first), job.choice.kind)
    record = _new_record(arguments, job, targets[0], space)
    return run_search(arguments, BisectionSearch(job, record), unfinished)


def _by_script(
    arguments: argparse.Namespace, scenario: Scenario, unfinished: UnfinishedSearch | None
) -> int:
    """Run a bisection that asks a script instead of servers; return the exit status.

    Raises `UsageError` for an option about servers.
    """
    unused = {"--server": arguments.server != "auto"} | {
        f"--{name}": getattr(arguments, name) for name in ("model", "weights", "image", "arm", "on")
    }
    if unused_option := next((name for name, value in unused.items() if value), None):
        raise UsageError(
            f"{unused_option} has no meaning with --script",
            hint="leave it out: no server is booted",
        )
    space = _space(arguments, scenario)
    arm = scenario.leading[0]
    options = ServerOptions(server=ServerKind.PROCESS.value)
    choice = ServerChoice(ServerKind.PROCESS, "")
    job = job_from(
        arguments,
        name=arguments.scenario,
        scenario=scenario,
        options=options,
        choice=choice,
        arms=[arm],
    )
    record = _new_record(arguments, job, arm, space)
    record = structs.replace(record, arm="", server="none, a script", evidence=None)
    return run_search(arguments, ScriptSearch(job, record, arguments.script), unfinished)


@dataclass(frozen=True)
class _Space:
    """Candidates of a bisection: vLLMs, oldest first, and the number of commits left out."""

    candidates: tuple[Candidate, ...]
    left_out: int = 0
    # with --component: the versions of each package, oldest first
    packages: dict[str, tuple[str, ...]] | None = None

    @property
    def first(self) -> Source:
        """Return the oldest vLLM, with the oldest packages."""
        oldest = [f"{name}=={versions[0]}" for name, versions in (self.packages or {}).items()]
        named = WITH.join((self.candidates[0].source, *oldest))  # as in `--vllm`
        return Candidate(label="", source=named).vllm


def _new_record(arguments: argparse.Namespace, job: Job, arm: Arm, space: _Space) -> Bisection:
    """Return the record of a bisection that has not booted anything yet."""
    fields = common_fields(job, _repeat(arguments, job)) | {
        "arm": arm.name,
        "expected": arm.expected,
        "find_fix": arguments.find_fix,
        "candidates": space.candidates,
        "left_out": space.left_out,
        "rate": arguments.rate,
    }
    if space.packages is None:
        return Bisection(**fields)
    return ComponentBisection(**fields, packages=space.packages)


def _space(arguments: argparse.Namespace, scenario: Scenario) -> _Space:
    """Return what a bisection chooses from. Raises `UsageError` for wrong ends or components.

    Writes out in `--component` the versions of packages, so that its command means the same later.
    """
    if not arguments.component:
        return _Space(*_candidates(arguments))
    components = parse_components(arguments.component, find_fix=arguments.find_fix)
    arguments.component = [f"{name}={versions}" for name, versions in components.items()]
    vllm = components.pop(VLLM, "")
    packages = {
        name: tuple(versions.split(",")[:: -1 if arguments.find_fix else 1])
        for name, versions in components.items()
    }
    if vllm:
        listed = re.split(r",|\.\.", vllm)
        if "," in vllm and (arguments.versions or arguments.repo):
            raise UsageError(
                "vllm=A,B,C names the versions, as --versions and --repo do",
                hint="write vllm=GOOD..BAD with one of them",
            )
        ends = {"good": listed[0], "bad": listed[-1]} | ({"versions": vllm} if "," in vllm else {})
        candidates = _candidates(argparse.Namespace(**{**vars(arguments), **ends}))
        return _Space(*candidates, packages=packages)
    if arguments.versions or arguments.repo:
        raise UsageError(
            "--versions and --repo have no meaning without --component vllm=GOOD..BAD",
            hint="add it, or leave them out",
        )
    # packages are not exchanged in containers, so they count for the choice of a server
    oldest = tuple(f"{name}=={versions[0]}" for name, versions in packages.items())
    trial = Source(base=Source(release=scenario.try_with), packages=oldest)
    options = for_release(server_options(arguments), trial)
    in_lab = not arguments.script and choice_of(scenario, options).kind.facts.in_lab
    release = scenario.lab_release if in_lab else scenario.try_with
    return _Space((Candidate(release, release),), packages=packages)


def _candidates(arguments: argparse.Namespace) -> tuple[tuple[Candidate, ...], int]:
    """Return releases or commits, oldest first, and how many commits change nothing that is run.

    Raises `UsageError` if the two ends are equal or in the wrong order, or if `--versions` names a
    release that is not between them.
    """
    if arguments.repo is not None:
        return _commits(arguments)
    bad, good = published_release(arguments.bad), published_release(arguments.good)
    refuse_wrong_order(bad, good, find_fix=arguments.find_fix)
    low, high = sorted((bad, good), key=Version)
    known: Sequence[str] = releases(arguments.versions) if arguments.versions else CPU_BUILDS
    between = [name for name in known if Version(low) <= Version(name) <= Version(high)]
    if arguments.versions and (outside := [name for name in known if name not in between]):
        text = f"--versions names {', '.join(outside)}, not between {low} and {high}"
        raise UsageError(text, hint="leave it out, or name other ends with --bad and --good")
    chosen = sorted({bad, good, *between}, key=Version)
    return tuple(Candidate(release, release) for release in chosen), 0


def _commits(arguments: argparse.Namespace) -> tuple[tuple[Candidate, ...], int]:
    """Return (commits that change what is run, oldest first; number of the others).

    Raises `UsageError` if there are fewer than two.
    """
    if arguments.versions:
        raise UsageError("--versions has no meaning with --repo", hint="leave it out")
    checkout = arguments.repo.expanduser().absolute()
    old, new = (
        (arguments.bad, arguments.good) if arguments.find_fix else (arguments.good, arguments.bad)
    )
    changes, left_out = commits_between(checkout, old, new)
    if len(changes) < 2 and left_out:
        raise UsageError(
            f"no commit from {old} to {new} changes vllm/",
            hint="name commits that lie further apart",
        )
    if len(changes) < 2:
        hint = (
            "leave --find-fix out" if arguments.find_fix else "--find-fix if --bad is the older one"
        )
        raise UsageError(f"{new} is not newer than {old} in {checkout}", hint=hint)
    return tuple(changes), left_out


def _repeat(arguments: argparse.Namespace, job: Job) -> str:
    """Return the command that repeats the bisection. Limits are left out: they are of one call."""
    ends = [word for text in arguments.component or () for word in ("--component", text)]
    flag, value, *words = ends or ["--bad", arguments.bad, "--good", arguments.good]
    words += ["--find-fix"] if arguments.find_fix else []
    named = {
        "--repo": arguments.repo and str(arguments.repo.expanduser().absolute()),
        "--versions": arguments.versions,
        "--rate": f"{arguments.rate:g}" if arguments.rate != 1 else None,
        "--script": arguments.script,
    }
    words += [word for name, value in named.items() if value for word in (name, value)]
    if arguments.script:
        folders = [word for folder in job.folders for word in ("--scenarios", folder)]
        return shlex.join(
            ["vllm-repro", "bisect", arguments.scenario, *folders, flag, value, *words]
        )
    repeated = repeat_command("bisect", job, job.choice.kind, (flag, value))
    return f"{repeated} {shlex.join(words)}" if words else repeated


def _share(text: str) -> float:
    """Return the number of a `--rate` option: above 0 and at most 1, else it is refused."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share of boots above 0, at most 1")
    return value
