from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Set
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError
from junitparser import Error, Failure, JUnitXml, Property, Skipped, TestSuite
from markupsafe import Markup
from msgspec import Struct

from tests.core.report.html_tree import parsed
from tests.golden_files import assert_golden
from tests.report_examples import EXAMPLES, REHEARSAL, replace, report
from vllm_repro.report.document import document, fragment, local_link, plain_text
from vllm_repro.report.json_report import PatchedFile, RunJson, report_dict
from vllm_repro.report.junit import junit
from vllm_repro.report.model import RunReport, arm_fields, verdict_fields
from vllm_repro.report.text import cell, code, printable
from vllm_repro.verdict.outcome import Death, Outcome
from vllm_repro.verdict.verdict import Verdict, VerdictReport, arm_result

CONTRACT = {
    "": (
        "scenario issue verdict expected evidence rehearsal harness_version started_at duration_s"
        " environment arms throughput infra reproduce"
    ),
    "arms": "name command server result k n bound trials",
    "server": "kind image digest vllm_version argv replaced patched weights env",
    "trials": "outcome phase trigger death client_saw boot_s duration_s requests throughput log",
    "trigger": "crossed evidence",
    "death": "detected_by latency_s exception message frames signature channels",
    "requests": "sent ok failed",
    "environment": "os python cpus memory_gb docker gpus driver",
}
"""Keys that scripts outside of this repository rely on, by the key of their object."""


# `jsonschema.validate` would check the schema for every report.
RUN = jsonschema.Draft202012Validator(msgspec.json.schema(RunJson))


def objects(value: Any, name: str = "") -> list[tuple[str, dict[str, Any]]]:
    if isinstance(value, list):
        return [one for item in value for one in objects(item, name)]
    if not isinstance(value, dict):
        return []
    return [(name, value), *(one for key, item in value.items() for one in objects(item, key))]


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_the_schema_and_the_contract_hold(folder: Path) -> None:
    made = report_dict(report(folder))
    RUN.validate(made)
    assert msgspec.to_builtins(msgspec.convert(made, RunJson)) == msgspec.to_builtins(
        msgspec.json.decode(json.dumps(made), type=RunJson)
    )
    for name, found in objects(made):
        if name in CONTRACT and not (name == "requests" and "sent" not in found):
            assert set(CONTRACT[name].split()) <= set(found), name


def test_the_schema_is_sound_and_leaves_room_for_new_keys() -> None:
    assert_schema(RunJson, optional={"schema"})


def assert_schema(record: type[Struct], *, optional: Set[str]) -> None:
    """Check that a record's schema is valid, takes new keys, and requires all that are known."""
    schema = msgspec.json.schema(record)
    jsonschema.Draft202012Validator.check_schema(schema)
    fields = schema["$defs"][record.__name__]
    assert "additionalProperties" not in fields
    assert fields["properties"].keys() - set(fields["required"]) == optional


@pytest.mark.parametrize(("key", "value"), [("verdict", "dunno"), ("schema", 2), ("arms", [{}])])
def test_a_broken_report_breaks_the_schema(key: str, value: object) -> None:
    broken = {**report_dict(report(EXAMPLES[0])), key: value}
    with pytest.raises(jsonschema.ValidationError):
        RUN.validate(broken)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(broken, RunJson)


def test_a_patched_file_that_nobody_looked_for_has_no_such_key() -> None:
    assert "imported" not in msgspec.to_builtins(PatchedFile(file="vllm/a.py", sha256="0"))


def test_a_lone_surrogate_of_a_journal_is_valid_json() -> None:
    made = replace(report(EXAMPLES[0]), because="\ud800")
    assert json.loads(json.dumps(report_dict(made)))["because"] == "\ud800"


EXAMPLE = report(REHEARSAL)
# Typed, which the library's are not.
counted: Callable[[TestSuite], None] = TestSuite.update_statistics
listed: Callable[[TestSuite], Iterable[Property]] = TestSuite.properties
KINDS = {Failure: "failure", Error: "error", Skipped: "skipped"}


def mixed(
    why: str = "it died of this", message: str = "boom", frame: str = "vllm/a.py:f"
) -> RunReport:
    """Return one arm of each kind: expected, surprise, host trouble, unsupported."""
    death = Death(
        detected_by="answer",
        latency_s=0.1,
        exception="RuntimeError",
        message=message,
        frames=(frame,) * 30,
        signature=None,
        channels=("answer",),
    )
    outcomes = (Outcome.CLEAN, Outcome.CRASH, Outcome.INFRA, Outcome.UNSUPPORTED)
    arms = []
    for arm, outcome in zip(EXAMPLE.arms, outcomes, strict=False):
        died = death if outcome is Outcome.CRASH else None
        trial = replace(arm.trials[0], outcome=outcome, death=died, why=why)
        arms.append(
            replace(
                arm, trials=(trial,), **arm_fields(arm_result(arm.name, arm.expected, [outcome]))
            )
        )
    verdict = VerdictReport(
        verdict=Verdict.REGRESSED, expected=False, because="because", surprises=(arms[1].name,)
    )
    return replace(EXAMPLE, arms=tuple(arms), **verdict_fields(verdict))


def test_golden() -> None:
    assert_golden("junit-mixed.xml", junit(mixed()))


@pytest.mark.parametrize("source", [EXAMPLE, mixed()], ids=["example", "mixed"])
def test_junitparser_reads_what_was_meant(source: RunReport, tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(junit(source), encoding="utf-8")
    read = JUnitXml.fromfile(str(path))
    (suite,) = list(read)
    cases = list(suite)
    assert suite.name == source.scenario
    assert suite.time == pytest.approx(source.duration_s, abs=1e-3)
    assert [case.name for case in cases] == [arm.name for arm in source.arms if arm.trials]
    for case, arm in zip(cases, source.arms, strict=True):
        assert case.time == pytest.approx(
            sum(trial.duration_s or 0 for trial in arm.trials), abs=1e-3
        )
        assert len(case.result) <= 1
    before = (suite.tests, suite.failures, suite.errors, suite.skipped)
    counted(suite)  # its own count of what it read
    assert before == (suite.tests, suite.failures, suite.errors, suite.skipped)
    properties = {one.name: one.value for one in listed(suite)}
    assert (properties["issue"], properties["verdict"]) == (source.issue, source.verdict)
    if source.scenario == EXAMPLE.scenario and source.verdict is Verdict.REGRESSED:
        kinds = [KINDS[type(case.result[0])] if case.result else "passed" for case in cases]
        assert kinds == ["passed", "failure", "error", "skipped"]


def assert_read_by_github_and_buildkite(text: str) -> None:
    """Check that each case is read alike, and that something is shown of it.

    Both GitHub readers take `testsuites/testsuite/testcase`, count a case as failed by a failure or
    error, show the first one's `message` (dorny's with `type` before it) and its text; a case with
    `skipped` beside a failure would count as skipped for one and failed for the other. Buildkite's
    shows name, classname, message and text, and the message of a skip.
    """
    for case in ET.fromstring(text).findall("testsuite/testcase"):
        states = [one for one in case if one.tag in ("failure", "error", "skipped")]
        assert len(states) <= 1, "its readers would not agree"
        assert case.get("classname")
        float(case.get("time", ""))
        one = states[0] if states else None
        if one is None:
            continue
        message = one.get("message", "")
        assert message.strip(), "an empty message is taken for none"
        assert "\n" not in message, "it is shown on one line"
        if one.tag != "skipped":
            assert one.get("type")
            assert (one.text or "").strip(), "Buildkite's shows no box for it"


def test_the_traceback_is_trimmed() -> None:
    (failure,) = ET.fromstring(
        junit(mixed(why="x " * 50_000, frame="vllm/a.py:" + "f" * 3_000))
    ).iter("failure")
    assert len(failure.get("message", "")) < 1_100
    assert len(failure.text or "") <= 8_000


# What XML 1.0 has, by its grammar (section 2.2).
LEGAL = re.compile("[\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]*")
NASTY = [
    "\x00",
    "\x1b[31mred",
    "\x0c",
    "\ufffe",
    "\ud800",
    "]]>",
    "<![CDATA[",
    "&amp;",
    "--",
    "\u2028",
    "\r\n",
    "\x85",
]


@settings(max_examples=25)
@given(
    st.text(alphabet=st.characters(), max_size=60), st.sampled_from(NASTY), st.sampled_from(NASTY)
)
def test_only_characters_that_xml_has(text: str, one: str, other: str) -> None:
    for why, message in product((text + one, other + text), (one + other,)):
        made = junit(mixed(why=f"w {why}", message=message, frame=f"{why}:{message}"))
        assert LEGAL.fullmatch(made)
        assert_read_by_github_and_buildkite(made)
        JUnitXml.fromstring(made.encode())


def page(title: str = "A page", text: str = "text") -> str:
    return document(
        title=title, body=Markup("<main id=main><p>{}</p></main>").format(printable(text))
    )


def test_the_policy_allows_the_pages_own_style_and_nothing_else() -> None:
    text = page()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    none = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert rules == {**none, "style-src": f"'sha256-{digest}'"}
    assert "<script" not in text


@given(st.text())
def test_any_text_stays_text(text: str) -> None:
    tree = parsed(page(text, text))
    for tag in ("p", "title"):
        (found,) = tree.iter(tag)
        assert (found.text or "") == printable(text)
        assert not list(found)


@pytest.mark.parametrize(
    "body",
    [
        *(
            "<p>",
            "</p>",
            "<p><div></div></p>",
            "<b><i></b></i>",
            "<table><td>x</td></table>",
            "<ul>x</ul>",
        ),
        *(
            "<!-- x -->",
            "<br id=a id=b>",
            "<div/>",
            "<a href=b><a href=c></a></a>",
            "<p>\x07</p>",
            "<![CDATA[x]]>",
        ),
    ],
)
def test_a_page_that_a_browser_would_repair_is_no_page(body: str) -> None:
    whole = "<!doctype html><html><head><title>t</title></head><body>{}</body></html>"
    assert parsed(whole.format("<p>text</p>")).findtext("body/p") == "text"
    with pytest.raises(AssertionError):
        parsed(whole.format(body))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: document(title="t", body="<b>text</b>"),  # type: ignore[arg-type]  # no Markup
            TypeError,
            "markup that a template made",
        ),
        (
            lambda: document(title="t", body=Markup(""), style="x</STYLE>"),
            ValueError,
            "ends its element",
        ),
        (lambda: fragment("page.html", title="t"), UndefinedError, "undefined"),
    ],
)
def test_what_would_break_the_page_is_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("text", ["a | b", "*@you* #1", "<b>", "# a\nhttps://x"])
def test_a_template_of_markdown_escapes_each_value(text: str, tmp_path: Path) -> None:
    (tmp_path / "made.md").write_text("{{ value }} {{ value | code }}\n\n", encoding="utf-8")
    assert plain_text("made.md", tmp_path, value=text) == f"{cell(text)} {code(text)}"
    with pytest.raises(UndefinedError):
        plain_text("made.md", tmp_path)


@pytest.mark.parametrize(
    ("path", "link"),
    [
        ("logs/a b-1.log", "logs/a%20b-1.log"),
        ("javascript:alert(1)", "javascript%3Aalert%281%29"),
        ("../../etc/passwd", "#"),
        ("//evil.example/x", "#"),
        ("/etc/passwd", "#"),
        ("\\\\evil\\x", "#"),
        ("", "#"),
    ],
)
def test_links_stay_beside_the_page(path: str, link: str) -> None:
    assert local_link(path) == link
