"""A two-layer MLP across ranks against the same in NumPy float64 on one: forward, backward, and finite differences."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import kosmos_raw as kr
from tests import programs

BF16 = ml_dtypes.bfloat16


def f64(x):
    return np.asarray(x).astype(np.float64)


def swiglu(h):
    """h holds gate and value side by side."""
    gate, value = np.split(h, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * value


def swiglu_backward(h, da):
    gate, value = np.split(h, 2, axis=1)
    s = 1 / (1 + np.exp(-gate))
    return np.concatenate([da * value * s * (1 + gate * (1 - s)), da * gate * s], axis=1)


def problem(ranks, rows, hidden, width, seed=0):
    """Tokens, the gradient that comes back, and every rank's weights (gate and value of its width side by side)."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return (rng.standard_normal(shape) * scale).astype(BF16)

    x, dy = normal(sum(rows), hidden), normal(sum(rows), hidden)
    w1 = [normal(2 * width, hidden, scale=hidden**-0.5) for _ in range(ranks)]
    w2 = [normal(hidden, width, scale=(width * ranks) ** -0.5) for _ in range(ranks)]
    return x, dy, w1, w2


def reference(x, dy, w1, w2):
    """Y, dX, and every rank's dW1 and dW2, in float64."""
    x, dy = f64(x), f64(dy)
    h = [x @ f64(w).T for w in w1]
    a = [swiglu(part) for part in h]
    y = sum(part @ f64(w).T for part, w in zip(a, w2, strict=True))
    dw2 = [dy.T @ part for part in a]
    dh = [swiglu_backward(part, dy @ f64(w)) for part, w in zip(h, w2, strict=True)]
    dw1 = [part.T @ x for part in dh]
    return y, sum(part @ f64(w) for part, w in zip(dh, w1, strict=True)), dw1, dw2


def mlp(comm, rows, hidden, width, batches, grads):
    """Runs forward and backward `batches` times; returns this rank's Y, dX, and its weights' and biases' gradients."""
    x, dy, w1, w2 = problem(comm.ranks, rows, hidden, width)
    own = slice(sum(rows[: comm.rank]), sum(rows[: comm.rank + 1]))
    dtype = {"bf16": BF16, "float32": np.float32, "none": None}[grads]
    put, take = comm.device.xp.asarray, programs.on_host
    buffers = [None if dtype is None else put(np.zeros(w[comm.rank].shape, dtype)) for w in (w1, w2)]
    bias = [put(np.zeros(2 * width, np.float32)), put(np.zeros(hidden, BF16 if grads == "bf16" else np.float32))]
    up = kr.ColumnParallelLinear(comm, put(w1[comm.rank]), weight_grad=buffers[0], bias_grad=bias[0])
    down = kr.RowParallelLinear(comm, put(w2[comm.rank]), weight_grad=buffers[1], bias_grad=bias[1])
    for _ in range(batches):
        h = take(up.forward(put(x[own]), rows=rows)).astype(np.float32)
        y = down.forward(put(swiglu(h).astype(BF16)), rows=rows)
        da = take(down.backward(put(dy[own]))).astype(np.float32)
        dh = swiglu_backward(h, da).astype(BF16)
        dx = up.backward(put(dh))
    if dtype is not None:
        assert up.weight_grad is buffers[0] and down.weight_grad is buffers[1]
    results = take(y), take(dx), take(up.weight_grad), take(down.weight_grad)
    return *map(f64, results), [f64(take(grad)) for grad in bias], f64(dh)


def distance(got, want):
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


@pytest.mark.parametrize("grads", ["none", "bf16", "float32"])
@pytest.mark.parametrize("rows", [(16, 16, 16, 16), (30, 0, 5, 2)], ids=["even", "ragged"])
def test_mlp_matches_numpy(rows, grads):
    check_mlp(rows, grads, mode="threads")


def check_mlp(rows, grads, **options):
    """On any device: the tests of the emulated node call it too."""
    ranks, hidden, width, batches = len(rows), 40, 24, 1 if grads == "none" else 3
    results = kr.launch(mlp, rows, hidden, width, batches, grads, ranks=ranks, **options)
    x, dy, w1, w2 = problem(ranks, rows, hidden, width)
    y, dx, dw1, dw2 = reference(x, dy, w1, w2)
    assert distance(np.concatenate([r[0] for r in results]), y) < 6e-3
    assert distance(np.concatenate([r[1] for r in results]), dx) < 9e-3
    for rank, (_, _, got1, got2, bias, dh) in enumerate(results):
        assert distance(got1, batches * dw1[rank]) < 1e-2 and distance(got2, batches * dw2[rank]) < 1e-2
        assert np.allclose(bias[0], batches * dh.sum(0), rtol=1e-4, atol=1e-4)
        rounding = batches * 2.0**-8 if grads == "bf16" else 1e-4  # of each addition to a bf16 gradient
        assert np.allclose(bias[1], batches * f64(dy).sum(0), rtol=rounding, atol=rounding)


def test_finite_differences_agree():
    """The reference's own gradients, which the layers were compared with: d(sum of Y * dY) along random directions."""
    x, dy, w1, w2 = problem(2, (5, 4), 12, 6, seed=1)
    _, dx, dw1, dw2 = reference(x, dy, w1, w2)
    rng = np.random.default_rng(2)

    def loss(x, w1, w2):
        return float((reference(x, dy, w1, w2)[0] * f64(dy)).sum())

    step = 1e-5
    for which, gradient in (("x", [dx]), ("w1", dw1), ("w2", dw2)):
        direction = [rng.standard_normal(g.shape) for g in gradient]

        def moved(sign, which=which, direction=direction):
            add = [sign * step * d for d in direction]
            if which == "x":
                return loss(f64(x) + add[0], w1, w2)
            w = [f64(part) + more for part, more in zip(w1 if which == "w1" else w2, add, strict=True)]
            return loss(x, w, w2) if which == "w1" else loss(x, w1, w)

        slope = (moved(1) - moved(-1)) / (2 * step)
        assert slope == pytest.approx(sum((g * d).sum() for g, d in zip(gradient, direction, strict=True)), rel=1e-5)


def _fresh(comm):
    layer = kr.RowParallelLinear(comm, np.ones((4, 8), BF16))
    grads = []
    for _ in range(2):
        layer.forward(np.ones((3, 8), BF16))
        layer.backward(np.ones((3, 4), BF16))
        grads.append(layer.weight_grad)
    return [float(g[0, 0]) for g in grads]


def test_without_a_buffer_each_gradient_is_new():
    assert kr.launch(_fresh, ranks=1, mode="threads") == [[3.0, 3.0]]


def _misused(comm):
    layer = kr.RowParallelLinear(comm, np.ones((8, 8), BF16))
    calls = (
        lambda: layer.backward(np.ones((2, 8), BF16)),
        lambda: kr.ColumnParallelLinear(comm, np.ones((8, 8), BF16), bias_grad=np.ones(3)),
        lambda: kr.ColumnParallelLinear(comm, np.ones((8, 8), np.float32)),
        lambda: kr.ColumnParallelLinear(comm, np.ones((8, 8), BF16), bias_grad=np.ones(8)),
        lambda: kr.ColumnParallelLinear(comm, np.ones((8, 8), BF16), dtype="fp8"),
        lambda: layer.forward(np.ones((2, 7), BF16)),
        lambda: layer.forward(np.ones((2, 8), BF16), rows=[3]),
        lambda: (layer.forward(np.ones((2, 8), BF16)), layer.backward(np.ones((3, 8), BF16))),
    )
    return [str(programs.error_of(call)[1]) for call in calls]


def test_misuse_is_explained():
    wants = (
        "backward without the forward",
        "want (8,)",
        "float32, want bfloat16",
        "bias_grad has dtype float64, want bfloat16 or float32",
        "dtype is 'fp8', want one of bf16, mxfp8",
        "x has shape (2, 7), want (2, 8)",
        "x has 2 rows, but rows deals out 3",
        "dy has shape (3, 8), want (2, 8)",
    )
    for want, said in zip(wants, kr.launch(_misused, ranks=1, mode="threads")[0], strict=True):
        assert want in said
