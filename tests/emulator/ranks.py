"""All ranks of one ag_gemm in this process: buffers, params structs and the exact answer."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

from kosmos_raw import emulator
from kosmos_raw.build import gfx950
from kosmos_raw.build.params import AG_GEMM, MAX_RANKS, POLICIES, SIGNALS, WAIT_RECORD
from kosmos_raw.device.base import Tile
from kosmos_raw.ops.arguments import fill_pulls
from kosmos_raw.plan.ag_gemm import plan_ag_gemm
from kosmos_raw.plan.crew import Grid

TILE = Tile(256, 256)
CLOCK = 10**8  # ticks a second
BF16 = ml_dtypes.bfloat16


@cache
def ag_gemm_module() -> emulator.Module:
    return emulator.Module(gfx950.code_object("ag_gemm").text)


def address(x: np.ndarray) -> int:
    return x.ctypes.data


class AgGemmRanks:
    """Operands are small integers, so that every sum is exact in FP32 and its bf16 rounding is known to the bit."""

    def __init__(
        self,
        rows: list[int],
        n: int,
        k: int,
        wgs: int,
        seed: int = 0,
        policy: str = "one_way",
        limit_s: int = 60,
        queues: int = 1,
        trace_events: int = 0,
    ) -> None:
        self.plan = plan_ag_gemm(rows, n, k, Grid((TILE,), wgs), policy=policy, queues=queues)
        self.rng = np.random.default_rng(seed)
        self.ranks = len(rows)
        p = self.plan
        every = range(self.ranks)
        self.signals = [np.zeros(1, SIGNALS) for _ in every]
        self.counters = [np.zeros(2 * p.counter_words, np.uint32) for _ in every]
        self.words = [np.zeros(2, np.uint32) for _ in every]  # abort, host_abort
        self.record = [np.zeros(1, WAIT_RECORD) for _ in every]
        self.shards = [np.zeros((r, k), BF16) for r in rows]
        self.b = [np.zeros((n, k), BF16) for _ in every]
        self.gathered = [np.zeros((p.m, k), BF16) for _ in every]
        self.c = [np.zeros((p.m + 1, p.padded_n), BF16) for _ in every]  # a row of guard behind
        self.trace = [np.zeros((wgs, trace_events, 2), np.uint64) for _ in every]
        self.params = [self._params(r, limit_s) for r in every]
        self.epoch = 0

    def _params(self, rank: int, limit_s: int) -> np.ndarray:
        plan, p = self.plan, np.zeros(1, AG_GEMM)
        g = p["g"]
        g["signals_of"][0, : self.ranks] = [address(s) for s in self.signals]
        g["abort"], g["host_abort"] = address(self.words[rank]), address(self.words[rank]) + 4
        g["record"], g["limit_ticks"] = address(self.record[rank]), limit_s * CLOCK
        g["rank"], g["ranks"], g["wgs"] = rank, self.ranks, plan.workgroups
        g["trace_events"] = events = self.trace[rank].shape[1]
        g["trace"] = address(self.trace[rank]) if events else 0
        p["counters"]["sets"], p["counters"]["per_set"] = address(self.counters[rank]), plan.counter_words
        p["counters"]["to_clear"] = plan.counter_words
        p["shard_of"][0, : self.ranks] = [address(s) for s in self.shards]
        p["gathered"], p["b"], p["c"] = (address(x[rank]) for x in (self.gathered, self.b, self.c))
        p["m"]["first"][0] = plan.first
        p["m"]["tile_m"], p["m"]["tile_rows_max"] = plan.tile.m, plan.tile_rows_max
        p["N"], p["K"], p["ldc"], p["tile_n"] = plan.n, plan.padded_k, plan.padded_n, plan.tile.n
        fill_pulls(p["pulls"], plan.pulls)
        p["movers"], p["policy"] = plan.crew.movers, POLICIES.index(plan.crew.policy)
        p["queues"] = plan.queues
        assert plan.first[MAX_RANKS] == plan.m
        return p

    def memory(self) -> list[np.ndarray]:
        """Everything that kernels share."""
        return [*self.signals, *self.counters, *self.words, *self.shards, *self.b, *self.gathered, *self.c]

    def new_inputs(self) -> None:
        for x in (*self.shards, *self.b):
            x[:] = self.rng.integers(-3, 4, x.shape)
        for c in self.c:
            c[:] = -7

    def launches(self, module: emulator.Module, ranks: list[int] | None = None) -> list[emulator.Launch]:
        """The next launch of each rank (or of some)."""
        self.epoch += 1
        for p in self.params:
            p["g"]["epoch"], p["g"]["call"] = self.epoch, 77 + self.epoch
        chosen = range(self.ranks) if ranks is None else ranks
        return [
            emulator.Launch(module, "ag_gemm_main", self.plan.workgroups, 512, self.params[r].tobytes(), r)
            for r in chosen
        ]

    def run(self, module: emulator.Module, options: emulator.Options | None = None) -> emulator.RunReport:
        """One launch of all ranks with new inputs; asserts the exact result and an untouched guard row."""
        self.new_inputs()
        report = emulator.run(self.launches(module), options, self.memory())
        self.check()
        assert report.masked_barriers == 0
        return report

    def wrong_elements(self) -> int:
        a = np.concatenate(self.shards).astype(np.float64)
        wrong = 0
        for c, b in zip(self.c, self.b, strict=True):
            exact = (a @ b.astype(np.float64).T).astype(BF16)
            wrong += int((c[:-1, : self.plan.n].view(np.uint16) != exact.view(np.uint16)).sum())
        return wrong

    def check(self) -> None:
        assert not any(w.any() for w in self.words), self.record
        assert self.wrong_elements() == 0
        assert all((c[-1] == BF16(-7)).all() for c in self.c)
