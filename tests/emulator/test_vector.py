"""Vector arithmetic, one lane at a time, against NumPy: random bits, ordinary numbers and edges."""

# ruff: noqa: E501, E741 - the tables have one line an instruction

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kosmos_raw import emulator

from .launching import launch
from .text import kernel, module
from .vector_tables import (
    SCALAR,
    M,
    Results,
    d,
    f,
    flushed,
    fma,
    h,
    high,
    i,
    i24,
    j,
    lanes,
    mask_bit,
    run,
    same_bits,
    same_floats,
    u,
    u24,
    w,
    want,
    wide,
)  # fmt: skip

pytestmark = pytest.mark.emulated


def bfe(a, b, c):
    width = c & np.uint64(31)
    return (a & M) >> (b & np.uint64(31)) & ((np.uint64(1) << width) - np.uint64(1))


def nan_last(fn):
    """min and max of hardware: a NaN loses, and -0 < +0."""

    def both(a, b):
        r = fn(a, b)
        zero = (a == 0) & (b == 0)
        signs = np.signbit(a) & np.signbit(b) if fn is np.fmax else np.signbit(a) | np.signbit(b)
        return np.where(zero, np.where(signs, np.float32(-0.0), np.float32(0.0)), r).astype(a.dtype)

    return both


def saturate(x, low, top):
    return np.clip(np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0, posinf=top, neginf=low), low, top).astype(
        np.int64
    )


# fmt: off
# name or text, and the result from a, b, c. {d} result, {a} {b} {c} sources, capitals pairs, {s} a scalar, {m} a mask.
INTEGERS = {
    "v_mov_b32 {d}, {a}": lambda a, b, c: a,
    "v_mov_b64 {D}, {A}": lambda a, b, c: a,
    "v_not_b32 {d}, {a}": lambda a, b, c: ~a,
    "v_and_b32 {d}, {s}, {b}": lambda a, b, c: b & np.uint64(SCALAR),
    "v_or_b32 {d}, 0x12345, {b}": lambda a, b, c: b | np.uint64(0x12345),
    "v_xor_b32 {d}, -3, {b}": lambda a, b, c: b ^ np.uint64(0xFFFFFFFD),
    "v_xnor_b32 {d}, {a}, {b}": lambda a, b, c: ~(a ^ b),
    "v_add_u32 {d}, {a}, {b}": lambda a, b, c: a + b,
    "v_sub_u32 {d}, {a}, {b}": lambda a, b, c: a - b,
    "v_subrev_u32 {d}, {a}, {b}": lambda a, b, c: b - a,
    "v_add3_u32 {d}, {a}, {b}, {c}": lambda a, b, c: a + b + c,
    "v_mul_lo_u32 {d}, {a}, {b}": lambda a, b, c: a * b,
    "v_mul_hi_u32 {d}, {a}, {b}": lambda a, b, c: (a & M) * (b & M) >> np.uint64(32),
    "v_mul_hi_i32 {d}, {a}, {b}": lambda a, b, c: (wide(a) * wide(b) >> 32).view(np.uint64),
    "v_mul_u32_u24 {d}, {a}, {b}": lambda a, b, c: u24(a) * u24(b),
    "v_mul_hi_u32_u24 {d}, {a}, {b}": lambda a, b, c: u24(a) * u24(b) >> np.uint64(32),
    "v_mul_i32_i24 {d}, {a}, {b}": lambda a, b, c: (i24(a) * i24(b)).view(np.uint64),
    "v_mad_u32_u24 {d}, {a}, {b}, {c}": lambda a, b, c: u24(a) * u24(b) + c,
    "v_mad_i32_i24 {d}, {a}, {b}, {c}": lambda a, b, c: (i24(a) * i24(b)).view(np.uint64) + c,
    "v_lshlrev_b32 {d}, {a}, {b}": lambda a, b, c: b << (a & np.uint64(31)),
    "v_lshrrev_b32 {d}, {a}, {b}": lambda a, b, c: (b & M) >> (a & np.uint64(31)),
    "v_ashrrev_i32 {d}, {a}, {b}": lambda a, b, c: i(b) >> (u(a) & 31).astype(np.int32),
    "v_lshlrev_b64 {D}, {a}, {B}": lambda a, b, c: b << (a & np.uint64(63)),
    "v_lshrrev_b64 {D}, {a}, {B}": lambda a, b, c: b >> (a & np.uint64(63)),
    "v_ashrrev_i64 {D}, {a}, {B}": lambda a, b, c: (j(b) >> (a & np.uint64(63)).astype(np.int64)).view(np.uint64),
    "v_lshl_add_u32 {d}, {a}, 5, {c}": lambda a, b, c: (a << np.uint64(5)) + c,
    "v_lshl_add_u64 {D}, {A}, 3, {C}": lambda a, b, c: (a << np.uint64(3)) + c,
    "v_add_lshl_u32 {d}, {a}, {b}, 7": lambda a, b, c: (a + b) << np.uint64(7),
    "v_lshl_or_b32 {d}, {a}, 9, {c}": lambda a, b, c: (a << np.uint64(9)) | c,
    "v_and_or_b32 {d}, {a}, {b}, {c}": lambda a, b, c: (a & b) | c,
    "v_or3_b32 {d}, {a}, {b}, {c}": lambda a, b, c: a | b | c,
    "v_xad_u32 {d}, {a}, {b}, {c}": lambda a, b, c: (a ^ b) + c,
    "v_bfe_u32 {d}, {a}, {b}, {c}": bfe,
    "v_bfe_i32 {d}, {a}, 4, 9": lambda a, b, c: i(a) << 19 >> 23,
    "v_bfi_b32 {d}, {a}, {b}, {c}": lambda a, b, c: (a & b) | (~a & c),
    "v_bfrev_b32 {d}, {a}": lambda a, b, c: np.array([int(f"{int(x):032b}"[::-1], 2) for x in u(a)], np.uint64),
    "v_bcnt_u32_b32 {d}, {a}, {b}": lambda a, b, c: np.bitwise_count(u(a)).astype(np.uint64) + b,
    "v_ffbh_u32 {d}, {a}": lambda a, b, c: np.array([32 - int(x).bit_length() if x else -1 for x in u(a)]),
    "v_ffbl_b32 {d}, {a}": lambda a, b, c: np.array([(int(x) & -int(x)).bit_length() - 1 for x in u(a)]),
    "v_alignbit_b32 {d}, {a}, {b}, {c}": lambda a, b, c: (a << np.uint64(32) | (b & M)) >> (c & np.uint64(31)),
    "v_alignbyte_b32 {d}, {a}, {b}, {c}": lambda a, b, c: (a << np.uint64(32) | (b & M)) >> (np.uint64(8) * (c & np.uint64(3))),
    "v_perm_b32 {d}, {a}, {b}, {p}": lambda a, b, c: np.uint64(0x00FF0000) | (a >> np.uint64(16) & np.uint64(255)) << np.uint64(8) | (b >> np.uint64(8) & np.uint64(255)),
    "v_max_u32 {d}, {a}, {b}": lambda a, b, c: np.maximum(u(a), u(b)),
    "v_min_i32 {d}, {a}, {b}": lambda a, b, c: np.minimum(i(a), i(b)),
    "v_max3_i32 {d}, {a}, {b}, {c}": lambda a, b, c: np.maximum(np.maximum(i(a), i(b)), i(c)),
    "v_med3_u32 {d}, {a}, {b}, {c}": lambda a, b, c: np.median([u(a), u(b), u(c)], axis=0).astype(np.uint32),
    "v_bitop3_b32 {d}, {a}, {b}, {c} bitop3:0x1e": lambda a, b, c: a ^ (b | c),
    "v_bitop3_b32 {d}, {a}, {b}, {c} bitop3:0x6c": lambda a, b, c: b ^ (a & c),
    "v_cndmask_b32 {d}, {a}, {b}, {m}": lambda a, b, c: np.where(mask_bit(), b, a),
    "v_addc_co_u32 {d}, vcc, {a}, {b}, {m}": lambda a, b, c: a + b + mask_bit(),
    "v_subb_co_u32 {d}, vcc, {a}, {b}, {m}": lambda a, b, c: a - b - mask_bit().astype(np.uint64),
    "v_add_co_u32 {d}, vcc, {a}, {b}\nv_cndmask_b32 {d}, 0, 1, vcc": lambda a, b, c: ((a & M) + (b & M)) >> np.uint64(32),
    "v_sub_co_u32 {d}, vcc, {a}, {b}\nv_cndmask_b32 {d}, 0, 1, vcc": lambda a, b, c: u(a) < u(b),
    "v_mad_u64_u32 {D}, vcc, {a}, {b}, {C}": lambda a, b, c: (a & M) * (b & M) + c,
    "v_mad_i64_i32 {D}, vcc, {a}, {b}, {C}": lambda a, b, c: (wide(a) * wide(b)).view(np.uint64) + c,
    "v_mbcnt_lo_u32_b32 {d}, {a}, {b}": lambda a, b, c: np.bitwise_count(u(a) & ((1 << np.minimum(lanes(), 32)) - 1).astype(np.uint32)) + b,
    "v_mbcnt_hi_u32_b32 {d}, {a}, {b}": lambda a, b, c: np.bitwise_count(u(a) & ((1 << np.maximum(lanes() - 32, 0)) - 1).astype(np.uint32)) + b,
    "v_prng_b32 {d}, {a}": lambda a, b, c: (a << np.uint64(1)) ^ np.where(i(a) < 0, np.uint64(197), np.uint64(0)),
    "v_accvgpr_write_b32 a3, {a}\nv_accvgpr_read_b32 {d}, a3": lambda a, b, c: a,
    "v_add_u16 {d}, {a}, {b}": lambda a, b, c: w(w(a) + w(b)),
    "v_lshlrev_b16 {d}, {a}, {b}": lambda a, b, c: w(w(b) << (w(a) & 15)),
    "v_pk_add_u16 {d}, {a}, {b}": lambda a, b, c: w(w(a) + w(b)).astype(np.uint64) | w(w(a >> np.uint64(16)) + w(b >> np.uint64(16))).astype(np.uint64) << np.uint64(16),
    "v_pk_mov_b32 {D}, {A}, {B} op_sel:[1,0] op_sel_hi:[0,1]": lambda a, b, c: high(a) | high(b) << np.uint64(32),
    "v_readlane_b32 s30, {a}, 17\nv_mov_b32 {d}, s30": lambda a, b, c: np.full(64, a[17]),
    "v_readfirstlane_b32 s30, {a}\nv_mov_b32 {d}, s30": lambda a, b, c: np.full(64, a[0]),
    "v_writelane_b32 {d}, {s}, 9": lambda a, b, c: np.where(lanes() == 9, np.uint64(SCALAR), c),
    "v_mov_b32 {d}, {a}\nv_mov_b32 v20, {b}\nv_permlane32_swap_b32 {d}, v20": lambda a, b, c: np.concatenate([a[:32], b[:32]]),
    "v_mov_b32 {d}, {a}\nv_mov_b32 v20, {b}\nv_permlane16_swap_b32 v20, {d}": lambda a, b, c: np.concatenate([b[16:32], a[16:32], b[48:], a[48:]]),
}
SUBWORDS = {
    "v_add_u32_sdwa {d}, {a}, {b} dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1": lambda a, b, c: (a >> np.uint64(16) & np.uint64(255)) + (b >> np.uint64(16) & np.uint64(0xFFFF)),
    "v_and_b32_sdwa {d}, {a}, {b} dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD src1_sel:DWORD": lambda a, b, c: (c & np.uint64(0xFFFF)) | (a & b & np.uint64(0xFFFF)) << np.uint64(16),
    "v_or_b32_sdwa {d}, {a}, {b} dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:BYTE_3": lambda a, b, c: ((a | b >> np.uint64(24)) & np.uint64(255)) << np.uint64(8),
    "v_add_u32_sdwa {d}, sext({a}), {b} dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:DWORD": lambda a, b, c: w(a).view(np.int16).astype(np.int64).view(np.uint64) + b,
}
FLOATS = {
    "v_add_f32 {d}, {a}, {b}": lambda a, b, c: f(a) + f(b),
    "v_sub_f32 {d}, {s}, {b}": lambda a, b, c: np.array(SCALAR, np.uint32).view(np.float32) - f(b),
    "v_mul_f32 {d}, 0.5, {b}": lambda a, b, c: np.float32(0.5) * f(b),
    "v_add_f32 {d}, -{a}, |{b}|": lambda a, b, c: np.abs(f(b)) - f(a),
    "v_mul_f32 {d}, {a}, {b} clamp": lambda a, b, c: np.clip(np.nan_to_num(f(a) * f(b), nan=0.0), 0, 1) + np.float32(0),
    "v_mul_f32 {d}, {a}, {b} mul:4": lambda a, b, c: f(a) * f(b) * np.float32(4),
    "v_fma_f32 {d}, {a}, {b}, {c}": lambda a, b, c: fma(f(a), f(b), f(c)),
    "v_fma_f32 {d}, {a}, -{b}, 1.0": lambda a, b, c: fma(f(a), -f(b), np.float32(1)),
    "v_fmac_f32 {d}, {a}, {b}": lambda a, b, c: fma(f(a), f(b), f(c)),
    "v_fmaak_f32 {d}, {a}, {b}, 0x40490fdb": lambda a, b, c: fma(f(a), f(b), np.array(SCALAR, np.uint32).view(np.float32)),
    "v_max_f32 {d}, {a}, {b}": lambda a, b, c: nan_last(np.fmax)(f(a), f(b)),
    "v_min_f32 {d}, {a}, {b}": lambda a, b, c: nan_last(np.fmin)(f(a), f(b)),
    "v_max3_f32 {d}, {a}, {b}, {c}": lambda a, b, c: nan_last(np.fmax)(nan_last(np.fmax)(f(a), f(b)), f(c)),
    "v_rndne_f32 {d}, {a}": lambda a, b, c: np.rint(f(a)),
    "v_floor_f32 {d}, {a}": lambda a, b, c: np.floor(f(a)),
    "v_trunc_f32 {d}, {a}": lambda a, b, c: np.trunc(f(a)),
    "v_ldexp_f32 {d}, {a}, 5": lambda a, b, c: np.ldexp(f(a), 5),
    "v_cvt_f32_u32 {d}, {a}": lambda a, b, c: u(a).astype(np.float32),
    "v_cvt_f32_i32 {d}, {a}": lambda a, b, c: i(a).astype(np.float32),
    "v_cvt_f32_ubyte2 {d}, {a}": lambda a, b, c: (a >> np.uint64(16) & np.uint64(255)).astype(np.float32),
    "v_cvt_f64_f32 {D}, {a}": lambda a, b, c: f(a).astype(np.float64),
    "v_cvt_f32_f64 {d}, {A}": lambda a, b, c: d(a).astype(np.float32),
    "v_cvt_f64_i32 {D}, {a}": lambda a, b, c: i(a).astype(np.float64),
    "v_cvt_f64_u32 {D}, {a}": lambda a, b, c: u(a).astype(np.float64),
    "v_cvt_f32_f16 {d}, {a}": lambda a, b, c: h(a).astype(np.float32),
    "v_add_f64 {D}, {A}, {B}": lambda a, b, c: d(a) + d(b),
    "v_mul_f64 {D}, {A}, -{B}": lambda a, b, c: d(a) * -d(b),
    "v_pk_add_f32 {D}, {A}, {B}": lambda a, b, c: np.stack([f(a) + f(b), f(high(a)) + f(high(b))]),
    "v_pk_mul_f32 {D}, {A}, {B} op_sel_hi:[0,1] neg_lo:[1,0]": lambda a, b, c: np.stack([-f(a) * f(b), f(a) * f(high(b))]),
    "v_pk_fma_f32 {D}, {A}, {B}, {C}": lambda a, b, c: np.stack([fma(f(a), f(b), f(c)), fma(f(high(a)), f(high(b)), f(high(c)))]),
    "v_add_f16 {d}, {a}, {b}": lambda a, b, c: h(a) + h(b),
    "v_div_fixup_f32 {d}, {a}, 1.0, 1.0": lambda a, b, c: np.where(np.isnan(f(a)), np.float32(np.inf), np.abs(f(a))),
}
EXACT_BITS = {  # conversions whose results are bits
    "v_cvt_u32_f32 {d}, {a}": lambda a, b, c: saturate(f(a), 0, 2**32 - 1),
    "v_cvt_i32_f32 {d}, {a}": lambda a, b, c: saturate(f(a), -(2**31), 2**31 - 1),
    "v_cvt_i32_f64 {d}, {A}": lambda a, b, c: saturate(d(a), -(2**31), 2**31 - 1),
    "v_cmp_class_f32 vcc, {a}, {b}\nv_cndmask_b32 {d}, 0, 1, vcc": lambda a, b, c: (u(b) >> classes(f(a))) & 1,
}
ABOUT = {  # to a few units in the last place; float32 subnormals are zero, on both sides
    f"v_{name}_f32 {{d}}, {{a}}": lambda a, b, c, fn=fn: flushed(fn(flushed(f(a)).astype(np.float64)).astype(np.float32))
    for name, fn in {
        "exp": np.exp2, "log": np.log2, "sqrt": np.sqrt, "rcp": lambda x: 1 / x, "rsq": lambda x: 1 / np.sqrt(x),
    }.items()
}  # fmt: skip
# fmt: on
_COMPARES = {"lt": np.less, "le": np.less_equal, "eq": np.equal, "gt": np.greater, "ge": np.greater_equal}
_TYPES = {"u32": u, "i32": i, "f32": f, "u64": lambda x: x, "i64": j, "f64": d, "u16": w}


def classes(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    quiet, negative = bits >> 22 & 1, np.signbit(x)
    tiny = (np.abs(x) < np.finfo(np.float32).tiny) & (x != 0)
    c = np.where(negative, 3, 8)
    c = np.where(tiny, np.where(negative, 4, 7), c)
    c = np.where(x == 0, np.where(negative, 5, 6), c)
    c = np.where(np.isinf(x), np.where(negative, 2, 9), c)
    return np.where(np.isnan(x), quiet, c).astype(np.uint32)


def compares() -> dict:
    out = {}
    for type_name, view in _TYPES.items():
        pair = "64" in type_name
        names = ("{A}", "{B}") if pair else ("{a}", "{b}")
        for name, fn in _COMPARES.items():
            text = f"v_cmp_{name}_{type_name} vcc, {names[0]}, {names[1]}\nv_cndmask_b32 {{d}}, 0, 1, vcc"
            out[text] = lambda a, b, c, fn=fn, view=view: fn(view(a), view(b))
    for name, fn in {"nlt": np.less, "nge": np.greater_equal, "neq": np.equal}.items():
        text = f"v_cmp_{name}_f32 s[30:31], {{a}}, {{b}}\nv_cndmask_b32 {{d}}, 0, 1, s[30:31]"
        out[text] = lambda a, b, c, fn=fn: ~fn(f(a), f(b))
    out["v_cmp_u_f32 vcc, {a}, {b}\nv_cndmask_b32 {d}, 0, 1, vcc"] = lambda a, b, c: np.isnan(f(a)) | np.isnan(f(b))
    out["v_cmp_lg_f32 vcc, {a}, {b}\nv_cndmask_b32 {d}, 0, 1, vcc"] = lambda a, b, c: (f(a) < f(b)) | (f(a) > f(b))
    return out


ALL = INTEGERS | SUBWORDS | FLOATS | EXACT_BITS | ABOUT | compares()


@pytest.fixture(scope="module")
def results() -> Results:
    return run(ALL)


@pytest.mark.parametrize("text", INTEGERS | SUBWORDS | EXACT_BITS | compares(), ids=lambda t: t.split("\n")[0])
def test_result_has_the_bits_of_numpy(results, text):
    same_bits(ALL, results, text)


@pytest.mark.parametrize("text", FLOATS, ids=lambda t: t.split("\n")[0])
def test_result_is_the_float_of_numpy(results, text):
    same_floats(ALL, results, text)


@pytest.mark.parametrize("text", ABOUT)
def test_result_is_near(results, text):
    x, got = results
    for row, numbers in enumerate(want(ALL, text, x)):
        np.testing.assert_allclose(f(got[text][row]), numbers, rtol=1e-6, atol=0, err_msg=f"row {row} of the inputs")


def test_inactive_lanes_keep_their_registers():
    body = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_mov_b32 v2, 7
s_mov_b64 exec, 0x55
v_mov_b32 v2, 9
v_cmp_ge_u32 vcc, 100, v0
s_mov_b64 exec, -1
v_mov_b32 v3, vcc_lo
v_mov_b32 v4, vcc_hi
v_lshlrev_b32 v6, 4, v0
s_waitcnt lgkmcnt(0)
global_store_dwordx3 v6, v[2:4], s[4:5]
"""
    out = np.zeros((64, 4), np.uint32)
    launch(module("masked", kernel("masked", body)), "masked", 1, 64, out)
    assert (out[:, 0] == np.where([0x55 >> l & 1 for l in range(64)], 9, 7)).all()
    assert (out[:, 1] == 0x55).all() and not out[:, 2].any()


def test_division_is_exact():
    """The compiler's expansion of a / b, with numbers far apart, subnormal, infinite and NaN."""
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 1 << 32, (2, 8192), np.uint32)
    close = (rng.integers(0, 20, (2, 8192), np.uint32) + 117 << 23) | (bits & 0x807FFFFF)
    edges = rng.choice(
        np.array([0, 1 << 31, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x3F800000], np.uint32),
        (2, 1024),
    )
    a, b = np.concatenate([bits, close, edges], axis=1).view(np.float32)
    n = a.size
    out = np.zeros(n, np.float32)
    body = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dwordx2 s[8:9], s[0:1], 0x10
s_lshl_b32 s2, s2, 8
v_lshlrev_b32 v1, 2, v0
v_add_u32 v1, s2, v1
s_waitcnt lgkmcnt(0)
global_load_dword v2, v1, s[4:5]
global_load_dword v3, v1, s[6:7]
s_waitcnt vmcnt(0)
v_div_scale_f32 v4, s[10:11], v3, v3, v2
v_rcp_f32 v5, v4
v_div_scale_f32 v6, vcc, v2, v3, v2
v_fma_f32 v7, -v4, v5, 1.0
v_fmac_f32 v5, v7, v5
v_mul_f32 v7, v6, v5
v_fma_f32 v8, -v4, v7, v6
v_fmac_f32 v7, v8, v5
v_fma_f32 v4, -v4, v7, v6
v_div_fmas_f32 v4, v4, v5, v7
v_div_fixup_f32 v2, v4, v3, v2
global_store_dword v1, v2, s[8:9]
"""
    launch(module("divide", kernel("divide", body)), "divide", n // 64, 64, a.copy(), b.copy(), out)
    with np.errstate(all="ignore"):
        want = a / b
    tiny = np.abs(want) < np.finfo(np.float32).tiny  # rounded twice on the way
    np.testing.assert_array_equal(out[~tiny], want[~tiny])
    np.testing.assert_allclose(out[tiny], want[tiny], rtol=0, atol=1.5e-45)


def test_eight_bit_floats_and_bfloat16():
    special = [
        448,
        449,
        464,
        465,
        480,
        1e6,
        0,
        -0.0,
        2**-9,
        2**-10,
        1.5 * 2**-10,
        1e-5,
        57344,
        61439,
        65536,
        3.3e38,
        1e-40,
        np.inf,
        np.nan,
    ]
    rng = np.random.default_rng(3)
    x = np.concatenate(
        [special, -np.array(special), rng.standard_normal(2010) * 10.0 ** rng.integers(-8, 6, 2010)]
    ).astype(np.float32)
    x = x[:2048]
    back = np.arange(1024, dtype=np.uint8)[:1024].repeat(2).view(np.uint16)[:1024]
    out = np.zeros((1024, 12), np.uint32)
    body = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dwordx2 s[8:9], s[0:1], 0x10
s_lshl_b32 s2, s2, 6
v_add_u32 v0, s2, v0
v_lshlrev_b32 v1, 3, v0
v_lshlrev_b32 v20, 2, v0
v_mul_u32_u24 v9, 48, v0
s_mov_b32 s12, 0x41000000
s_waitcnt lgkmcnt(0)
global_load_dwordx2 v[2:3], v1, s[4:5]
global_load_dword v8, v20, s[6:7]
s_waitcnt vmcnt(0)
v_cvt_pk_bf16_f32 v10, v2, v3
v_mov_b32 v11, 7
v_cvt_pk_fp8_f32 v11, v2, v3 op_sel:[0,0,1]
v_mov_b32 v12, -1
v_cvt_pk_bf8_f32 v12, v2, v3
v_mov_b32 v13, s12
v_mov_b32 v14, -1
v_cvt_scalef32_pk_fp8_f32 v14, v2, v3, v13
v_cvt_pk_f32_fp8 v[16:17], v8
v_cvt_pk_f32_bf8 v[18:19], v8
global_store_dwordx3 v9, v[10:12], s[8:9]
global_store_dword v9, v14, s[8:9] offset:12
global_store_dwordx4 v9, v[16:19], s[8:9] offset:16
"""
    launch(module("eight_bits", kernel("eight_bits", body)), "eight_bits", 16, 64, x, back.astype(np.uint32), out)
    pairs = out.view(np.uint16)

    def same(codes, want, dtype):
        codes = np.ascontiguousarray(codes).view(np.uint8).ravel().view(dtype).astype(np.float32)
        np.testing.assert_array_equal(codes, want.astype(np.float32))

    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(
            np.ascontiguousarray(pairs[:, 0:2]).view(ml_dtypes.bfloat16).astype(np.float32).ravel(),
            x.astype(ml_dtypes.bfloat16).astype(np.float32),
        )
        same(pairs[:, 3], x.astype(ml_dtypes.float8_e4m3fn), ml_dtypes.float8_e4m3fn)
        same(pairs[:, 4], x.astype(ml_dtypes.float8_e5m2), ml_dtypes.float8_e5m2)
        same(pairs[:, 6], (x / 8).astype(ml_dtypes.float8_e4m3fn), ml_dtypes.float8_e4m3fn)
    assert (pairs[:, 2] == 7).all() and (pairs[:, 5] == 0xFFFF).all() and (pairs[:, 7] == 0xFFFF).all()
    two = back.view(np.uint8).reshape(1024, 2)
    np.testing.assert_array_equal(out[:, 4:6].view(np.float32), two.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    np.testing.assert_array_equal(out[:, 6:8].view(np.float32), two.view(ml_dtypes.float8_e5m2).astype(np.float32))


def test_unknown_instructions_are_named():
    text = kernel(
        "odd",
        "v_add_u32 v1, v0, v0\nv_frobnicate_b32 v1, v2\ns_mystery_b64 s[4:5], s[6:7]\nv_add_f32 v1, v0, v0 op_sel:[1,0]",
    )
    with pytest.raises(emulator.UnknownInstructions) as error:
        module("odd", text, assemble=False)
    message = str(error.value)
    assert (
        "v_frobnicate_b32 v1, v2" in message
        and "s_mystery_b64" in message
        and "op_sel" in message
        and "line 9" in message
    )


def test_registers_past_the_declared_ones_are_named():
    with pytest.raises(emulator.UnknownInstructions, match="v64: the kernel declares 64"):
        module("past", kernel("past", "v_mov_b32 v64, v0"), assemble=False)
