"""What ranks run in the tests. At the top of a module, so that spawned processes can import it."""

from __future__ import annotations

import os
import signal
import time

import ml_dtypes
import numpy as np

import kosmos_raw as kr

BF16 = ml_dtypes.bfloat16


def on_host(array):
    """As a NumPy array."""
    return np.array(array.get() if hasattr(array, "get") else array)


def ternary(rng, shape):
    """Values -1, 0, 1: sums of up to 256 products are exact in bf16."""
    return rng.integers(-1, 2, shape).astype(np.float32).astype(BF16)


def back_to_back(comm, calls, seed):
    """Calls of all operators in turn, with changing data, shapes, crews and policies; every element of every call is
    exact. Returns how many."""
    rng = np.random.default_rng(seed)  # the same on every rank
    kept = []
    for call in range(calls):
        rows = [int(r) for r in rng.integers(0, 40, comm.ranks) * (rng.random(comm.ranks) < 0.8)]
        n, k = int(rng.integers(1, 120)), int(rng.integers(1, 120))
        one = EXACT[int(rng.integers(len(EXACT)))]
        policy = ("one_way", "fixed", "two_way")[int(rng.integers(3))]
        movers = int(rng.integers(1, comm.workgroups)) if comm.ranks > 1 else None
        results = one(comm, (seed, call), rows, n, k, policy=policy, movers=movers)
        kept = [*kept[-3:], results]
        for results in kept:  # a result is the caller's: later calls must not touch it
            for got, want in results:
                assert np.array_equal(got.astype(np.float32), want), (call, one.__name__, rows, n, k, policy, movers)
    return calls


def exact_ag_gemm(comm, seed, rows, n, k, **options):
    """[(result, what it must be)] of one call with data from `seed`."""
    shards = [ternary(np.random.default_rng((*seed, q)), (r, k)) for q, r in enumerate(rows)]
    b = ternary(np.random.default_rng((*seed, 100 + comm.rank)), (n, k))
    c = kr.ag_gemm(comm, shards[comm.rank], b, rows=rows, **options)
    return [(c, np.concatenate(shards).astype(np.float32) @ b.astype(np.float32).T)]


def exact_gemm_rs(comm, seed, rows, n, k, **options):
    m, own = sum(rows), slice(sum(rows[: comm.rank]), sum(rows[: comm.rank + 1]))
    given = []
    for q in range(comm.ranks):
        rng = np.random.default_rng((*seed, q))
        given.append((ternary(rng, (m, k)), ternary(rng, (n, k))))
    c = kr.gemm_rs(comm, *given[comm.rank], rows=rows, **options)
    want = sum(a[own].astype(np.float32) @ b.astype(np.float32).T for a, b in given)
    return [
        (c, want.astype(BF16).astype(np.float32))
    ]  # partials are exact, and so is their sum before its one rounding


def exact_ag_gemm_dgrad(comm, seed, rows, n, k, **options):
    shards = [ternary(np.random.default_rng((*seed, q)), (r, k)) for q, r in enumerate(rows)]
    b = ternary(np.random.default_rng((*seed, 100 + comm.rank)), (k, n))
    a = np.concatenate(shards)
    gathered = np.zeros_like(a)
    c = kr.ag_gemm_dgrad(comm, shards[comm.rank], b, rows=rows, gathered=gathered, split=1 + seed[-1] % 3, **options)
    return [(c, a.astype(np.float32) @ b.astype(np.float32)), (gathered, a.astype(np.float32))]


def exact_bulk_ag(comm, seed, rows, n, k, **options):
    x = ternary(np.random.default_rng(seed), (sum(rows), k))
    own = slice(sum(rows[: comm.rank]), sum(rows[: comm.rank + 1]))
    rng = np.random.default_rng((*seed, comm.rank))
    a, b = ternary(rng, (int(rng.integers(1, 150)), n)), ternary(rng, (n, int(rng.integers(1, 150))))
    c, gathered = kr.bulk_ag(comm, x[own], a, b, rows=rows, **options)
    return [(c, a.astype(np.float32) @ b.astype(np.float32)), (gathered, x.astype(np.float32))]


def exact_bulk_rs(comm, seed, rows, n, k, **options):
    xs = [ternary(np.random.default_rng((*seed, q)), (sum(rows), n)) for q in range(comm.ranks)]
    own = slice(sum(rows[: comm.rank]), sum(rows[: comm.rank + 1]))
    rng = np.random.default_rng((*seed, 100 + comm.rank))
    a, b = ternary(rng, (k, int(rng.integers(1, 150)))), ternary(rng, (k, int(rng.integers(1, 150))))
    was = ternary(rng, (a.shape[1], b.shape[1])).astype((BF16, np.float32)[int(rng.integers(2))])
    c, accumulate = was.copy(), bool(rng.integers(2))
    out, c = kr.bulk_rs(
        comm, xs[comm.rank], a, b, rows=rows, c=c, accumulate=accumulate, split=1 + seed[-1] % 3, **options
    )
    want = a.astype(np.float32).T @ b.astype(np.float32) + (was.astype(np.float32) if accumulate else 0)
    return [(out, sum(x[own].astype(np.float32) for x in xs)), (c, want)]


EXACT = [exact_ag_gemm, exact_gemm_rs, exact_ag_gemm_dgrad, exact_bulk_ag, exact_bulk_rs]


def small_call(comm, rows=6, k=16):
    rng = np.random.default_rng(1)
    shards = [ternary(rng, (rows, k)) for _ in range(comm.ranks)]
    b = ternary(rng, (5, k))
    c = kr.ag_gemm(comm, shards[comm.rank], b)
    want = np.concatenate(shards).astype(np.float32) @ b.astype(np.float32).T
    assert np.array_equal(c.astype(np.float32), want)
    return True


def error_of(call):
    """Seconds until `call` raised, and what. Fails when it does not raise."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return time.monotonic() - start, error
    raise AssertionError("nothing was raised")


def killed_rank(comm, victim, how):
    """Rank `victim` goes between two calls; the others report what their next call raised, and how soon."""
    small_call(comm)
    if comm.rank == victim:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise ValueError("this rank has had enough")
        os._exit(3)
    seconds, error = error_of(lambda: [small_call(comm) for _ in range(3)])
    raise RuntimeError(f"survivor {comm.rank} {seconds:.3f} {type(error).__name__} {error}")


def absent_rank(comm, absent):
    """Rank `absent` does not come to a call; the others give up; after rebuild() all is well."""
    small_call(comm)
    result = None
    if comm.rank != absent:
        seconds, error = error_of(lambda: small_call(comm))
        refused = error_of(lambda: small_call(comm))[1]
        result = (seconds, error.record, type(refused).__name__)
    comm.barrier()
    comm.rebuild()
    for _ in range(3):
        small_call(comm)
    return result


def different_calls(comm, what):
    """Rank 0 calls with another shape than the rest."""
    small_call(comm)
    odd = {"rows": {"rows": 7}, "k": {"k": 24}}[what] if comm.rank == 0 else {}
    _, error = error_of(lambda: small_call(comm, **odd))
    comm.rebuild()
    small_call(comm)
    return error.record


def mixed_memory(comm):
    """Rank 0 passes an array of the arena, the others do not: their offsets differ."""
    x = comm.empty((4, 8))
    x[...] = 1
    a = x if comm.rank == 0 else np.ones((4, 8), BF16)
    _, error = error_of(lambda: kr.ag_gemm(comm, a, np.ones((4, 8), BF16)))
    return error.record


def bad_arguments(comm):
    """(error type, message) of each wrong call; a right call works after each."""
    a, b = np.ones((4, 16), BF16), np.ones((8, 16), BF16)
    both = np.ones((4 * comm.ranks + 4, 16), BF16)
    ok = [4] * comm.ranks
    wrong = {
        "k": lambda: kr.ag_gemm(comm, a, np.ones((8, 24), BF16)),
        "dims": lambda: kr.ag_gemm(comm, a[0], b),
        "dtype": lambda: kr.ag_gemm(comm, a.astype(np.float32), b),
        "list": lambda: kr.ag_gemm(comm, [[1.0]], b),
        "rows_count": lambda: kr.ag_gemm(comm, a, b, rows=[*ok, 4]),
        "rows_negative": lambda: kr.ag_gemm(comm, a, b, rows=[-1] * comm.ranks),
        "rows_own": lambda: kr.ag_gemm(comm, a, b, rows=[5] * comm.ranks),
        "out_shape": lambda: kr.ag_gemm(comm, a, b, out=np.ones((4, 8), BF16)),
        "out_overlap": lambda: kr.ag_gemm(comm, both[:4], b, out=both[: 4 * comm.ranks, :8]),
        "policy": lambda: kr.ag_gemm(comm, a, b, policy="no_way"),
        "order": lambda: kr.ag_gemm(comm, a, b, order="random"),
        "movers_none": lambda: kr.ag_gemm(comm, a, b, movers=0),
        "movers_all": lambda: kr.ag_gemm(comm, a, b, movers=comm.workgroups),
        "arena": lambda: kr.ag_gemm(comm, np.ones((40000, 1024), BF16), np.ones((8, 1024), BF16)),
    }
    messages = {}
    for name, call in wrong.items():
        error = error_of(call)[1]
        messages[name] = (type(error).__name__, str(error))
        assert small_call(comm)
    return messages


def arena_calls(comm):
    """Arrays of empty(): same offset everywhere, used without a copy, freed and taken again."""
    first = comm.empty((6, 16))
    second = comm.empty((3, 8))
    offsets = comm.allgather([comm.device.address_of(x) - comm.arena.address(comm.rank) for x in (first, second)])
    assert offsets.count(offsets[0]) == comm.ranks
    rng = np.random.default_rng(5)
    shards = ternary(rng, (comm.ranks, 6, 16))
    first[...] = shards[comm.rank]
    before = comm.arena.workspace_used
    c = kr.ag_gemm(comm, first, shards[0])
    assert comm.arena.workspace_used == before  # no copy was made
    want = shards.reshape(-1, 16).astype(np.float32) @ shards[0].astype(np.float32).T
    assert np.array_equal(c.astype(np.float32), want)
    comm.free(second)
    third = comm.empty((3, 8))
    assert comm.device.address_of(third) == comm.device.address_of(second)
    errors = [error_of(lambda: comm.free(np.ones(3)))[1], error_of(lambda: comm.empty((1 << 40,)))[1]]
    return [(type(error).__name__, str(error)) for error in errors]


def traced(comm):
    with comm.tracing(events_per_row=256) as trace:
        small_call(comm, rows=300, k=64)
    return trace.events


def world(comm):
    return comm.rank, comm.ranks, os.getpid()
