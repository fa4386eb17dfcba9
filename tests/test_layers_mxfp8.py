"""A two-layer MLP across ranks in MXFP8: every product against float64 of what its factors stand for, by what FP32 sums
and roundings allow, and against the same of the BF16 factors; and what layers keep of their weights."""

from __future__ import annotations

import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.numerics import oracles
from kosmos_raw.numerics.mxfp8 import rounded
from kosmos_raw.numerics.tolerance import FP32_EPS, compare, gemm_bound, reduced_bound
from tests import programs
from tests.test_layers import BF16, f64, problem, swiglu, swiglu_backward

UP, DOWN = ("h", "dx", "dw1"), ("y", "da", "dw2")  # products of each layer


def mlp(comm, rows, hidden, width, batches, into, dtypes):
    """Forward and backward of the same batch, again and again; what every product was given and gave."""
    x, dy, w1, w2 = problem(comm.ranks, rows, hidden, width)
    own = slice(sum(rows[: comm.rank]), sum(rows[: comm.rank + 1]))
    put, take = comm.device.xp.asarray, programs.on_host
    weights = w1[comm.rank], w2[comm.rank]
    grads = [None if into == "none" else put(np.zeros(w.shape, into)) for w in weights]
    bias = [put(np.zeros(len(weights[0]), np.float32)), put(np.zeros(hidden, BF16))]
    kinds = kr.ColumnParallelLinear, kr.RowParallelLinear
    up, down = (
        kind(comm, put(w), weight_grad=g, bias_grad=b, dtype=dtype)
        for kind, w, g, b, dtype in zip(kinds, weights, grads, bias, dtypes, strict=True)
    )
    for _ in range(batches):
        h = take(up.forward(put(x[own]), rows=rows))
        a = swiglu(f64(h)).astype(BF16)
        y = take(down.forward(put(a), rows=rows))
        da = take(down.backward(put(dy[own])))
        dh = swiglu_backward(f64(h), f64(da)).astype(BF16)
        dx = take(up.backward(put(dh)))
    found = {"h": h, "a": a, "y": y, "da": da, "dh": dh, "dx": dx}
    return found | {"dw1": take(up.weight_grad), "dw2": take(down.weight_grad), "bias": [f64(take(b)) for b in bias]}


def products(of, rank, found, rows, x, dy, w1, w2):
    """{name: (exact, magnitude, K)} of the products of a rank; of those that are added over ranks, every rank's (exact,
    magnitude). of: what a factor stands for that is contracted over columns (1) or rows (0)."""

    def over_rows(a, b):
        return *oracles.product(of(a, 0, rows).T, of(b, 0, rows)), len(x)

    return {
        "h": (*oracles.gemm(of(x), of(w1[rank])), x.shape[1]),
        "da": (*oracles.product(of(dy), of(w2[rank], 0)), dy.shape[1]),
        "dw1": over_rows(found[rank]["dh"], x),
        "dw2": over_rows(dy, found[rank]["a"]),
        "y": [oracles.gemm(of(got["a"]), of(w)) for got, w in zip(found, w2, strict=True)],
        "dx": [oracles.product(of(got["dh"]), of(w, 0)) for got, w in zip(found, w1, strict=True)],
    }


def once(of):
    """The same, made once of each array."""
    known = {}

    def found(x, axis=1, groups=None):
        if (id(x), axis) not in known:
            known[id(x), axis] = of(x, axis, groups)
        return known[id(x), axis]

    return found


def plain(x, axis=1, groups=None):
    return f64(x)


def distance(got, want):
    return np.linalg.norm(f64(got) - want) / np.linalg.norm(want)


@pytest.mark.parametrize(
    ("rows", "batches", "into"),
    [((16, 16, 16, 16), 2, "float32"), ((60, 0, 5, 40), 1, "none")],
    ids=["even", "ragged"],
)
def test_mlp_multiplies_what_is_quantised(rows, batches, into):
    check_mlp(rows, batches, into, mode="threads")


def check_mlp(rows, batches, into, hidden=136, width=72, dtypes=("mxfp8", "mxfp8"), **options):
    """On any device: the tests of the emulated node call it too."""
    found = kr.launch(mlp, rows, hidden, width, batches, into, dtypes, ranks=len(rows), **options)
    quantised = [name for names, dtype in zip((UP, DOWN), dtypes, strict=True) for name in names if dtype == "mxfp8"]
    given = _, dy, _, _ = problem(len(rows), rows, hidden, width)
    views = once(rounded), once(plain)
    for rank, got in enumerate(found):
        own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        rounds, bf16 = (products(of, rank, found, rows, *given) for of in views)
        for name in (*UP, *DOWN):
            want = (rounds if name in quantised else bf16)[name]
            if name in ("y", "dx"):
                exact, bound = reduced_bound([(e[own], m[own]) for e, m in want], {"y": width, "dx": 2 * width}[name])
                unquantised = sum(e for e, _ in bf16[name])[own]
            elif name.startswith("dw"):
                exact, bound = added(*want, batches, into)
                unquantised = batches * bf16[name][0]
            else:
                exact, bound = want[0], gemm_bound(*want)
                unquantised = bf16[name][0]
            result = compare(got[name], exact, bound)
            assert result.passed, (rank, name, result)
            if name in quantised and got[name].size >= 1000:  # the square root of 2 times the error of an element
                assert distance(got[name], unquantised) == pytest.approx(0.038, abs=0.003), (rank, name)
        sums = [batches * f64(g).sum(0) for g in (got["dh"], dy)]
        assert np.allclose(got["bias"][0], sums[0], rtol=1e-4, atol=1e-4)
        assert np.allclose(got["bias"][1], sums[1], rtol=batches * 2.0**-8, atol=batches * 2.0**-8)
    for got in found[1:]:
        assert np.array_equal(got["bias"][1], found[0]["bias"][1])


def added(exact, magnitude, k, batches, into):
    """The sum of equal products, and its bound: of each, and of adding them in FP32."""
    if into == "none":
        return exact, gemm_bound(exact, magnitude, k)
    return batches * exact, (k + batches) * FP32_EPS * batches * magnitude


def changed(comm, kind):
    """What a layer gives and takes back: at first, with a changed weight it was not told of, and then told of."""
    rng = np.random.default_rng(3)
    weight = programs.ternary(rng, (24, 40))
    layer = kind(comm, weight, dtype="mxfp8")
    found = []

    def step():
        x = np.ones((6 if kind is kr.ColumnParallelLinear else 6 * comm.ranks, 40), BF16)
        y = layer.forward(x)
        found.append((f64(y), f64(layer.backward(np.ones(y.shape, BF16)))))

    step()
    old = f64(weight)
    weight[...] = programs.ternary(rng, weight.shape)
    step()
    layer.weight_changed()
    step()
    ranks = comm.ranks if kind is kr.RowParallelLinear else 1
    assert np.array_equal(found[0][0][0], ranks * old.sum(1))
    assert np.array_equal(found[2][0][0], ranks * f64(weight).sum(1))
    same = [all(np.array_equal(a, b) for a, b in zip(found[0], found[i], strict=True)) for i in (1, 2)]
    one = [any(np.array_equal(a, b) for a, b in zip(found[0], found[i], strict=True)) for i in (1, 2)]
    return same[0], one[1]


@pytest.mark.parametrize("kind", [kr.ColumnParallelLinear, kr.RowParallelLinear])
def test_a_changed_weight_is_seen_when_told_of(kind):
    assert kr.launch(changed, kind, ranks=2, mode="threads") == [(True, False)] * 2
