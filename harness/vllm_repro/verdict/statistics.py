"""What a number of boots supports, and what it does not.

One crash and one quiet boot prove nothing: a fix that does nothing would look the same half of the time or more. These functions put
a number on that. Method: exact (Clopper-Pearson) one-sided bounds for a binomial rate; `alpha` is the chance of being wrong, 5 %.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, comb, exp, fsum, lgamma, log, log1p

__all__ = ["clean_needed", "clean_streak", "excluded_rate", "fisher", "lower_bound"]

ALPHA = 0.05
_EXACT = 1_000


def _at_least(k: int, n: int, p: float) -> float:
    """Chance of k or more crashes in n boots of an engine that crashes with rate p, 0 < p < 1."""
    if n <= _EXACT:
        return sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
    # The ways to crash so often are more than a float holds; their logarithms are not.
    ways, win, lose = lgamma(n + 1), log(p), log1p(-p)
    return fsum(exp(ways - lgamma(i + 1) - lgamma(n - i + 1) + i * win + (n - i) * lose) for i in range(k, n + 1))


@lru_cache(256)
def lower_bound(crashed: int, boots: int, alpha: float = ALPHA) -> float:
    """The crash rate that `crashed` of `boots` supports at least: 5 of 5 supports 0.55, 1 of 1 only 0.05."""
    if not 0 <= crashed <= boots:
        raise ValueError(f"{crashed} crashes of {boots} boots")
    if crashed == 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):  # halves the interval each time: far below any printed digit
        middle = (low + high) / 2
        if _at_least(crashed, boots, middle) < alpha:
            low = middle
        else:
            high = middle
    return low


def excluded_rate(clean: int, alpha: float = ALPHA) -> float:
    """The crash rate above which `clean` quiet boots in a row would be a surprise: 3 exclude rates above 0.63."""
    return 1.0 if clean <= 0 else 1.0 - alpha ** (1.0 / clean)


def fisher(crashed: int, boots: int, other_crashed: int, other_boots: int) -> float:
    """Fisher's exact test, one-sided: the chance that so few of the crashes fall to the other side, where both sides crash alike.

    5 of 5 against 0 of 4 gives 0.008; 3 of 3 against 0 of 3 only 0.05.
    """
    total, crashes = boots + other_boots, crashed + other_crashed
    if not (0 <= crashed <= boots and 0 <= other_crashed <= other_boots):
        raise ValueError(f"{crashed} crashes of {boots} boots, {other_crashed} of {other_boots}")
    ways = (comb(other_boots, i) * comb(boots, crashes - i) for i in range(other_crashed + 1) if i <= crashes)
    return sum(ways) / comb(total, crashes)


def clean_needed(crashed: int, boots: int, alpha: float = ALPHA) -> int | None:
    """Quiet boots needed before "fixed" may be said, given that the unpatched engine died in `crashed` of `boots`.

    Enough that an engine which still crashes at the lower bound would be caught with 95 %. None where no number of boots helps.
    """
    rate = lower_bound(crashed, boots, alpha)
    if rate <= 0.0:
        return None
    if rate >= 1.0:
        return 1
    return max(1, ceil(log(alpha) / log(1.0 - rate) - 1e-9))


def clean_streak(crashed: int, boots: int, alpha: float = ALPHA) -> int | None:
    """Quiet boots in a row needed by whoever watches night after night, after `crashed` of `boots`. None where nothing crashed.

    A bug that dies now and then has a lucky streak sooner or later: one may begin after each death. So the j-th death leaves only
    alpha / (j (j + 1)) of the chance of being wrong, which adds up to alpha however long one watches: 5 of 5 asks for 9, 30 of 30 for
    5, 35 of 70 for 21. `clean_needed` is for a comparison that is made once.
    """
    rate = lower_bound(crashed, boots)
    if rate <= 0.0:
        return None
    if rate >= 1.0:
        return 1
    return max(1, ceil(log(alpha / (crashed * (crashed + 1))) / log(1.0 - rate) - 1e-9))
