"""Operators in MXFP8 on the CPU device: values, bits, what moves, errors; and as where tiles know BF16 alone."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.build import report
from kosmos_raw.checks.operators import CHECKED, Case
from kosmos_raw.checks.validate import Outcome, arena_bytes, merge, run_all
from kosmos_raw.device.base import Tile
from kosmos_raw.device.cuda import CudaDevice
from kosmos_raw.device.hip import HipDevice
from kosmos_raw.ops.quantize import dequantize
from kosmos_raw.plan.ag_gemm import plan_ag_gemm, plan_ag_gemm_dgrad, plan_ag_gemm_grads
from kosmos_raw.plan.bulk import plan_bulk_ag, plan_bulk_rs
from kosmos_raw.plan.crew import Grid
from kosmos_raw.plan.gemm_rs import plan_gemm_rs
from kosmos_raw.plan.shapes import BF16_FORMAT, MXFP8_FORMAT
from tests import programs

BF16 = ml_dtypes.bfloat16
SHAPES = [
    # rows of every rank, N, K
    ((97,), 100, 72),
    ((97, 95), 130, 72),
    ((5, 0), 3, 7),
    ((0, 0), 4, 8),
    ((300, 1, 0, 2), 98, 200),
    ((0, 0, 0, 250), 97, 264),
    ((64, 128, 32, 96), 96, 128),
    ((33, 97, 1, 0, 96, 0, 3, 130), 70, 129),
]


def outcomes_of(cases: list[Case]) -> list[Outcome]:
    options = {"mode": "threads", "workgroups": 4, "arena_bytes": arena_bytes(cases)}
    outcomes = kr.launch(run_all, cases, ranks=cases[0].ranks, **options)
    return [merge(of_ranks) for of_ranks in zip(*outcomes, strict=True)]


def check(cases: list[Case]) -> None:
    for case, outcome in zip(cases, outcomes_of(cases), strict=True):
        assert outcome.passed and outcome.bitwise_repeat, (case, outcome.problems)


def cases(op: str, ranks: int) -> list[Case]:
    found = [
        Case(rows, n, k, op, policy, arena=i % 2 == 1, seed=ranks + i, iters=1, dtype="mxfp8")
        for rows, n, k in SHAPES
        if len(rows) == ranks
        for i, policy in enumerate(("one_way", "two_way", "fixed"))
    ]
    if op == "gemm_rs" and ranks > 1:
        found += [replace(case, transport="push") for case in found[::2]]
    return found


@pytest.mark.parametrize("op", CHECKED)
def test_matches_the_product_of_what_is_quantised(op):
    """By FP32 sums and one rounding, whatever the ranks, rows and padding."""
    for ranks in (1, 2, 4, 8):
        check(cases(op, ranks))


def test_cut_contractions():
    check([Case((97, 400), 98, 130, "bulk_rs", split=split, iters=1, dtype="mxfp8") for split in (2, 3)])


# -- as on sm_90a


@pytest.mark.parametrize("op", CHECKED)
def test_movers_make_bf16_where_tiles_need_it(op, bf16_tiles):
    for ranks in (1, 4):
        check(cases(op, ranks)[::2])


def gaussian(seed: object, shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(BF16)


def weight_of_many_calls(comm: kr.Communicator) -> dict[str, tuple[list[int], bool]]:
    """Of operators, with a weight that is reused and with one that is not: how many matrices three calls make BF16 of,
    and whether bits are equal; also once the weight has been quantised anew."""
    rows, made = (5, 70), []
    launch_plain = comm.launch_plain
    comm.launch_plain = lambda op, params: (made.append(op), launch_plain(op, params))[1]  # type: ignore[method-assign]
    x, q = gaussian(comm.rank, (rows[comm.rank], 100)), kr.quantize_mxfp8
    whole, other = gaussian((comm.rank, 1), (sum(rows), 100)), gaussian((comm.rank, 2), (sum(rows), 40))
    weights = [gaussian((comm.rank, i), (27, 100)) for i in (3, 4)]  # 27: gemm_rs pads it
    turned = [gaussian((comm.rank, i), (100, 27)) for i in (5, 6)]
    calls = {
        "ag_gemm": (1, weights, lambda w: kr.ag_gemm(comm, q(comm, x), w, rows=rows)),
        "gemm_rs": (1, weights, lambda w: kr.gemm_rs(comm, q(comm, whole), w, rows=rows)),
        "bulk_ag": (0, turned, lambda w: kr.bulk_ag(comm, q(comm, x, 0), q(comm, whole), w, rows=rows)[0]),
        "ag_gemm_grads": (
            0,
            turned,
            lambda w: kr.ag_gemm_grads(comm, *q(comm, x, (1, 0)), w, q(comm, other, 0, groups=rows), rows=rows)[0],
        ),
    }
    found = {}
    for op, (axis, sources, call) in calls.items():
        counts, bits = [], []
        for reused in (True, False):
            made.clear()
            w = q(comm, sources[0], axis, reused=reused)
            bits.append([call(w).copy() for _ in range(3)])
            counts.append(made.count("dequantize_mxfp8"))
            q(comm, sources[1], axis, out=w)
            bits[-1].append(call(w).copy())
        found[op] = counts, all(np.array_equal(a, b) for a, b in zip(*bits, strict=True)), np.array_equal(*bits[0][2:])
    return found


def test_a_reused_weight_is_made_bf16_once(bf16_tiles):
    for found in kr.launch(weight_of_many_calls, ranks=2, mode="threads", workgroups=4):
        others = {"ag_gemm": 1, "gemm_rs": 1, "bulk_ag": 1, "ag_gemm_grads": 3}  # factors of a call, but for the weight
        for op, more in others.items():
            assert found[op] == ([1 + 3 * more, 3 * (1 + more)], True, False), op


def every_code(comm: kr.Communicator) -> bool:
    """All codes beside all scales that BF16 holds times any code, of lines whose number is no multiple of anything."""
    codes, lines = np.arange(256, dtype=np.uint8), np.arange(3, 247, dtype=np.uint8)
    x = kr.MxArray.empty(comm, (len(lines), 256))
    x.elements[:] = codes
    x.scales[:] = 127
    x.scales[:, : len(lines)] = lines[:, None]
    got = np.empty(x.elements.shape, BF16)
    dequantize(comm, x, comm.device.address_of(got), 256)
    return np.array_equal(got.astype(np.float64), x.dequantize(), equal_nan=True)


def test_every_element_is_exact_as_bf16():
    assert kr.launch(every_code, ranks=2, mode="threads", workgroups=3) == [True, True]


def keeps_nothing(comm: kr.Communicator) -> bool:
    return kr.quantize_mxfp8(comm, np.ones((3, 5), BF16), reused=True).values is None


def test_tiles_of_mxfp8_need_nothing_kept():
    assert kr.launch(keeps_nothing, ranks=1, mode="threads") == [True]


def test_devices_know_whether_they_multiply_it():
    for device in (CudaDevice, HipDevice):
        assert device.multiplies_mxfp8 == bool(report.target_constants(device.target)["MULTIPLIES_MXFP8"])


# -- what only some data show


def extreme(comm: kr.Communicator) -> bool:
    """128 ones of scale 2^-127 times 128 of 2^127, as rows and as columns of both sides."""
    low, high = [], []
    for to, byte in ((low, 0), (high, 254)):
        for axis in (1, 0):
            x = kr.MxArray.empty(comm, (128, 128), axis)
            x.elements[:] = 0x38
            x.scales[:] = byte
            to.append(x)
    rows = kr.ag_gemm(comm, low[0], high[0]).view(BF16)
    same = [bool((c == 128).all()) for c in (rows, kr.gemm_wgrad(comm, high[1], low[1]).view(BF16))]
    return all(same) and rows.shape == (128 * comm.ranks, 128)


def test_extreme_scales_meet():
    assert kr.launch(extreme, ranks=2, mode="threads", workgroups=4) == [True, True]


# -- what moves

ROWS, N, K = (128, 256), 96, 256


def moved(comm: kr.Communicator, kernel: str, call: str) -> int:
    """Bytes that a call reads of peers, on all ranks together."""
    q, own = kr.quantize_mxfp8, slice(sum(ROWS[: comm.rank]), sum(ROWS[: comm.rank + 1]))
    dy, w, x, other = (np.ones(s, BF16) for s in ((sum(ROWS), K), (K, N), (sum(ROWS), N), (N, K)))
    mine, kw = dy[own], {"rows": ROWS}
    mx = {name: q(comm, m) for name, m in (("dy", dy), ("mine", mine), ("other", other))}
    mx_columns = {name: q(comm, m, 0) for name, m in (("mine", mine), ("w", w), ("x", x[own]))}
    whole = {name: q(comm, m, 0, groups=ROWS) for name, m in (("dy", dy), ("x", x))}
    calls = {
        "ag_gemm": lambda: kr.ag_gemm(comm, mine, other, **kw),
        "ag_gemm mx": lambda: kr.ag_gemm(comm, mx["mine"], mx["other"], **kw),
        "dgrad": lambda: kr.ag_gemm_dgrad(comm, mine, w, **kw),
        "dgrad mx": lambda: kr.ag_gemm_grads(comm, mx["mine"], mx_columns["mine"], mx_columns["w"], whole["x"], **kw),
        "bulk_ag": lambda: kr.bulk_ag(comm, x[own], dy, w, **kw),
        "bulk_ag mx": lambda: kr.bulk_ag(comm, mx_columns["x"], mx["dy"], mx_columns["w"], **kw),
        "gemm_rs": lambda: kr.gemm_rs(comm, dy, other, transport="pull", **kw),
        "gemm_rs mx": lambda: kr.gemm_rs(comm, mx["dy"], mx["other"], transport="pull", **kw),
        "bulk_rs": lambda: kr.bulk_rs(comm, x, dy, x, **kw),
        "bulk_rs mx": lambda: kr.bulk_rs(comm, x, whole["dy"], whole["x"], **kw),
    }
    before = comm.kernel(kernel).moved_bytes
    comm.barrier()
    calls[call]()
    comm.barrier()  # ranks are threads: the library counts for all
    return comm.kernel(kernel).moved_bytes - before


GRID, M = Grid((Tile(96, 96),), 4), sum(ROWS)
MX, BF = {"form": MXFP8_FORMAT}, {"form": BF16_FORMAT}
MOVES = {  # operator: MXFP8 over BF16, and for both of them kernel, call and plan
    "ag_gemm": (
        33 / 64,
        ("ag_gemm_mxfp8", "ag_gemm mx", plan_ag_gemm(ROWS, N, K, GRID, **MX)),
        ("ag_gemm", "ag_gemm", plan_ag_gemm(ROWS, N, K, GRID, **BF)),
    ),
    "ag_gemm_dgrad": (  # dY is gathered twice
        2 * 33 / 64,
        ("ag_gemm_grads", "dgrad mx", plan_ag_gemm_grads(ROWS, N, K, N, GRID)),
        ("ag_gemm_dgrad", "dgrad", plan_ag_gemm_dgrad(ROWS, N, K, GRID, split=1)),
    ),
    "bulk_ag": (
        33 / 64,
        ("bulk_ag_mxfp8", "bulk_ag mx", plan_bulk_ag(ROWS, N, (M, N, K), GRID, **MX)),
        ("bulk_ag", "bulk_ag", plan_bulk_ag(ROWS, N, (M, N, K), GRID, **BF)),
    ),
    "gemm_rs": (
        1,
        ("gemm_rs_mxfp8", "gemm_rs mx", plan_gemm_rs(ROWS, N, K, GRID, **MX)),
        ("gemm_rs", "gemm_rs", plan_gemm_rs(ROWS, N, K, GRID, **BF)),
    ),
    "bulk_rs": (
        1,
        ("bulk_rs_mxfp8", "bulk_rs mx", plan_bulk_rs(ROWS, N, (K, N, M), GRID, **MX)),
        ("bulk_rs", "bulk_rs", plan_bulk_rs(ROWS, N, (K, N, M), GRID, **BF)),
    ),
}


@pytest.mark.parametrize("op", MOVES)
def test_bytes_moved(op):
    """Gathers move elements and scales, 33/64 of BF16; what is added is BF16. Counted as it is moved, on the CPU."""
    ratio, *both = MOVES[op]
    counts = []
    for kernel, call, plan in both:
        count = set(kr.launch(moved, kernel, call, ranks=2, mode="threads", workgroups=4))
        assert count == {plan.moved_bytes}
        counts += count
    assert counts[0] == ratio * counts[1] > 0


# -- sums into a buffer, and errors


def accumulates(comm: kr.Communicator) -> bool:
    """Two micro batches into a float32 buffer whose rows are no multiples of 8."""
    rows, n, k = (40, 3), 21, 50
    rng = np.random.default_rng(comm.rank)
    c, total = np.zeros((k, n), np.float32), np.zeros((k, n))
    for batch in range(2):
        dy = programs.ternary(np.random.default_rng(batch), (sum(rows), k))
        own = dy[sum(rows[: comm.rank]) :][: rows[comm.rank]]
        w, x = programs.ternary(rng, (k, n)), programs.ternary(rng, (sum(rows), n))
        q = kr.quantize_mxfp8
        factors = q(comm, own), q(comm, own, 0), q(comm, w, 0), q(comm, x, 0, groups=rows)
        dx, same = kr.ag_gemm_grads(comm, *factors, rows=rows, c=c, accumulate=True)
        total += dy.astype(np.float64).T @ x.astype(np.float64)
        if same is not c or not np.array_equal(
            dx.view(BF16).astype(np.float64), dy.astype(np.float64) @ w.astype(np.float64)
        ):
            return False
    return np.array_equal(c, total)


def test_weight_gradients_accumulate():
    assert kr.launch(accumulates, ranks=2, mode="threads", workgroups=4) == [True, True]


def bad(comm: kr.Communicator) -> dict[str, str]:
    a, b = np.ones((8, 64), BF16), np.ones((16, 64), BF16)
    mx, columns, w = kr.quantize_mxfp8(comm, a), kr.quantize_mxfp8(comm, a, 0), kr.quantize_mxfp8(comm, b)
    halves = kr.quantize_mxfp8(comm, a, 0, groups=(4, 4))
    strided = replace(mx, elements=np.zeros((8, 256), np.uint8)[:, ::2])
    turned, x = (kr.quantize_mxfp8(comm, np.ones(shape, BF16), 0) for shape in ((64, 16), (16, 64)))
    wrong = {
        "mixed": lambda: kr.ag_gemm(comm, mx, b),
        "axis": lambda: kr.ag_gemm(comm, columns, w),
        "k": lambda: kr.gemm_rs(comm, mx, kr.quantize_mxfp8(comm, b[:, :32].copy())),
        "groups": lambda: kr.bulk_rs(comm, a, columns, halves),
        "strided": lambda: kr.ag_gemm(comm, strided, w),
        "dgrad": lambda: kr.ag_gemm_dgrad(comm, mx, columns),
        "shard": lambda: kr.bulk_ag(comm, halves, mx, turned),
        "x": lambda: kr.ag_gemm_grads(comm, mx, columns, turned, x),
        "rows": lambda: kr.ag_gemm(comm, mx, w, rows=(8, 8, 8)),
        "out": lambda: kr.ag_gemm(comm, mx, w, out=np.ones((8, 16), BF16)),
        "beside": lambda: kr.ag_gemm(comm, mx, w, policy="beside"),
    }
    return {name: str(programs.error_of(call)[1]) for name, call in wrong.items()}


def test_bad_arguments_are_explained():
    wants = {
        "mixed": "b is a ndarray, want an MxArray",
        "axis": "a is quantised along axis 0, want 1",
        "k": "want the same K",
        "groups": "in groups of (4, 4)",
        "strided": "contiguous",
        "dgrad": "ag_gemm_grads",
        "shard": "want this rank's rows in one",
        "x": "x is (16, 64), over axis 0 in groups of (16,)",
        "rows": "want 2 counts",
        "out": "out has shape (8, 16), want (16, 16)",
        "beside": "'beside'",
    }
    for messages in kr.launch(bad, ranks=2, mode="threads"):
        for name, text in wants.items():
            assert text in messages[name], (name, messages[name])
