"""Calls that are made again: they launch without planning, with the caller's present data, until workspace moves."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.build.params import AG_GEMM
from kosmos_raw.ops import arguments
from kosmos_raw.ranks import prepared
from tests.programs import ternary

BF16 = ml_dtypes.bfloat16
ROWS, N, K = 24, 40, 72  # rows of each rank
ADDRESS = lambda array: array.ctypes.data  # noqa: E731


class _Given:
    """An argument with new data for each call: BF16, or MXFP8 along an axis."""

    def __init__(self, comm, shape, axis=None, *, groups=None, shared=False, reused=False):
        self.comm, self.shape, self.axis, self.groups, self.reused = comm, shape, axis, groups, reused
        if axis is not None:
            self.array = kr.MxArray.empty(comm, shape, axis, groups=groups, symmetric=shared)
        else:
            self.array = comm.empty(shape) if shared else np.empty(shape, BF16)

    def fill(self, *seed):
        drawn = ternary(np.random.default_rng((self.comm.rank, *seed)), self.shape)
        self.values = drawn.astype(np.float64)
        if self.axis is None:
            self.array[...] = drawn
        else:
            options = {"groups": self.groups, "reused": self.reused, "out": self.array}
            self.array = kr.quantize_mxfp8(self.comm, drawn, self.axis, **options)


def _calls(comm, mx, n=N, shared=True, reused=False):
    """Of each operator that remembers: call, what it is given, its results, and what must be in them."""
    m, every, own = ROWS * comm.ranks, (ROWS,) * comm.ranks, slice(ROWS * comm.rank, ROWS * (comm.rank + 1))
    dtype = np.uint16 if mx else BF16

    def shard(shape, axis):
        return _Given(comm, shape, axis if mx else None, shared=shared)

    def factor(shape, axis, groups=None):
        return _Given(comm, shape, axis if mx else None, groups=groups, reused=reused)

    def of_all(given):
        return comm.allgather(given.values)

    def products(a, b):
        return [x @ y.T for x, y in comm.allgather((a.values, b.values))]

    x, w, y = shard((ROWS, K), 1), factor((n, K), 1), np.empty((m, n), dtype)
    full, b, z = factor((m, K), 1), factor((n, K), 1), np.empty((ROWS, n), dtype)
    turned, dy, v = shard((ROWS, K), 0), factor((m, n), 1), factor((n, K), 0)
    dx, room = np.empty((m, K), dtype), np.empty((m, K), BF16)
    if mx:
        room = kr.MxArray.empty(comm, (m, K), 0, groups=every)
    partial, p, q = _Given(comm, (m, K), shared=shared), factor((m, n), 0, every), factor((m, K), 0, every)
    part, grad, alone = np.empty((ROWS, K), BF16), np.empty((n, K), dtype), np.empty((n, K), np.float32)
    calls = {
        "ag_gemm": (
            lambda: kr.ag_gemm(comm, x.array, w.array, out=y),
            (x, w),
            (y,),
            lambda: (np.concatenate(of_all(x)) @ w.values.T,),
        ),
        "gemm_rs": (
            lambda: kr.gemm_rs(comm, full.array, b.array, out=z, transport="push"),
            (full, b),
            (z,),
            lambda: (sum(products(full, b))[own],),
        ),
        "bulk_ag": (
            lambda: kr.bulk_ag(comm, turned.array, dy.array, v.array, out=dx, gathered=room),
            (turned, dy, v),
            (dx, room),
            lambda: (dy.values @ v.values, np.concatenate(of_all(turned))),
        ),
        "bulk_rs": (
            lambda: kr.bulk_rs(comm, partial.array, p.array, q.array, out=part, c=grad),
            (partial, p, q),
            (part, grad),
            lambda: (sum(of_all(partial))[own], p.values.T @ q.values),
        ),
        "gemm_wgrad": (
            lambda: kr.gemm_wgrad(comm, p.array, q.array, c=alone),
            (p, q),
            (alone,),
            lambda: (p.values.T @ q.values,),
        ),
    }
    if not mx:
        g, turned_w, back = shard((ROWS, K), None), factor((K, n), None), np.empty((m, n), BF16)
        calls["ag_gemm_dgrad"] = (
            lambda: kr.ag_gemm_dgrad(comm, g.array, turned_w.array, out=back),
            (g, turned_w),
            (back,),
            lambda: (np.concatenate(of_all(g)) @ turned_w.values,),
        )
    return calls


def _values(result):
    if isinstance(result, kr.MxArray):
        return result.dequantize()
    return (result if result.dtype == np.float32 else result.view(BF16)).astype(np.float64)


def _wipe(result):
    for array in prepared.parts_of(result):
        array.view(np.uint8)[...] = 0xFF  # NaNs


def _planned(comm, calls, repeats=3, moved=()):
    """Makes each call several times, every time with new data, and looks at its results. moved: repeats after which
    workspace moves. Returns: how often each call was planned."""
    found, launch = {}, comm.launch
    for name, (call, given, results, want) in calls.items():
        planned = []
        comm.launch = lambda *args, planned=planned, **kw: (planned.append(1), launch(*args, **kw))
        for repeat in range(repeats):
            for i, one in enumerate(given):
                one.fill(repeat, i)
            for result in results:
                _wipe(result)
            comm.barrier()
            call()
            for i, (got, exact) in enumerate(zip(results, want(), strict=True)):
                assert np.array_equal(_values(got), exact), (name, repeat, i)
            if repeat in moved:
                comm.local(f"{name} test", 4096 << repeat)
        found[name] = len(planned)
    comm.launch = launch
    return found


def _again(comm, mx):
    moved = (1, 2)  # new, then moved: calls that are known may hold addresses of workspace
    return _planned(comm, _calls(comm, mx), repeats=4, moved=moved)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("mx", [False, True], ids=["bf16", "mxfp8"])
def test_a_call_is_planned_once_and_uses_the_present_data(mx, ranks):
    for planned in kr.launch(_again, mx, ranks=ranks, device="cpu", mode="processes"):
        assert set(planned.values()) == {2}, planned  # the first call, and that after the workspace has moved


def _copied(comm, options):
    return _planned(comm, _calls(comm, **options))


ODD = {"n": 30}  # no row of which begins on 16 bytes
COPIES = [  # options of _calls, and which calls need no copy even so
    ({"mx": False, "shared": False}, "gemm_rs gemm_wgrad"),
    ({"mx": True, "shared": False}, "gemm_rs gemm_wgrad"),
    ({"mx": False, **ODD}, ""),
    ({"mx": True, **ODD}, "bulk_ag bulk_rs gemm_wgrad"),
]


@pytest.mark.parametrize(("options", "without"), COPIES)
def test_what_is_copied_for_a_launch_is_planned_every_time(options, without):
    for planned in kr.launch(_copied, options, ranks=2, device="cpu", mode="processes"):
        assert {name for name, count in planned.items() if count == 1} == set(without.split())
        assert set(planned.values()) <= {1, 3}


@pytest.mark.parametrize(
    ("reused", "without"), [(False, ""), (True, "gemm_rs bulk_ag bulk_rs gemm_wgrad")], ids=["made", "reused"]
)
def test_bf16_that_is_made_for_a_launch_is_made_every_time(reused, without, bf16_tiles):
    options = {"mx": True, "reused": reused}
    for planned in kr.launch(_copied, options, ranks=2, mode="threads", workgroups=4):
        assert {name for name, count in planned.items() if count == 1} == set(without.split())


def _twins(comm):
    """A remembered call, then others that differ from it in one thing alone. Returns: whether each came out right."""
    a, w = (_Given(comm, (rows, 128), 1, shared=True) for rows in (8, 16))
    a.fill(0)
    w.fill(1)
    w, y = w.array, np.empty((8 * comm.ranks, 16), np.uint16)
    for _ in range(2):
        kr.ag_gemm(comm, a.array, w, out=y)
    once = _values(y)
    found = {}
    for name, twin, times in (
        ("elements", replace(w, elements=w.elements ^ 0x80), -1),
        ("scales", replace(w, scales=w.scales + 1), 2),
    ):
        kr.ag_gemm(comm, a.array, twin, out=y)
        found[name] = np.array_equal(_values(y), times * once)
    try:
        kr.ag_gemm(comm, a.array, replace(w, axis=0, shape=(128, 16), groups=(128,)), out=y)
        found["form"] = False
    except ValueError:
        found["form"] = True
    return found


@pytest.mark.parametrize("forgotten", [None, "elements", "scales", "form"])
def test_a_key_without_a_part_would_be_noticed(forgotten, monkeypatch):
    def key_of(*call):
        op, given, options = prepared.key_of(*call)
        kept = {"elements": slice(1, None), "scales": slice(0, 1)}.get(forgotten, slice(None))
        return op, tuple((None if forgotten == "form" else form, parts[kept]) for form, parts in given), options

    monkeypatch.setattr(arguments, "key_of", key_of)
    for found in kr.launch(_twins, ranks=2, device="cpu", mode="threads"):
        assert found == {name: name != forgotten for name in ("elements", "scales", "form")}


def test_other_arrays_and_options_are_other_calls():
    a, b = np.zeros((4, 8), np.uint16), np.zeros((4, 8), np.uint16)
    keys = [
        prepared.key_of("op", ADDRESS, arrays, *options)
        for arrays in ((a, b), (b, a), (a, b[:2]), (a, b.view(np.float16)), (a, b[:, ::2]))
        for options in ((None,), (1,))
    ]
    assert len(set(keys)) == len(keys) and prepared.key_of("op", ADDRESS, (a, b), None) == keys[0]


def test_mx_arrays_are_known_by_all_that_they_are():
    parts = [np.zeros((n, 128), np.uint8) for n in (4, 4, 4)]
    x = kr.MxArray(parts[0], parts[1], 1, (4, 100), (4,))
    others = [
        {"elements": parts[2]},
        {"scales": parts[2]},
        {"values": parts[2]},
        {"axis": 0},
        {"shape": (4, 99)},
        {"groups": (3, 1)},
    ]
    keys = [prepared.key_of("op", ADDRESS, (one, parts[2])) for one in (x, *(replace(x, **other) for other in others))]
    assert len(set(keys)) == len(keys) and prepared.key_of("op", ADDRESS, (replace(x), parts[2])) == keys[0]


def test_what_is_remembered_is_bounded():
    known = prepared.Remembered()
    for i in range(3 * prepared.MOST):
        known.keep(i, prepared.Prepared("op", np.zeros(1, AG_GEMM), 0, 0, print))
        assert known.get(i) is not None
    assert len(known._known) <= prepared.MOST
    known.forget()
    assert known.get(3 * prepared.MOST - 1) is None


def _random(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(BF16)


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
