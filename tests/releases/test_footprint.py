"""What is said about an install before it starts."""

from __future__ import annotations

import itertools

import pytest

from vllm_repro.releases.footprint import Size, base_size, further_set_size, largest_install, release_size, set_size


def test_sizes_grow_with_what_must_be_fetched() -> None:
    for torch in ("2.11.0", "2.13.0", None):
        steps = [release_size(), release_size() + further_set_size(), release_size() + set_size(torch)]
        steps.append(steps[-1] + base_size(torch))
        for one, other in itertools.pairwise(steps):
            assert one.disk < other.disk
            assert one.download < other.download
            assert one.room < other.room
        assert largest_install().room >= steps[-1].room


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        (Size(120_000_000, 530_000_000), "about 530 MB (120 MB to download)"),
        (Size(1, 2) + Size(2_000_000_000, 5_000_000_000), "about 5.0 GB (2.0 GB to download)"),
        (
            Size(100_000_000, 500_000_000) + Size(200_000_000, 900_000_000, cuda=Size(1_000_000_000, 3_000_000_000)),
            "about 1.4 GB (300 MB to download), or 4.4 GB (1.3 GB) if pip finds only the CUDA build of torch,",
        ),
    ],
)
def test_a_size_as_it_is_said(size: Size, sentence: str) -> None:
    assert str(size) == sentence


def test_only_a_build_that_is_known_is_said_without_a_reservation() -> None:
    assert base_size("2.11.0").cuda is None
    assert base_size("2.13.0").cuda is not None
    assert base_size(None) == base_size("2.13.0")
