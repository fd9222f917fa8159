"""The history of runs: rows made from reports, the store that keeps them, and what all nights together show."""
