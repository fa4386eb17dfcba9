"""Vector arithmetic of gfx950: a table of what each instruction computes for one lane, as a C++ expression.

A signature names the type of the result and of each source, which the expression calls a, b, c:
u i unsigned and signed 32 bits, q j 64 bits, w s 16 bits; h f d floats of 16, 32, 64 bits; + is the old result, as c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TYPES = {
    "u": "u32",
    "i": "i32",
    "q": "u64",
    "j": "i64",
    "w": "u16",
    "s": "i16",
    "h": "half",
    "f": "float",
    "d": "double",
}
# How constants are made into bits, see Operand.bits.
CONSTANTS = {"u": "u32", "i": "u32", "q": "q64", "j": "q64", "w": "f16", "s": "f16", "h": "f16", "f": "f32", "d": "f64"}
FLOATS = "hfd"


@dataclass(frozen=True)
class VectorOp:
    result: str
    sources: str
    expression: str
    keeps_high: bool = False  # of a 16-bit result: the register's upper half stays; else it becomes zero
    by_mode: bool = True  # float32 subnormals are flushed where MODE says so
    saturated: str = ""  # the expression with `clamp`, of integers

    @property
    def wide(self) -> bool:
        return self.result in "qjd"


VECTOR: dict[str, VectorOp] = {}
PACKED: dict[str, VectorOp] = {}  # the same on both halves of each operand; types are those of one half


def _op(names: str, signature: str, expression: str, **more: Any) -> None:
    result, sources = signature.split(":")
    for name in names.split():
        VECTOR[name] = VectorOp(result, sources, expression, **more)


def _packed(names: str, signature: str, expression: str, **more: Any) -> None:
    result, sources = signature.split(":")
    for name in names.split():
        PACKED[name] = VectorOp(result, sources, expression, **more)


def _moves_and_bits() -> None:
    _op("v_mov_b32 v_accvgpr_read_b32 v_accvgpr_write_b32 v_accvgpr_mov_b32", "u:u", "a")
    _op("v_mov_b64", "q:q", "a")
    _op("v_not_b32", "u:u", "~a")
    _op("v_bfrev_b32", "u:u", "reverse_bits(a)")
    _op("v_and_b32", "u:uu", "a & b")
    _op("v_or_b32", "u:uu", "a | b")
    _op("v_xor_b32", "u:uu", "a ^ b")
    _op("v_xnor_b32", "u:uu", "~(a ^ b)")
    _op("v_and_or_b32", "u:uuu", "(a & b) | c")
    _op("v_or3_b32", "u:uuu", "a | b | c")
    _op("v_bfi_b32", "u:uuu", "(a & b) | (~a & c)")
    _op("v_bfm_b32", "u:uu", "((1u << (a & 31)) - 1) << (b & 31)")
    _op("v_bfe_u32", "u:uuu", "c & 31 ? a >> (b & 31) & ((1u << (c & 31)) - 1) : 0")
    _op("v_bfe_i32", "i:iuu", "c & 31 ? (i32)((u32)(a >> (b & 31)) << (32 - (c & 31))) >> (32 - (c & 31)) : 0")
    _op("v_lshlrev_b32", "u:uu", "b << (a & 31)")
    _op("v_lshrrev_b32", "u:uu", "b >> (a & 31)")
    _op("v_ashrrev_i32", "i:ui", "b >> (a & 31)")
    _op("v_lshlrev_b64", "q:uq", "b << (a & 63)")
    _op("v_lshrrev_b64", "q:uq", "b >> (a & 63)")
    _op("v_ashrrev_i64", "j:uj", "b >> (a & 63)")
    _op("v_lshlrev_b16", "w:ww", "b << (a & 15)")
    _op("v_lshrrev_b16", "w:ww", "b >> (a & 15)")
    _op("v_ashrrev_i16", "s:ws", "b >> (a & 15)")
    _op("v_lshl_or_b32", "u:uuu", "(a << (b & 31)) | c")
    _op("v_lshl_add_u32", "u:uuu", "(a << (b & 31)) + c")
    _op("v_lshl_add_u64", "q:quq", "(a << (b & 7)) + c")
    _op("v_add_lshl_u32", "u:uuu", "(a + b) << (c & 31)")
    _op("v_xad_u32", "u:uuu", "(a ^ b) + c")
    _op("v_alignbit_b32", "u:uuu", "(u32)(((u64)a << 32 | b) >> (c & 31))")
    _op("v_alignbyte_b32", "u:uuu", "(u32)(((u64)a << 32 | b) >> (8 * (c & 3)))")
    _op("v_perm_b32", "u:uuu", "permute_bytes(a, b, c)")
    _op("v_bcnt_u32_b32", "u:uu", "__builtin_popcount(a) + b")
    _op("v_ffbh_u32", "u:u", "a ? __builtin_clz(a) : ~0u")
    _op("v_ffbh_i32", "u:u", "a == 0 || a == ~0u ? ~0u : __builtin_clz((i32)a < 0 ? ~a : a)")
    _op("v_ffbl_b32", "u:u", "a ? __builtin_ctz(a) : ~0u")
    _op("v_prng_b32", "u:u", "(a << 1) ^ (197u & (u32)((i32)a >> 31))")
    _op("v_pack_b32_f16", "u:ww", "a | (u32)b << 16")
    _op("v_sad_u8", "u:uuu", "sum_of_byte_differences(a, b) + c")


def _integers() -> None:
    saturated = {"add": "clamped_sum(a, b)", "sub": "clamped_difference(a, b)", "subrev": "clamped_difference(b, a)"}
    for name, e in {"add": "a + b", "sub": "a - b", "subrev": "b - a"}.items():
        _op(f"v_{name}_u32", "u:uu", e, saturated=saturated[name])
        _op(f"v_{name}_u16", "w:ww", e, saturated=saturated[name])
        _op(f"v_{name}_f16", "h:hh", e)
        _op(f"v_{name}_f32", "f:ff", e)
    for name, e in {"add": "a + b", "sub": "a - b"}.items():
        _op(f"v_{name}_i32", "i:ii", e.replace("a", "(u32)a").replace("b", "(u32)b"), saturated=saturated[name])
        _op(f"v_{name}_i16", "s:ss", e, saturated=saturated[name])
    _op("v_add3_u32", "u:uuu", "a + b + c")
    _op("v_mul_lo_u32", "u:uu", "a * b")
    _op("v_mul_hi_u32", "u:uu", "(u32)((u64)a * b >> 32)")
    _op("v_mul_hi_i32", "u:ii", "(u32)((u64)((i64)a * b) >> 32)")
    _op("v_mul_lo_u16", "w:ww", "(u16)((u32)a * b)")
    _op("v_mad_u16 v_mad_i16", "w:www", "(u32)a * b + c", keeps_high=True)
    _op("v_mad_legacy_u16 v_mad_legacy_i16", "w:www", "(u32)a * b + c")
    for c in ("", "c"):
        _op(f"v_dot4{c}_i32_i8", "i:uu+" if c else "i:uui", "dot_signed<8>(a, b, c)")
        _op(f"v_dot2{c}_i32_i16", "i:uu+" if c else "i:uui", "dot_signed<16>(a, b, c)")
    _op("v_dot4_u32_u8", "u:uuu", "dot_unsigned<8>(a, b, c)")
    _op("v_dot2_u32_u16", "u:uuu", "dot_unsigned<16>(a, b, c)")
    low, signed = "({} & 0xffffff)", "((i32)({} << 8) >> 8)"
    a, b = low.format("a"), low.format("b")
    _op("v_mul_u32_u24", "u:uu", f"{a} * {b}")
    _op("v_mul_hi_u32_u24", "u:uu", f"(u32)((u64){a} * {b} >> 32)")
    _op("v_mad_u32_u24", "u:uuu", f"{a} * {b} + c")
    a, b = signed.format("a"), signed.format("b")
    _op("v_mul_i32_i24", "u:uu", f"(u32)((i64){a} * {b})")
    _op("v_mul_hi_i32_i24", "u:uu", f"(u32)((i64){a} * {b} >> 32)")
    _op("v_mad_i32_i24", "u:uuu", f"(u32)((i64){a} * {b}) + c")
    for kind, t in {"u32": "u", "i32": "i", "u16": "w", "i16": "s"}.items():
        _op(f"v_max_{kind}", f"{t}:{t}{t}", "larger(a, b)")
        _op(f"v_min_{kind}", f"{t}:{t}{t}", "smaller(a, b)")
        _op(f"v_max3_{kind}", f"{t}:{t}{t}{t}", "larger(larger(a, b), c)")
        _op(f"v_min3_{kind}", f"{t}:{t}{t}{t}", "smaller(smaller(a, b), c)")
        _op(f"v_med3_{kind}", f"{t}:{t}{t}{t}", "med3(a, b, c)")


def _floats() -> None:
    for suffix, t in {"f16": "h", "f32": "f", "f64": "d"}.items():
        two, three = f"{t}:{t}{t}", f"{t}:{t}{t}{t}"
        _op(f"v_mul_{suffix}", two, "a * b")
        _op(f"v_fma_{suffix}", three, "fma_(a, b, c)", keeps_high=t == "h")
        _op(f"v_fmac_{suffix}", f"{t}:{t}{t}+", "fma_(a, b, c)", keeps_high=t == "h")
        _op(f"v_max_{suffix}", two, "max_num(a, b)")
        _op(f"v_min_{suffix}", two, "min_num(a, b)")
        _op(
            f"v_ldexp_{suffix}",
            f"{t}:{t}{'s' if t == 'h' else 'i'}",
            "ldexp_(a, b)" if t != "h" else "(half)ldexp_((float)a, b)",
        )
    _op("v_add_f64", "d:dd", "a + b")
    _op("v_fmamk_f32 v_fmaak_f32", "f:fff", "fma_(a, b, c)")
    _op("v_mul_legacy_f32", "f:ff", "a == 0 || b == 0 ? 0.f : a * b")
    _op("v_max3_f32", "f:fff", "max_num(max_num(a, b), c)")
    _op("v_min3_f32", "f:fff", "min_num(min_num(a, b), c)")
    _op("v_med3_f32", "f:fff", "med3_num(a, b, c)")
    nan = 'a != a || b != b || c != c ? __builtin_nanf("") : '
    _op("v_maximum3_f32", "f:fff", nan + "max_num(max_num(a, b), c)")
    _op("v_minimum3_f32", "f:fff", nan + "min_num(min_num(a, b), c)")
    for name, call in {"rndne": "rint", "floor": "floor", "ceil": "ceil", "trunc": "trunc"}.items():
        _op(f"v_{name}_f32", "f:f", f"__builtin_{call}f(a)")
        _op(f"v_{name}_f64", "d:d", f"__builtin_{call}(a)")
        _op(f"v_{name}_f16", "h:h", f"(half)__builtin_{call}f((float)a)")
    # Hardware approximates these to about one unit in the last place, and takes and gives no float32 subnormals.
    one_argument = {
        "exp": "__builtin_exp2f({})",
        "log": "__builtin_log2f({})",
        "rcp": "1.f / {}",
        "sqrt": "__builtin_sqrtf({})",
    }
    one_argument |= {"rsq": "1.f / __builtin_sqrtf({})", "sin": "sine_of_turns({})", "cos": "cosine_of_turns({})"}
    for name, e in one_argument.items():
        _op(f"v_{name}_f32", "f:f", f"flushed({e.format('flushed(a)')})", by_mode=False)
        _op(f"v_{name}_f16", "h:h", f"(half)({e.format('(float)a')})")
    _op("v_rcp_iflag_f32", "f:f", "flushed(1.f / flushed(a))", by_mode=False)
    _op("v_rcp_f64", "d:d", "1. / a")
    _op("v_rsq_f64", "d:d", "1. / __builtin_sqrt(a)")
    _op("v_sqrt_f64", "d:d", "__builtin_sqrt(a)")
    _op("v_fract_f32", "f:f", "fraction_part(a)")
    _op("v_frexp_mant_f32", "f:f", "mantissa_part(a)", by_mode=False)
    _op("v_frexp_exp_i32_f32", "i:f", "exponent_part(a)", by_mode=False)
    for suffix, t in {"f16": "h", "f32": "f", "f64": "d"}.items():
        _op(f"v_div_fixup_{suffix}", f"{t}:{t}{t}{t}", "div_fixup(a, b, c)", keeps_high=t == "h", by_mode=False)
    _op("v_dot2_f32_bf16", "f:uuf", "dot_bf16(a, b, c)")
    _op("v_dot2c_f32_bf16", "f:uu+", "dot_bf16(a, b, c)")
    _op("v_dot2_f32_f16", "f:uuf", "dot_f16(a, b, c)")


def _conversions() -> None:
    _op("v_cvt_f32_u32", "f:u", "(float)a")
    _op("v_cvt_f32_i32", "f:i", "(float)a")
    _op("v_cvt_u32_f32", "u:f", "to_u32(a)")
    _op("v_cvt_i32_f32", "i:f", "to_i32(a)")
    _op("v_cvt_rpi_i32_f32", "i:f", "to_i32(__builtin_floorf(a + 0.5f))")
    _op("v_cvt_flr_i32_f32", "i:f", "to_i32(__builtin_floorf(a))")
    _op("v_cvt_f32_f16", "f:h", "(float)a")
    _op("v_cvt_f16_f32", "h:f", "(half)a")
    _op("v_cvt_f16_u16", "h:w", "(half)(float)a")
    _op("v_cvt_f16_i16", "h:s", "(half)(float)a")
    _op("v_cvt_f32_bf16", "f:w", "from_bf16(a)")
    _op("v_cvt_f64_f32", "d:f", "(double)a")
    _op("v_cvt_f32_f64", "f:d", "(float)a")
    _op("v_cvt_f64_i32", "d:i", "(double)a")
    _op("v_cvt_f64_u32", "d:u", "(double)a")
    _op("v_cvt_i32_f64", "i:d", "to_i32(a)")
    _op("v_cvt_u32_f64", "u:d", "to_u32(a)")
    for i in range(4):
        _op(f"v_cvt_f32_ubyte{i}", "f:u", f"(float)(a >> {8 * i} & 255)")
    _op("v_cvt_pk_bf16_f32", "u:ff", "to_bf16(a) | to_bf16(b) << 16")
    _op("v_cvt_pk_f16_f32", "u:ff", "to_f16(a) | to_f16(b) << 16")
    _op("v_cvt_pkrtz_f16_f32", "u:ff", "to_f16_toward_zero(a) | to_f16_toward_zero(b) << 16")
    _op("v_cvt_pk_u8_f32", "u:fuu", "put_byte(c, b & 3, smaller(to_u32(a), 255u))")
    _op("v_cvt_pk_u16_u32", "u:uu", "smaller(a, 0xffffu) | smaller(b, 0xffffu) << 16")
    _op("v_cvt_f32_fp8", "f:u", "from_fp8(a & 255)")
    _op("v_cvt_f32_bf8", "f:u", "from_bf8(a & 255)")


def _packed_arithmetic() -> None:
    for suffix, t in {"f32": "f", "f16": "h"}.items():
        _packed(f"v_pk_add_{suffix}", f"{t}:{t}{t}", "a + b")
        _packed(f"v_pk_mul_{suffix}", f"{t}:{t}{t}", "a * b")
        _packed(f"v_pk_fma_{suffix}", f"{t}:{t}{t}{t}", "fma_(a, b, c)")
    _packed("v_pk_max_f16", "h:hh", "max_num(a, b)")
    _packed("v_pk_min_f16", "h:hh", "min_num(a, b)")
    _packed("v_pk_mov_b32", "u:uu", "0")  # not the same on both halves: see vector.py
    for suffix, t in {"u16": "w", "i16": "s"}.items():
        _packed(f"v_pk_add_{suffix}", f"{t}:{t}{t}", "a + b", saturated="clamped_sum(a, b)")
        _packed(f"v_pk_sub_{suffix}", f"{t}:{t}{t}", "a - b", saturated="clamped_difference(a, b)")
        _packed(f"v_pk_max_{suffix}", f"{t}:{t}{t}", "larger(a, b)")
        _packed(f"v_pk_min_{suffix}", f"{t}:{t}{t}", "smaller(a, b)")
        _packed(f"v_pk_mad_{suffix}", f"{t}:{t}{t}{t}", "(u32)a * (u32)b + (u32)c")
    _packed("v_pk_mul_lo_u16", "w:ww", "(u32)a * b")
    _packed("v_pk_lshlrev_b16", "w:ww", "b << (a & 15)")
    _packed("v_pk_lshrrev_b16", "w:ww", "b >> (a & 15)")
    _packed("v_pk_ashrrev_i16", "s:ws", "b >> (a & 15)")


for _table in (_moves_and_bits, _integers, _floats, _conversions, _packed_arithmetic):
    _table()

# ---- compares ----
_COMPARES = {"eq": "a == b", "ne": "a != b", "lt": "a < b", "gt": "a > b", "le": "a <= b", "ge": "a >= b"}
_FLOAT_COMPARES = {k: e for k, e in _COMPARES.items() if k != "ne"} | {
    "lg": "a < b || a > b",
    "nlg": "!(a < b || a > b)",
    "neq": "!(a == b)",
    "nlt": "!(a < b)",
    "ngt": "!(a > b)",
    "nle": "!(a <= b)",
    "nge": "!(a >= b)",
    "u": "a != a || b != b",
    "o": "a == a && b == b",
}
_COMPARED = {"u32": "u", "i32": "i", "u64": "q", "i64": "j", "u16": "w", "i16": "s", "f16": "h", "f32": "f", "f64": "d"}
_CLASSES = {"f16": ("h", "half, 5, 10"), "f32": ("f", "float, 8, 23"), "f64": ("d", "double, 11, 52")}


def compare(mnemonic: str) -> VectorOp | None:
    """What v_cmp_... and v_cmpx_... ask of each lane."""
    _, _, rest = mnemonic.partition("_cmpx_" if "_cmpx_" in mnemonic else "_cmp_")
    condition, _, type_name = rest.partition("_")
    if condition == "class" and type_name in _CLASSES:
        t, layout = _CLASSES[type_name]
        return VectorOp("m", t + "u", f"in_class<{layout}>(a, b)")
    t = _COMPARED.get(type_name, "")
    known = _FLOAT_COMPARES if t and t in FLOATS else _COMPARES
    return VectorOp("m", t + t, known[condition]) if t and condition in known else None
