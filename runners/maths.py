"""What a decoder needs beside its linear and MoE layers, forward and backward, in the arrays' library and type."""

from __future__ import annotations

from typing import Any

EPS = 1e-5


def rms_norm(xp: Any, x: Any, gain: Any) -> tuple[Any, tuple[Any, ...]]:
    """Rows of x [T, H]. Returns: the result, and what the backward needs."""
    scale = 1 / xp.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    normed = x * scale
    return normed * gain, (normed, scale, gain)


def rms_norm_backward(dy: Any, saved: tuple[Any, ...]) -> tuple[Any, Any]:
    """dL/dx and dL/dgain."""
    normed, scale, gain = saved
    dn = dy * gain
    return scale * (dn - normed * (dn * normed).mean(-1, keepdims=True)), (dy * normed).sum(0)


def attention(xp: Any, qkv: Any, length: int, heads: int) -> tuple[Any, tuple[Any, ...]]:
    """Causal attention of `heads` heads; position is the outer index of rows.

    Args: qkv: [length * sequences, heads * 3 * width]: a head's q, k and v, head after head.
    Returns: [length * sequences, heads * width], and what the backward needs.
    """
    T, features = qkv.shape
    width = features // (3 * heads)
    q, k, v = qkv.reshape(length, T // length, heads, 3, width).transpose(3, 1, 2, 0, 4)
    scores = q @ k.swapaxes(-1, -2) * width**-0.5
    future = xp.arange(length)[None, :] > xp.arange(length)[:, None]
    scores = xp.where(future, -xp.inf, scores)
    p = xp.exp(scores - scores.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    return (p @ v).transpose(2, 0, 1, 3).reshape(T, heads * width), (q, k, v, p)


def attention_backward(xp: Any, dy: Any, saved: tuple[Any, ...]) -> Any:
    """dL/dqkv, laid out as qkv."""
    q, k, v, p = saved
    sequences, heads, length, width = q.shape
    do = dy.reshape(length, sequences, heads, width).transpose(1, 2, 0, 3)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * width**-0.5
    d = xp.stack([ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do])  # [3, sequences, heads, length, width]
    return d.transpose(3, 1, 2, 0, 4).reshape(length * sequences, heads * 3 * width)


def cross_entropy(xp: Any, logits: Any, targets: Any, tokens: int) -> tuple[Any, Any]:
    """Of rows of a batch of `tokens`: their part of the mean loss, and its gradient."""
    shifted = logits - logits.max(-1, keepdims=True)
    e = xp.exp(shifted)
    total = e.sum(-1, keepdims=True)
    hot = one_hot(xp, targets, logits)
    loss = (xp.log(total)[:, 0] - (shifted * hot).sum(-1)).sum() / tokens
    return loss, (e / total - hot) / tokens


def one_hot(xp: Any, ids: Any, like: Any, size: int | None = None) -> Any:
    """[T, size], by default as wide as `like`. Its transpose times rows adds those of each id, in a fixed order."""
    return (ids[:, None] == xp.arange(size or like.shape[-1])[None, :]).astype(like.dtype)
