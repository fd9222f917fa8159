"""Self-contained HTML pages: one file, no network, and whatever a log holds stays text."""
