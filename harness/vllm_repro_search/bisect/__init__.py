"""Bisection over releases, commits, or versions of several components: `bisect`."""
