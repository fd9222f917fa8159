"""Kept runs of live tests, to be judged again while the inputs of a boot stay the same.

A kept run is found by a hash of its command, its scenario and the code that boots and watches
(`inputs`). It has the journal and the logs, without names of the machine that made it. Canaries are
booted although they are kept, and must end as the kept run did: so a wrong one is found.

`python -m tests.live.kept` puts the runs in this user's cache into `tests/data/kept`.
"""

from __future__ import annotations

import contextlib
import io
import json
import lzma
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.conftest import Done
from tests.live.inputs import ROOT, digest, meaning
from vllm_repro.journal.journal import read
from vllm_repro.releases.disk import cache_root
from vllm_repro.report.build import build
from vllm_repro.report.files import write_reports
from vllm_repro.report.summary import print_summary
from vllm_repro.verdict.verdict import exit_status

COMMITTED = ROOT / "tests" / "data" / "kept"
CACHED = cache_root() / "tests" / "kept"
CANARIES = 2

_ELSEWHERE = {"attach", "rehearsal", "docker"}
_KEPT_FILES = ("journal.jsonl", "requests.jsonl", "logs/*")


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """A finished run of `vllm-repro run`."""

    scenario: str
    # of the command, without the path of a scenario file
    words: list[str]
    key: str
    release: str
    # printed before the run: which vLLM it is
    first_line: str
    # by their path in the run's folder
    files: dict[str, str]


def key_of(words: Sequence[str]) -> str | None:
    """Return the key of a command's run, or None if its run cannot be kept."""
    verb, name, *options = words
    server = option(options, "--server")
    if verb != "run" or server in _ELSEWHERE or "--on" in options:
        return None
    scenario = meaning(_scenario_file(name))
    command = json.dumps([public(words), digest("boot")]).encode()
    return sha256(command + scenario).hexdigest()


def option(words: Sequence[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def _scenario_file(name: str) -> Path:
    return (
        Path(name) if name.endswith(".py") else ROOT / "scenarios" / f"{name.replace('-', '_')}.py"
    )


def public(words: Sequence[str]) -> list[str]:
    return [Path(word).name if word.endswith(".py") else word for word in words]


def lookup(key: str) -> KeptRun | None:
    """Return the kept run of a key, from the cache or the repository."""
    for folder in (CACHED, COMMITTED):
        for path in folder.glob(f"*-{key[:12]}.json.xz"):
            kept = load(path)
            if kept.key == key:
                return kept
    return None


def load(path: Path) -> KeptRun:
    """Return the kept run in a file. Raises `ValueError` if the file is damaged."""
    head, _, text = lzma.decompress(path.read_bytes()).decode().partition("\n")
    if head != sha256(text.encode()).hexdigest():
        raise ValueError(
            f"{path} was changed since it was kept: remove it, so that its run boots again"
        )
    return KeptRun(**json.loads(text))


def save(kept: KeptRun, folder: Path) -> Path:
    """Write a kept run, the same bytes for the same run, in place of older ones of its command."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = "-".join([kept.scenario, sha256(" ".join(kept.words).encode()).hexdigest()[:4]])
    text = json.dumps(asdict(kept), ensure_ascii=False)
    packed = lzma.compress(f"{sha256(text.encode()).hexdigest()}\n{text}".encode(), preset=9)
    path = folder / f"{stem}-{kept.key[:12]}.json.xz"
    fresh = folder / f".{path.name}.{os.getpid()}"
    fresh.write_bytes(packed)
    fresh.replace(path)
    for older in folder.glob(f"{stem}-*.json.xz"):
        if older != path:
            older.unlink(missing_ok=True)
    return path


def keep(words: Sequence[str], key: str, done: Done) -> KeptRun:
    """Return the run that a command just made as a kept one, without names of this machine."""
    paths = sorted(path for name in _KEPT_FILES for path in done.run.glob(name))
    head = next(read(done.run / "journal.jsonl").of("run-started"))
    private = _private_names(head.fields)
    texts = {
        str(path.relative_to(done.run)): path.read_text(encoding="utf-8", errors="replace")
        for path in paths
    }
    return KeptRun(
        scenario=head["scenario"],
        words=public(words),
        key=key,
        release=str(head["version"]),
        first_line=_without(done.out.partition("\n")[0], private),
        files={name: _without(text, private) for name, text in texts.items()},
    )


def _private_names(head: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of this machine in a journal, each with a public one of the same kind."""
    temporary = re.escape(str(Path(os.environ.get("TMPDIR", "/tmp"))))
    public = {"$HOME": "/home/user", ".": "/home/user/vllm-repro"}
    names = {rf"{temporary}/pytest-of-[\w.-]+/pytest-\d+(?:/popen-gw\d+)?": "/tmp/pytest"}
    folders = sorted(head.get("folders", ()), key=lambda pair: -len(pair[0]))
    for folder, word in folders:
        if len(folder) > 1 and not folder.startswith("/tmp"):
            fallback = f"/home/user/.{word.strip('$').lower()}"
            names[rf"{re.escape(folder)}(?![\w-])"] = public.get(word, fallback)
    for host in head.get("hosts", ()):
        names[rf"(?<![\w.-]){re.escape(host)}(?![\w-])"] = "host"
    return names


def _without(text: str, private: Mapping[str, str]) -> str:
    for pattern, public in private.items():
        text = re.sub(pattern, public, text)
    return text


def judge(kept: KeptRun, out: Path) -> Done:
    """Judge a kept run with today's code: write its reports below `out`, as the run would have."""
    folder = out / kept.scenario / f"kept-{kept.key[:12]}"
    for name, text in kept.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    latest = folder.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(folder.name)
    printed = io.StringIO()
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        report = build(folder)
        # The banner of today, and the kept choice of a server.
        print(report.banner, "".join(kept.first_line.partition("Server: ")[1:]), file=printed)
        write_reports(report)
        print_summary(report, printed)
    status = exit_status(report.as_expected)
    return Done(status, printed.getvalue(), errors.getvalue(), folder, kept=True)


def endings(report: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return what must not differ between two runs of one command, a row for each trial."""
    rows = []
    for arm in report["arms"]:
        for trial in arm["trials"]:
            death = trial["death"] or {}
            crossed = (trial["trigger"] or {}).get("crossed")
            about = (arm["name"], trial["outcome"], trial["phase"], crossed)
            rows.append((*about, death.get("exception"), death.get("signature")))
    return rows


def compare(kept: KeptRun, booted: Done, out: Path) -> None:
    """Raise `AssertionError` if a canary ended otherwise than the kept run of its command."""
    was, now = endings(judge(kept, out).report), endings(booted.report)
    assert was == now, (
        f"the kept run of `{' '.join(kept.words)}` is wrong: it ends as {was}, a boot as {now}. "
        "Name in tests/live/inputs.py what changed it, or boot all: .ci/run --all"
    )


def canaries(entries: Iterable[KeptRun], seed: str) -> list[KeptRun]:
    """Return the kept runs to boot nevertheless, of different releases, chosen by `seed`."""
    ranked = sorted(entries, key=lambda kept: sha256(f"{seed} {kept.key}".encode()).digest())
    chosen: dict[str, KeptRun] = {}
    for kept in ranked:
        if len(chosen) < CANARIES:
            chosen.setdefault(kept.release, kept)
    return list(chosen.values())


def valid_entries() -> list[KeptRun]:
    """Return the kept runs whose inputs have not changed, except those of made scenario files."""
    entries: dict[str, KeptRun] = {}
    for folder in (CACHED, COMMITTED):
        for path in sorted(folder.glob("*.json.xz")):
            kept = load(path)
            if not kept.words[1].endswith(".py") and key_of(kept.words) == kept.key:
                entries.setdefault(kept.key, kept)
    return list(entries.values())


def head_commit() -> str:
    """Return the commit of this checkout, or nothing outside of one."""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Replace the kept runs of the repository by those of the cache that are still valid."""
    for path in COMMITTED.glob("*.json.xz"):
        path.unlink()
    for kept in valid_entries():
        path = save(kept, COMMITTED)
        sys.stdout.write(f"{path.stat().st_size:>7} {path.name}\n")


if __name__ == "__main__":
    main()
