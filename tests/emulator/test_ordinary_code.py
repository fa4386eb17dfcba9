"""What ordinary HIP programs need beside the product's own instructions: found by compiling CuPy's kernels and others."""

# ruff: noqa: E501 - the tables have one line an instruction

from __future__ import annotations

import numpy as np
import pytest

from kosmos_raw import emulator
from kosmos_raw.build import gfx950, zig
from kosmos_raw.emulator import Options
from kosmos_raw.emulator.node.hiprtc import INCLUDE
from kosmos_raw.emulator.translate import translate

from .launching import launch
from .text import KERNELS, kernel, module
from .vector_tables import Results, Table, f, flushed, h, high, i, run, same_bits, same_floats, u, w

pytestmark = pytest.mark.emulated
LANE = np.arange(64)
LATE = ("direct", "lds", "loads", "stores")


def s16(x):
    return w(x).view(np.int16).astype(np.int64)


def u16(x):
    return w(x).astype(np.int64)


def u32(x):
    return u(x).astype(np.int64)


def keeps(low, old):
    """A 16-bit result over the lower half of the old register."""
    return (old & np.uint64(0xFFFF0000)) | np.asarray(low).astype(np.int64).view(np.uint64) & np.uint64(0xFFFF)


def halves(fn, a, b):
    low, top = (fn(x, y) & 0xFFFF for x, y in ((a, b), (a >> np.uint64(16), b >> np.uint64(16))))
    return low | top << 16


def dot(bits, signed, a, b, c):
    total = i(c).astype(np.int64)
    for first in range(0, 32, bits):
        x, y = ((u32(z) >> first & (1 << bits) - 1) for z in (a, b))
        if signed:
            x, y = (z - (z >> bits - 1 << bits) for z in (x, y))
        total = total + x * y
    return total


def mix(a, b, c):
    """Rounded once to float32."""
    return (np.asarray(a).astype(np.longdouble) * b + c).astype(np.float32)


def fixup(quotient, den, num):
    """div_fixup of 16-bit floats."""
    sign = np.signbit(den) != np.signbit(num)
    r = np.abs(quotient)
    r = np.where(np.isnan(quotient), np.float16(np.inf), r)
    r = np.where(np.isinf(den) | (num == 0), np.float16(0), r)
    r = np.where((den == 0) | np.isinf(num), np.float16(np.inf), r)
    r = np.where(sign, -r, r)
    none = ((num == 0) & (den == 0)) | (np.isinf(num) & np.isinf(den)) | np.isnan(num) | np.isnan(den)
    return np.where(none, np.float16(np.nan), r)


# fmt: off
BITS: Table = {
    "v_mad_legacy_u16 {d}, {a}, {b}, {c}": lambda a, b, c: w(w(a) * w(b) + w(c)),
    "v_mad_legacy_i16 {d}, {a}, {b}, {c}": lambda a, b, c: w(w(a) * w(b) + w(c)),
    "v_mad_u16 {d}, {a}, {b}, {c}": lambda a, b, c: keeps(w(w(a) * w(b) + w(c)), c),
    "v_mad_i16 {d}, {a}, {b}, {c}": lambda a, b, c: keeps(w(w(a) * w(b) + w(c)), c),
    "v_add_i16 {d}, {a}, {b}": lambda a, b, c: w(w(a) + w(b)),
    "v_sub_i16 {d}, {a}, {b}": lambda a, b, c: w(w(a) - w(b)),
    "v_add_u32 {d}, {a}, {b} clamp": lambda a, b, c: np.minimum(u32(a) + u32(b), 2**32 - 1),
    "v_sub_u32 {d}, {a}, {b} clamp": lambda a, b, c: np.maximum(u32(a) - u32(b), 0),
    "v_subrev_u32 {d}, {a}, {b} clamp": lambda a, b, c: np.maximum(u32(b) - u32(a), 0),
    "v_add_i32 {d}, {a}, {b} clamp": lambda a, b, c: np.clip(i(a).astype(np.int64) + i(b), -(2**31), 2**31 - 1),
    "v_sub_i32 {d}, {a}, {b} clamp": lambda a, b, c: np.clip(i(a).astype(np.int64) - i(b), -(2**31), 2**31 - 1),
    "v_add_i32 {d}, {a}, {b}": lambda a, b, c: a + b,
    "v_add_u16 {d}, {a}, {b} clamp": lambda a, b, c: np.minimum(u16(a) + u16(b), 0xFFFF),
    "v_sub_u16 {d}, {a}, {b} clamp": lambda a, b, c: np.maximum(u16(a) - u16(b), 0),
    "v_add_i16 {d}, {a}, {b} clamp": lambda a, b, c: np.clip(s16(a) + s16(b), -0x8000, 0x7FFF) & 0xFFFF,
    "v_sub_i16 {d}, {a}, {b} clamp": lambda a, b, c: np.clip(s16(a) - s16(b), -0x8000, 0x7FFF) & 0xFFFF,
    "v_pk_add_u16 {d}, {a}, {b} clamp": lambda a, b, c: halves(lambda x, y: np.minimum(u16(x) + u16(y), 0xFFFF), a, b),
    "v_pk_sub_i16 {d}, {a}, {b} clamp": lambda a, b, c: halves(lambda x, y: np.clip(s16(x) - s16(y), -0x8000, 0x7FFF), a, b),
    "v_dot4_i32_i8 {d}, {a}, {b}, {c}": lambda a, b, c: dot(8, True, a, b, c),
    "v_dot4c_i32_i8 {d}, {a}, {b}": lambda a, b, c: dot(8, True, a, b, c),
    "v_dot4_u32_u8 {d}, {a}, {b}, {c}": lambda a, b, c: dot(8, False, a, b, c),
    "v_dot2_i32_i16 {d}, {a}, {b}, {c}": lambda a, b, c: dot(16, True, a, b, c),
    "v_dot2c_i32_i16 {d}, {a}, {b}": lambda a, b, c: dot(16, True, a, b, c),
    "v_dot2_u32_u16 {d}, {a}, {b}, {c}": lambda a, b, c: dot(16, False, a, b, c),
    "v_mov_b32 v20, {a}\nv_mov_b32 v21, {b}\ns_mov_b32 s30, 1\ns_set_gpr_idx_on s30, gpr_idx(SRC0)\nv_mov_b32 {d}, v20\ns_set_gpr_idx_off": lambda a, b, c: b,
    "s_movk_i32 s30, 0x102\ns_set_gpr_idx_on s30, gpr_idx(DST)\nv_mov_b32 v8, {b}\ns_set_gpr_idx_off\nv_lshlrev_b32 v8, 3, v0": lambda a, b, c: b,
    "ds_swizzle_b32 {d}, {a} offset:swizzle(SWAP,16)\ns_waitcnt lgkmcnt(0)": lambda a, b, c: a[LANE ^ 16],
    "ds_swizzle_b32 {d}, {a} offset:swizzle(REVERSE,8)\ns_waitcnt lgkmcnt(0)": lambda a, b, c: a[LANE ^ 7],
    "ds_swizzle_b32 {d}, {a} offset:swizzle(BROADCAST,8,5)\ns_waitcnt lgkmcnt(0)": lambda a, b, c: a[LANE & ~7 | 5],
    'ds_swizzle_b32 {d}, {a} offset:swizzle(BITMASK_PERM,"01pip")\ns_waitcnt lgkmcnt(0)': lambda a, b, c: a[LANE & 32 | 8 | LANE & 5 | ~LANE & 2],
    "ds_swizzle_b32 {d}, {a} offset:swizzle(QUAD_PERM,3,1,0,2)\ns_waitcnt lgkmcnt(0)": lambda a, b, c: a[LANE & ~3 | np.array([3, 1, 0, 2])[LANE & 3]],
}
HALVES: Table = {  # whose NaNs may have any bits
    "v_fma_f16 {d}, {a}, {b}, {c}": lambda a, b, c: (h(a).astype(np.float64) * h(b) + h(c)).astype(np.float16),
    "v_div_fixup_f16 {d}, {a}, {b}, {c}": lambda a, b, c: fixup(h(a), h(b), h(c)),
    "v_fma_mixlo_f16 {d}, {a}, {b}, {c} op_sel_hi:[1,1,0]": lambda a, b, c: mix(h(a), h(b), f(c)).astype(np.float16),
}
FLOATS: Table = {
    "v_fma_mix_f32 {d}, {a}, -{b}, {c} op_sel:[1,0,0] op_sel_hi:[1,1,0]": lambda a, b, c: mix(h(a >> np.uint64(16)), -h(b), f(c)),
    "v_fma_mix_f32 {d}, {a}, |{b}|, {c} op_sel:[0,0,1] op_sel_hi:[0,0,1]": lambda a, b, c: mix(f(a), np.abs(f(b)), h(c >> np.uint64(16))),
    "v_fma_mix_f32 {d}, {a}, 2.0, {c} op_sel_hi:[1,0,0]": lambda a, b, c: mix(h(a), np.float32(2), f(c)),
}
SUBNORMAL: Table = {  # with MODE as CuPy's kernels have it: float32 subnormals are zero, in and out
    "v_add_f32 {d}, {a}, {b}": lambda a, b, c: flushed(flushed(f(a)) + flushed(f(b))),
    "v_mul_f32 {d}, -{a}, {b}": lambda a, b, c: flushed(-flushed(f(a)) * flushed(f(b))),
    "v_fma_f32 {d}, {a}, {b}, {c}": lambda a, b, c: flushed(mix(flushed(f(a)), flushed(f(b)), flushed(f(c)))),
    "v_fmac_f32 {d}, {a}, {b}": lambda a, b, c: flushed(mix(flushed(f(a)), flushed(f(b)), flushed(f(c)))),
    "v_floor_f32 {d}, {a}": lambda a, b, c: np.floor(flushed(f(a))),
    "v_cvt_f64_f32 {D}, {a}": lambda a, b, c: flushed(f(a)).astype(np.float64),
    "v_pk_mul_f32 {D}, {A}, {B}": lambda a, b, c: flushed(np.stack([flushed(f(a)) * flushed(f(b)), flushed(f(high(a))) * flushed(f(high(b)))])),
    "v_cmp_gt_f32 vcc, {a}, {b}\nv_cndmask_b32 {d}, 0, 1.0, vcc": lambda a, b, c: (flushed(f(a)) > flushed(f(b))).astype(np.float32),
    "v_cmp_lt_f32 vcc, 0, |{a}|\nv_cndmask_b32 {d}, 0, 1.0, vcc": lambda a, b, c: (flushed(np.abs(f(a))) > 0).astype(np.float32),
    "v_add_f16 {d}, {a}, {b}": lambda a, b, c: h(a) + h(b),
    "v_cndmask_b32 {d}, {a}, {b}, {m}\nv_mov_b32 {d}, {a}": lambda a, b, c: f(a),
    # Division asks for subnormals on its way:
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3\nv_add_f32 {d}, {a}, {b}\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0": lambda a, b, c: f(a) + f(b),
    "s_mov_b32 s30, 1\ns_setreg_b32 hwreg(HW_REG_MODE, 4, 2), s30\nv_mul_f32 {d}, {a}, 0.5\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0": lambda a, b, c: flushed(f(a) * np.float32(0.5)),
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 2\nv_mul_f32 {d}, {a}, 0.5\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0": lambda a, b, c: flushed(f(a)) * np.float32(0.5),
    "s_getreg_b32 s30, hwreg(HW_REG_MODE, 4, 4)\nv_cvt_f32_u32 {d}, s30": lambda a, b, c: np.full(64, 12, np.float32),
}
# fmt: on
KEPT = BITS | HALVES | FLOATS


@pytest.fixture(scope="module")
def kept() -> Results:
    return run(KEPT)


@pytest.fixture(scope="module")
def flushing() -> Results:
    return run(SUBNORMAL, denormals=0)


def first_line(text):
    return text.split("\n")[-1 if text.startswith("s_set") else 0]


@pytest.mark.parametrize("text", BITS, ids=first_line)
def test_bits(kept, text):
    same_bits(KEPT, kept, text)


@pytest.mark.parametrize("text", HALVES, ids=first_line)
def test_halves_keep_the_upper_one(kept, text):
    same_floats(KEPT, kept, text)
    x, got = kept
    assert (got[text] >> np.uint64(16) & np.uint64(0xFFFF) == x[2] >> np.uint64(16) & np.uint64(0xFFFF)).all()


@pytest.mark.parametrize("text", FLOATS, ids=first_line)
def test_floats(kept, text):
    same_floats(KEPT, kept, text)


@pytest.mark.parametrize("text", SUBNORMAL, ids=first_line)
def test_subnormals_by_mode(flushing, text):
    same_floats(SUBNORMAL, flushing, text)


MEMORY = [
    kernel("doubles", """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_mov_b32 v1, 0
v_lshlrev_b32 v8, 3, v0
v_lshlrev_b32 v12, 2, v0
s_waitcnt lgkmcnt(0)
v_cvt_f64_u32 v[2:3], v0
v_add_f64 v[4:5], v[2:3], 0.5
global_atomic_add_f64 v1, v[4:5], s[4:5]
global_atomic_max_f64 v1, v[2:3], s[4:5] offset:8
global_atomic_min_f64 v1, v[2:3], s[4:5] offset:16
v_mov_b32 v6, 40
global_atomic_inc v7, v1, v6, s[4:5] offset:24 sc0
v_mov_b32 v6, 9
global_atomic_dec v1, v6, s[4:5] offset:28
v_mov_b32 v2, 7
v_mov_b32 v3, 0
v_mov_b32 v4, v0
v_mov_b32 v5, 3
ds_write_b64 v1, v[2:3]
s_waitcnt vmcnt(0) lgkmcnt(0)
s_barrier
ds_cmpst_rtn_b64 v[10:11], v1, v[2:3], v[4:5]
s_waitcnt lgkmcnt(0)
global_store_dword v12, v7, s[6:7]
global_store_dwordx2 v8, v[10:11], s[6:7] offset:512
""", lds=64),
    kernel("anywhere", """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v8, 3, v0
v_lshlrev_b32 v1, 2, v0
v_add_u32 v2, 5, v0
s_mov_b64 s[8:9], src_shared_base
s_mov_b64 s[10:11], src_private_base
scratch_store_dword off, v2, off offset:8
v_add_u32 v2, 0x100, v0
ds_write_b32 v1, v2
s_waitcnt vmcnt(0) lgkmcnt(0)
s_barrier
; lanes 0 to 15 mean LDS, 16 to 31 scratch, the others memory
v_mov_b32 v12, s4
v_mov_b32 v13, s5
v_add_co_u32 v12, vcc, v12, v1
v_addc_co_u32 v13, vcc, 0, v13, vcc
v_mov_b32 v14, s9
v_mov_b32 v15, s11
v_cmp_gt_u32 vcc, 32, v0
v_cndmask_b32 v12, v12, 8, vcc
v_cndmask_b32 v13, v13, v15, vcc
v_cmp_gt_u32 vcc, 16, v0
v_cndmask_b32 v12, v12, v1, vcc
v_cndmask_b32 v13, v13, v14, vcc
flat_load_dword v19, v[12:13]
s_waitcnt vmcnt(0) lgkmcnt(0)
v_add_u32 v4, 1, v19
flat_store_dword v[12:13], v4
s_waitcnt vmcnt(0) lgkmcnt(0)
flat_load_dword v16, v[12:13]
ds_read_b32 v17, v1
scratch_load_dword v18, off, off offset:8
s_waitcnt vmcnt(0) lgkmcnt(0)
v_lshlrev_b32 v8, 4, v0
global_store_dwordx4 v8, v[16:19], s[6:7]
""", lds=256).replace("private_segment_fixed_size 0", "private_segment_fixed_size 16"),
    kernel("past", """
s_mov_b64 s[8:9], src_shared_base
v_mov_b32 v2, 0x100
v_mov_b32 v3, s9
flat_load_dword v4, v[2:3]
""", lds=256),
    kernel("indexed_past", """
s_movk_i32 s4, 200
s_set_gpr_idx_on s4, gpr_idx(SRC0)
v_mov_b32 v1, v2
s_set_gpr_idx_off
"""),
]  # fmt: skip
OPTIONS = [Options(), Options(caches="xcd"), Options(late_memory=LATE), Options(caches="workgroup", late_memory=LATE)]


@pytest.fixture(scope="module")
def memory() -> emulator.Module:
    return module("ordinary", *MEMORY)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "caches", "late", "both"])
def test_atomics_of_doubles_and_others(memory, options):
    x, out = np.zeros(8, np.float64), np.zeros(128 + 128, np.uint32)
    x[2] = 5
    x[3:4].view(np.uint32)[1] = 3
    launch(memory, "doubles", 1, 64, x, out, options=options)
    assert list(x[:3]) == [63 * 64 / 2 + 32, 63, 0]
    assert x[3:4].view(np.uint32)[0] == 64 % 41 and sorted(out[:64]) == sorted(n % 41 for n in range(64))
    assert x[3:4].view(np.uint32)[1] == (3 - 64) % 10  # 3, 2, 1, 0, 9, 8, ...
    old = out[128:].view(np.uint64)  # the first sees 7 and writes; the others see what it wrote
    assert old.tolist().count(7) == 1 and len(set(old[old != 7].tolist())) == 1
    assert old[old != 7][0] == int(np.flatnonzero(old == 7)[0]) | 3 << 32


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "caches", "late", "both"])
def test_a_pointer_to_anything(memory, options):
    x, out = np.arange(1000, 1064, dtype=np.uint32), np.zeros((64, 4), np.uint32)
    launch(memory, "anywhere", 1, 64, x, out, options=options)
    before = np.where(LANE < 16, 0x100 + LANE, np.where(LANE < 32, 5 + LANE, 1000 + LANE))
    np.testing.assert_array_equal(out[:, 3], before)
    np.testing.assert_array_equal(out[:, 0], before + 1)
    np.testing.assert_array_equal(out[:, 1], 0x100 + LANE + (LANE < 16))
    np.testing.assert_array_equal(out[:, 2], 5 + LANE + ((LANE >= 16) & (LANE < 32)))
    np.testing.assert_array_equal(x, 1000 + LANE + (LANE >= 32))


@pytest.mark.parametrize(("name", "word"), [("past", "past the end of LDS"), ("indexed_past", "past the last vector")])
def test_what_is_out_of_bounds_is_named(memory, name, word):
    with pytest.raises(emulator.RunError, match=word):
        launch(memory, name, 1, 64)


@pytest.mark.parametrize(
    "what", ["hwreg(HW_REG_MODE, 0, 4), 3", "hwreg(HW_REG_MODE, 2, 2), 1", "hwreg(HW_REG_MODE, 8, 1), 0"]
)
def test_other_bits_of_mode_are_refused(what):
    text = kernel("rounding", f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 2, 2), 0\ns_setreg_imm32_b32 {what}")
    with pytest.raises(emulator.UnknownInstructions, match="does not know 1 kinds"):
        module("rounding", text)


def test_only_moves_may_be_indexed():
    text = kernel("odd", "s_set_gpr_idx_on s4, gpr_idx(SRC0)\nv_add_f32 v1, v2, v3\ns_set_gpr_idx_off")
    with pytest.raises(emulator.UnknownInstructions, match="indexed by SRC0"):
        module("odd", text)


@pytest.mark.parametrize("more", [(), ("-fgpu-flush-denormals-to-zero",), ("-mllvm", "-amdgpu-sdwa-peephole=1")])
def test_ordinary_programs_have_no_unknown_instruction(tmp_path, more):
    """Compiled as hiprtc compiles on the emulated node; also without the option that avoids SDWA."""
    options = [o for o in gfx950.COMPILE if not o.startswith("-W")]
    if "peephole" in str(more):
        at = next(n for n, o in enumerate(options) if "peephole" in o)
        del options[at - 1 : at + 1]
    headers = ("-include", str(INCLUDE / "device.h"), "-isystem", str(INCLUDE), "-w")
    zig.run(["clang", *options, *headers, *more, "-o", str(tmp_path / "o.s"), str(KERNELS / "ordinary.hip")])
    translation = translate((tmp_path / "o.s").read_text(), "ordinary")
    assert len(translation.kernels) > 30
    assert {"v_fma_mix_f32", "s_set_gpr_idx_on", "flat_load_dword", "v_div_fixup_f16"} <= translation.mnemonics
    assert ("s_setreg_imm32_b32" in translation.mnemonics) == ("-fgpu-flush-denormals-to-zero" in more)
