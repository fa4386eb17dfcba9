"""How everything here is timed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from statistics import median


def alternate(
    variants: Mapping[str, Callable[[], object]],
    *,
    warm_up: int = 10,
    timed: int = 25,
    rounds: int = 3,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each variant. Every round runs all of them, in an order shuffled anew for each repetition, so
    that clocks, caches and neighbours treat them alike. clock: time.process_time counts cores, not neighbours."""
    order = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for repetition in range(warm_up + timed):
            names = list(variants)
            order.shuffle(names)
            for name in names:
                start = clock()
                variants[name]()
                if repetition >= warm_up:
                    seconds[name].append(clock() - start)
    return {name: median(times) for name, times in seconds.items()}
