"""The text of the shipped gemm_rs, on emulated ranks: exact with caches that hold back what is not stored past them."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np
import pytest

from kosmos_raw import emulator
from kosmos_raw.build import gfx950
from kosmos_raw.build.params import GEMM_RS, SENTINEL, SIGNALS, WAIT_RECORD
from kosmos_raw.device.base import Tile
from kosmos_raw.emulator import Options
from kosmos_raw.plan.crew import Grid
from kosmos_raw.plan.gemm_rs import plan_gemm_rs

pytestmark = [pytest.mark.emulated, pytest.mark.skipif(gfx950.missing() is not None, reason=str(gfx950.missing()))]

BF16 = ml_dtypes.bfloat16
CLOCK = 10**8  # ticks a second


@cache
def module() -> emulator.Module:
    return emulator.Module(gfx950.code_object("gemm_rs").text)


def address(x: np.ndarray) -> int:
    return int(x.ctypes.data)


class GemmRsRanks:
    """All ranks of gemm_rs in this process. Operands are small integers, so that every sum is exact but for roundings
    that are known to the bit."""

    def __init__(self, most_rows: int, ranks: int, n: int, k: int, wgs: int):
        self.ranks, self.n, self.k, self.wgs = ranks, n, k, wgs
        every = range(ranks)
        self.signals = [np.zeros(1, SIGNALS) for _ in every]
        self.counters = [np.zeros(6, np.uint32) for _ in every]
        self.words = [np.zeros(2, np.uint32) for _ in every]  # abort, host_abort
        self.record = [np.zeros(1, WAIT_RECORD) for _ in every]
        self.a = [np.zeros((most_rows, k), BF16) for _ in every]
        self.b = [np.zeros((n, k), BF16) for _ in every]
        self.c = [np.zeros((most_rows + 1, n), BF16) for _ in every]
        self.staging = [np.full((2, most_rows, n), SENTINEL, np.uint16) for _ in every]
        self.turn = self.dirty = 0
        self.rng = np.random.default_rng(0)

    def run(self, rows: list[int], options: Options) -> None:
        """One launch of all ranks with new inputs; asserts every element."""
        plan = plan_gemm_rs(rows, self.n, self.k, Grid((Tile(256, 256),), self.wgs))
        self.turn += 1
        for x in (*self.a, *self.b):
            x[:] = self.rng.integers(-3, 4, x.shape)
        for c in self.c:
            c[:] = -7
        launches = []
        for rank in range(self.ranks):
            p = np.zeros(1, GEMM_RS)
            g = p["g"]
            g["signals_of"][0, : self.ranks] = [address(s) for s in self.signals]
            g["abort"], g["host_abort"] = address(self.words[rank]), address(self.words[rank]) + 4
            g["record"], g["limit_ticks"] = address(self.record[rank]), 60 * CLOCK
            g["rank"], g["ranks"], g["wgs"] = rank, self.ranks, self.wgs
            g["epoch"], g["call"] = self.turn, 77 + self.turn
            p["counters"]["sets"], p["counters"]["per_set"] = address(self.counters[rank]), 3
            p["counters"]["to_clear"] = 3
            p["a"], p["b"], p["c"] = (address(x[rank]) for x in (self.a, self.b, self.c))
            p["staging"]["of"][0, : self.ranks] = [address(s) for s in self.staging]
            p["staging"]["buffer_words"] = self.staging[0][0].nbytes // 16
            p["staging"]["dirty_words"], p["staging"]["turn"] = self.dirty // 16, self.turn
            p["m"]["first"][0] = plan.first
            p["m"]["tile_m"], p["m"]["tile_rows_max"] = plan.tile.m, plan.tile_rows_max
            p["N"], p["K"], p["tile_n"] = plan.padded_n, plan.padded_k, plan.tile.n
            p["movers"], p["max_movers"] = plan.crew.movers, plan.crew.max_movers
            p["band_tile_rows"], p["slices"] = plan.band_tile_rows, plan.slices
            launches.append(emulator.Launch(module(), "gemm_rs_main", self.wgs, 512, p.tobytes(), rank))
        self.dirty = plan.partial_bytes
        memory = [
            *(*self.signals, *self.counters, *self.words),
            *(*self.a, *self.b, *self.c, *self.staging),
        ]
        emulator.run(launches, options, memory)
        assert not any(w.any() for w in self.words), self.record
        parts = [
            (a.astype(np.float32) @ b.astype(np.float32).T).astype(BF16) for a, b in zip(self.a, self.b, strict=True)
        ]
        total = sum(part.astype(np.float32) for part in parts).astype(BF16)
        for rank, c in enumerate(self.c):
            own = slice(plan.first[rank], plan.first[rank + 1])
            assert np.array_equal(c[: rows[rank]].view(np.uint16), total[own].view(np.uint16)), rank
            assert (c[rows[rank] :] == BF16(-7)).all()


@pytest.mark.parametrize(
    "options",
    [
        Options(threads=2),
        Options(caches="xcd", threads=2),
        Options(caches="workgroup", late_memory=("direct", "lds", "loads", "stores"), preempt=4, seed=1, threads=2),
    ],
    ids=["plain", "caches", "late memory"],
)
def test_shapes_that_change_and_empty_chunks(options):
    ranks = GemmRsRanks(600, 3, 264, 192, 4)
    for rows in ([200, 200, 200], [300, 0, 41], [1, 2, 0], [0, 512, 80], [200, 200, 200]):
        ranks.run(rows, options)
