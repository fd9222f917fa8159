"""Map of a scenario over releases: `versions`."""
