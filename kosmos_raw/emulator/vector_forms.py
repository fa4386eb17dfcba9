"""What all vector instructions share: templates of opcodes, operands from halves and other lanes, output modifiers."""

from __future__ import annotations

from .asm import Instruction, Operand, Unsupported
from .context import Context
from .vector_ops import CONSTANTS, FLOATS, TYPES, VectorOp

_DPP_KINDS = {
    "quad_perm": "QUAD_PERM", "row_shl": "ROW_SHL", "row_shr": "ROW_SHR", "row_ror": "ROW_ROR",
    "row_mirror": "ROW_MIRROR", "row_half_mirror": "ROW_HALF_MIRROR", "row_newbcast": "ROW_NEWBCAST",
    "wave_shr": "WAVE_SHR", "wave_shl": "WAVE_SHL",
    "wave_ror": "WAVE_ROR", "wave_rol": "WAVE_ROL",
}  # fmt: skip
DPP_MODIFIERS = (*_DPP_KINDS, "row_bcast", "row_mask", "bank_mask", "bound_ctrl", "fi")
_SDWA_PARTS = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
}
SDWA_MODIFIERS = ("dst_sel", "dst_unused", "src0_sel", "src1_sel")
OUTPUT_MODIFIERS = ("clamp", "mul", "div")


# ---- function templates ----
def parameters(count: int) -> tuple[str, str]:
    names = "ABCD"[:count]
    return "".join(f", class {n}" for n in names), "".join(f", u64 {n.lower()}_" for n in names)


def _reads(op: VectorOp, count: int) -> str:
    return "".join(
        f"  const auto {n}0 = {n.upper()}::template get<{TYPES[t]}>(w, {n}_);\n"
        for n, t in zip("abcd", op.sources[:count], strict=False)
    )


def define(c: Context, name: str, op: VectorOp, clamp: bool = False) -> str:
    """Makes sure that the template is there, and gives its name: variants by modifiers and by the kernel's MODE."""
    expression = op.expression
    if clamp:
        if not op.saturated:
            raise Unsupported("clamp of an integer")
        name, expression = f"{name}_clamped", op.saturated
    flushes = c.flushes and op.by_mode and "f" in op.sources + op.result
    name += "_by_mode" * flushes
    if name in c.helpers:
        return name
    count = len(op.sources.replace("+", ""))
    classes, numbers = parameters(count)
    old = ""
    if "+" in op.sources:
        old = f"  const auto c0 = V::get<{TYPES[op.result]}>(w, d);\n"
    types = op.sources.replace("+", op.result)
    names = "abcd"[:count] + "c" * bool(old)
    values = " ".join(
        f"const {TYPES[t]} {n} = {'by_mode(reads, ' if flushes and t == 'f' else '('}{n}0[l]);"
        for n, t in zip(names, types, strict=True)
    )
    mode = "  [[maybe_unused]] const bool reads = w.mode >> 4 & 1;\n" if flushes else ""
    if op.result == "m":
        body = f"  w.set_s64(d, lane_mask(w, [&](int l) {{ {values} return {expression}; }}));\n"
        classes = classes.replace(", ", "", 1)
    else:
        result = TYPES[op.result]
        value = f"({result})({expression})"
        if flushes and op.result == "f":
            mode += "  const bool writes = w.mode >> 5 & 1;\n"
            value = f"by_mode(writes, {value})"
        body = f"  Out::template write<{result}>(w, d, [&](int l) {{ {values} return {value}; }});\n"
        classes = "class Out" + classes
    head = f"template <{classes}> NOINLINE void {name}(Wave& w, u32 d{numbers}) {{\n"
    c.helpers[name] = f"{head}{mode}{_reads(op, count)}{old}{body}}}\n"
    return name


# ---- operands ----
def sources_of(c: Context, i: Instruction, op: VectorOp, operands: tuple[Operand, ...]) -> tuple[list[str], list[str]]:
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


def output_of(i: Instruction, op: VectorOp) -> str:
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
    clamp = "clamp" in i.modifiers and op.result in FLOATS
    if scale == 2 and not clamp:
        return "Into<0, 16>" if op.keeps_high else "Plain"
    if op.keeps_high:
        raise Unsupported("output modifier of a 16-bit result")
    return f"Modified<{scale}, {'true' if clamp else 'false'}>"


def in_dpp(c: Context, i: Instruction, call: str, registers: int) -> str:
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
