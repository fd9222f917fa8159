"""What installers wrote down about the files of a package, and which of them are gone or cut since.

Every installed distribution has a RECORD of its files with their sizes and hashes. To look at each takes about 0.1 s for a dependency
set (30,000 files), which is little beside the boot of a server that would die of one that is missing. A release's own sources are read
as well, in 0.3 s: somebody may have tried a change in them, and what runs then is not what was released.
"""

from __future__ import annotations

import csv
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

__all__ = ["count_distributions", "damage"]


def count_distributions(packages: Path) -> int | None:
    """The distributions in a folder of packages that was just made, for `damage` to compare with later.

    None where the records do not fit even now, as two distributions that write the same file make them: then they prove nothing.
    """
    return None if damage(packages) else len(list(packages.glob("*.dist-info/RECORD")))


def damage(packages: Path, distributions: int | None = None, *, sources: bool = False) -> str:
    """The first thing that is wrong in a folder of packages, as half a sentence; empty where all is there.

    distributions: how many there were when it was whole, None where nobody counted. sources: whether the hashes of Python's files are
    compared too. Compiled files do not count, as Python
    writes them again; nor do scripts, which lie outside the folder and are changed when it gets its name.
    """
    records = sorted(packages.glob("*.dist-info/RECORD"))
    if distributions is not None and len(records) != distributions:
        return f"{len(records)} of {distributions} packages are in {packages}"
    files = 0
    for record in records:
        try:
            with record.open(newline="", encoding="utf-8") as text:
                rows = [row for row in csv.reader(text) if len(row) == 3 and row[2].isdigit()]
        except (OSError, ValueError, csv.Error):
            return f"{record} cannot be read"
        for name, digest, size in rows:
            if name.startswith(("..", "/")) or name.endswith(".pyc"):
                continue
            files += 1
            if (found := _size(packages / name)) is None:
                return f"{name} is missing"
            if found != int(size):
                return f"{name} has {found:,} bytes, not {int(size):,}"
            if sources and name.endswith(".py") and digest not in ("", _digest(packages / name)):
                return f"{name} was changed"
    return "" if files else f"no package is in {packages}"


def _digest(path: Path) -> str:
    """As a RECORD writes it."""
    return "sha256=" + urlsafe_b64encode(sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
