"""What a sample proves of a share: Wilson's bounds, and how large a count may really be.

E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927. The
bounds hold for small samples and for shares near 0 and 1, where the normal ones do not.
"""

from __future__ import annotations

import numpy as np

from tocsin.stream_rules.reading.tensor_rows import Doubles


def at_least(hits: Doubles, of: Doubles, z: float) -> Doubles:
    """The smallest true shares that the samples do not refute, by `z` standard deviations.

    0 where there is no sample. With a `z` of 0 the shares themselves.
    """
    n = np.maximum(of, 1.0)
    share = hits / n
    square = z * z / n
    spread = z * np.sqrt(share * (1 - share) / n + square / (4 * n))
    bound = (share + square / 2 - spread) / (1 + square)
    return np.where(of > 0, np.maximum(bound, 0.0), 0.0)


def at_most(hits: Doubles, of: Doubles, z: float) -> Doubles:
    """The largest true shares that the samples do not refute; 1 where there is no sample."""
    return 1 - at_least(of - hits, of, z)


def count_at_most(count: float, z: float) -> float:
    """The largest mean for which a count as small as this one is no surprise (Poisson)."""
    return count + z * z / 2 + z * float(np.sqrt(count + z * z / 4))
