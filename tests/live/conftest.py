"""Live tests boot only what changed: see `kept`. `LIVE=all` boots everything."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Done, Harness
from tests.live import kept
from tests.live.inputs import inputs_of_test
from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import parse_source

HERE = Path(__file__).parent
PASSED = cache_root() / "tests" / "passed"


@dataclass
class Session:
    """What this process boots although it is kept, and what it leaves out."""

    boot_all: bool
    canaries: set[str] = field(default_factory=set)
    unchanged: list[str] = field(default_factory=list)


@dataclass
class Runs:
    """The runs of one test."""

    lines: list[str] = field(default_factory=list)
    booted: dict[str, tuple[Sequence[str], Done]] = field(default_factory=dict)
    judged: bool = False


SESSION = pytest.StashKey[Session]()
RUNS = pytest.StashKey[Runs]()
FAILED = pytest.StashKey[bool]()
SUMMARY = pytest.StashKey[list[str]]()


@pytest.fixture
def harness(harness: Harness, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    """Return a function like that of the other tests, which judges a kept run if there is one."""
    runs = request.node.stash.setdefault(RUNS, Runs())
    session = session_of(request.config)
    by_hand = "by_hand" in request.node.keywords

    def call(*words: str, **options: Any) -> Done:
        key = None if by_hand or options else kept.key_of(words)
        found = kept.lookup(key) if key and not session.boot_all else None
        if found and found.key not in session.canaries:
            runs.judged = True
            runs.lines.append(f"judged again: {' '.join(found.words[1:])}")
            return kept.judge(found, tmp_path / "reports")
        release = kept.option(words, "--vllm")
        if release and (source := parse_source(release)).release:
            provision(source)  # before the run, so that its time limit does not include the install
        done = harness(*words, **options)
        if key and done.folder:
            runs.booted[key] = (words, done)
        if words[0] == "run":
            runs.lines.append(
                f"{'canary' if found else 'booted'}: {' '.join(kept.public(words)[1:])}"
            )
        return done

    yield call
    if request.node.stash.get(FAILED, False):
        return
    for key, (words, done) in runs.booted.items():
        if key in session.canaries and (old := kept.lookup(key)):
            kept.compare(old, done, tmp_path / "kept")
        kept.save(kept.keep(words, key, done), kept.CACHED)


def session_of(config: pytest.Config) -> Session:
    if SESSION not in config.stash:
        session = Session(boot_all=os.environ.get("LIVE") == "all")
        if not session.boot_all:
            chosen = kept.canaries(kept.valid_entries(), kept.head_commit())
            session.canaries = {run.key for run in chosen}
        config.stash[SESSION] = session
    return config.stash[SESSION]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out live tests that passed before with the same inputs."""
    live = [item for item in items if item.path.parent == HERE and "live" in item.keywords]
    if not live or config.option.collectonly:
        return
    session = session_of(config)
    if session.boot_all:
        return
    unchanged = [item for item in live if (mark := mark_of(item)) and mark.exists()]
    session.unchanged = [item.nodeid for item in unchanged]
    items[:] = [item for item in items if item not in unchanged]
    config.hook.pytest_deselected(items=unchanged)


def mark_of(item: pytest.Item) -> Path | None:
    """Return the file that exists if the test passed with its present inputs; None if all are."""
    marker = item.get_closest_marker("depends")
    subject = marker.args[0] if marker else "boot"
    if subject == "all":
        return None
    inputs = inputs_of_test(item.path, subject)
    return PASSED / sha256(f"{inputs} {item.nodeid}".encode()).hexdigest()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep that a live test passed, unless it judges kept runs: those are judged every time."""
    report = yield
    if not report.passed:
        item.stash[FAILED] = True
    runs = item.stash.get(RUNS, Runs())
    if call.when == "teardown" and "live" in item.keywords:
        report.user_properties += [("live run", line) for line in runs.lines]
        keepable = runs.judged or runs.booted or "by_hand" in item.keywords
        mark = mark_of(item)
        if mark and not (item.stash.get(FAILED, False) or keepable):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if output := getattr(session.config, "workeroutput", None):  # of pytest-xdist
        output["unchanged"] = session_of(session.config).unchanged


def pytest_testnodedown(node: Any) -> None:
    """Take what a worker of pytest-xdist left out; each of them leaves out the same."""
    unchanged = getattr(node, "workeroutput", {}).get("unchanged", ())
    session_of(node.config).unchanged = list(unchanged)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = [report for some in terminalreporter.stats.values() for report in some]
    pairs = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    lines = sorted({line for name, line in pairs if name == "live run"})
    unchanged = session_of(config).unchanged
    if not lines and not unchanged:
        return
    terminalreporter.section("real vLLM: what was booted, and what was not")
    for line in lines:
        terminalreporter.line(line)
    for module, count in sorted(Counter(name.partition("::")[0] for name in unchanged).items()):
        terminalreporter.line(f"passed before with the same inputs: {count} of {module}")
    if unchanged:
        terminalreporter.line("LIVE=all runs them again")
