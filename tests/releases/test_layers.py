"""What releases share: torch once, a dependency set for all that it satisfies, and what an install is said to add."""

from __future__ import annotations

import re
import shutil

from tests.releases.fake_installer import PYTHON, RELEASES, FakeInstaller, environment, silent
from vllm_repro.releases.footprint import Size, base_size, further_set_size, release_size, set_size
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.release_files import installed, packages_of, stands_on

TAG = PYTHON.replace("python", "py")
FIRST = set_size("2.13.0") + base_size("2.13.0")
"""Beside the release, for the first one that is built for torch 2.13.0."""
_LAYERS = [set_size("2.13.0"), further_set_size(), FIRST, set_size("2.11.0") + base_size("2.11.0")]
SIZES = [release_size(), *_LAYERS, *(release_size() + size for size in _LAYERS)]


def announced(cache: ReleaseCache, version: str) -> list[tuple[str, Size]]:
    """What installing a release says that it adds, and why."""
    said: list[str] = []
    cache.provision(version, said.append)
    sizes = {str(size): size for size in SIZES}
    found = [re.fullmatch(r"(.*): installing (about .*) into .*", line) for line in said]
    return [(match[1], sizes[match[2]]) for match in found if match]


def test_a_second_release_shares_the_dependencies(cache: ReleaseCache, installer: FakeInstaller) -> None:
    first, second = cache.provision("0.28.0", silent), cache.provision("0.29.0", silent)
    assert installer.calls.count("environment") == 1
    assert first.python == second.python
    assert [release.version for release in cache.cached()] == ["0.28.0", "0.29.0"]
    assert len({release.layers for release in cache.cached()}) == 1


def test_a_release_that_the_set_does_not_satisfy_gets_its_own(cache: ReleaseCache, installer: FakeInstaller) -> None:
    said: list[str] = []
    first = cache.provision("0.28.0", silent)
    before = sorted(first.python.parent.parent.rglob("*"))
    newer = cache.provision("0.32.0", said.append)
    assert installer.calls.count("environment") == 2
    assert installer.calls.count("base") == 1
    assert newer.python != first.python
    assert any("lacks regex>=2026.1, transformers>=5.9" in line for line in said)
    assert sorted(first.python.parent.parent.rglob("*")) == before
    assert cache.provision("0.29.0", silent).python in {first.python, newer.python}
    assert installer.calls.count("environment") == 2


def test_another_torch_is_another_set(cache: ReleaseCache) -> None:
    assert cache.provision("0.28.0", silent).python != cache.provision("0.23.0", silent).python
    assert [release.torch for release in cache.cached()] == ["2.11.0", "2.13.0"]


def test_scripts_of_a_moved_environment_find_it(cache: ReleaseCache) -> None:
    python = cache.provision("0.28.0", silent).python
    assert (python.parent / "tool").read_text() == f"#!{python}\n"
    base = cache.root / "torch" / f"2.13.0-{TAG}" / "bin"
    assert (base / "tool").read_text() == f"#!{base}/python\n"


def test_what_is_said_before_an_install_is_what_it_adds(cache: ReleaseCache) -> None:
    """Nothing cached; a whole set; a set that turns out to lack something; torch alone."""
    assert announced(cache, "0.28.0") == [("vLLM 0.28.0 is not in the cache", release_size() + FIRST)]
    assert announced(cache, "0.29.0") == [("vLLM 0.29.0 is not in the cache", release_size())]
    name = next((cache.root / "deps").iterdir()).name
    assert announced(cache, "0.32.0") == [
        ("vLLM 0.32.0 is not in the cache", release_size()),
        (f"{name} lacks regex>=2026.1, transformers>=5.9", further_set_size()),
    ]
    for folder in (cache.root / "deps").iterdir():
        shutil.rmtree(folder)
    assert announced(cache, "0.32.0") == [("vLLM 0.32.0 is not in the cache", release_size() + set_size("2.13.0"))]
    assert announced(cache, "0.23.0") == [
        ("vLLM 0.23.0 is not in the cache", release_size() + set_size("2.11.0") + base_size("2.11.0"))
    ]


def test_a_torch_that_was_not_foreseen_is_said_before_it_is_fetched(
    cache: ReleaseCache, installer: FakeInstaller
) -> None:
    cache.provision("0.28.0", silent)
    installer.releases["0.31.0"] = ("2.10.0", ())
    said = announced(cache, "0.31.0")
    assert said[0] == ("vLLM 0.31.0 is not in the cache", release_size())
    assert said[1] == ("vLLM 0.31.0 is built for torch 2.10.0", set_size("2.10.0") + base_size("2.10.0"))


def test_a_set_with_a_torch_of_its_own_stays_usable(cache: ReleaseCache, installer: FakeInstaller) -> None:
    """As older versions of this package made them."""
    old = cache.root / "deps" / f"torch-2.13.0-{TAG}-0123abcd"
    environment(old, ["torch==2.13.0", "transformers==5.6"])
    (old / "complete.json").write_text('{"python": "py3.11", "seconds": 1.0, "size": 4711, "torch": "2.13.0"}')
    assert announced(cache, "0.28.0") == [("vLLM 0.28.0 is not in the cache", release_size())]
    assert cache.provision("0.28.0", silent).python == old / "bin" / "python"
    assert installer.calls == ["download", "unpack"]
    assert [layer.size for layer in cache.cached()[0].layers] == [4711]
    said = announced(cache, "0.32.0")[1]
    assert said == (f"{old.name} lacks regex>=2026.1, transformers>=5.9", further_set_size())
    further = cache.provision("0.32.0", silent)
    assert [layer.path for layer in cache.cached()[-1].layers] == [further.python.parent.parent, old]
    assert "base" not in installer.calls


def test_torch_is_there_once_and_counts_once(cache: ReleaseCache) -> None:
    for version in RELEASES:
        cache.provision(version, silent)
    found = {release.version: release for release in cache.cached()}
    assert found["0.28.0"].layers == found["0.29.0"].layers
    assert [layer.path.parent.name for layer in found["0.28.0"].layers] == ["deps", "torch"]
    assert found["0.32.0"].layers[1:] == found["0.28.0"].layers
    assert found["0.23.0"].layers[-1] != found["0.32.0"].layers[-1]
    layers = {layer for release in found.values() for layer in release.layers}
    assert len(layers) == 5
    markers = sum(path.stat().st_size for path in cache.root.rglob("complete.json"))
    sizes = sum(layer.size for layer in layers) + sum(release.size for release in found.values())
    assert cache.size() == sizes + markers


def test_a_further_set_holds_only_what_differs_and_stands_on_a_first_one(
    cache: ReleaseCache, installer: FakeInstaller
) -> None:
    first = cache.provision("0.28.0", silent).python.parent.parent
    installer.releases["0.33.0"] = ("2.13.0", ("transformers>=5.9", "regex>=2027"))
    second, third = (cache.provision(version, silent).python.parent.parent for version in ("0.32.0", "0.33.0"))
    assert len({first, second, third}) == 3
    assert sorted(path.name for path in packages_of(second).glob("*.py")) == ["regex.py", "transformers.py"]
    assert stands_on(second) == stands_on(third) == (first, *stands_on(first))
    assert installed(second) == {"torch": "2.13.0", "setuptools": "81.0", "transformers": "5.9", "regex": "2026.1"}
    shutil.rmtree(first)
    assert cache.get("0.32.0") is None
    assert cache.provision("0.32.0", silent).version == "0.32.0"
    assert cache.provision("0.28.0", silent).version == "0.28.0"
    assert installer.calls.count("base") == 1
