"""The text of the shipped ag_gemm, on emulated ranks: exact in every kind of memory and every interleaving tried."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kosmos_raw import emulator
from kosmos_raw.build import gfx950
from kosmos_raw.emulator import Options
from kosmos_raw.trace.events import decode_rank

from .ranks import CLOCK, AgGemmRanks, ag_gemm_module

pytestmark = [pytest.mark.emulated, pytest.mark.skipif(gfx950.missing() is not None, reason=str(gfx950.missing()))]

LATE = ("direct", "lds", "loads", "stores")


@pytest.fixture(scope="module")
def module() -> emulator.Module:
    began = time.perf_counter()
    loaded = ag_gemm_module()
    seconds = time.perf_counter() - began
    print(f"\nag_gemm: {loaded.translation.instructions} instructions, translated and compiled in {seconds:.1f} s")
    assert loaded.warnings == ()
    return loaded


@pytest.fixture(scope="module")
def big() -> Iterator[AgGemmRanks]:
    """Eight ranks of eight workgroups: M 2048, N 512, K 512."""
    yield AgGemmRanks([256] * 8, 512, 512, 8)


@pytest.mark.parametrize(
    "options",
    [
        Options(threads=2),
        Options(caches="xcd", threads=2),
        Options(late_memory=LATE, threads=2),
        Options(caches="workgroup", late_memory=LATE, late_by_chance=True, preempt=4, seed=1, threads=2),
    ],
    ids=["plain", "caches", "late memory", "all by chance"],
)
def test_eight_ranks(module, big, options, capsys):
    for _ in range(2):  # the second launch meets counters, signals and buffers that the first one used
        report = big.run(module, options)
    with capsys.disabled():
        print(f"\n  8 ranks x 8 WGs, 2048 x 512 x 512, {options.caches} caches, late {options.late}: {report}")


def test_twenty_preemption_seeds_give_the_same_bits(module):
    ranks = AgGemmRanks([256, 256, 256], 256, 192, 4)
    ranks.new_inputs()
    for seed in range(1, 21):
        for c in ranks.c:
            c[:] = -7
        emulator.run(
            ranks.launches(module),
            Options(preempt=3, seed=seed, late_memory=LATE, late_by_chance=True, outside="garbage"),
        )
        ranks.check()


@pytest.mark.parametrize("rows", [[300, 0, 17], [256, 511, 1, 60, 0], [100], [5, 7]], ids=str)
@pytest.mark.parametrize("policy", ["one_way", "fixed"])
def test_ragged_rows_and_other_counts_of_ranks(module, rows, policy):
    ranks = AgGemmRanks(rows, 264, 72, 3, seed=len(rows), policy=policy)
    for caches in ("none", "xcd"):
        ranks.run(module, Options(caches=caches, seed=5, preempt=5, late_memory=LATE, late_by_chance=True))


QUEUE_OF_COLUMN = [next(q for q in range(4) if column < 5 * (q + 1) // 4) for column in range(5)]


@pytest.mark.parametrize("policy", ["one_way", "two_way"])
def test_a_queue_for_each_die(module, policy):
    """A WG takes another die's columns only when its own are all claimed; whichever ids dies get, every tile is built
    once, exactly."""
    ranks = AgGemmRanks([256, 300, 0], 1280, 64, 10, policy=policy, queues=4, trace_events=64)
    dies, own, early = set(), 0, 0
    tiles = (1 + 2) * ranks.plan.columns
    for seed in range(6):
        for trace in ranks.trace:
            trace[:] = 0
        ranks.run(module, Options(seed=seed, preempt=3 * (seed > 0), caches="xcd" if seed % 2 else "none"))
        for rank in range(3):
            wgs = decode_rank(ranks.trace[rank], CLOCK).wgs
            dies.add((rank, tuple(wg.die for wg in wgs)))
            taken = [(s, wg.die % 4, QUEUE_OF_COLUMN[s.part]) for wg in wgs for s in wg.spans if s.kind == "tile"]
            places = [(s.chunk, s.row, s.part) for s, _, _ in taken]
            assert len(places) == len(set(places)) == tiles
            last_claim = {queue: max(s.t_claimed for s, _, q in taken if q == queue) for queue in range(4)}
            for span, home, queue in taken:
                own += home == queue
                early += home != queue and span.t_claimed < last_claim[home]
    assert early <= 3  # a claim is marked a moment after it is made
    assert len(dies) > 6 and own > 3 * 6 * tiles // 2


def test_dies_are_dealt_in_turn_without_a_seed(module):
    ranks = AgGemmRanks([256], 512, 64, 10, trace_events=8)
    ranks.run(module)
    assert [wg.die for wg in decode_rank(ranks.trace[0], CLOCK).wgs] == [n % 8 for n in range(10)]


def test_a_missing_rank_makes_the_others_leave(module):
    ranks = AgGemmRanks([256, 256], 256, 64, 3, limit_s=1)
    ranks.new_inputs()
    began = time.perf_counter()
    emulator.run(ranks.launches(module, [0]), Options(limit_seconds=20))
    assert time.perf_counter() - began < 10
    assert ranks.words[0][0] and ranks.record[0]["reason"][0] == 1


# ---- each fence and wait in the text is needed ----
@pytest.mark.parametrize("fence", ["device write-back", "device invalidate"])
def test_a_missing_fence_is_noticed(module, fence):
    ranks = AgGemmRanks([256] * 3, 256, 64, 4, limit_s=2)

    def wrong(seed: int) -> bool:
        ranks.new_inputs()
        options = Options(caches="workgroup", seed=seed, preempt=3, limit_seconds=5, without_fences=(fence,))
        emulator.run(ranks.launches(module), options, ranks.memory())
        return any(w[0] for w in ranks.words) or ranks.wrong_elements() > 0

    assert any(wrong(seed) for seed in range(1, 5))


def _inputs_after_the_start(module: emulator.Module, *without: str) -> int:
    """Rank 0 starts, and may have read its peers' shards ahead of time; then they are written, and the peers start."""
    ranks = AgGemmRanks([256] * 3, 256, 64, 4)
    ranks.new_inputs()
    launches = ranks.launches(module)
    with emulator.Machine(Options(caches="xcd", limit_seconds=20, without_fences=without)) as machine:
        machine.remember(ranks.memory())
        first = machine.start(launches[:1])
        for shard in ranks.shards[1:]:
            shard[:] = ranks.rng.integers(-3, 4, shard.shape)
        rest = machine.start(launches[1:])
        first.wait()
        rest.wait()
    return ranks.wrong_elements()


def test_the_fence_behind_a_peers_start_is_needed(module):
    assert _inputs_after_the_start(module) == 0
    assert _inputs_after_the_start(module, "system invalidate") > 0


def _without(pattern: str) -> emulator.Module:
    """The text with every place of a pattern turned into s_nop."""
    text, places = re.subn(pattern, "s_nop 0", gfx950.code_object("ag_gemm").text.read_text())
    assert places
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ag_gemm.s"
        path.write_text(text)
        return emulator.Module(path)


def test_deleted_counted_waits_are_noticed():
    """The waits of the tile's loop, which say how many direct loads may be on their way."""
    broken = _without(r"s_waitcnt vmcnt\(8\)")
    ranks = AgGemmRanks([256, 256], 256, 512, 3)
    ranks.new_inputs()
    emulator.run(ranks.launches(broken), Options())
    assert ranks.wrong_elements() == 0  # memory that answers at once hides it
    emulator.run(ranks.launches(broken), Options(late_memory=LATE))
    assert ranks.wrong_elements() > 0
