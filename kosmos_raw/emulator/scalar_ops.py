"""Scalar arithmetic of gfx950: a table of C++ expressions.

Signatures as in vector_ops.py. What becomes of SCC: None keeps it, "nonzero" says whether the result is, else an
expression that may use r, the result.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalarOp:
    result: str
    sources: str
    expression: str
    scc: str | None = None


SCALAR: dict[str, ScalarOp] = {}


def _op(name: str, signature: str, expression: str, scc: str | None = None) -> None:
    result, sources = signature.split(":")
    SCALAR[name] = ScalarOp(result, sources, expression, scc)


def _of_width(bits: int, t: str, signed: str) -> None:
    """What exists for 32 and for 64 bits alike."""
    two, last = f"{t}:{t}{t}", bits - 1
    logic = {"and": "a & b", "or": "a | b", "xor": "a ^ b", "andn2": "a & ~b", "orn2": "a | ~b"}
    logic |= {"nand": "~(a & b)", "nor": "~(a | b)", "xnor": "~(a ^ b)"}
    for name, e in logic.items():
        _op(f"s_{name}_b{bits}", two, e, "nonzero")
    _op(f"s_mov_b{bits}", f"{t}:{t}", "a")
    _op(f"s_cmov_b{bits}", f"{t}:{t}+", "w.scc ? a : c")
    _op(f"s_not_b{bits}", f"{t}:{t}", "~a", "nonzero")
    _op(f"s_cselect_b{bits}", two, "w.scc ? a : b")
    _op(f"s_lshl_b{bits}", f"{t}:{t}u", f"a << (b & {last})", "nonzero")
    _op(f"s_lshr_b{bits}", f"{t}:{t}u", f"a >> (b & {last})", "nonzero")
    _op(f"s_ashr_i{bits}", f"{signed}:{signed}u", f"a >> (b & {last})", "nonzero")
    _op(f"s_bfm_b{bits}", f"{t}:uu", f"bit_run(0, a & {last}) << (b & {last})")
    _op(f"s_bcnt0_i32_b{bits}", f"u:{t}", f"{bits} - __builtin_popcountll(a)", "nonzero")
    _op(f"s_bcnt1_i32_b{bits}", f"u:{t}", "__builtin_popcountll(a)", "nonzero")
    _op(f"s_ff0_i32_b{bits}", f"i:{t}", "~a ? __builtin_ctzll(~a) : -1")
    _op(f"s_ff1_i32_b{bits}", f"i:{t}", "a ? __builtin_ctzll(a) : -1")
    _op(f"s_flbit_i32_b{bits}", f"i:{t}", f"a ? __builtin_clzll(a) - {64 - bits} : -1")
    signs = f"__builtin_clrsb{'ll' if bits == 64 else ''}(a)"
    _op(f"s_flbit_i32{'_i64' if bits == 64 else ''}", f"i:{signed}", f"a == 0 || a == -1 ? -1 : {signs} + 1")
    _op(f"s_bfe_u{bits}", f"{t}:{t}u", f"a >> (b & {last}) & bit_run(0, b >> 16 & 127)", "nonzero")
    field = f"bit_run(0, smaller(b >> 16 & 127, {bits}u)) & (u64)a >> (b & {last})"
    _op(f"s_bfe_i{bits}", f"{signed}:{t}u", f"sign_extend({field}, smaller(b >> 16 & 127, {bits}u))", "nonzero")
    _op(f"s_bitset0_b{bits}", f"{t}:u+", f"c & ~(({'u64' if bits == 64 else 'u32'})1 << (a & {last}))")
    _op(f"s_bitset1_b{bits}", f"{t}:u+", f"c | (({'u64' if bits == 64 else 'u32'})1 << (a & {last}))")
    _op(f"s_brev_b{bits}", f"{t}:{t}", f"__builtin_bitreverse{bits}(a)")
    _op(f"s_wqm_b{bits}", f"{t}:{t}", "whole_quads(a)", "nonzero")


def _additions() -> None:
    _op("s_add_u32", "u:uu", "a + b", "r < a")
    _op("s_addc_u32", "u:uu", "a + b + w.scc", "((u64)a + b + w.scc) >> 32")
    _op("s_sub_u32", "u:uu", "a - b", "a < b")
    _op("s_subb_u32", "u:uu", "a - b - w.scc", "(u64)a < (u64)b + w.scc")
    _op("s_add_i32", "u:uu", "a + b", "(~(a ^ b) & (a ^ r)) >> 31")
    _op("s_sub_i32", "u:uu", "a - b", "((a ^ b) & (a ^ r)) >> 31")
    _op("s_absdiff_i32", "u:ii", "a < b ? (u32)b - (u32)a : (u32)a - (u32)b", "nonzero")
    _op("s_mul_i32", "u:uu", "a * b")
    _op("s_mul_hi_u32", "u:uu", "(u64)a * b >> 32")
    _op("s_mul_hi_i32", "u:ii", "(u64)((i64)a * b) >> 32")
    for i in (1, 2, 3, 4):
        _op(f"s_lshl{i}_add_u32", "u:uu", f"(a << {i}) + b", f"(((u64)a << {i}) + b) >> 32 != 0")
    for name, sign in {"min": "<", "max": ">"}.items():
        _op(f"s_{name}_u32", "u:uu", f"a {sign} b ? a : b", f"a {sign} b")
        _op(f"s_{name}_i32", "i:ii", f"a {sign} b ? a : b", f"a {sign} b")


def _conversions() -> None:
    _op("s_abs_i32", "u:i", "a < 0 ? -(u32)a : (u32)a", "nonzero")
    _op("s_sext_i32_i8", "i:u", "(i32)(i8)a")
    _op("s_sext_i32_i16", "i:u", "(i32)(i16)a")
    _op("s_pack_ll_b32_b16", "u:uu", "(a & 0xffff) | b << 16")
    _op("s_pack_lh_b32_b16", "u:uu", "(a & 0xffff) | (b & 0xffff0000)")
    _op("s_pack_hh_b32_b16", "u:uu", "a >> 16 | (b & 0xffff0000)")
    # With a 16-bit constant, sign-extended:
    _op("s_movk_i32", "u:s", "(u32)(i32)b")
    _op("s_cmovk_i32", "u:s", "w.scc ? (u32)(i32)b : a")
    _op("s_addk_i32", "u:s", "a + (u32)(i32)b", "(~(a ^ (u32)(i32)b) & (a ^ r)) >> 31")
    _op("s_mulk_i32", "u:s", "a * (u32)(i32)b")


_of_width(32, "u", "i")
_of_width(64, "q", "j")
_additions()
_conversions()
WITH_CONSTANT = {"s_movk_i32", "s_cmovk_i32", "s_addk_i32", "s_mulk_i32"}

SAVE_EXEC = {
    "and": "a & exec", "or": "a | exec", "xor": "a ^ exec",
    "xnor": "~(a ^ exec)", "nand": "~(a & exec)", "nor": "~(a | exec)",
    "andn1": "~a & exec", "andn2": "a & ~exec", "orn1": "~a | exec", "orn2": "a | ~exec",
}  # fmt: skip
BRANCHES = {
    "s_branch": "true", "s_cbranch_scc0": "!w.scc", "s_cbranch_scc1": "w.scc", "s_cbranch_vccz": "!w.s64(VCC)",
    "s_cbranch_vccnz": "w.s64(VCC)", "s_cbranch_execz": "!w.exec()", "s_cbranch_execnz": "w.exec()",
}  # fmt: skip
# They change timing, caches that the emulator has not, or nothing at all.
NOTHING = {
    "s_nop", "s_setprio", "s_icache_inv", "s_dcache_inv", "s_dcache_wb", "s_inst_prefetch", "s_code_end",
    "v_nop", "s_ttracedata",
}  # fmt: skip
