"""Scalar arithmetic against Python integers: results and SCC."""

from __future__ import annotations

import numpy as np
import pytest

from .launching import launch
from .text import kernel, module

pytestmark = pytest.mark.emulated

EDGES = [0, 1, 2, 5, 31, 32, 63, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF8000, 0x00130004, 0x123456789ABCDEF0]
EDGES += [0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF, 0x00000001FFFFFFFF]


def cut(x: int, bits: int = 32) -> int:
    return x & ((1 << bits) - 1)


def signed(x: int, bits: int = 32) -> int:
    x = cut(x, bits)
    return x - (1 << bits) if x >> (bits - 1) else x


def field(x: int, at: int, bits: int, is_signed: bool) -> int:
    first, count = at & (bits - 1), min(at >> 16 & 127, bits)
    x = cut(x, bits) >> first & ((1 << count) - 1)
    return signed(x, count) if is_signed and count else x


def flbit(x: int, bits: int) -> int:
    return bits - x.bit_length() if x else -1


def sign_bits(x: int, bits: int) -> int:
    """How many of the first bits are like the first; -1 when all are."""
    return bits - (~x if x < 0 else x).bit_length() if x not in (0, -1) else -1


# text: (result, SCC), from a, b (64 bits each) and SCC before, as the least significant bit of c; None keeps SCC.
# {d} {a} {b} are 32-bit registers, capitals pairs; the result before is 0x55aa in {d} and 0 above.
OLD = 0x55AA
OPS = {
    "s_add_u32 {d}, {a}, {b}": lambda a, b, c: (a + b, cut(a) + cut(b) >> 32),
    "s_addc_u32 {d}, {a}, {b}": lambda a, b, c: (a + b + c, cut(a) + cut(b) + c >> 32),
    "s_sub_u32 {d}, {a}, {b}": lambda a, b, c: (a - b, cut(a) < cut(b)),
    "s_subb_u32 {d}, {a}, {b}": lambda a, b, c: (a - b - c, cut(a) < cut(b) + c),
    "s_add_i32 {d}, {a}, {b}": lambda a, b, c: (a + b, signed(a + b) != signed(a) + signed(b)),
    "s_sub_i32 {d}, {a}, {b}": lambda a, b, c: (a - b, signed(a - b) != signed(a) - signed(b)),
    "s_mul_i32 {d}, {a}, {b}": lambda a, b, c: (a * b, None),
    "s_mul_hi_u32 {d}, {a}, {b}": lambda a, b, c: (cut(a) * cut(b) >> 32, None),
    "s_mul_hi_i32 {d}, {a}, {b}": lambda a, b, c: (signed(a) * signed(b) >> 32, None),
    "s_and_b32 {d}, {a}, {b}": lambda a, b, c: (a & b, cut(a & b) != 0),
    "s_andn2_b64 {D}, {A}, {B}": lambda a, b, c: (a & ~b, cut(a & ~b, 64) != 0),
    "s_orn2_b64 {D}, {A}, {B}": lambda a, b, c: (a | ~b, cut(a | ~b, 64) != 0),
    "s_xor_b64 {D}, {A}, {B}": lambda a, b, c: (a ^ b, a != b),
    "s_nand_b32 {d}, {a}, {b}": lambda a, b, c: (~(a & b), cut(~(a & b)) != 0),
    "s_not_b64 {D}, {A}": lambda a, b, c: (~a, cut(~a, 64) != 0),
    "s_lshl_b32 {d}, {a}, {b}": lambda a, b, c: (a << (b & 31), cut(a << (b & 31)) != 0),
    "s_lshr_b64 {D}, {A}, {b}": lambda a, b, c: (a >> (b & 63), a >> (b & 63) != 0),
    "s_ashr_i32 {d}, {a}, {b}": lambda a, b, c: (signed(a) >> (b & 31), signed(a) >> (b & 31) != 0),
    "s_ashr_i64 {D}, {A}, {b}": lambda a, b, c: (signed(a, 64) >> (b & 63), signed(a, 64) >> (b & 63) != 0),
    "s_bfe_u32 {d}, {a}, {b}": lambda a, b, c: (field(a, b, 32, False), field(a, b, 32, False) != 0),
    "s_bfe_i32 {d}, {a}, {b}": lambda a, b, c: (field(a, b, 32, True), field(a, b, 32, True) != 0),
    "s_bfe_i64 {D}, {A}, {b}": lambda a, b, c: (field(a, b, 64, True), field(a, b, 64, True) != 0),
    "s_bfe_u64 {D}, {A}, {b}": lambda a, b, c: (field(a, b, 64, False), field(a, b, 64, False) != 0),
    "s_bfm_b32 {d}, {a}, {b}": lambda a, b, c: (((1 << (a & 31)) - 1) << (b & 31), None),
    "s_bcnt1_i32_b64 {d}, {A}": lambda a, b, c: (a.bit_count(), a != 0),
    "s_ff1_i32_b64 {d}, {A}": lambda a, b, c: ((a & -a).bit_length() - 1, None),
    "s_flbit_i32_b32 {d}, {a}": lambda a, b, c: (flbit(cut(a), 32), None),
    "s_flbit_i32 {d}, {a}": lambda a, b, c: (sign_bits(signed(a), 32), None),
    "s_flbit_i32_i64 {d}, {A}": lambda a, b, c: (sign_bits(signed(a, 64), 64), None),
    "s_brev_b32 {d}, {a}": lambda a, b, c: (int(f"{cut(a):032b}"[::-1], 2), None),
    "s_min_i32 {d}, {a}, {b}": lambda a, b, c: (min(signed(a), signed(b)), signed(a) < signed(b)),
    "s_max_u32 {d}, {a}, {b}": lambda a, b, c: (max(cut(a), cut(b)), cut(a) > cut(b)),
    "s_abs_i32 {d}, {a}": lambda a, b, c: (abs(signed(a)), cut(a) != 0),
    "s_sext_i32_i16 {d}, {a}": lambda a, b, c: (signed(a, 16), None),
    "s_pack_lh_b32_b16 {d}, {a}, {b}": lambda a, b, c: (a & 0xFFFF | b & 0xFFFF0000, None),
    "s_lshl3_add_u32 {d}, {a}, {b}": lambda a, b, c: ((a << 3) + b, (cut(a) << 3) + cut(b) >> 32 != 0),
    "s_cselect_b32 {d}, {a}, {b}": lambda a, b, c: (a if c else b, None),
    "s_cmov_b32 {d}, {a}": lambda a, b, c: (a if c else OLD, None),
    "s_movk_i32 {d}, 0x8001": lambda a, b, c: (-0x7FFF, None),
    "s_addk_i32 {d}, 0x7fff": lambda a, b, c: (OLD + 0x7FFF, 0),
    "s_mulk_i32 {d}, -3": lambda a, b, c: (OLD * -3, None),
    "s_bitset1_b32 {d}, {a}": lambda a, b, c: (OLD | 1 << (a & 31), None),
    "s_bitset0_b32 {d}, {a}": lambda a, b, c: (OLD & ~(1 << (a & 31)), None),
    "s_mov_b64 {D}, -2": lambda a, b, c: (-2, None),
    "s_cmp_lt_i32 {a}, {b}": lambda a, b, c: (OLD, signed(a) < signed(b)),
    "s_cmp_ge_u32 {a}, {b}": lambda a, b, c: (OLD, cut(a) >= cut(b)),
    "s_cmp_lg_u64 {A}, {B}": lambda a, b, c: (OLD, a != b),
    "s_cmpk_gt_i32 {a}, 0xfffe": lambda a, b, c: (OLD, signed(a) > -2),
    "s_cmpk_lt_u32 {a}, 0xfffe": lambda a, b, c: (OLD, cut(a) < 0xFFFE),
    "s_bitcmp1_b32 {a}, 4": lambda a, b, c: (OLD, a >> 4 & 1),
    "s_bitcmp0_b64 {A}, {b}": lambda a, b, c: (OLD, not a >> (b & 63) & 1),
}
_NAMES = {"d": "s20", "D": "s[20:21]", "a": "s12", "A": "s[12:13]", "b": "s14", "B": "s[14:15]"}


def _body() -> str:
    out = [
        "s_load_dwordx4 s[4:7], s[0:1], 0x0", "s_lshl_b32 s2, s2, 5", "s_waitcnt lgkmcnt(0)",
        "s_load_dwordx8 s[12:19], s[4:5], s2",
        f"s_mul_i32 s8, s2, {len(OPS) // 2 + 1}", "v_mov_b32 v4, s8", "s_waitcnt lgkmcnt(0)",
    ]  # fmt: skip
    for text in OPS:
        out += [
            f"s_movk_i32 s20, {OLD:#x}",
            "s_mov_b32 s21, 0",
            "s_cmp_lg_u32 s16, 0",
            text.format(**_NAMES),
            "s_cselect_b32 s22, 1, 0",
        ]
        out += [
            "v_mov_b32 v0, s20",
            "v_mov_b32 v1, s21",
            "v_mov_b32 v2, s22",
            "global_store_dwordx4 v4, v[0:3], s[6:7]",
            "v_add_u32 v4, 16, v4",
        ]
    return "\n".join(out)


@pytest.fixture(scope="module")
def results():
    rng = np.random.default_rng(9)
    cases = [(a, b, c) for a in EDGES for b in EDGES for c in (0, 1)]
    cases += [(int(a), int(b), int(a) & 1) for a, b in rng.integers(0, 1 << 64, (40, 2), np.uint64)]
    x = np.array([(a, b, c, 0) for a, b, c in cases], np.uint64)
    stride = 32 * (len(OPS) // 2 + 1) // 16
    out = np.zeros((len(cases), stride, 4), np.uint32)
    launch(module("scalar", kernel("scalar", _body())), "scalar", len(cases), 64, x, out)
    return cases, out


@pytest.mark.parametrize("n", range(len(OPS)), ids=list(OPS))
def test_result_and_scc(results, n):
    cases, out = results
    text = list(OPS)[n]
    bits = 64 if "{D}" in text else 32
    for row, (a, b, c) in enumerate(cases):
        value, scc = OPS[text](a, b, c)
        got = int(out[row, n, 0]) | (int(out[row, n, 1]) << 32 if bits == 64 else 0)
        assert (got, out[row, n, 2]) == (cut(value, bits), int(c if scc is None else scc)), (hex(a), hex(b), c)


def test_exec_and_branches():
    body = """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_mov_b32 v1, 0
v_cmp_gt_u32 vcc, 40, v0
s_and_saveexec_b64 s[6:7], vcc
s_cbranch_execz .Lskip
v_add_u32 v1, 1, v1
.Lskip:
s_xor_b64 exec, exec, s[6:7]
v_add_u32 v1, 2, v1
s_mov_b64 exec, s[6:7]
s_movk_i32 s8, 0x5
.Lloop:
v_add_u32 v1, 16, v1
s_add_i32 s8, s8, -1
s_cmp_lg_u32 s8, 0
s_cbranch_scc1 .Lloop
s_bitcmp1_b32 s8, 0
s_cbranch_scc0 .Lstore
v_mov_b32 v1, 0
.Lstore:
v_lshlrev_b32 v2, 2, v0
s_waitcnt lgkmcnt(0)
global_store_dword v2, v1, s[4:5]
"""
    out = np.zeros(64, np.uint32)
    launch(module("branches", kernel("branches", body)), "branches", 1, 64, out)
    np.testing.assert_array_equal(out, np.where(np.arange(64) < 40, 1, 2) + 80)
