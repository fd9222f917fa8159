"""Exact bounds on the rate of a crash, from a number of trials.

One crash and one quiet trial prove little: a fix that does nothing looks the same half of the time
or more. All bounds are exact, one-sided Clopper-Pearson bounds of a binomial rate; `alpha` is the
chance of being wrong, 5 %. After 5 crashes of 5 a fix needs 4 quiet trials, after 1 of 1 it needs
59.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, comb, exp, fsum, lgamma, log, log1p

ALPHA = 0.05
"""Chance that a bound is wrong."""


def _at_least(k: int, n: int, p: float) -> float:
    """Return the chance of k or more crashes in n trials at rate p, 0 < p < 1."""
    # Logarithms: the binomials of a long history do not fit into a float.
    ways, crash, clean = lgamma(n + 1), log(p), log1p(-p)
    return fsum(
        exp(ways - lgamma(i + 1) - lgamma(n - i + 1) + i * crash + (n - i) * clean)
        for i in range(k, n + 1)
    )


@lru_cache(256)
def lower_bound(crashed: int, trials: int, alpha: float = ALPHA) -> float:
    """Return the least crash rate that `crashed` of `trials` supports.

    5 of 5 supports 0.55; 1 of 1 only 0.05; no crash 0. alpha: chance that the true rate is lower.
    Raises `ValueError` for more crashes than trials.
    """
    if not 0 <= crashed <= trials:
        raise ValueError(f"{crashed} crashes of {trials} trials")
    if crashed == 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):  # halve the interval, far below any printed digit
        middle = (low + high) / 2
        if _at_least(crashed, trials, middle) < alpha:
            low = middle
        else:
            high = middle
    return low


def excluded_rate(clean: int, alpha: float = ALPHA) -> float:
    """Return the lowest crash rate that `clean` quiet trials exclude: 0.63 for 3, 1 for 0.

    alpha: chance that the exclusion is wrong.
    """
    return 1.0 if clean <= 0 else 1.0 - alpha ** (1.0 / clean)


def fisher(crashed: int, trials: int, other_crashed: int, other_trials: int) -> float:
    """Return the one-sided p of Fisher's exact test.

    It is the chance of at most `other_crashed` crashes in `other_trials`, if both sides have the
    same crash rate. 5 of 5 against 0 of 4 gives 0.008; 3 of 3 against 0 of 3 only 0.05. Raises
    `ValueError` for more crashes than trials.
    """
    total, crashes = trials + other_trials, crashed + other_crashed
    if not (0 <= crashed <= trials and 0 <= other_crashed <= other_trials):
        raise ValueError(f"{crashed} crashes of {trials} trials, {other_crashed} of {other_trials}")
    ways = (
        comb(other_trials, i) * comb(trials, crashes - i)
        for i in range(other_crashed + 1)
        if i <= crashes
    )
    return sum(ways) / comb(total, crashes)


def clean_needed(crashed: int, trials: int, alpha: float = ALPHA) -> int | None:
    """Return the quiet trials needed to call a bug fixed that crashed in `crashed` of `trials`.

    An engine that still crashes at the lower bound would then crash at least once, with 95 %
    confidence. Valid for one comparison. None if nothing crashed.
    """
    return _quiet_trials(lower_bound(crashed, trials), alpha)


def clean_streak(crashed: int, trials: int, alpha: float = ALPHA) -> int | None:
    """Return the quiet trials in a row that a nightly watch needs after `crashed` of `trials`.

    A quiet streak may begin by chance after each crash. So the j-th crash gets only
    alpha / (j (j + 1)) of the chance of being wrong, whose sum stays below alpha. 5 of 5 needs 9,
    30 of 30 needs 5, 35 of 70 needs 21. None if nothing crashed.
    """
    return (
        _quiet_trials(lower_bound(crashed, trials), alpha / (crashed * (crashed + 1)))
        if crashed
        else None
    )


def _quiet_trials(rate: float, alpha: float) -> int | None:
    """Return the quiet trials that exclude a crash rate; None for a rate of 0."""
    return ceil(log(alpha) / log(1.0 - rate)) if rate > 0.0 else None
