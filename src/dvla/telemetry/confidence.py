"""How sure a success rate is."""

from __future__ import annotations

import math

_Z = 1.959963984540054  # 97.5th percentile of the normal distribution


def success_interval(successes: int, episodes: int) -> tuple[float, float]:
    """95 % confidence interval of a success rate (Wilson's score interval, J. Am. Stat. Assoc. 22, 1927, p. 209).

    Unlike the textbook's plus-minus it stays within [0, 1] and means something for 0 or all of few episodes.
    """
    if episodes == 0:
        return 0.0, 1.0
    rate, spread = successes / episodes, _Z * _Z / episodes
    centre = (rate + spread / 2) / (1 + spread)
    reach = math.sqrt(rate * (1 - rate) * spread + spread * spread / 4) / (1 + spread)
    # The formula's own value at the ends, but for rounding:
    low = 0.0 if successes == 0 else centre - reach
    high = 1.0 if successes == episodes else centre + reach
    return low, high
