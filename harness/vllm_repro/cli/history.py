"""`vllm-repro history`: what changed since the last nights, and the nightly page."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from vllm_repro.cli.common import Subparsers, print_json, verb
from vllm_repro.cli.options import number
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.history.account import account
from vllm_repro.history.page import page
from vllm_repro.history.store import Caught, Store
from vllm_repro.history.telling import as_json, terminal
from vllm_repro.report.files import write_whole
from vllm_repro.report.wording import many
from vllm_repro.running.run import default_out

_EPILOG = """

A night is named for its morning and begins at 18:00 the evening before, by this machine's clock (TZ=UTC for another).
What is called, and when: docs/history.md."""


def add(subparsers: Subparsers) -> None:
    parser = verb(
        subparsers,
        "history",
        run,
        does="say what changed since the last nights: fixes, regressions, throughput, and hosts that are to blame",
        example="vllm-repro history --html reports/nights.html",
        prints="the news, where each bug stands, and the speeds, night by night",
        more=_EPILOG,
    )
    parser.add_argument("--scenario", action="append", metavar="S", help="only this scenario; may be given again")
    parser.add_argument(
        "--nights",
        type=_nights,
        default=1,
        metavar="N",
        help="compare the last N nights with those before (default: 1)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the nightly page")
    parser.add_argument(
        "--rebuild", action="store_true", help="make the store anew from the journals, which are the truth"
    )
    parser.add_argument("--reports", type=Path, metavar="DIR", help="where runs are written (default: reports)")


def _nights(text: str) -> int:
    return number(text, least=1, most=10_000, what="number of nights: at least 1")


def run(arguments: argparse.Namespace) -> int:
    root = arguments.reports or default_out()
    if not root.is_dir():
        raise UsageError(
            f"there is no folder {root}", hint="vllm-repro run SCENARIO makes the first run; or name --reports DIR"
        )
    store = Store(root)
    caught = store.rebuild() if arguments.rebuild else store.catch_up()
    _tell(caught, rebuilt=arguments.rebuild)
    rows = store.rows()
    named = arguments.scenario or ()
    if unknown := [name for name in named if all(row.scenario != name for row in rows)]:
        known = ", ".join(sorted({row.scenario for row in rows})) or "no run at all"
        raise UsageError(f"no run of {unknown[0]} in {root}", hint=f"it has: {known}")
    found = account(rows, None, nights=arguments.nights, scenarios=named)
    if arguments.html:  # before anything is printed: the reader of that may go away
        _write(arguments.html, page(found, way(root, arguments.html)))
    if arguments.json:
        print_json(as_json(found))
    else:
        print(terminal(found))
    if arguments.html:
        print(f"page: {arguments.html}", file=sys.stderr if arguments.json else sys.stdout)
    return 0


def _tell(caught: Caught, *, rebuilt: bool) -> None:
    said: list[str] = []
    runs = many(caught.added, "run")
    if rebuilt:
        said.append(f"{runs}, from their journals")
    elif caught.added:
        said.append(f"not in the history yet, and now added: {runs}")
    if rebuilt and caught.gone:
        said.append(f"without a folder by now: {caught.gone}; the store that has them is kept as history.sqlite.old")
    said += [f"left out, its journal does not hold a run: {name}" for name in caught.unreadable]
    for line in said:
        print(f"vllm-repro: {line}", file=sys.stderr)


def way(root: Path, file: Path) -> str:
    """From the page to the folder of all runs, as a relative link."""
    return Path(os.path.relpath(root.resolve(), file.resolve().parent)).as_posix()


def _write(file: Path, text: str) -> None:
    if not file.parent.is_dir():
        raise InfraError(f"cannot write {file}: there is no folder {file.parent}", hint="make it, or name another file")
    write_whole(file, text, hint="name another file with --html")
