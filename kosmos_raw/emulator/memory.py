"""Memory instructions to C++ calls of runtime/memory.h."""

from __future__ import annotations

import re

from .asm import Instruction
from .context import Context, refuse_modifiers

# Name behind load_ or store_: format and registers.
_MEMORY = {
    "dword": ("DWORDS", 1), "dwordx2": ("DWORDS", 2), "dwordx3": ("DWORDS", 3), "dwordx4": ("DWORDS", 4),
    "ubyte": ("UBYTE", 1), "sbyte": ("SBYTE", 1), "byte": ("UBYTE", 1),
    "ushort": ("USHORT", 1), "sshort": ("SSHORT", 1),
    "short": ("USHORT", 1), "short_d16": ("SHORT_LOW", 1), "short_d16_hi": ("SHORT_HIGH", 1),
}  # fmt: skip
_LDS = {
    "b32": ("DWORDS", 1), "b64": ("DWORDS", 2), "b96": ("DWORDS", 3), "b128": ("DWORDS", 4), "u8": ("UBYTE", 1),
    "i8": ("SBYTE", 1), "b8": ("UBYTE", 1), "u16": ("USHORT", 1), "i16": ("SSHORT", 1), "b16": ("USHORT", 1),
    "u16_d16": ("SHORT_LOW", 1), "u16_d16_hi": ("SHORT_HIGH", 1), "b16_d16_hi": ("SHORT_HIGH", 1),
}  # fmt: skip
_ATOMICS = {
    "add": "ADD", "sub": "SUB", "umax": "UMAX", "umin": "UMIN", "smax": "SMAX", "smin": "SMIN",
    "and": "AND", "or": "OR",
    "xor": "XOR", "swap": "SWAP", "cmpswap": "CMPSWAP", "add_f32": "ADD_F32", "pk_add_f16": "PK_ADD_F16",
    "pk_add_bf16": "PK_ADD_BF16", "inc": "INC", "dec": "DEC",
    "add_f64": "ADD_F64", "min_f64": "MIN_F64", "max_f64": "MAX_F64",
}  # fmt: skip


def _lds_atomics() -> dict[str, str]:
    table = {"add_f32": "ADD_F32", **{f"{name}_f64": f"{name.upper()}_F64" for name in ("add", "min", "max")}}
    for bits in (32, 64):
        table |= {f"inc_u{bits}": "INC", f"dec_u{bits}": "DEC"}
        table |= {f"add_u{bits}": "ADD", f"sub_u{bits}": "SUB", f"cmpst_b{bits}": "CMPSWAP", f"wrxchg_b{bits}": "SWAP"}
        table |= {f"{name}_b{bits}": name.upper() for name in ("and", "or", "xor")}
        table |= {f"{name}_u{bits}": f"U{name.upper()}" for name in ("min", "max")}
        table |= {f"{name}_i{bits}": f"S{name.upper()}" for name in ("min", "max")}
    return table


_LDS_ATOMICS = _lds_atomics()
_SCOPES = ("offset", "sc0", "sc1", "nt")


def translate(c: Context, i: Instruction) -> str | None:
    """The C++ statement, or None when the instruction is not known here."""
    for pattern, emit in _FAMILIES:
        if m := pattern.fullmatch(i.mnemonic):
            return emit(c, i, m)
    return None


def _scope(i: Instruction) -> str:
    """sc1 alone: this device. Both: everybody. (Stores and loads; an atomic's sc0 asks for the old value.)"""
    if "sc1" not in i.modifiers:
        return "WORKGROUP"
    return "SYSTEM" if "sc0" in i.modifiers else "DEVICE"


def _where(c: Context, i: Instruction, address: int) -> tuple[str, str]:
    """Class and numbers of a global address: operand `address`, and behind the data a scalar base or `off`."""
    base = i.operands[-1] if len(i.operands) > address + 1 else None
    offset = i.number("offset")
    if base is None or base.text == "off":
        return "Far", f"{c.vector(i.operands[address], 2)}, 0, {offset}"
    return "Near", f"{c.vector(i.operands[address])}, {c.scalar(base)}, {offset}"


def _flat(i: Instruction, where: str) -> str:
    return "Flat" if i.mnemonic.startswith("flat_") else where


def _global_load(c: Context, i: Instruction, m: re.Match[str]) -> str:
    refuse_modifiers(i, *_SCOPES)
    f, n = _MEMORY[m[1]]
    where, numbers = _where(c, i, 1)
    return f"global_load<{f}, {n}, {_flat(i, where)}>(w, {c.vector(i.operands[0], n)}, {numbers}, {_scope(i)});"


def _global_store(c: Context, i: Instruction, m: re.Match[str]) -> str:
    refuse_modifiers(i, *_SCOPES)
    f, n = _MEMORY[m[1]]
    offset = i.number("offset")
    base = i.operands[2] if len(i.operands) > 2 else None
    data = c.vector(i.operands[1], n)
    if base is None or base.text == "off":
        where, numbers = "Far", f"{c.vector(i.operands[0], 2)}, 0, {offset}"
    else:
        where, numbers = "Near", f"{c.vector(i.operands[0])}, {c.scalar(base)}, {offset}"
    return f"global_store<{f}, {n}, {_flat(i, where)}>(w, {data}, {numbers}, {_scope(i)});"


def _global_load_lds(c: Context, i: Instruction, m: re.Match[str]) -> str:
    refuse_modifiers(i, *_SCOPES)
    where, numbers = _where(c, i, 0)
    return f"global_load_lds<{_MEMORY[m[1]][1]}, {where}>(w, {numbers}, {_scope(i)});"


def _global_atomic(c: Context, i: Instruction, m: re.Match[str]) -> str | None:
    refuse_modifiers(i, *_SCOPES)
    if m[1] not in _ATOMICS:
        return None
    n = 2 if m[2] or m[1].endswith("f64") else 1
    returns = "sc0" in i.modifiers
    operands = i.operands[1:] if returns else i.operands
    d = c.vector(i.operands[0], n) if returns else 0
    data = c.vector(operands[1], 2 * n if m[1] == "cmpswap" else n)
    base = operands[2] if len(operands) > 2 else None
    near = base is not None and base.text != "off"
    scalar = c.scalar(base) if near and base else 0
    address = f"{c.vector(operands[0], 1 if near else 2)}, {data}, {scalar}, {i.number('offset')}"
    scope = "SYSTEM" if "sc1" in i.modifiers else "DEVICE"
    where = "Near" if near else _flat(i, "Far")
    flags = f"ATOMIC_{_ATOMICS[m[1]]}, {n}, {'true' if returns else 'false'}, {where}"
    return f"global_atomic<{flags}>(w, {d}, {address}, {scope});"


def _buffer(c: Context, i: Instruction, m: re.Match[str]) -> str | None:
    refuse_modifiers(i, *_SCOPES, "offen", "lds")
    direct = "lds" in i.modifiers
    operands = i.operands if not direct or len(i.operands) == 4 else (i.operands[0], *i.operands)
    if m[2] not in _MEMORY or (direct and m[1] == "store"):
        return None
    f, n = _MEMORY[m[2]]
    descriptor, scalar = c.scalar(operands[2]), c.scalar_value(operands[3])
    address = c.vector(operands[1]) if "offen" in i.modifiers else -1
    numbers = f"{address}, {descriptor}, {scalar}, {i.number('offset')}, {_scope(i)}"
    if direct:
        if f != "DWORDS" or n == 2:
            return None
        return f"buffer_load_lds<{n}>(w, {numbers});"
    return f"buffer_{m[1]}<{f}, {n}>(w, {c.vector(operands[0], n)}, {numbers});"


def _scratch(c: Context, i: Instruction, m: re.Match[str]) -> str:
    refuse_modifiers(i, *_SCOPES)
    f, n = _MEMORY[m[2]]
    data, address = (i.operands[0], i.operands[1]) if m[1] == "load" else (i.operands[1], i.operands[0])
    base = i.operands[2]
    scalar = "0" if base.text == "off" else c.scalar_value(base)
    offset = f"{scalar} + {i.number('offset')}"
    return f"scratch_{m[1]}<{f}, {n}>(w, {c.vector(data, n)}, {c.vector_or_none(address)}, {offset});"


def _lds_load(c: Context, i: Instruction, m: re.Match[str]) -> str:
    refuse_modifiers(i, "offset")
    f, n = _LDS[m[1]]
    return f"lds_load<{f}, {n}>(w, {c.vector(i.operands[0], n)}, {c.vector(i.operands[1])}, {i.number('offset')});"


def _lds_store(c: Context, i: Instruction, m: re.Match[str]) -> str:
    refuse_modifiers(i, "offset")
    f, n = _LDS[m[1]]
    return f"lds_store<{f}, {n}>(w, {c.vector(i.operands[0])}, {c.vector(i.operands[1], n)}, {i.number('offset')});"


def _lds_two(c: Context, i: Instruction, m: re.Match[str]) -> str:
    refuse_modifiers(i, "offset0", "offset1")
    n = int(m[3]) // 32
    step = 4 * n * (64 if m[2] else 1)
    offsets = f"{i.number('offset0') * step}, {i.number('offset1') * step}"
    if m[1] == "read":
        return f"lds_load_two<{n}>(w, {c.vector(i.operands[0], 2 * n)}, {c.vector(i.operands[1])}, {offsets});"
    data = ", ".join(str(c.vector(op, n)) for op in i.operands[1:])
    return f"lds_store_two<{n}>(w, {c.vector(i.operands[0])}, {data}, {offsets});"


def _lds_transposed(c: Context, i: Instruction, m: re.Match[str]) -> str:
    refuse_modifiers(i, "offset")
    return f"lds_load_transposed(w, {c.vector(i.operands[0], 2)}, {c.vector(i.operands[1])}, {i.number('offset')});"


def _lds_atomic(c: Context, i: Instruction, m: re.Match[str]) -> str | None:
    refuse_modifiers(i, "offset")
    name = f"{m[1]}_{m[3]}"
    if name not in _LDS_ATOMICS:
        return None
    op, n, returns = _LDS_ATOMICS[name], int(m[3][1:]) // 32, bool(m[2])
    operands = i.operands[1:] if returns else i.operands
    d = c.vector(i.operands[0], n) if returns else 0
    flags = f"ATOMIC_{op}, {n}, {'true' if returns else 'false'}"
    if op == "CMPSWAP":  # LDS has expected and new value the other way round, and in two operands
        given = f"{c.vector(operands[0])}, {c.vector(operands[1], n)}, {c.vector(operands[2], n)}"
        return f"lds_compare_swap<{flags}>(w, {d}, {given}, {i.number('offset')});"
    return f"lds_atomic<{flags}>(w, {d}, {c.vector(operands[0])}, {c.vector(operands[1], n)}, {i.number('offset')});"


def _exchange(c: Context, i: Instruction, m: re.Match[str]) -> str:
    refuse_modifiers(i, "offset")
    numbers = ", ".join(str(c.vector(op)) for op in i.operands)
    return f"ds_{m[1]}(w, {numbers}, {i.number('offset')});"


def _swizzle(c: Context, i: Instruction, m: re.Match[str]) -> str:
    name, *numbers = re.findall(r"\w+", i.modifiers.get("offset", "0").removeprefix("swizzle"))
    pattern = _pattern(name, numbers) if numbers else int(name, 0)
    return f"ds_swizzle(w, {c.vector(i.operands[0])}, {c.vector(i.operands[1])}, {pattern});"


def _pattern(name: str, given: list[str]) -> int:
    """A named pattern as ds_swizzle's offset: which bits of the lane are kept (0..4), set (5..9), turned (10..14)."""
    if name == "BITMASK_PERM":
        masks = [0, 0, 0]
        for bit in given[0]:
            masks = [m << 1 | (bit in which) for m, which in zip(masks, ("pi", "1", "i"), strict=True)]
        return masks[0] | masks[1] << 5 | masks[2] << 10
    numbers = [int(x) for x in given]
    if name == "QUAD_PERM":
        return 0x8000 | sum(n << 2 * k for k, n in enumerate(numbers))
    if name == "BROADCAST":
        return ~(numbers[0] - 1) & 31 | numbers[1] << 5
    return 31 | {"SWAP": numbers[0], "REVERSE": numbers[0] - 1}[name] << 10


_FAMILIES = [
    (re.compile(r"global_load_lds_(dword|dwordx3|dwordx4)"), _global_load_lds),
    (re.compile(rf"(?:global|flat)_load_({'|'.join(_MEMORY)})"), _global_load),
    (re.compile(rf"(?:global|flat)_store_({'|'.join(_MEMORY)})"), _global_store),
    (re.compile(r"(?:global|flat)_atomic_(\w+?)(_x2)?"), _global_atomic),
    (re.compile(r"buffer_(load|store)_(\w+)"), _buffer),
    (re.compile(rf"scratch_(load|store)_({'|'.join(_MEMORY)})"), _scratch),
    (re.compile(r"ds_read_b64_tr_b16"), _lds_transposed),
    (re.compile(r"ds_(read|write)2(st64)?_b(32|64)"), _lds_two),
    (re.compile(rf"ds_read_({'|'.join(_LDS)})"), _lds_load),
    (re.compile(rf"ds_write_({'|'.join(_LDS)})"), _lds_store),
    (re.compile(r"ds_(bpermute|permute)_b32"), _exchange),
    (re.compile(r"ds_(swizzle)_b32"), _swizzle),
    (re.compile(r"ds_(\w+?)(_rtn)?_([uibf]\d\d)"), _lds_atomic),
]
