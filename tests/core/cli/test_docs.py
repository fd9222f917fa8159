"""The documentation: commands, tables, numbers and samples are those of the program; links work."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import budgets
from tests.conftest import Harness
from tests.live import kept
from tests.rows import ROWS, missing
from tests.test_layers import FEATURES, LAYERS
from vllm_repro.cli import parser, verbs
from vllm_repro.cli.list_ import crashes_in
from vllm_repro.cli.show import STYLES
from vllm_repro.features import additions
from vllm_repro.report.files import FORMATS
from vllm_repro.scenario import vocabulary
from vllm_repro.scenario.catalogue import all_scenarios, find, find_arms
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.servers.kinds import KINDS
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Verdict
from vllm_repro_lab.parts import MECHANISMS

ROOT = Path(__file__).parents[3]
DOCS = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("harness/*/docs/*.md"))]
"""Pages of the core, and those of the features, which lie in their packages."""
RESULTS = sorted((ROOT / "reports" / "results").glob("*.md"))
ENTRY = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = [*ENTRY, ROOT / "SECURITY.md", *DOCS, *RESULTS]
PASTED = ROOT / "tests" / "data" / "pasted"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
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


@cache
def dry_run(*words: str) -> None:
    """Check that `make` knows the targets."""
    subprocess.run([*words, "--dry-run"], check=True, capture_output=True, timeout=60)


HERE = {*verbs(), *STYLES, *FORMATS, *additions("show_forms"), *additions("report_forms")}
DOCUMENTED = [(page, words) for page in PAGES for words in commands(page)]
ALL = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)}")
    for page, words in DOCUMENTED
    if parts(words) <= HERE
]


def test_the_documentation_has_commands() -> None:
    for page, expected in (
        ("README.md", {"run", "diagnose"}),
        ("docs/scenarios.md", {"show", "check"}),
    ):
        assert {words[1] for words in commands(ROOT / page) if words[0] == "vllm-repro"} >= expected


@pytest.mark.features
def test_a_verb_of_the_documentation_lacks_only_with_its_feature() -> None:
    missing = {part for _, words in DOCUMENTED for part in parts(words)} - HERE
    assert not missing or not all(map(find_spec, FEATURES)), missing


@pytest.mark.features
@pytest.mark.parametrize("words", ALL)
def test_a_command_of_the_documentation_exists(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    if words[0] == "make":
        dry_run(*words)
    if words[0] != "vllm-repro":
        return
    # no such checkout is here
    words = ["0.23.0" if word.startswith("~/vllm@") else word for word in words[1:]]
    arguments = parser(words[0]).parse_args(words)
    names = getattr(arguments, "scenarios", None) or [getattr(arguments, "scenario", None)]
    for name in names if words[0] != "history" else ():
        if name and not name.endswith(".py"):
            find_arms(find(name), getattr(arguments, "arm", None))


INLINE = [
    pytest.param(command, id=f"{page.name}: {command}")
    for page in [*ENTRY, *DOCS]
    for command in re.findall(
        r"`((?:vllm-repro|make|UPDATE_GOLDEN=1|\.venv/bin/python -m pytest) [^`\\|]*)`",
        page.read_text(encoding="utf-8"),
    )
    if not re.search(r"\b(?:SCENARIO|RUN|FILE)\b|\[", command)
    and parts(shlex.split(command)) <= HERE
]
"""Commands in tables and sentences, without those that are a form to fill in."""
assert len(INLINE) > 12


@pytest.mark.parametrize("command", INLINE)
def test_a_command_in_a_table_works_as_it_is_printed(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the target of `make`, the tests that pytest collects, and the options of others."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)
    if words[0] == "vllm-repro":
        parser(words[1]).parse_args(words[1:])
    elif words[0] == "make":
        dry_run(*words)
    else:
        options = words[words.index("pytest") + 1 :]
        collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
        done = subprocess.run(collect, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]


def own_copy(source: Path, target: Path) -> None:
    """Copy a scenario and edit its id, as the page says."""
    ids = [path.stem.replace("_", "-") for path in (source, target)]
    target.write_text(
        source.read_text(encoding="utf-8").replace(f'id="{ids[0]}"', f'id="{ids[1]}"'),
        encoding="utf-8",
    )


_QUICK = {"list", "show", "check", "diagnose", "history", "report", "run"}


def is_quick(words: list[str]) -> bool:
    """Return True for a command without vLLM, network, cluster or a search."""
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
    # as a draft of `intake`
    own_copy(ROOT / "scenarios" / "tq_chunked_prefill.py", tmp_path / "my_bug.py")
    quick = [words for words in commands(page) if words[0] == "cp" or is_quick(words)]
    if any(words[1] in ("history", "report") for words in quick):
        assert (
            harness("run", "tq-chunked-prefill", "--server", "rehearsal", "--arm", "eager").status
            == 0
        )
    for words in quick:
        if words[0] == "cp":
            own_copy(*map(Path, words[1:]))
            continue
        if words[1] == "run" and "--arm" not in words:
            words = [*words, "--arm", "eager"]  # one arm is enough to see that the words are right
        done = harness(*words[1:], env={"VLLM_REPRO_SCENARIOS": ""})
        assert done.status == 0, (words, done.err)


def section(page: str, heading: str) -> str:
    """Return the text below a heading, up to the next one of its level."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(
        rf"^(#+) {re.escape(heading)}\n(.*?)(?=^\1 |\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert found, heading
    return found[2]


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of a section's tables, and of its lists the words before the colon."""
    text = section(page, heading)
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return cells + [[head] for head in re.findall(r"^- (`.*?): ", text, re.MULTILINE | re.DOTALL)]


def named(page: str, heading: str) -> list[str]:
    """Return the code words in the first column."""
    return [word for cells in rows(page, heading) for word in re.findall(r"`([^`]+)`", cells[0])]


PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
GROUPS = PROJECT["project"]["entry-points"].keys() - {"pytest11"}
FIELDS = [field.name for field in fields(Scenario) if field.name != "about"]


@pytest.mark.parametrize(
    ("page", "heading", "program"),
    [
        ("README.md", "Commands", verbs()),
        ("docs/page.md", "Outcome of a trial", Outcome),
        ("docs/page.md", "Verdict of a scenario", Verdict),
        ("docs/architecture.md", "Packages", [path.partition("/")[2] for path in PACKAGES]),
        ("docs/architecture.md", "Add a feature: a verb, a report form", GROUPS),
        ("docs/lab.md", "What the lab replaces", MECHANISMS),
        ("docs/scenarios.md", "Fields of `Scenario(...)`", FIELDS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_table_names_what_the_program_has(
    page: str, heading: str, program: Iterable[str]
) -> None:
    assert sorted(set(named(page, heading)) & {*program}) == sorted(program)
    assert len(named(page, heading)) >= len([*program])


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("Server kinds", [[kind, facts.summary] for kind, facts in KINDS.items()]),
        ("Budgets", [[folder, f"{most:,}"] for folder, most in budgets.BUDGETS.items()]),
    ],
)
def test_a_table_has_the_values_of_the_program(heading: str, table: list[list[str]]) -> None:
    page = "docs/architecture.md"
    assert rows(page, heading) == [[f"`{name}`", value] for name, value in table]
    assert named(page, "The core") == [*LAYERS]


def test_every_library_and_word_is_explained() -> None:
    libraries = {re.split("[><=]", line)[0] for line in PROJECT["project"]["dependencies"]}
    assert libraries <= {*re.findall(r"[\w-]+", section("docs/architecture.md", "Libraries"))}
    text = (ROOT / "docs" / "scenarios.md").read_text(encoding="utf-8")
    words = vocabulary.__all__
    assert [word for word in words if not re.search(rf"{word}\(|`{word}`|, {word},", text)] == []


def test_the_way_into_the_code_names_files() -> None:
    text = (ROOT / "docs" / "how-a-run-works.md").read_text(encoding="utf-8")
    paths = re.findall(r"\*\*`([\w/]+\.py)`\*\*", text)
    folders = (ROOT / "harness" / "vllm_repro", ROOT / "harness")
    assert len(paths) > 25
    assert [
        path for path in paths if not any((folder / path).is_file() for folder in folders)
    ] == []


def bug_row(name: str) -> list[str]:
    """Return the row of README's table for a scenario."""
    scenario = find(name)
    status, number = scenario.status, scenario.issue.partition("#")[2]
    first = (f"`{name}`", f"[#{number}]", crashes_in(status))
    return [*first, status.first_good or "-", str(scenario.needs)]


def test_the_readme_has_the_reported_bugs_and_the_number_of_all() -> None:
    table = rows("README.md", "Bugs")
    assert [cells[1] for cells in table] == ["[#41726]", "[#40807]", "[#41700]", "[#42085]"]
    assert table == [bug_row(cells[0].strip("`")) for cells in table]
    scenarios = all_scenarios()
    labs = sum(scenario.lab is not None for scenario in scenarios)
    assert f"They are {len(scenarios)} in all: {labs} run in the lab" in section(
        "README.md", "Bugs"
    )
    assert not any(scenario.needs.gpus for scenario in scenarios if scenario.lab is None)


@pytest.mark.parametrize("name", [*ROWS])
@pytest.mark.parametrize("scenario", ["my_bug.py", "tq_a.py"])
def test_lint_names_the_rows_that_a_new_scenario_lacks(
    tmp_path: Path, name: str, scenario: str
) -> None:
    shutil.copytree(ROOT / "scenarios", tmp_path / "scenarios")
    for file in ("README.md", *ROWS):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, tmp_path / file)
    assert list(missing(tmp_path)) == []
    (tmp_path / "scenarios" / scenario).touch()
    known = scenario.removesuffix(".py").replace("_", "-")
    found = list(missing(tmp_path))
    assert f"{name}: no row for {known}: {ROWS[name][1]}" in found
    assert len(found) == len(ROWS) + 1
    (tmp_path / "scenarios" / scenario).unlink()
    (tmp_path / "scenarios" / "sco_hybrid.py").unlink()
    assert f"{name}: a row for what is no scenario, sco-hybrid: {ROWS[name][1]}" in [
        *missing(tmp_path)
    ]


SAMPLES = [
    pytest.param(name, sample, id=f"{page.name}: {sample.split(' ', 2)[0]}")
    for page in PAGES
    for name, sample in re.findall(
        r"<!-- sample: ([^\n]+) -->\n```console\n(.*?)```\n",
        page.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    if (ROOT / name).parents[1].is_dir()  # that of a deleted feature is not
]


@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_a_sample_is_what_the_program_prints(name: str, sample: str, tmp_path: Path) -> None:
    """The lines come in this order; dots stand for what is left out. Times of a kept run vary."""
    if name == "kept run":
        command, _, sample = sample.partition("\n")
        words = shlex.split(command)[2:]
        (run,) = [
            run for path in kept.COMMITTED.glob("*.xz") if (run := kept.load(path)).words == words
        ]
        texts = (kept.judge(run, tmp_path).out, sample)
        printed, sample = (re.sub(r"\d+ m?s\b", "0 s", re.sub(" +", " ", text)) for text in texts)
    else:
        printed = (ROOT / name).read_text(encoding="utf-8")
    at = 0
    for part in re.split(r" ?\.\.\. ?\n?|\n", sample):
        at = printed.index(part, at) + len(part)


def test_each_sample_names_its_source() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in [*ENTRY, *DOCS])
    commands = re.findall(r"(?<! -->\n)```console\n(?!\$ )", text)
    assert (len(SAMPLES) >= 4, commands) == (True, []), "pages of features may be deleted"


@pytest.mark.parametrize("page", [*ENTRY, *DOCS], ids=lambda page: page.name)
def test_a_page_is_narrow_and_starts_with_a_command(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$|^ {4}[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 100] == []
    first = text.partition("\n## ")[0]
    assert re.search(r"^ {4}(vllm-repro|make|pip|\.venv/bin/python) ", first, re.MULTILINE)


def test_pages_are_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 8_000
    assert sum(page.stat().st_size for page in DOCS) <= 99_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_link_is_dead(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?://)([^)\s]*)\)", text):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        package = re.search(r"harness/(\w+)/docs/", target.as_posix())
        if package and find_spec(package[1]) is None:
            continue  # the feature was deleted with its pages
        assert target.exists(), link
        titles = (
            re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            if heading
            else []
        )
        assert not heading or heading in {
            re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in titles
        }, link


def test_the_description_has_only_links_an_index_can_follow() -> None:
    """The build applies these substitutions (hatch-fancy-pypi-readme)."""
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before = text.count("](https://")
    for one in hook["substitutions"]:
        assert re.search(one["pattern"], text), one
        text = re.sub(one["pattern"], one["replacement"], text)
    assert re.findall(r"\]\((?!https://)", text) == []
    assert (text.count("](https://"), "`tq-chunked-prefill`" in text, "<!--" in text) == (
        before,
        True,
        False,
    )


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)]+\.md)\)", index)}
    assert [
        page.name for page in [*DOCS, *RESULTS] if page not in linked and page.name != "README.md"
    ] == []
