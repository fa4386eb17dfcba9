"""Tables of vector instructions, each with what NumPy makes of a lane: run in one kernel on random bits, numbers, edges."""

# ruff: noqa: E501, E741 - views have the short names of the types

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .launching import launch
from .text import kernel, module

Table = Mapping[str, Callable[..., np.ndarray]]  # text -> result from a, b, c

SCALAR = 0x40490FDB  # of {s}
MASK = 0xF0F0_1234_8001_7777  # of {m}
M = np.uint64(0xFFFFFFFF)


# ---- inputs: rows of 64 lanes of 64 bits ----
def inputs() -> np.ndarray:
    rng = np.random.default_rng(5)
    edges32 = np.array([
        0, 1, 2, 31, 32, 63, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3F800000,
        0xBF800000, 0x00800000, 0x007FFFFF, 0x00000003, 0x7F7FFFFF, 0x4B800001, 0x3F000000, 0x4F000000, 0xCF000000, 0x4F800000,
    ], np.uint64)  # fmt: skip
    edges64 = np.array([
        0, 1, 0x3FF0000000000000, 0xBFF8000000000000, 0x7FF0000000000000, 0x7FF8000000000000, 0x41DFFFFFFFC00000,
        0x41EFFFFFFFE00000, 0xC1E0000000000000, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF, 0x3800000000000000,
    ], np.uint64)  # fmt: skip

    def floats(scale: float) -> np.ndarray:
        return (rng.standard_normal((3, 64)) * scale).astype(np.float32).view(np.uint32).astype(np.uint64) | (
            (rng.standard_normal((3, 64)) * scale).astype(np.float32).view(np.uint32).astype(np.uint64) << np.uint64(32)
        )

    return np.stack(
        [
            rng.integers(0, 1 << 64, (3, 64), np.uint64),
            rng.integers(0, 1 << 64, (3, 64), np.uint64),
            floats(1.0),
            floats(1e4),
            rng.integers(0, 300, (3, 64)).astype(np.uint64),
            rng.choice(edges32, (3, 64)) | rng.choice(edges32, (3, 64)) << np.uint64(32),
            rng.choice(edges32, (3, 64)),
            rng.choice(edges64, (3, 64)),
            (rng.standard_normal((3, 64)) * 1e5).view(np.uint64),
        ],
        axis=1,
    )  # [operand][row][lane]


# fmt: off
# ---- views of 64-bit lanes ----
def u(x): return x.astype(np.uint32)
def i(x): return u(x).view(np.int32)
def f(x): return u(x).view(np.float32)
def w(x): return x.astype(np.uint16)
def h(x): return w(x).view(np.float16)
def d(x): return x.view(np.float64)
def j(x): return x.view(np.int64)
def wide(x): return i(x).astype(np.int64)
def high(x): return x >> np.uint64(32)
def u24(x): return x & np.uint64(0xFFFFFF)
def i24(x): return (i(x) << 8 >> 8).astype(np.int64)
def fma(a, b, c): return (a.astype(np.longdouble) * b + c).astype(np.float32)
def mask_bit(): return np.array([MASK >> l & 1 for l in range(64)], bool)
def lanes(): return np.arange(64)

def flushed(x): return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)
# fmt: on


_NAMES = {"d": "v10", "a": "v2", "b": "v4", "c": "v6", "D": "v[10:11]", "A": "v[2:3]", "B": "v[4:5]", "C": "v[6:7]"}
_NAMES |= {"s": "s16", "m": "s[20:21]", "p": "s22"}


def _body(table: Table) -> str:
    """Loads a, b, c; runs each instruction with c as the old result; stores 64 bits a lane and instruction."""
    out = [
        "s_load_dwordx8 s[4:11], s[0:1], 0x0", "s_waitcnt lgkmcnt(0)", "s_lshl_b32 s12, s2, 9", "v_lshlrev_b32 v8, 3, v0",
        "v_add_u32 v1, s12, v8", "global_load_dwordx2 v[2:3], v1, s[4:5]", "global_load_dwordx2 v[4:5], v1, s[6:7]",
        "global_load_dwordx2 v[6:7], v1, s[8:9]", f"s_mov_b32 s16, {SCALAR:#x}", f"s_mov_b32 s20, {MASK & 0xFFFFFFFF:#x}",
        f"s_mov_b32 s21, {MASK >> 32:#x}", "s_mov_b32 s22, 0x0c0d0601", f"s_mul_i32 s12, s2, {512 * len(table)}", "v_add_u32 v9, s12, v8", "s_waitcnt vmcnt(0)",
    ]  # fmt: skip
    for text in table:
        out += ["v_mov_b32 v10, v6", "v_mov_b32 v11, v7", *text.format(**_NAMES).split("\n")]
        out += ["global_store_dwordx2 v9, v[10:11], s[10:11]", "v_add_u32 v9, 0x200, v9"]
    return "\n".join(out)


Results = tuple[np.ndarray, dict[str, np.ndarray]]


def run(table: Table, denormals: int = 3) -> Results:
    """The inputs [operand, row, lane], and 64 bits a row and lane by text. `denormals`: MODE's bits for float32."""
    x = inputs()
    rows = x.shape[1]
    out = np.zeros((rows, len(table), 64), np.uint64)
    text = kernel("vector", _body(table), denormals=denormals).replace("accum_offset 64", "accum_offset 32")
    launch(module("vector", text), "vector", rows, 64, *(np.ascontiguousarray(y) for y in x), out)
    return x, {text: out[:, n] for n, text in enumerate(table)}


def want(table: Table, text: str, x: np.ndarray) -> list[np.ndarray]:
    """What each row should give."""
    with np.errstate(all="ignore"):
        return [np.asarray(table[text](*x[:, row])) for row in range(x.shape[1])]


def same_bits(table: Table, results: Results, text: str) -> None:
    x, got = results
    cut = np.uint64((1 << (64 if "{D}" in text else 32)) - 1)
    for row, bits in enumerate(want(table, text, x)):
        if bits.dtype.kind == "f":
            bits = bits.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[bits.itemsize])
        bits = bits.astype(np.int64).view(np.uint64) if bits.dtype.kind in "ib" else bits.astype(np.uint64)
        np.testing.assert_array_equal(got[text][row] & cut, bits & cut, err_msg=f"row {row} of the inputs")


def same_floats(table: Table, results: Results, text: str) -> None:
    """Of the type that NumPy gives; NaNs equal each other, zeros have signs."""
    x, got = results
    for row, numbers in enumerate(want(table, text, x)):
        have = _as_floats(got[text][row], numbers)
        np.testing.assert_array_equal(have, numbers, err_msg=f"row {row} of the inputs")
        known = ~np.isnan(numbers)
        np.testing.assert_array_equal(np.signbit(have)[known], np.signbit(numbers)[known])


def _as_floats(bits: np.ndarray, like: np.ndarray) -> np.ndarray:
    if like.ndim == 2:
        return np.stack([f(bits), f(high(bits))])
    return {2: h, 4: f, 8: d}[like.itemsize](bits)
