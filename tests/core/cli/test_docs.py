"""The documentation: its commands exist, those that need no vLLM run, its sample is real, and no link is dead."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import Harness
from tests.test_layers import FEATURES
from vllm_repro.cli import parser, verbs
from vllm_repro.cli.show import STYLES
from vllm_repro.features import additions
from vllm_repro.report.files import FORMATS
from vllm_repro.scenario.catalogue import find, find_arms

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
PASTED = ROOT / "tests" / "data" / "pasted"
_LINE = re.compile(r"^(?:    |(?:    )?\$ )((?:vllm-repro|make|pytest|cp) .*)$", re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command on a line of its own."""
    found = _LINE.findall(page.read_text(encoding="utf-8"))
    return [shlex.split(part, comments=True) for line in found for part in line.split(" && ")]


def parts(words: list[str]) -> set[str]:
    """Return the verb and the form of a command, which a feature may add."""
    if words[0] != "vllm-repro":
        return set()
    forms = {words[at + 1] for at, word in enumerate(words) if word in ("--as", "--format")}
    return {words[1], *forms}


HERE = {*verbs(), *STYLES, *FORMATS, *additions("show_forms"), *additions("report_forms")}
DOCUMENTED = [(page, words) for page in PAGES for words in commands(page)]
ALL = [pytest.param(words, id=f"{page.name}: {' '.join(words)}") for page, words in DOCUMENTED if parts(words) <= HERE]


def test_the_documentation_has_commands() -> None:
    for page, expected in (("README.md", {"run", "diagnose"}), ("docs/scenarios.md", {"show", "check"})):
        assert {words[1] for words in commands(ROOT / page) if words[0] == "vllm-repro"} >= expected


@pytest.mark.features
def test_a_verb_of_the_documentation_lacks_only_with_its_feature() -> None:
    missing = {part for _, words in DOCUMENTED for part in parts(words)} - HERE
    assert not missing or not all(map(find_spec, FEATURES)), missing


@pytest.mark.features
@pytest.mark.parametrize("words", ALL)
def test_a_command_of_the_documentation_exists(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if words[0] == "make":
        subprocess.run(["make", "--dry-run", *words[1:]], check=True, capture_output=True, timeout=60)
    if words[0] != "vllm-repro":
        return
    words = ["0.23.0" if word.startswith("~/vllm@") else word for word in words[1:]]  # no such checkout is here
    arguments = parser(words[0]).parse_args(words)
    names = getattr(arguments, "scenarios", None) or [getattr(arguments, "scenario", None)]
    for name in names if words[0] != "history" else ():
        if name and not name.endswith(".py"):
            find_arms(find(name), getattr(arguments, "arm", None))


INLINE = [
    pytest.param(command, id=f"{page.name}: {command}")
    for page in PAGES[:2]
    for command in re.findall(
        r"`((?:vllm-repro|make|UPDATE_GOLDEN=1|\.venv/bin/python -m pytest) [^`\\|]*)`",
        page.read_text(encoding="utf-8"),
    )
    if not re.search(r"\b(?:SCENARIO|RUN|FILE)\b|\[", command) and parts(shlex.split(command)) <= HERE
]
"""Commands in the tables and sentences of README and CONTRIBUTING, without those that are a form to fill in."""


def test_the_tables_have_commands() -> None:
    assert len(INLINE) > 12


@pytest.mark.parametrize("command", INLINE)
def test_a_command_in_a_table_works_as_it_is_printed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make` has each target; the tests that a command of pytest names exist; the options of others do."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)
    if words[0] == "vllm-repro":
        parser(words[1]).parse_args(words[1:])
    elif words[0] == "make":
        subprocess.run(["make", "--dry-run", *words[1:]], check=True, capture_output=True, timeout=60)
    else:
        options = words[words.index("pytest") + 1 :]
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
        done = subprocess.run(collect, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]


def own_copy(source: Path, target: Path) -> None:
    """Copy a scenario and edit its id, as the page says."""
    ids = [path.stem.replace("_", "-") for path in (source, target)]
    target.write_text(source.read_text(encoding="utf-8").replace(f'id="{ids[0]}"', f'id="{ids[1]}"'), encoding="utf-8")


_QUICK = {"list", "show", "check", "diagnose", "history", "report", "run"}


def is_quick(words: list[str]) -> bool:
    """Return True for a command that needs no vLLM, no network, no cluster and no run of a search."""
    if words[0] != "vllm-repro" or words[1] not in _QUICK & HERE or {"--vllm", "--on"} & set(words):
        return False
    return (words[1] != "run" or "rehearsal" in words) and "reports/explore/latest" not in words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_need_no_vllm_run(
    page: Path, harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the page, in a folder with a log, a run, and scenarios of one's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    (tmp_path / "my-bugs").mkdir()
    shutil.copyfile(next(PASTED.glob("tq-chunked-prefill*")), tmp_path / "server.log")
    own_copy(ROOT / "scenarios" / "tq_chunked_prefill.py", tmp_path / "my_bug.py")  # as a draft of `intake`
    quick = [words for words in commands(page) if words[0] == "cp" or is_quick(words)]
    if any(words[1] in ("history", "report") for words in quick):
        assert harness("run", "tq-chunked-prefill", "--server", "rehearsal", "--arm", "eager").status == 0
    for words in quick:
        if words[0] == "cp":
            own_copy(*map(Path, words[1:]))
            continue
        if words[1] == "run" and "--arm" not in words:
            words = [*words, "--arm", "eager"]  # one arm is enough to see that the words are right
        done = harness(*words[1:], env={"VLLM_REPRO_SCENARIOS": ""})
        assert done.status == 0, (words, done.err)


def test_the_sample_of_the_readme_is_what_a_kept_run_prints() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ((name, sample),) = re.findall(r"<!-- sample: (\S+) -->\n```console\n\$ (.*?)```\n", readme, re.DOTALL)
    golden = (ROOT / "tests" / "golden" / f"terminal-{name}.txt").read_text(encoding="utf-8")
    command, *lines = sample.splitlines()
    assert f"again:   {command}\n" in golden
    at = 0
    for line in lines:  # in order; a long line may end in dots
        at = golden.index(line.removesuffix(" ...") if line else "\n", at)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_link_is_dead(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?://)([^)\s]*)\)", text):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if heading else []
        assert not heading or heading in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in titles}, link


def test_the_description_of_the_package_has_no_link_that_an_index_cannot_follow() -> None:
    """The build applies these substitutions (hatch-fancy-pypi-readme)."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        hook = tomllib.load(file)["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before = text.count("](https://")
    for one in hook["substitutions"]:
        assert re.search(one["pattern"], text), one
        text = re.sub(one["pattern"], one["replacement"], text)
    assert re.findall(r"\]\((?!https://)", text) == []
    assert (text.count("](https://"), "`tq-chunked-prefill`" in text, "<!--" in text) == (before, True, False)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == {
        "README.md",
        *re.findall(r"\]\((\w[\w-]*\.md)\)", index),
    }
