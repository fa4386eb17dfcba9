"""Vector instructions that fit no table, each with a function that makes its C++."""

from __future__ import annotations

from collections.abc import Callable

from .asm import Instruction, Unsupported
from .context import Context, refuse_modifiers
from .vector_forms import DPP_MODIFIERS, SDWA_MODIFIERS, define, in_dpp, output_of, sources_of
from .vector_ops import CONSTANTS, VectorOp

Emit = Callable[[Context, Instruction], str]


def _two(c: Context, i: Instruction, first: int, size: str = "u32", registers: int = 1) -> tuple[str, str]:
    """Two sources as template and as call arguments."""
    pairs = [c.source(op, size, registers) for op in i.operands[first : first + 2]]
    if i.form == "dpp":
        pairs[0] = (pairs[0][0].replace("V", "Dpp"), "0")
    return ", ".join(p[0] for p in pairs), ", ".join(p[1] for p in pairs)


def _select(c: Context, i: Instruction) -> str:
    refuse_modifiers(i, *(DPP_MODIFIERS if i.form == "dpp" else ()), *(SDWA_MODIFIERS if i.form == "sdwa" else ()))
    mask = c.scalar_value(i.operands[3], "u64") if len(i.operands) > 3 else "w.s64(VCC)"
    op = VectorOp("f", "ff", "")
    classes, numbers = sources_of(c, i, op, i.operands[1:3])
    given = ", ".join([str(c.vector(i.operands[0])), *numbers, mask])
    call = f"v_cndmask_b32<{', '.join([output_of(i, op), *classes])}>(w, {given});"
    return in_dpp(c, i, call, 1) if i.form == "dpp" else call


def _carry(c: Context, i: Instruction) -> str:
    refuse_modifiers(i, *(DPP_MODIFIERS if i.form == "dpp" else ()))
    kind = "CARRY_ADD" if "add" in i.mnemonic else "CARRY_SUBREV" if "rev" in i.mnemonic else "CARRY_SUB"
    classes, numbers = _two(c, i, 2)
    carry = c.scalar_value(i.operands[4], "u64") if len(i.operands) > 4 else "0"
    call = (
        f"v_with_carry<{kind}, {classes}>(w, {c.vector(i.operands[0])}, {c.scalar(i.operands[1])}, {numbers}, {carry});"
    )
    return in_dpp(c, i, call, 1) if i.form == "dpp" else call


def _mad_wide(c: Context, i: Instruction) -> str:
    refuse_modifiers(i)
    classes, numbers = _two(c, i, 2)
    addend, number = c.source(i.operands[4], "u64", 2)
    t = "u32" if i.mnemonic == "v_mad_u64_u32" else "i32"
    d = c.vector(i.operands[0], 2)
    return f"v_mad_wide<{t}, {classes}, {addend}>(w, {d}, {c.scalar(i.operands[1])}, {numbers}, {number});"


def _read_first_lane(c: Context, i: Instruction) -> str:
    source = i.operands[1]
    value = f"first_lane(w, {c.vector(source)})" if source.is_vector else c.scalar_value(source)
    return f"w.s[{c.scalar(i.operands[0])}] = {value};"


def _read_lane(c: Context, i: Instruction) -> str:
    return f"w.s[{c.scalar(i.operands[0])}] = w.v[{c.vector(i.operands[1])}][{c.scalar_value(i.operands[2])} & 63];"


def _write_lane(c: Context, i: Instruction) -> str:
    return f"w.v[{c.vector(i.operands[0])}][{c.scalar_value(i.operands[2])} & 63] = {c.scalar_value(i.operands[1])};"


def _swap_lanes(c: Context, i: Instruction) -> str:
    refuse_modifiers(i)
    return f"swap_lanes(w, {c.vector(i.operands[0])}, {c.vector(i.operands[1])}, {16 if '16' in i.mnemonic else 32});"


def _swap(c: Context, i: Instruction) -> str:
    return f"v_swap_b32(w, {c.vector(i.operands[0])}, {c.vector(i.operands[1])});"


def _counted_below(name: str, lower_lanes: str) -> Emit:
    """v_mbcnt: bits of a mask that belong to lower lanes, added to b."""
    op = VectorOp("u", "uu", f"__builtin_popcount(a & (u32){lower_lanes}) + b")

    def emit(c: Context, i: Instruction) -> str:
        refuse_modifiers(i)
        define(c, name, op)
        classes, numbers = _two(c, i, 1)
        return f"{name}<Plain, {classes}>(w, {c.vector(i.operands[0])}, {numbers});"

    return emit


def _bit_table(c: Context, i: Instruction) -> str:
    """v_bitop3: bit n of the table is the result where the bits of a, b, c are the bits of n."""
    refuse_modifiers(i, "bitop3")
    table = i.number("bitop3")
    terms = [
        f"({'' if n & 4 else '~'}a & {'' if n & 2 else '~'}b & {'' if n & 1 else '~'}c)"
        for n in range(8)
        if table >> n & 1
    ]
    t = "u" if i.mnemonic == "v_bitop3_b32" else "w"
    op = VectorOp(t, t * 3, " | ".join(terms) or "0")
    name = f"{i.mnemonic}_{table:02x}"
    define(c, name, op)
    classes, numbers = sources_of(c, i, op, i.operands[1:])
    return f"{name}<Plain, {', '.join(classes)}>(w, {c.vector(i.operands[0])}, {', '.join(numbers)});"


def _half_of_result(c: Context, i: Instruction, op: VectorOp) -> str:
    """Two 8-bit floats into the low or high half of a register; the last op_sel bit says which."""
    refuse_modifiers(i, "op_sel")
    select = i.bits("op_sel", len(op.sources) + 1)
    if any(select[:-1]):
        raise Unsupported("op_sel on a source")
    define(c, i.mnemonic, op)
    classes, numbers = sources_of(c, i, op, i.operands[1:])
    out = f"Into<{16 if select[-1] else 0}, 16>"
    return f"{i.mnemonic}<{', '.join([out, *classes])}>(w, {c.vector(i.operands[0])}, {', '.join(numbers)});"


def _pack_fp8(c: Context, i: Instruction) -> str:
    t = "fp8" if "fp8" in i.mnemonic else "bf8"
    return _half_of_result(c, i, VectorOp("u", "ff", f"to_{t}(a) | to_{t}(b) << 8"))


def _pack_fp8_scaled(c: Context, i: Instruction) -> str:
    """Two floats, or one register of two 16-bit floats; then the scale that they are divided by."""
    t = "fp8" if "pk_fp8" in i.mnemonic else "bf8"
    source = i.mnemonic.rsplit("_", 1)[1]
    if source == "f32":
        types, values, scale = "fff", ("a", "b"), "c"
    else:
        types, values, scale = "uf", (f"from_{source}(a & 0xffff)", f"from_{source}(a >> 16)"), "b"
    low, high = (f"to_{t}(divide_by_scale({x}, {scale}))" for x in values)
    return _half_of_result(c, i, VectorOp("u", types, f"{low} | {high} << 8"))


def _unpack_fp8(c: Context, i: Instruction) -> str:
    refuse_modifiers(i, "op_sel", *(("src0_sel",) if i.form == "sdwa" else ()))
    t = "fp8" if i.mnemonic.endswith("fp8") else "bf8"
    scaled = "scalef32" in i.mnemonic
    half = i.modifiers.get("src0_sel", "WORD_1" if i.bits("op_sel", 1)[0] else "WORD_0")
    if half not in ("WORD_0", "WORD_1"):
        raise Unsupported(f"src0_sel:{half}")
    shift = 16 if half == "WORD_1" else 0
    low, high = f"from_{t}(a >> {shift} & 255)", f"from_{t}(a >> {shift + 8} & 255)"
    if scaled:
        low, high = (f"multiply_by_scale({x}, b)" for x in (low, high))
    op = VectorOp("q", "uf" if scaled else "u", f"to_bits({low}) | (u64)to_bits({high}) << 32")
    name = f"{i.mnemonic}_{shift}"
    define(c, name, op)
    pairs = [c.source(o, CONSTANTS[t]) for o, t in zip(i.operands[1:], op.sources, strict=True)]
    classes, numbers = ", ".join(p[0] for p in pairs), ", ".join(p[1] for p in pairs)
    return f"{name}<Plain, {classes}>(w, {c.vector(i.operands[0], 2)}, {numbers});"


def _div_scale(c: Context, i: Instruction) -> str:
    refuse_modifiers(i)
    t, size, registers = ("float", "f32", 1) if i.mnemonic.endswith("f32") else ("double", "f64", 2)
    pairs = [c.source(o, size, registers) for o in i.operands[2:5]]
    classes, numbers = ", ".join(p[0] for p in pairs), ", ".join(p[1] for p in pairs)
    return (
        f"v_div_scale<{t}, {classes}>(w, {c.vector(i.operands[0], registers)}, {c.scalar(i.operands[1])}, {numbers});"
    )


def _div_fmas(c: Context, i: Instruction) -> str:
    refuse_modifiers(i)
    t, size, registers = ("float", "f32", 1) if i.mnemonic.endswith("f32") else ("double", "f64", 2)
    pairs = [c.source(o, size, registers) for o in i.operands[1:4]]
    classes, numbers = ", ".join(p[0] for p in pairs), ", ".join(p[1] for p in pairs)
    return f"v_div_fmas<{t}, {classes}>(w, {c.vector(i.operands[0], registers)}, {numbers});"


def _fma_mix(c: Context, i: Instruction) -> str:
    """Sources that are float32, or 16-bit floats in either half; the result is rounded again where it is 16 bits."""
    refuse_modifiers(i, "op_sel", "op_sel_hi")
    small, high = i.bits("op_sel_hi", 3), i.bits("op_sel", 3)
    types, classes, numbers = "", [], []
    for n, source in enumerate(i.operands[1:]):
        name, number = c.source(source, "f16" if small[n] else "f32")
        if small[n] and not source.is_constant:
            plain = "V" if source.is_vector else "S"
            name = name.replace(plain, f"Part<{plain}, {16 if high[n] else 0}, 16>")
        types += "h" if small[n] else "f"
        classes.append(name)
        numbers.append(number)
    wide = i.mnemonic.endswith("f32")
    op = VectorOp("f" if wide else "h", types, "fma_((float)a, (float)b, (float)c)")
    call = define(c, f"{i.mnemonic}_{types}", op)
    out = "Plain" if wide else f"Into<{16 if 'mixhi' in i.mnemonic else 0}, 16>"
    return f"{call}<{', '.join([out, *classes])}>(w, {c.vector(i.operands[0])}, {', '.join(numbers)});"


SPECIAL: dict[str, Emit] = {
    **dict.fromkeys(("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"), _fma_mix),
    "v_cndmask_b32": _select,
    **{f"v_{n}_co_u32": _carry for n in ("add", "sub", "subrev", "addc", "subb", "subbrev")},
    "v_mad_u64_u32": _mad_wide,
    "v_mad_i64_i32": _mad_wide,
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_permlane16_swap_b32": _swap_lanes,
    "v_permlane32_swap_b32": _swap_lanes,
    "v_swap_b32": _swap,
    "v_bitop3_b32": _bit_table,
    "v_bitop3_b16": _bit_table,
    "v_mbcnt_lo_u32_b32": _counted_below("v_mbcnt_lo_u32_b32", "bit_run(0, smaller(l, 32))"),
    "v_mbcnt_hi_u32_b32": _counted_below("v_mbcnt_hi_u32_b32", "(bit_run(0, l) >> 32)"),
    "v_cvt_pk_fp8_f32": _pack_fp8,
    "v_cvt_pk_bf8_f32": _pack_fp8,
    **{f"v_cvt_scalef32_pk_{t}_{s}": _pack_fp8_scaled for t in ("fp8", "bf8") for s in ("f32", "bf16", "f16")},
    **{f"v_cvt_{scale}pk_f32_{t}": _unpack_fp8 for scale in ("", "scalef32_") for t in ("fp8", "bf8")},
    "v_div_scale_f32": _div_scale,
    "v_div_scale_f64": _div_scale,
    "v_div_fmas_f32": _div_fmas,
    "v_div_fmas_f64": _div_fmas,
}  # fmt: skip
