"""Vector arithmetic to C++: a function template for each opcode that occurs, one call for each instruction."""

from __future__ import annotations

from .asm import Instruction, Unsupported
from .context import Context, refuse_modifiers
from .vector_forms import (
    DPP_MODIFIERS,
    OUTPUT_MODIFIERS,
    SDWA_MODIFIERS,
    define,
    in_dpp,
    output_of,
    parameters,
    sources_of,
)
from .vector_ops import CONSTANTS, FLOATS, PACKED, TYPES, VECTOR, VectorOp, compare
from .vector_special import SPECIAL


def translate(c: Context, i: Instruction) -> str | None:
    """The C++ statement, or None when the instruction is not vector arithmetic."""
    if c.indexed and i.mnemonic.startswith("v_"):
        return _indexed_move(c, i)
    if i.mnemonic in VECTOR:
        return _arithmetic(c, i, VECTOR[i.mnemonic])
    if i.mnemonic.startswith(("v_cmp_", "v_cmpx_")):
        op = compare(i.mnemonic)
        return _compare(c, i, op) if op else None
    if i.mnemonic in PACKED:
        return _packed(c, i, PACKED[i.mnemonic])
    special = SPECIAL.get(i.mnemonic)
    return special(c, i) if special else None


def _arithmetic(c: Context, i: Instruction, op: VectorOp) -> str:
    refuse_modifiers(
        i,
        "op_sel",
        *OUTPUT_MODIFIERS,
        *(DPP_MODIFIERS if i.form == "dpp" else ()),
        *(SDWA_MODIFIERS if i.form == "sdwa" else ()),
    )
    name = define(c, i.mnemonic, op, clamp="clamp" in i.modifiers and op.result not in FLOATS)
    classes, numbers = sources_of(c, i, op, i.operands[1:])
    d = c.vector(i.operands[0], 2 if op.wide else 1)
    call = f"{name}<{', '.join([output_of(i, op), *classes])}>(w, {', '.join([str(d), *numbers])});"
    return in_dpp(c, i, call, 2 if op.sources[0] in "qjd" else 1) if i.form == "dpp" else call


def _compare(c: Context, i: Instruction, op: VectorOp) -> str:
    refuse_modifiers(i, *(SDWA_MODIFIERS if i.form == "sdwa" else ()))
    name = define(c, i.mnemonic.replace("_cmpx_", "_cmp_"), op)
    classes, numbers = sources_of(c, i, op, i.operands[1:])
    d = c.scalar(i.operands[0])
    call = f"{name}<{', '.join(classes)}>(w, {', '.join([str(d), *numbers])});"
    return call + (f" w.set_s64(EXEC, w.s64({d}));" if "_cmpx_" in i.mnemonic else "")


def _indexed_move(c: Context, i: Instruction) -> str:
    """Between s_set_gpr_idx_on and _off: M0 is added to the number of the source's or the result's register."""
    if i.mnemonic != "v_mov_b32" or not i.operands[1].is_vector or c.indexed - {"SRC0", "DST"}:
        raise Unsupported(f"with registers indexed by {', '.join(sorted(c.indexed))}")
    d, source = (c.vector(op) for op in i.operands)
    flags = ", ".join("true" if name in c.indexed else "false" for name in ("DST", "SRC0"))
    return f"w.at = {i.line}; v_mov_indexed(w, {d}, {source}, {flags});"


# ---- packed: two results from halves that op_sel and op_sel_hi choose ----
def _packed(c: Context, i: Instruction, op: VectorOp) -> str:
    refuse_modifiers(i, "op_sel", "op_sel_hi", "neg_lo", "neg_hi", *(("clamp",) if op.saturated else ()))
    count = len(op.sources)
    wide = op.result in "fu"
    low, high = i.bits("op_sel", count), i.bits("op_sel_hi", count, 1)
    negative = i.bits("neg_lo", count), i.bits("neg_hi", count)
    whole = "u64" if wide else "u32"
    name = i.mnemonic + "_clamped" * ("clamp" in i.modifiers) + "_by_mode" * (c.flushes and op.result == "f")
    if name not in c.helpers:
        c.helpers[name] = _packed_template(name, op, whole, 32 if wide else 16)
    classes, numbers = [], []
    for n, source in enumerate(i.operands[1:]):
        operand, number = c.source(source, CONSTANTS[op.sources[n]], 2 if wide and source.is_vector else 1)
        choice = low[n], high[n], negative[0][n], negative[1][n]
        classes.append(f"Halves<{operand}, {whole}, {', '.join(map(str, choice))}>")
        numbers.append(number)
    d = c.vector(i.operands[0], 2 if wide else 1)
    return f"{name}<{', '.join(classes)}>(w, {', '.join([str(d), *numbers])});"


def _packed_template(name: str, op: VectorOp, whole: str, bits: int) -> str:
    classes, numbers = parameters(len(op.sources))
    element, result = TYPES[op.sources[0]], TYPES[op.result]
    names = "abc"[: len(op.sources)]
    reads = "".join(f"  const auto {n}0 = {n.upper()}::get(w, {n}_);\n" for n in names)
    expression = op.saturated if "_clamped" in name else op.expression
    value, given = f"({result})({expression})", "from_bits<{}>({}0[l] >> {})"
    if name.endswith("_by_mode"):
        reads += "  const bool reads = w.mode >> 4 & 1, writes = w.mode >> 5 & 1;\n"
        value, given = f"by_mode(writes, {value})", f"by_mode(reads, {given})"

    def half(shift: int) -> str:
        if name == "v_pk_mov_b32":  # the low half of the first, the high half of the second
            return f"to_bits((u32)({'b' if shift else 'a'}0[l] >> {shift}))"
        values = " ".join(f"const {element} {n} = {given.format(element, n, shift)};" for n in names)
        return f"[&] {{ {values} return to_bits({value}); }}()"

    body = f"  write_lanes<{whole}>(w, d, [&](int l) {{ return {half(0)} | ({whole}){half(bits)} << {bits}; }});\n"
    return f"template <{classes[2:]}> NOINLINE void {name}(Wave& w, u32 d{numbers}) {{\n{reads}{body}}}\n"
