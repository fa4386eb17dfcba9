"""Calls that are made again: they launch without planning, with the caller's present data, until workspace moves."""

from __future__ import annotations

import importlib

import ml_dtypes
import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.build.params import AG_GEMM
from kosmos_raw.ranks import prepared

M, N, K = 96, 40, 72
ADDRESS = lambda array: array.ctypes.data  # noqa: E731


def _random(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def _calls(comm, rng):
    """(call, its arrays to refill, its output) of each operator that remembers."""
    x, dy = comm.empty((M // comm.ranks, K)), comm.empty((M // comm.ranks, K))
    w, v = np.empty((N, K), x.dtype), np.empty((K, N), x.dtype)
    full, b = np.empty((M, K), x.dtype), np.empty((N, K), x.dtype)
    y, dx, z = np.empty((M, N), x.dtype), np.empty((M, N), x.dtype), np.empty((M // comm.ranks, N), x.dtype)
    return [
        (lambda: kr.ag_gemm(comm, x, w, out=y), (x, w), y, "ag_gemm"),
        (lambda: kr.ag_gemm_dgrad(comm, dy, v, out=dx), (dy, v), dx, "ag_gemm_dgrad"),
        (lambda: kr.gemm_rs(comm, full, b, out=z, transport="push"), (full, b), z, "gemm_rs"),
    ]


def _again(comm):
    rng = np.random.default_rng(comm.rank)
    for call, inputs, out, name in _calls(comm, rng):
        module, planned = importlib.import_module(f"kosmos_raw.ops.{name}"), []
        plan_of = module.grid_of
        module.grid_of = lambda *given, plan_of=plan_of, planned=planned: planned.append(1) or plan_of(*given)
        try:
            results = []
            for repeat in range(4):
                for array in inputs:
                    array[...] = _random(np.random.default_rng((comm.rank, repeat % 2, len(array))), *array.shape)
                out[...] = np.float32("nan")
                comm.barrier()
                call()
                results.append(out.view(np.uint16).copy())
                if repeat in (1, 2):  # new, then moved: calls that are known may hold addresses of workspace
                    comm.local(f"{name} test", 4096 << repeat)
        finally:
            module.grid_of = plan_of
        assert len(planned) == 2, (module.OP, planned)  # the first call, and that after the workspace has moved
        assert np.array_equal(results[0], results[2]) and np.array_equal(results[1], results[3])
        assert not np.array_equal(results[0], results[1])
    return True


@pytest.mark.parametrize("mode", ["processes"])
def test_a_call_is_planned_once_and_uses_the_present_data(mode):
    assert all(kr.launch(_again, ranks=2, device="cpu", mode=mode))


def test_other_arrays_and_options_are_other_calls():
    a, b = np.zeros((4, 8), np.uint16), np.zeros((4, 8), np.uint16)
    keys = [
        prepared.key_of("op", ADDRESS, arrays, *options)
        for arrays in ((a, b), (b, a), (a, b[:2]), (a, b.view(np.float16)), (a, b[:, ::2]))
        for options in ((None,), (1,))
    ]
    assert len(set(keys)) == len(keys) and prepared.key_of("op", ADDRESS, (a, b), None) == keys[0]


def test_what_is_remembered_is_bounded():
    known = prepared.Remembered()
    for i in range(3 * prepared.MOST):
        known.keep(i, prepared.Prepared("op", np.zeros(1, AG_GEMM), 0, 0, print))
        assert known.get(i) is not None
    assert len(known._known) <= prepared.MOST
    known.forget()
    assert known.get(3 * prepared.MOST - 1) is None


def _uneven(comm):
    rng = np.random.default_rng(comm.rank)
    widths = (24, 72, 40)
    a, b = _random(rng, 50, widths[comm.rank]), _random(rng, 30, widths[comm.rank])
    with pytest.raises(ValueError, match="widths is"):
        kr.gemm_rs(comm, a, b, widths=(8, 8, 8))
    got = kr.gemm_rs(comm, a, b, widths=widths, transport="push").astype(np.float64)
    want = sum(x.astype(np.float64) @ y.astype(np.float64).T for x, y in comm.allgather((a, b)))
    first = sum((17, 17, 16)[: comm.rank])
    assert np.allclose(got, want[first : first + len(got)], atol=0.02 * np.abs(want).max())
    with pytest.raises(kr.WaitError, match="different call"):
        kr.gemm_rs(comm, a, b, transport="push")
    return True


def test_ranks_may_contract_over_different_widths_if_they_say_so():
    assert all(kr.launch(_uneven, ranks=3, device="cpu", mode="threads"))
