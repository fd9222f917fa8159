"""The page of a run as a person has it: a file, opened in Chromium."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.report.conftest import Open
from tests.report.hostile_logs import run_folder, write_hostile
from vllm_repro.report.build import build
from vllm_repro.report.files import render

pytestmark = pytest.mark.browser

LOG = "".join(f"(EngineCore pid=7) INFO line {n} of the boot\n" for n in range(200)) + (
    "(EngineCore pid=7) ERROR 11-21 EngineCore encountered a fatal error.\n"
    "Traceback (most recent call last):\n"
    '  File "vllm/v1/worker/workspace.py", line 1, in _ensure_workspace_size\n'
    "AssertionError: Workspace is locked\n" + "after it\n" * 60
)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The rehearsal's page, with a log for its first arm and another for its second."""
    folder = run_folder(tmp_path / "run")
    (folder / "logs" / "reported-1.log").write_text(LOG, encoding="utf-8")
    (folder / "logs" / "eager-1.log").write_text("INFO line 7 of the boot, nothing else\n", encoding="utf-8")
    return written(folder)


def written(folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(render(build(folder), "html"), encoding="utf-8")
    return path


def test_it_renders_without_a_word_and_without_the_network(page: Path, opened: Open) -> None:
    made = opened(page)
    assert made.said == []
    assert made.asked == [page.as_uri()]
    assert made.page.title() == "tq-chunked-prefill: reproduces (REHEARSAL)"


def test_the_first_screen_has_verdict_cause_and_command(page: Path, opened: Open) -> None:
    made = opened(page)
    for words in ("says nothing about vLLM", "reproduces", "as expected", "AssertionError", "Workspace is locked but"):
        box = made.page.get_by_text(words, exact=False).first.bounding_box()
        assert box is not None, words
        assert box["y"] + box["height"] <= 800, words
    command = made.page.locator(".copied pre").first
    assert "vllm-repro run tq-chunked-prefill" in command.inner_text()
    box = command.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 800


def test_trials_are_filtered_by_outcome_and_arm(page: Path, opened: Open) -> None:
    made = opened(page)
    trials = made.page.locator(".trial:visible")
    total = trials.count()
    clean = made.page.locator(".trial[data-outcome=clean]").count()
    assert 0 < clean < total
    made.page.get_by_role("button", name="clean", exact=True).click()
    assert trials.count() == total - clean
    assert made.page.locator("#shown").inner_text() == f"{total - clean} of {total}"
    made.page.get_by_role("button", name="clean", exact=True).click()
    made.page.locator("#arm-filter").select_option("eager")
    assert trials.count() == 1
    made.page.locator("#arm-filter").select_option("")
    assert trials.count() == total


def test_all_trials_open_and_close(page: Path, opened: Open) -> None:
    made = opened(page)
    made.page.get_by_role("button", name="Open all").click()
    assert made.page.locator(".trial[open]").count() == made.page.locator(".trial").count()
    made.page.get_by_role("button", name="Close all").click()
    assert made.page.locator(".trial[open]").count() == 0


def test_the_search_counts_opens_what_is_folded_and_goes_round(page: Path, opened: Open) -> None:
    made = opened(page)
    needle, told = made.page.get_by_label("Search the logs"), made.page.locator("#hits")
    needle.fill("LINE 7 OF")
    expect(told).to_have_text("2 found")
    folded = made.page.locator("details.fold").first
    assert folded.get_attribute("open") is None
    needle.press("Enter")
    assert told.inner_text() == "1 of 2"
    assert folded.get_attribute("open") is not None
    made.page.get_by_role("button", name="Next").click()
    assert told.inner_text() == "2 of 2"
    made.page.get_by_role("button", name="Next").click()
    assert told.inner_text() == "1 of 2"
    needle.fill("no such words")
    expect(told).to_have_text("not found")
    needle.press("Enter")
    assert made.said == []


def test_the_first_error_and_the_root_traceback_are_in_sight_and_linked(page: Path, opened: Open) -> None:
    made = opened(page)
    log = made.page.locator(".log").first
    assert log.get_by_text("EngineCore encountered a fatal error").is_visible()
    assert log.get_by_text("AssertionError: Workspace is locked").is_visible()
    assert not log.get_by_text("line 7 of the boot").is_visible()
    assert log.locator("summary", has_text="lines before the first error").is_visible()
    log.get_by_role("link", name="root traceback").click()
    assert made.page.evaluate("location.hash") == "#root-1"
    assert made.page.evaluate("document.querySelector(':target').textContent").startswith("Traceback")


def test_the_command_is_copied(page: Path, opened: Open) -> None:
    made = opened(page, permissions=["clipboard-read", "clipboard-write"])
    made.page.get_by_role("button", name="Copy").first.click()
    made.page.get_by_role("button", name="Copied").wait_for()
    copied = made.page.evaluate("navigator.clipboard.readText()")
    assert copied == made.page.locator(".copied pre").first.inner_text()


def test_the_keyboard_reaches_everything(page: Path, opened: Open) -> None:
    made = opened(page)
    made.page.keyboard.press("Tab")
    assert made.page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert made.page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    made.page.keyboard.press("Enter")
    assert made.page.evaluate("location.hash") == "#main"
    unreached = made.page.evaluate(
        """() => [...document.querySelectorAll('a[href], button, select, input, summary')]
            .filter((one) => one.checkVisibility() && one.tabIndex < 0).length"""
    )
    assert unreached == 0
    trial = made.page.locator(".trial > summary").nth(1)
    trial.focus()
    made.page.keyboard.press("Tab")
    assert made.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    trial.focus()
    made.page.keyboard.press("Enter")
    assert made.page.locator(".trial").nth(1).get_attribute("open") is not None
    made.page.get_by_role("button", name="clean", exact=True).focus()
    made.page.keyboard.press("Space")
    assert made.page.get_by_role("button", name="clean", exact=True).get_attribute("aria-pressed") == "false"
    unnamed = made.page.evaluate(
        "() => [...document.querySelectorAll('input, select')].filter((one) => one.labels.length === 0).length"
    )
    assert unnamed == 0


def test_all_is_there_without_a_script(page: Path, opened: Open) -> None:
    made = opened(page, java_script_enabled=False)
    assert made.page.locator(".trial:visible").count() == made.page.locator(".trial").count() == 8
    assert made.page.locator(".log").count() == 2
    assert made.page.get_by_text("AssertionError: Workspace is locked").last.is_visible()
    for name in ("Copy", "Open all", "Next"):
        assert made.page.get_by_role("button", name=name).count() == 0, name
    made.page.locator(".trial > summary").nth(2).click()
    assert made.page.locator(".trial").nth(2).locator("dl").is_visible()


CONTRAST = """() => {
    const number = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (rgb) => {
        const [r, g, b] = rgb.slice(0, 3).map((one) => (one /= 255) <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const paper = (one) => {
        for (; one; one = one.parentElement) {
            const rgb = number(getComputedStyle(one).backgroundColor);
            if (rgb.length === 3 || rgb[3] === 1) return rgb;
        }
        return [255, 255, 255];
    };
    const low = [];
    for (const one of document.querySelectorAll('main *, header *, .banner, footer *')) {
        const bare = ![...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (bare || one.closest('svg') || !one.checkVisibility()) continue;
        const [a, b] = [light(number(getComputedStyle(one).color)), light(paper(one))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) low.push(`${one.tagName}.${one.className} ${ratio.toFixed(2)}`);
    }
    return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(page: Path, opened: Open, scheme: str) -> None:
    made = opened(page, color_scheme=scheme)
    assert made.page.evaluate(CONTRAST) == []


def test_dark_and_light_differ_and_paper_is_white(page: Path, opened: Open) -> None:
    made = opened(page)
    seen = []
    for scheme in ("light", "dark"):
        made.page.emulate_media(color_scheme=scheme)
        seen.append(made.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    made.page.emulate_media(color_scheme="dark", media="print")
    assert made.page.evaluate("getComputedStyle(document.body).backgroundColor") == seen[0] == "rgb(255, 255, 255)"
    assert seen[1] != seen[0]
    assert not made.page.locator(".filters").is_visible()
    assert not made.page.get_by_role("button", name="Copy").first.is_visible()


@pytest.mark.parametrize("width", [400, 1280])
def test_only_tables_and_charts_are_wider_than_the_screen(page: Path, opened: Open, width: int) -> None:
    made = opened(page, viewport={"width": width, "height": 800})
    made.page.get_by_role("button", name="Open all").click()
    assert made.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_hostile_log_neither_runs_nor_freezes_the_page(tmp_path: Path, opened: Open) -> None:
    folder = run_folder(tmp_path / "run")
    write_hostile(folder)
    path = written(folder)
    assert path.stat().st_size < 4 << 20
    made = opened(path)
    made.page.get_by_role("button", name="Open all").click()
    made.page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    made.page.get_by_label("Search the logs").fill("x")
    expect(made.page.locator("#hits")).to_have_text(re.compile("found"))
    for _ in range(30):
        made.page.keyboard.press("Tab")
    assert made.page.evaluate("window.hacked") is None
    assert made.said == []
    assert made.asked == [path.as_uri()]
    assert made.page.url == path.as_uri()
    text = made.page.locator(".log").first.inner_text()
    for words in ("<script>window.hacked", "{{ 7 * 7 }}", "{% for x in y %}", "-->", "\N{REPLACEMENT CHARACTER}"):
        assert words in text, words
    assert "\x1b" not in text
