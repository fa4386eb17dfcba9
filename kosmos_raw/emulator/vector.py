"""Vector arithmetic to C++: a function template for each opcode that occurs, one call for each instruction."""

from __future__ import annotations

from collections.abc import Callable

from .asm import Instruction, Operand, Unsupported
from .context import Context, refuse_modifiers
from .vector_ops import CONSTANTS, FLOATS, PACKED, TYPES, VECTOR, VectorOp, compare

Emit = Callable[[Context, Instruction], str]

_DPP_KINDS = {
    "quad_perm": "QUAD_PERM", "row_shl": "ROW_SHL", "row_shr": "ROW_SHR", "row_ror": "ROW_ROR",
    "row_mirror": "ROW_MIRROR", "row_half_mirror": "ROW_HALF_MIRROR", "row_newbcast": "ROW_NEWBCAST",
    "wave_shr": "WAVE_SHR", "wave_shl": "WAVE_SHL",
    "wave_ror": "WAVE_ROR", "wave_rol": "WAVE_ROL",
}  # fmt: skip
_DPP_MODIFIERS = (*_DPP_KINDS, "row_bcast", "row_mask", "bank_mask", "bound_ctrl", "fi")
_SDWA_PARTS = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
}
_SDWA_MODIFIERS = ("dst_sel", "dst_unused", "src0_sel", "src1_sel")
_OUTPUT_MODIFIERS = ("clamp", "mul", "div")


def translate(c: Context, i: Instruction) -> str | None:
    """The C++ statement, or None when the instruction is not vector arithmetic."""
    if i.mnemonic in VECTOR:
        return _arithmetic(c, i, VECTOR[i.mnemonic])
    if i.mnemonic.startswith(("v_cmp_", "v_cmpx_")):
        op = compare(i.mnemonic)
        return _compare(c, i, op) if op else None
    if i.mnemonic in PACKED:
        return _packed(c, i, PACKED[i.mnemonic])
    special = _SPECIAL.get(i.mnemonic)
    return special(c, i) if special else None


# ---- function templates ----
def _parameters(count: int) -> tuple[str, str]:
    names = "ABCD"[:count]
    return "".join(f", class {n}" for n in names), "".join(f", u64 {n.lower()}_" for n in names)


def _reads(op: VectorOp, count: int) -> str:
    return "".join(
        f"  const auto {n}0 = {n.upper()}::template get<{TYPES[t]}>(w, {n}_);\n"
        for n, t in zip("abcd", op.sources[:count], strict=False)
    )


def _lane_values(op: VectorOp, count: int) -> str:
    return " ".join(f"const {TYPES[t]} {n} = {n}0[l];" for n, t in zip("abcd", op.sources[:count], strict=False))


def _define(c: Context, name: str, op: VectorOp) -> None:
    if name in c.helpers:
        return
    count = len(op.sources.replace("+", ""))
    classes, numbers = _parameters(count)
    old = ""
    if "+" in op.sources:
        old = f"  const auto c0 = V::get<{TYPES[op.result]}>(w, d);\n"
    values = _lane_values(op, count) + (f" const {TYPES[op.result]} c = c0[l];" if old else "")
    if op.result == "m":
        body = f"  w.set_s64(d, lane_mask(w, [&](int l) {{ {values} return {op.expression}; }}));\n"
        classes = classes.replace(", ", "", 1)
    else:
        result = TYPES[op.result]
        body = (
            f"  Out::template write<{result}>(w, d, [&](int l) {{ {values} return ({result})({op.expression}); }});\n"
        )
        classes = "class Out" + classes
    c.helpers[name] = (
        f"template <{classes}> NOINLINE void {name}(Wave& w, u32 d{numbers}) {{\n{_reads(op, count)}{old}{body}}}\n"
    )


# ---- operands ----
def _sources(c: Context, i: Instruction, op: VectorOp, operands: tuple[Operand, ...]) -> tuple[list[str], list[str]]:
    types = op.sources.replace("+", "")
    if len(operands) != len(types):
        raise Unsupported(f"{len(operands)} sources, known with {len(types)}")
    select = i.bits("op_sel", len(types) + 1)
    classes, numbers = [], []
    for n, (source, t) in enumerate(zip(operands, types, strict=True)):
        if (source.negated or source.absolute) and t not in FLOATS:
            raise Unsupported(f"sign modifier on integer operand {source.text}")
        name, number = c.source(source, CONSTANTS[t], 2 if t in "qjd" else 1)
        plain = "V" if source.is_vector else "S" if source.kind == "s" else name
        part = ""
        if i.form == "sdwa" and n < 2:
            sel = i.modifiers.get(f"src{n}_sel", "DWORD")
            if sel != "DWORD":
                first, bits = _SDWA_PARTS[sel]
                part = f"Part<{plain}, {first}, {bits}, {'true' if source.sign_extended else 'false'}>"
        elif select[n]:
            if t not in "hws":
                raise Unsupported("op_sel on an operand that is not of 16 bits")
            part = f"Part<{plain}, 16, 16>"
        if part:
            name = name.replace(plain, part)
        if i.form == "dpp" and n == 0:
            name, number = name.replace("V", "Dpp"), "0"
        classes.append(name)
        numbers.append(number)
    return classes, numbers


def _output(i: Instruction, op: VectorOp) -> str:
    """The class that says what becomes of the result."""
    if i.form == "sdwa":
        sel = i.modifiers.get("dst_sel", "DWORD")
        if sel == "DWORD":
            return "Plain"
        first, bits = _SDWA_PARTS[sel]
        unused = i.modifiers.get("dst_unused", "UNUSED_PAD")
        if unused not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
            raise Unsupported(f"dst_unused:{unused}")
        return f"{'Into' if unused == 'UNUSED_PRESERVE' else 'Padded'}<{first}, {bits}>"
    if "op_sel" in i.modifiers and i.bits("op_sel", 4)[len(op.sources.replace("+", ""))]:
        if op.result not in "hws":
            raise Unsupported("op_sel on a result that is not of 16 bits")
        return "Into<16, 16>"
    scale = {"2": 4, "4": 8}.get(i.modifiers.get("mul", ""), 1 if "div" in i.modifiers else 2)
    clamp = "clamp" in i.modifiers
    if scale == 2 and not clamp:
        return "Plain"
    if op.result not in FLOATS:
        raise Unsupported("clamp of an integer")
    return f"Modified<{scale}, {'true' if clamp else 'false'}>"


def _in_dpp(c: Context, i: Instruction, call: str, registers: int) -> str:
    """Wraps a call for an operand from another lane."""
    kind, n = "", 0
    for name, value in i.modifiers.items():
        if name == "quad_perm":
            kind, n = "QUAD_PERM", sum(x << (2 * k) for k, x in enumerate(i.bits(name, 4)))
        elif name == "row_bcast":
            kind = f"ROW_BCAST{value}"
        elif name in _DPP_KINDS:
            kind, n = _DPP_KINDS[name], int(value or 0)
    if not kind:
        raise Unsupported("DPP without a known lane pattern")
    rows, banks = i.number("row_mask", 15), i.number("bank_mask", 15)
    zero = "true" if "bound_ctrl" in i.modifiers else "false"
    first = c.vector(i.operands[_first_source(i)], registers)
    return f"{{ DppScope scope(w, {first}, {registers}, {kind}, {n}, {rows}, {banks}, {zero}); {call} }}"


def _first_source(i: Instruction) -> int:
    return 2 if "_co_" in i.mnemonic else 1


def _arithmetic(c: Context, i: Instruction, op: VectorOp) -> str:
    refuse_modifiers(
        i,
        "op_sel",
        *_OUTPUT_MODIFIERS,
        *(_DPP_MODIFIERS if i.form == "dpp" else ()),
        *(_SDWA_MODIFIERS if i.form == "sdwa" else ()),
    )
    _define(c, i.mnemonic, op)
    classes, numbers = _sources(c, i, op, i.operands[1:])
    d = c.vector(i.operands[0], 2 if op.wide else 1)
    call = f"{i.mnemonic}<{', '.join([_output(i, op), *classes])}>(w, {', '.join([str(d), *numbers])});"
    return _in_dpp(c, i, call, 2 if op.sources[0] in "qjd" else 1) if i.form == "dpp" else call


def _compare(c: Context, i: Instruction, op: VectorOp) -> str:
    refuse_modifiers(i, *(_SDWA_MODIFIERS if i.form == "sdwa" else ()))
    name = i.mnemonic.replace("_cmpx_", "_cmp_")
    _define(c, name, op)
    classes, numbers = _sources(c, i, op, i.operands[1:])
    d = c.scalar(i.operands[0])
    call = f"{name}<{', '.join(classes)}>(w, {', '.join([str(d), *numbers])});"
    return call + (f" w.set_s64(EXEC, w.s64({d}));" if "_cmpx_" in i.mnemonic else "")


# ---- packed: two results from halves that op_sel and op_sel_hi choose ----
def _packed(c: Context, i: Instruction, op: VectorOp) -> str:
    refuse_modifiers(i, "op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    count = len(op.sources)
    wide = op.result in "fu"
    low, high = i.bits("op_sel", count), i.bits("op_sel_hi", count, 1)
    negative = i.bits("neg_lo", count), i.bits("neg_hi", count)
    whole = "u64" if wide else "u32"
    if i.mnemonic not in c.helpers:
        c.helpers[i.mnemonic] = _packed_template(i.mnemonic, op, whole, 32 if wide else 16)
    classes, numbers = [], []
    for n, source in enumerate(i.operands[1:]):
        name, number = c.source(source, CONSTANTS[op.sources[n]], 2 if wide and source.is_vector else 1)
        choice = low[n], high[n], negative[0][n], negative[1][n]
        classes.append(f"Halves<{name}, {whole}, {', '.join(map(str, choice))}>")
        numbers.append(number)
    d = c.vector(i.operands[0], 2 if wide else 1)
    return f"{i.mnemonic}<{', '.join(classes)}>(w, {', '.join([str(d), *numbers])});"


def _packed_template(name: str, op: VectorOp, whole: str, bits: int) -> str:
    classes, numbers = _parameters(len(op.sources))
    element, result = TYPES[op.sources[0]], TYPES[op.result]
    reads = "".join(f"  const auto {n}0 = {n.upper()}::get(w, {n}_);\n" for n in "abc"[: len(op.sources)])

    def half(shift: int) -> str:
        if name == "v_pk_mov_b32":  # the low half of the first, the high half of the second
            return f"to_bits((u32)({'b' if shift else 'a'}0[l] >> {shift}))"
        values = " ".join(
            f"const {element} {n} = from_bits<{element}>({n}0[l] >> {shift});" for n in "abc"[: len(op.sources)]
        )
        return f"[&] {{ {values} return to_bits(({result})({op.expression})); }}()"

    body = f"  write_lanes<{whole}>(w, d, [&](int l) {{ return {half(0)} | ({whole}){half(bits)} << {bits}; }});\n"
    return f"template <{classes[2:]}> NOINLINE void {name}(Wave& w, u32 d{numbers}) {{\n{reads}{body}}}\n"


# ---- what fits no table ----
def _two(c: Context, i: Instruction, first: int, size: str = "u32", registers: int = 1) -> tuple[str, str]:
    """Two sources as template and as call arguments."""
    pairs = [c.source(op, size, registers) for op in i.operands[first : first + 2]]
    if i.form == "dpp":
        pairs[0] = (pairs[0][0].replace("V", "Dpp"), "0")
    return ", ".join(p[0] for p in pairs), ", ".join(p[1] for p in pairs)


def _select(c: Context, i: Instruction) -> str:
    refuse_modifiers(i, *(_DPP_MODIFIERS if i.form == "dpp" else ()), *(_SDWA_MODIFIERS if i.form == "sdwa" else ()))
    mask = c.scalar_value(i.operands[3], "u64") if len(i.operands) > 3 else "w.s64(VCC)"
    op = VectorOp("f", "ff", "")
    classes, numbers = _sources(c, i, op, i.operands[1:3])
    given = ", ".join([str(c.vector(i.operands[0])), *numbers, mask])
    call = f"v_cndmask_b32<{', '.join([_output(i, op), *classes])}>(w, {given});"
    return _in_dpp(c, i, call, 1) if i.form == "dpp" else call


def _carry(c: Context, i: Instruction) -> str:
    refuse_modifiers(i, *(_DPP_MODIFIERS if i.form == "dpp" else ()))
    kind = "CARRY_ADD" if "add" in i.mnemonic else "CARRY_SUBREV" if "rev" in i.mnemonic else "CARRY_SUB"
    classes, numbers = _two(c, i, 2)
    carry = c.scalar_value(i.operands[4], "u64") if len(i.operands) > 4 else "0"
    call = (
        f"v_with_carry<{kind}, {classes}>(w, {c.vector(i.operands[0])}, {c.scalar(i.operands[1])}, {numbers}, {carry});"
    )
    return _in_dpp(c, i, call, 1) if i.form == "dpp" else call


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
        _define(c, name, op)
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
    _define(c, name, op)
    classes, numbers = _sources(c, i, op, i.operands[1:])
    return f"{name}<Plain, {', '.join(classes)}>(w, {c.vector(i.operands[0])}, {', '.join(numbers)});"


def _half_of_result(c: Context, i: Instruction, op: VectorOp) -> str:
    """Two 8-bit floats into the low or high half of a register; the last op_sel bit says which."""
    refuse_modifiers(i, "op_sel")
    select = i.bits("op_sel", len(op.sources) + 1)
    if any(select[:-1]):
        raise Unsupported("op_sel on a source")
    _define(c, i.mnemonic, op)
    classes, numbers = _sources(c, i, op, i.operands[1:])
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
    refuse_modifiers(i, "op_sel")
    t = "fp8" if i.mnemonic.endswith("fp8") else "bf8"
    scaled = "scalef32" in i.mnemonic
    shift = 16 if i.bits("op_sel", 1)[0] else 0
    low, high = f"from_{t}(a >> {shift} & 255)", f"from_{t}(a >> {shift + 8} & 255)"
    if scaled:
        low, high = (f"multiply_by_scale({x}, b)" for x in (low, high))
    op = VectorOp("q", "uf" if scaled else "u", f"to_bits({low}) | (u64)to_bits({high}) << 32")
    name = f"{i.mnemonic}_{shift}"
    _define(c, name, op)
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


_SPECIAL: dict[str, Emit] = {
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
