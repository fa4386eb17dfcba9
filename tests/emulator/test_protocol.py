"""Ranks that hand data to each other: right code passes in every kind of memory; each fence and wait is needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kosmos_raw import emulator
from kosmos_raw.emulator import Options

from .launching import params
from .text import changed_module, compiled, compiled_module

pytestmark = pytest.mark.emulated

RANKS, ROUNDS, WORDS = 3, 4, 512
LATE = ("direct", "lds", "loads", "stores")
CRUEL = [
    Options(),
    Options(threads=2),
    Options(caches="xcd"),
    Options(caches="workgroup", threads=2),
    Options(late_memory=LATE),
    Options(late_memory=LATE, late_by_chance=True, seed=3),
    *(Options(caches="xcd", late_memory=LATE, late_by_chance=True, preempt=3, seed=seed) for seed in range(1, 7)),
]


def value(rank: int, rounds: np.ndarray, i: np.ndarray) -> np.ndarray:
    return (
        np.uint32(rank << 24)
        ^ (rounds << 16)[:, None].astype(np.uint32)
        ^ (i * np.uint64(2654435761)).astype(np.uint32)[None]
    ).astype(np.uint32)


def exchange(module: emulator.Module, options: Options, kernel: str = "exchange") -> tuple[int, emulator.RunReport]:
    """Runs all ranks; how many words are wrong."""
    inbox, out = np.zeros((RANKS, WORDS), np.uint32), np.zeros((RANKS, ROUNDS, WORDS), np.uint32)
    full, taken = np.zeros((RANKS, 32), np.uint32), np.zeros((RANKS, 32), np.uint32)
    launches = []
    for r in range(RANKS):
        right, left = (r + 1) % RANKS, (r - 1) % RANKS
        given = params(inbox[r], inbox[right], full[r], full[right], taken[r], taken[left], out[r], r, ROUNDS)
        launches.append(emulator.Launch(module, kernel, 2, 256, given, r))
    report = emulator.run(launches, options, [inbox, out, full, taken])
    rounds, i = np.arange(1, ROUNDS + 1, dtype=np.uint32), np.arange(WORDS, dtype=np.uint64)
    wrong = sum(int((out[r] != value((r - 1) % RANKS, rounds, i)).sum()) for r in range(RANKS))
    return wrong, report


@pytest.mark.parametrize("options", CRUEL, ids=str)
def test_exchange_is_right(options):
    wrong, report = exchange(compiled_module("exchange"), options)
    assert wrong == 0 and report.masked_barriers == 0


def noticed(module: emulator.Module, options: list[Options], kernel: str = "exchange") -> bool:
    """Wrong data, or a wait that never ends."""
    for o in options:
        try:
            if exchange(module, o, kernel)[0]:
                return True
        except emulator.RunError:
            return True
    return False


CACHES = [Options(caches="xcd", seed=seed, limit_seconds=5) for seed in range(1, 5)]


@pytest.mark.parametrize("fence", ["system write-back", "system invalidate"])
def test_a_missing_fence_is_noticed(fence):
    module = compiled_module("exchange")
    assert exchange(module, Options(without_fences=(fence,)))[0] == 0  # memory without caches hides it
    assert noticed(module, [replace(o, without_fences=(fence,)) for o in CACHES])


def test_fences_of_too_small_a_scope_are_noticed():
    assert exchange(compiled_module("exchange"), Options(), "exchange_with_device_fences")[0] == 0
    assert noticed(compiled_module("exchange"), CACHES, "exchange_with_device_fences")


def test_a_flag_that_overtakes_the_write_back_is_noticed():
    """The wait between write-back and signal: some compilers forget it."""
    lines = compiled("exchange").read_text().split("\n")
    fences = [n for n, line in enumerate(lines) if "buffer_wbl2 sc0 sc1" in line]
    assert fences
    for first in fences:
        n = first + 1
        while "s_barrier" not in lines[n]:
            if "s_waitcnt" in lines[n]:
                lines[n] = "\ts_nop 0"
            n += 1
    module = changed_module("exchange", compiled("exchange").read_text(), "\n".join(lines))
    assert noticed(module, [Options(caches="xcd", preempt=3, seed=seed, limit_seconds=5) for seed in range(1, 9)])


@pytest.mark.parametrize("caches", ["xcd", "workgroup"])
def test_device_scope_is_enough_within_a_device(caches):
    for seed in range(4):
        wgs = 16
        counter, data, seen = np.zeros(32, np.uint32), np.zeros(64, np.uint32), np.zeros((wgs, wgs), np.uint32)
        launch = emulator.Launch(compiled_module("exchange"), "count", wgs, 64, params(counter, data, seen, wgs))
        emulator.run([launch], Options(caches=caches, seed=seed, limit_seconds=10), [counter, data])
        assert (seen == np.arange(wgs) + 100).all()


def test_launches_of_several_host_threads_run_at_once():
    """Each rank is started alone, as from a stream of its own, and waits for the others."""
    inbox, out = np.zeros((RANKS, WORDS), np.uint32), np.zeros((RANKS, ROUNDS, WORDS), np.uint32)
    full, taken = np.zeros((RANKS, 32), np.uint32), np.zeros((RANKS, 32), np.uint32)
    with emulator.Machine(Options(threads=2)) as machine:
        running = []
        for r in range(RANKS):
            right, left = (r + 1) % RANKS, (r - 1) % RANKS
            given = params(inbox[r], inbox[right], full[r], full[right], taken[r], taken[left], out[r], r, ROUNDS)
            running.append(machine.start([emulator.Launch(compiled_module("exchange"), "exchange", 2, 256, given, r)]))
        for r in running:
            r.wait()
    assert out.all()
