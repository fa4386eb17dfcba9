"""Scalar arithmetic to C++: one block of statements for each instruction. Control flow is in translate.py."""

from __future__ import annotations

import re

from .asm import Instruction, Unsupported
from .context import Context
from .scalar_ops import NOTHING, SAVE_EXEC, SCALAR, WITH_CONSTANT, ScalarOp
from .vector_ops import TYPES

_SIZES = {"u": "u32", "i": "u32", "s": "u16", "q": "q64", "j": "q64"}
_COMPARE = {"eq": "==", "lg": "!=", "lt": "<", "gt": ">", "le": "<=", "ge": ">="}
_COMPARED = {"u32": ("u32", "u32"), "i32": ("u32", "i32"), "u64": ("q64", "u64")}


def translate(c: Context, i: Instruction) -> str | None:
    """The C++ statements, or None when the instruction is not scalar arithmetic."""
    if i.mnemonic in NOTHING:
        return ""
    if i.mnemonic in SCALAR:
        return _arithmetic(c, i, SCALAR[i.mnemonic])
    if m := re.fullmatch(r"s_cmp(k?)_(eq|lg|lt|gt|le|ge)_(u32|i32|u64)", i.mnemonic):
        size, t = _COMPARED[m[3]]
        a, b = (c.scalar_value(op, size) for op in i.operands)
        if m[1]:  # 16 bits, extended by the type of the comparison
            b = f"{'(i16)' if t == 'i32' else '(u16)'}{i.operands[1].bits('u16')}"
        return f"w.scc = ({t}){a} {_COMPARE[m[2]]} ({t}){b};"
    if m := re.fullmatch(r"s_bitcmp([01])_b(32|64)", i.mnemonic):
        value = c.scalar_value(i.operands[0], "q64" if m[2] == "64" else "u32")
        return f"w.scc = ({value} >> ({c.scalar_value(i.operands[1])} & {int(m[2]) - 1}) & 1) == {m[1]};"
    if m := re.fullmatch(r"s_(\w+)_saveexec_b64", i.mnemonic):
        return _save_exec(c, i, SAVE_EXEC[m[1]]) if m[1] in SAVE_EXEC else None
    special = _SPECIAL.get(i.mnemonic)
    return special(c, i) if special else None


def _put(c: Context, i: Instruction, wide: bool, value: str) -> str:
    d = c.scalar(i.operands[0])
    return f"w.set_s64({d}, {value});" if wide else f"w.s[{d}] = {value};"


def _arithmetic(c: Context, i: Instruction, op: ScalarOp) -> str:
    wide = op.result in "qj"
    if i.mnemonic in WITH_CONSTANT:
        types, operands, names = "us", i.operands, "ab"
    else:
        types = op.sources.replace("+", op.result)
        operands = (*i.operands[1:], i.operands[0]) if "+" in op.sources else i.operands[1:]
        names = "ac" if op.sources.endswith("+") else "abc"
    if len(operands) != len(types):
        raise Unsupported(f"{len(operands)} sources, known with {len(types)}")
    values = [
        f"[[maybe_unused]] const {TYPES[t]} {n} = ({TYPES[t]}){c.scalar_value(operand, _SIZES[t])};"
        for n, t, operand in zip(names[: len(types)], types, operands, strict=True)
    ]
    whole = "u64" if wide else "u32"
    result = f"const {whole} r = ({whole})({TYPES[op.result]})({op.expression});"
    scc = {None: "", "nonzero": "w.scc = r != 0;"}.get(op.scc, f"w.scc = ({op.scc}) & 1;")
    return f"{{ {' '.join(values)} {result} {scc} {_put(c, i, wide, 'r')} }}"


def _save_exec(c: Context, i: Instruction, expression: str) -> str:
    value = c.scalar_value(i.operands[1], "q64")
    new = f"const u64 r = {expression}; w.set_s64({c.scalar(i.operands[0])}, exec); w.set_s64(EXEC, r); w.scc = r != 0;"
    return f"{{ [[maybe_unused]] const u64 a = {value}, exec = w.exec(); {new} }}"


def _load(c: Context, i: Instruction) -> str:
    n = int(i.mnemonic.rpartition("dword")[2].lstrip("x") or 1)
    base, offset = i.operands[1], i.operands[2]
    where = str(offset.first) if offset.kind == "i" else c.scalar_value(offset)
    more = i.number("offset") if "offset" in i.modifiers else 0
    return f"scalar_load(w, {c.scalar(i.operands[0])}, {c.scalar_value(base, 'q64')} + {where} + {more}, {n});"


def _buffer_load(c: Context, i: Instruction) -> str:
    n = int(i.mnemonic.rpartition("dword")[2].lstrip("x") or 1)
    base, offset = c.scalar(i.operands[1]), c.scalar_value(i.operands[2])
    more = i.number("offset") if "offset" in i.modifiers else 0
    return f"scalar_load(w, {c.scalar(i.operands[0])}, (w.s64({base}) & 0xffffffffffffull) + {offset} + {more}, {n});"


def _clock(c: Context, i: Instruction) -> str:
    return f"w.set_s64({c.scalar(i.operands[0])}, w.services->realtime());"


def _get_register(c: Context, i: Instruction) -> str:
    m = re.fullmatch(r"hwreg\((\w+)(?:, *(\d+), *(\d+))?\)", i.operands[1].text)
    known = {"HW_REG_XCC_ID": "w.xcc", "HW_REG_HW_ID": "w.hardware_id", "HW_REG_MODE": "w.mode"}
    if not m or m[1] not in known:
        raise Unsupported(i.operands[1].text)
    first, count = int(m[2] or 0), int(m[3] or 32)
    return f"w.s[{c.scalar(i.operands[0])}] = (u32)({known[m[1]]} >> {first} & bit_run(0, {count}));"


def _set_register(c: Context, i: Instruction) -> str:
    """Of MODE alone: what becomes of float32 subnormals; and rounding to the nearest, the only one there is here."""
    name = i.operands[0].text.replace(" ", "")
    if name in ("hwreg(HW_REG_MODE,0,2)", "hwreg(HW_REG_MODE,2,2)", "hwreg(HW_REG_MODE,0,4)"):
        if not i.operands[1].is_constant or i.operands[1].first:
            raise Unsupported(f"{name}: only 0, rounding to the nearest")
        return ""
    if name != "hwreg(HW_REG_MODE,4,2)":
        raise Unsupported(name)
    return f"w.mode = (w.mode & ~0x30u) | ({c.scalar_value(i.operands[1])} & 3) << 4;"


_INDEXED = ("SRC0", "SRC1", "SRC2", "DST")  # bits 12 to 15 of M0


def _index_on(c: Context, i: Instruction) -> str:
    names = re.findall(r"\w+", i.text.partition("gpr_idx(")[2])
    c.indexed = frozenset(names)
    bits = sum(1 << _INDEXED.index(name) for name in names)
    return f"w.s[M0] = (w.s[M0] & 0xffff0f00u) | ({c.scalar_value(i.operands[0])} & 255) | {bits}u << 12;"


def _index_off(c: Context, i: Instruction) -> str:
    c.indexed = frozenset()
    return ""


def _get_pc(c: Context, i: Instruction) -> str:
    return f"w.set_s64({c.scalar(i.operands[0])}, 0);"  # see Context._address_part


_SPECIAL = {
    **{f"s_load_dword{n}": _load for n in ("", "x2", "x3", "x4", "x8", "x16")},
    **{f"s_buffer_load_dword{n}": _buffer_load for n in ("", "x2", "x3", "x4", "x8", "x16")},
    "s_memtime": _clock,
    "s_memrealtime": _clock,
    "s_getreg_b32": _get_register,
    "s_setreg_b32": _set_register,
    "s_setreg_imm32_b32": _set_register,
    "s_set_gpr_idx_on": _index_on,
    "s_set_gpr_idx_off": _index_off,
    "s_getpc_b64": _get_pc,
}
