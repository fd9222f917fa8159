"""Which night a run belongs to. Pure.

A night is named for its morning and begins the evening before, at 18:00: what starts at 23:30 and what starts at 02:00 is one night.
"""

from __future__ import annotations

from datetime import date, datetime, timedelta, tzinfo

__all__ = ["night_of"]

_EVENING = timedelta(hours=6)
"""From the evening on to midnight."""


def night_of(started_at: str, zone: tzinfo | None) -> date:
    """Of `2026-11-22T03:45:16Z`, as the clocks of `zone` have it (None: this machine's). Raises ValueError for other texts."""
    return (datetime.fromisoformat(started_at).astimezone(zone).replace(tzinfo=None) + _EVENING).date()
