"""Bisection over releases, then commits: `bisect`."""
