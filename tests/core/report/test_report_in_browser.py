"""The page of a run in Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import Open
from tests.core.report.hostile_logs import run_folder, write_hostile
from tests.report_examples import DIED, EXAMPLES, replace, report
from vllm_repro.report.build import build
from vllm_repro.report.files import render
from vllm_repro.report.html import html_page
from vllm_repro.trigger.trigger import Amounts

pytestmark = pytest.mark.browser

LOG = "".join(f"(EngineCore pid=7) INFO line {n} of the boot\n" for n in range(200)) + (
    "(EngineCore pid=7) ERROR 11-21 EngineCore encountered a fatal error.\n"
    "Traceback (most recent call last):\n"
    '  File "vllm/v1/worker/workspace.py", line 1, in _ensure_workspace_size\n'
    "AssertionError: Workspace is locked\n" + "after it\n" * 60
)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Write the rehearsal's page with logs for its first two arms."""
    folder = run_folder(tmp_path / "run")
    (folder / "logs" / "reported-1.log").write_text(LOG, encoding="utf-8")
    (folder / "logs" / "eager-1.log").write_text(
        "INFO line 7 of the boot, nothing else\n", encoding="utf-8"
    )
    return written(folder)


def written(folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(render(build(folder), "html"), encoding="utf-8")
    return path


def test_it_renders_without_the_network_and_its_first_screen_says_the_verdict(
    page: Path, opened: Open
) -> None:
    made = opened(page)
    assert (made.shown, made.asked) == ([], [page.as_uri()])
    assert made.page.title() == "tq-chunked-prefill: reproduces (REHEARSAL)"
    arms = made.page.locator(".scroll:has(.arms)")
    assert arms.evaluate("region => region.scrollWidth <= region.clientWidth")
    for words in (
        "says nothing about vLLM",
        "reproduces",
        "as expected",
        "AssertionError",
        "Workspace is locked but",
        "vllm-repro run tq-chunked-prefill",
    ):
        box = made.page.get_by_text(words, exact=False).first.bounding_box()
        assert box is not None, words
        assert box["y"] + box["height"] <= 800, words
    assert (
        "vllm-repro run tq-chunked-prefill" in made.page.locator("pre.command").first.inner_text()
    )


def test_logs_and_keyboard(page: Path, opened: Open) -> None:
    made = opened(page)
    made.page.keyboard.press("Tab")
    assert made.page.evaluate("document.activeElement.textContent") == "Skip to the content"
    made.page.keyboard.press("Enter")
    assert made.page.evaluate("location.hash") == "#main"
    trial = made.page.locator(".trial > summary").nth(1)
    trial.focus()
    made.page.keyboard.press("Enter")
    assert made.page.locator(".trial").nth(1).get_attribute("open") is not None
    made.page.locator(".log").first.get_by_role("link", name="root exception").click()
    assert made.page.evaluate("location.hash") == "#root-1"
    assert (
        made.page.evaluate("document.querySelector(':target').textContent")
        .strip()
        .startswith("AssertionError")
    )


OPEN_ALL = "for (const one of document.querySelectorAll('details')) one.open = true"
PAPER = "getComputedStyle(document.body).backgroundColor"
CONTRAST = """() => {
    const number = (text) => text.match(/[\\d.]+/g).map(Number);
    const linear = (one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
    const light = (rgb) => {
        const [r, g, b] = rgb.slice(0, 3).map((one) => linear(one / 255));
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
        if (bare || !one.checkVisibility()) continue;
        const [a, b] = [light(number(getComputedStyle(one).color)), light(paper(one))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) low.push(`${one.tagName}.${one.className} ${ratio.toFixed(2)}`);
    }
    return low;
}"""


def test_every_text_has_contrast_and_paper_is_white(page: Path, opened: Open) -> None:
    made = opened(page)
    seen = []
    for scheme in ("light", "dark"):
        made.page.emulate_media(color_scheme=scheme)
        assert made.page.evaluate(CONTRAST) == [], scheme
        seen.append(made.page.evaluate(PAPER))
    made.page.emulate_media(color_scheme="dark", media="print")
    assert made.page.evaluate(PAPER) == seen[0] == "rgb(255, 255, 255)"
    assert seen[1] != seen[0]


OVERLAPS = """() => {
    const boxes = [];
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node; node = walk.nextNode();) {
        const parent = node.parentElement;
        const hidden = !parent.checkVisibility() || parent.closest('.unseen, .skip');
        if (!node.data.trim() || hidden) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        const style = getComputedStyle(parent);
        // What has scrolled out of a box is not seen.
        const seen = {l: -1e9, r: 1e9, t: -1e9, b: 1e9};
        for (let one = parent; one !== document.body; one = one.parentElement) {
            if (getComputedStyle(one).overflow === 'visible') continue;
            const box = one.getBoundingClientRect();
            [seen.l, seen.r] = [Math.max(seen.l, box.left), Math.min(seen.r, box.right)];
            [seen.t, seen.b] = [Math.max(seen.t, box.top), Math.min(seen.b, box.bottom)];
        }
        for (const rect of range.getClientRects()) {
            // The box of a letter is higher than its ink.
            const spare = Math.max(0, rect.height - parseFloat(style.fontSize)) / 2 + 1;
            const [l, r] = [Math.max(rect.left, seen.l), Math.min(rect.right, seen.r)];
            const t = Math.max(rect.top + spare, seen.t);
            const b = Math.min(rect.bottom - spare, seen.b);
            if (r - l > 2 && b > t) boxes.push({l, r, t, b, text: node.data.trim().slice(0, 60)});
        }
    }
    boxes.sort((a, b) => a.t - b.t);
    const found = [];
    boxes.forEach((one, at) => {
        for (let next = at + 1; next < boxes.length && boxes[next].t < one.b; next++) {
            const other = boxes[next];
            const common = Math.min(one.r, other.r) - Math.max(one.l, other.l);
            if (common > 1) found.push(`${one.text} / ${other.text}`);
        }
    });
    return [boxes.length, found];
}"""


@pytest.fixture
def whole_page(tmp_path: Path) -> Path:
    """Write a page with bars that have long names, and with a wide and a high text."""
    made = report(DIED)
    arm = made.arms[0]
    bars = (
        ("needed for 102,400 cached tokens", 400.0),
        ("decoding locks", 1.02),
        ("this release locks", 123456.78),
    )
    amounts = (Amounts("MB", bars), Amounts("blocks", (("asked for", 50), ("in the free list", 0))))
    trial = replace(arm.trials[0], trigger=replace(arm.trials[0].trigger, amounts=amounts))
    path = tmp_path / "whole.html"
    path.write_text(
        html_page(replace(made, arms=(replace(arm, trials=(trial,)), *made.arms[1:]))),
        encoding="utf-8",
    )
    return path


def test_no_text_overlaps_and_pages_fit_the_screen(
    page: Path, whole_page: Path, opened: Open
) -> None:
    for path in (page, whole_page, *(folder / "report.html" for folder in EXAMPLES)):
        assert_fits(path, opened)


BESIDE = """(width) => {
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const beside = [];
    for (let node; node = walk.nextNode();) {
        if (!node.parentElement.checkVisibility()) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        const wide = [...range.getClientRects()].some((rect) => rect.right > width);
        if (wide) beside.push(node.data.trim().slice(0, 60));
    }
    return beside;
}"""
"""Texts that go over the right edge of the screen, also those in a box that scrolls."""


WIDTHS = (390, 1280)


def assert_fits(path: Path, opened: Open) -> None:
    """Check that no text of a page lies on another, and that it is as wide as each screen.

    On a phone no text needs scrolling sideways.
    """
    made = opened(path)
    made.page.evaluate(OPEN_ALL)
    for width in WIDTHS:
        made.page.set_viewport_size({"width": width, "height": 800})
        measured, found = made.page.evaluate(OVERLAPS)
        assert measured > 50, path
        assert found == [], path
        assert width > 390 or made.page.evaluate(BESIDE, width) == [], path
        assert made.page.evaluate("document.documentElement.scrollWidth") <= width, path


def test_text_that_lies_on_another_is_found(page: Path, opened: Open) -> None:
    """Otherwise the test above could not fail."""
    made = opened(page)
    made.page.evaluate(
        "document.querySelector('h1').style.cssText = 'position: relative; top: 30px'"
    )
    assert len(made.page.evaluate(OVERLAPS)[1]) >= 1


def test_a_hostile_log_neither_runs_nor_freezes_the_page(tmp_path: Path, opened: Open) -> None:
    folder = run_folder(tmp_path / "run")
    write_hostile(folder)
    path = written(folder)
    assert path.stat().st_size < 4 << 20
    made = opened(path)
    made.page.evaluate(OPEN_ALL)
    for _ in range(30):
        made.page.keyboard.press("Tab")
    assert made.page.evaluate("window.hacked") is None
    assert made.shown == []
    assert made.asked == [path.as_uri()]
    assert made.page.url == path.as_uri()
    text = made.page.locator(".log").first.inner_text()
    for words in (
        "<script>window.hacked",
        "{{ 7 * 7 }}",
        "{% for x in y %}",
        "-->",
        "\N{REPLACEMENT CHARACTER}",
    ):
        assert words in text, words
    assert "\x1b" not in text
