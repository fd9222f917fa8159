"""The browser of the report's tests."""

from tests.core.report.conftest import browser, opened

__all__ = ["browser", "opened"]
