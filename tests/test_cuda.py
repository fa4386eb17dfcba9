"""The CUDA device on a real Hopper GPU. One GPU is enough: ranks share it, each with its part of the SMs."""

from __future__ import annotations

import importlib
import os
import signal
import time

import ml_dtypes
import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.bench import cuda_gemm
from kosmos_raw.build import sm90
from kosmos_raw.checks.operators import Case
from kosmos_raw.checks.validate import arena_bytes, merge, run_all
from kosmos_raw.errors import KosmosError, WaitError
from tests.sm90 import layouts
from tests.test_layers_mxfp8 import check_mlp


def _missing() -> str | None:
    try:
        cupy = importlib.import_module("cupy")
        properties = cupy.cuda.runtime.getDeviceProperties(0)
    except Exception as error:  # no CuPy, CuPy for ROCm, no driver, no GPU
        return f"needs CuPy and an NVIDIA GPU ({type(error).__name__})"
    if (properties["major"], properties["minor"]) != (9, 0):
        return "needs a Hopper GPU (H100, H200)"
    return None


pytestmark = [pytest.mark.cuda, pytest.mark.skipif(_missing() is not None, reason=str(_missing()))]
TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def share_the_gpu(monkeypatch):
    monkeypatch.setenv("KOSMOS_SHARE_GPU", "1")
    monkeypatch.setenv("KOSMOS_TIMEOUT_S", str(TIMEOUT_S))


SHAPES = [
    # rows of every rank, N, K
    ((1,), 1, 1),
    ((300,), 200, 264),
    ((0,), 5, 8),
    ((700,), 1290, 1032),
    ((2048, 2048), 512, 512),
    ((257, 130), 200, 72),
    ((5, 0), 3, 7),
    ((0, 0), 4, 8),
    ((1300, 1301), 770, 2056),
    ((129, 128), 64, 0),
    ((300, 0, 1), 130, 264),
    ((700, 701, 699), 385, 520),
    ((0, 0, 0, 250), 97, 264),
]


def _check(cases, ranks):
    options = {"device": "cuda", "mode": "threads", "arena_bytes": arena_bytes(cases)}
    for case, *of_ranks in zip(cases, *kr.launch(run_all, cases, ranks=ranks, **options), strict=True):
        outcome = merge(of_ranks)
        assert outcome.passed and outcome.bitwise_repeat, (case, outcome.problems)


@pytest.mark.parametrize("policy", ["one_way", "fixed", "two_way", "beside"])
@pytest.mark.parametrize("arena", [False, True], ids=["copied", "in_arena"])
def test_ag_gemm_matches_oracle(policy, arena):
    for ranks in range(1, 5):
        cases = [
            Case(rows, n, k, policy=policy, movers=movers if ranks > 1 else None, arena=arena, seed=ranks)
            for rows, n, k in SHAPES
            if len(rows) == ranks
            for movers in (None, 1, 7)
        ]
        _check(cases, ranks)


@pytest.mark.parametrize("policy", ["one_way", "fixed"])
def test_gemm_rs_matches_oracle(policy):
    for ranks in range(1, 5):
        cases = [
            Case(rows, n, k, op="gemm_rs", policy=policy, movers=movers, seed=ranks)
            for rows, n, k in SHAPES
            if len(rows) == ranks
            for movers in (None, 1, 7)
        ]
        _check(cases, ranks)


@pytest.mark.parametrize("policy", ["one_way", "fixed", "two_way", "beside"])
@pytest.mark.parametrize("arena", [False, True], ids=["copied", "in_arena"])
def test_bulk_rs_matches_oracle(policy, arena):
    for ranks in range(1, 5):
        cases = [
            Case(rows, n, k, "bulk_rs", policy, movers=movers if ranks > 1 else None, arena=arena, seed=ranks)
            for rows, n, k in SHAPES
            if len(rows) == ranks
            for movers in (None, 1, 7)
        ]
        _check(cases, ranks)


SUMS = [
    # rows of every rank, width, shape of the product
    ((700, 701), 1032, (770, 1290, 264)),
    ((5, 0), 3, (1, 1, 1)),
    ((300, 0, 1), 520, (130, 97, 72)),
    ((900, 30, 600, 7), 2056, (384, 512, 1024)),
    ((120,) * 8, 1032, (200, 136, 64)),
]


def _sums(comm, rows, width, shape, policy, movers):
    """Bits of sums of BF16 rows, and weight gradients of all kinds beside them."""
    m, n, k = shape
    xs = [np.random.default_rng((q, width)).standard_normal((sum(rows), width), np.float32) for q in range(comm.ranks)]
    xs = [np.where(np.abs(x) < 0.1, np.float32(-0.0), x).astype(ml_dtypes.bfloat16) for x in xs]
    first = sum(rows[: comm.rank])
    want = xs[0][first : first + rows[comm.rank]].astype(np.float32)
    for x in xs[1:]:
        want += x[first : first + rows[comm.rank]].astype(np.float32)
    want = want.astype(ml_dtypes.bfloat16).view(np.uint16)
    rng, xp = np.random.default_rng((comm.rank, 99)), comm.device.xp
    a, b, was = (rng.integers(-1, 2, of).astype(np.float32) for of in ((k, m), (k, n), (m, n)))
    given = [xp.asarray(y.astype(ml_dtypes.bfloat16).view(np.uint16)) for y in (xs[comm.rank], a, b)]
    for accumulate in (False, True):
        for dtype in (np.float32, ml_dtypes.bfloat16):
            there, out = was.astype(dtype), xp.full(want.shape, 0x7FA5, np.uint16)
            c = xp.asarray(there if dtype is np.float32 else there.view(np.uint16))
            options = {"rows": rows, "policy": policy, "movers": movers, "accumulate": accumulate, "split": 1}
            kr.bulk_rs(comm, *given, out=out, c=c, **options)
            comm.synchronize()
            assert np.array_equal(out.get(), want), (rows, policy, movers)
            exact = (a.T @ b + (was if accumulate else 0)).astype(dtype)
            assert np.array_equal(c.get(), exact if dtype is np.float32 else exact.view(np.uint16)), (rows, policy)
    return True


@pytest.mark.parametrize("movers", [None, 1, 5])
@pytest.mark.parametrize("policy", ["one_way", "beside"])
def test_bulk_rs_adds_in_rank_order_whoever_moves(policy, movers):
    for rows, width, shape in SUMS:
        options = {"ranks": len(rows), "device": "cuda", "mode": "threads", "arena_bytes": 64 << 20}
        assert all(kr.launch(_sums, rows, width, shape, policy, movers, **options))


def test_processes_match_oracle():
    cases = [Case((250, 251), 130, 72), Case((0, 300), 96, 40, policy="fixed")]
    outcomes = kr.launch(run_all, cases, ranks=2, device="cuda", mode="processes", arena_bytes=64 << 20)
    for of_ranks in zip(*outcomes, strict=True):
        assert merge(of_ranks).passed, merge(of_ranks).problems


def test_mxfp8_layers_multiply_what_is_quantised():
    check_mlp((60, 71), 2, "float32", device="cuda", mode="threads", arena_bytes=64 << 20)


def _bits(comm, calls):
    rng = np.random.default_rng(5)
    shards = rng.standard_normal((comm.ranks, 1000, 1032), np.float32).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((1290, 1032), np.float32).astype(ml_dtypes.bfloat16)
    xp = comm.device.xp
    a, b = (xp.asarray(x.view(np.uint16)) for x in (shards[comm.rank], b))
    first, out = None, xp.empty((comm.ranks * 1000, 1290), np.uint16)
    for call in range(calls):
        out[...] = 0x7FA5
        kr.ag_gemm(comm, a, b, out=out, movers=1 + call % 20, policy=("one_way", "fixed")[call % 2])
        comm.synchronize()
        first = out.copy() if first is None else first
        assert bool((out == first).all()), call
    return first.get()


def test_a_hundred_calls_give_the_same_bits():
    one, two = kr.launch(_bits, 100, ranks=2, device="cuda", mode="threads", arena_bytes=64 << 20)
    assert np.array_equal(one, two)


@pytest.mark.skipif(sm90.missing() is not None, reason=str(sm90.missing()))
def test_every_layout_width_and_tail_is_exact():
    (count,) = kr.launch(layouts.exact, ranks=1, device="cuda", mode="threads", arena_bytes=1 << 21)
    assert count == len(layouts.EXACT) * len(layouts.KERNELS) * 2


def _call(comm, rows=300):
    rng = np.random.default_rng(comm.rank)
    shapes = ((rows, 64), (200, 64))
    a, b = (rng.standard_normal(s, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16) for s in shapes)
    kr.ag_gemm(comm, comm.device.xp.asarray(a), comm.device.xp.asarray(b))
    comm.synchronize()


SPIN = """
extern "C" __global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {}
}
"""


def _second_stream(comm):
    """Milliseconds from the start of a large product until another stream's kernel has run, and until its own end."""
    cp = comm.device.cupy
    problem = cuda_gemm.Problem(comm, cuda_gemm.Shape("large", 32768, 7168, 8192))
    spin, other, done = cp.RawKernel(SPIN, "spin"), cp.cuda.Stream(non_blocking=True), cp.cuda.Event()
    for _ in range(2):  # the first loads both
        with comm.device.stream:
            start = comm.device.record()
            problem.run(problem.planned())
            end = comm.device.record()
        with other:
            spin((32,), (1024,), (np.int64(100_000),))
            done.record()
        comm.synchronize()
        done.synchronize()
    return cp.cuda.get_elapsed_time(start, done), cp.cuda.get_elapsed_time(start, end)


def test_a_second_streams_work_fits_beside_a_capped_kernel():
    options = {"ranks": 1, "device": "cuda", "mode": "threads", "arena_bytes": 1 << 21}
    ((beside, capped),) = kr.launch(_second_stream, workgroups=100, **options)
    ((behind, whole),) = kr.launch(_second_stream, **options)
    text = (
        f"another kernel ends after {beside:.3f} of {capped:.3f} ms with 100 WGs, {behind:.3f} of {whole:.3f} with all"
    )
    assert beside < 0.2 * capped, text
    assert behind > 0.9 * whole, text  # a WG of ours leaves no registers on its SM: it is the cap that makes room


def _different(comm):
    with pytest.raises(WaitError, match="different call"):
        _call(comm, rows=300 + comm.rank)
    comm.rebuild()
    _call(comm)
    return True


def test_different_calls_are_reported_and_rebuilt():
    assert kr.launch(_different, ranks=2, device="cuda", mode="threads", arena_bytes=64 << 20) == [True, True]


def _killed(comm):
    _call(comm)
    comm.barrier()
    comm.device.launches_together = False  # processes need not meet, so the survivor's kernel is what waits
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(3):
            _call(comm)
    except KosmosError as error:
        raise RuntimeError(f"survivor after {time.monotonic() - start:.1f} s: {error}") from None


def test_a_killed_rank_is_named_and_the_gpu_stays_usable(monkeypatch):
    monkeypatch.setenv("KOSMOS_TIMEOUT_S", "20")  # taking a killed process off the GPU can hold up the others
    start = time.monotonic()
    with pytest.raises((KosmosError, RuntimeError)) as raised:
        kr.launch(_killed, ranks=2, device="cuda", mode="processes", arena_bytes=64 << 20)
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", []), str(raised.value.__cause__)])
    assert "survivor after" in text and "rank 1" in text, text
    assert time.monotonic() - start < 60
    assert kr.launch(_different, ranks=2, device="cuda", mode="threads", arena_bytes=64 << 20) == [True, True]


def test_bench_checks_and_measures(tmp_path):
    shapes = [cuda_gemm.Shape("small", 1000, 1304, 520), cuda_gemm.Shape("large", 2048, 2048, 1024)]
    (rows,) = kr.launch(cuda_gemm.run, shapes, ranks=1, device="cuda", mode="threads", arena_bytes=1 << 21)
    assert all(row.ms["planned"] > 0 and 0.05 < row.ratio < 20 and row.over_bound <= 1 for row in rows)
    cuda_gemm.write_csv(rows, tmp_path / "samples.csv")
    assert len((tmp_path / "samples.csv").read_text().splitlines()) > 2 * 2 * 9
