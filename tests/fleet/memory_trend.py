"""Estimate how fast a process's memory grows, and decide whether it grows.

The slope is Theil-Sen's: the median of the slopes between all pairs of points. A few outliers, or one step to a new
plateau, do not change it, but a steady growth does. Neighbouring samples of memory are not independent of each other,
so they are first reduced to the medians of consecutive blocks; without this the confidence interval would be far too
narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, sqrt
from statistics import median

BOUND_MB_H = 30.0
"""The largest growth of the web process's memory that is allowed, in MB per hour."""
WARM_UP = 1 / 3
"""Fraction of the samples that is not judged, because caches fill and the allocator gets its arenas."""
BLOCKS = 24
LEAST_BLOCKS = 8
Z_95 = 1.96
KB_PER_MB = 1024.0
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Sample:
    """Memory of one process at one time. The `pid` shows whether the process was replaced."""

    at_s: float
    kb: float
    pid: int = 0


@dataclass(frozen=True)
class Trend:
    """A slope in MB per hour with its 95 % confidence interval; `residual_mb` is the median distance from the line."""

    mb_per_hour: float
    low: float
    high: float
    residual_mb: float
    seconds: float
    """Time span of the judged samples, after warm-up."""

    @property
    def precision(self) -> float:
        """Return half the width of the confidence interval."""
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return (
            f"{self.mb_per_hour:+.1f} MB/h (95 %: {self.low:+.1f} to {self.high:+.1f}),"
            f" residual {self.residual_mb:.2f} MB over {self.seconds:.0f} s after warm-up"
        )


@dataclass(frozen=True)
class Judgement:
    """The answer to the question whether memory stays flat. `trend` is None if it could not be estimated."""

    holds: bool
    text: str
    trend: Trend | None = None


def estimate_trend(samples: Sequence[Sample]) -> Trend | None:
    """Fit a line to the samples after warm-up; return None if they are too few for `LEAST_BLOCKS` blocks."""
    judged = samples[int(len(samples) * WARM_UP) :]
    points = _reduce_to_blocks(judged)
    if len(points) < LEAST_BLOCKS:
        return None
    slopes = sorted((kb2 - kb1) / (at2 - at1) for (at1, kb1), (at2, kb2) in combinations(points, 2))
    slope = median(slopes)
    offset = median(kb - slope * at for at, kb in points)
    residual = median(abs(kb - slope * at - offset) for at, kb in points)
    low, high = _find_interval(slopes, len(points))
    hourly = SECONDS_PER_HOUR / KB_PER_MB
    span = judged[-1].at_s - judged[0].at_s
    return Trend(slope * hourly, low * hourly, high * hourly, residual / KB_PER_MB, span)


def _reduce_to_blocks(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Return the median time and median memory of each of at most `BLOCKS` consecutive blocks of equal size."""
    size = max(1, ceil(len(samples) / BLOCKS))
    blocks = [samples[at : at + size] for at in range(0, len(samples) - size + 1, size)]
    return [(median(one.at_s for one in block), median(one.kb for one in block)) for block in blocks]


def _find_interval(slopes: list[float], points: int) -> tuple[float, float]:
    """Return Sen's 95 % confidence interval: the slopes at the ranks that follow from Kendall's statistic."""
    half = Z_95 * sqrt(points * (points - 1) * (2 * points + 5) / 18) / 2
    middle = (len(slopes) - 1) / 2
    low, high = max(0, int(middle - half)), min(len(slopes) - 1, int(middle + half) + 1)
    return slopes[low], slopes[high]


def judge_memory(samples: Sequence[Sample], bound: float = BOUND_MB_H) -> Judgement:
    """Decide whether one process's memory stayed flat.

    It did if the upper end of the confidence interval is not above `bound`, because a larger growth is then improbable.
    If the process was replaced meanwhile or there are too few samples, the result does not hold either.
    """
    if len({one.pid for one in samples}) > 1:
        return Judgement(False, "cannot be judged: the process was replaced meanwhile")
    trend = estimate_trend(samples)
    if trend is None:
        return Judgement(False, f"cannot be judged: {len(samples)} samples are too few")
    if trend.mb_per_hour > bound:
        return Judgement(False, f"grows by {trend}; at most {bound:.0f}", trend)
    if trend.high > bound:
        return Judgement(False, f"cannot be judged: {trend} may be more than {bound:.0f}; soak it longer", trend)
    return Judgement(True, f"{trend}; at most {bound:.0f}", trend)
