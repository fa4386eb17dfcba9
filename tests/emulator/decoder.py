"""What a code object holds, by a decoder that shares nothing with the compiler: against the text that we emulate.

The decoder is tinygrad's, whose tables of encodings, opcodes and operands are generated from AMD's machine-readable
description of CDNA4. It gives fields; here both they and the text are brought into one form, `Line`. What differs
between the two is then a fault of the assembler, of the text's reader (kosmos_raw/emulator/asm.py), or of the tables.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from tinygrad.renderer.amd import decode_inst
from tinygrad.renderer.amd.dsl import FixedBitField
from tinygrad.runtime.autogen.amd.cdna.enum import HWREG, VOP3POp

from kosmos_raw.emulator import asm

Part = tuple  # an operand: (kind, number, registers, negated, absolute), or (kind, number)


class Line(NamedTuple):
    """One instruction. Operands in the text's order, modifiers as (name, value) but for those that change nothing.

    "unread" among them are bits that are set in the code and mean nothing here: an assembler leaves them clear.
    """

    mnemonic: str
    short: str  # "e32", "dpp", or "" for the long encodings and those without a choice
    operands: tuple[Part, ...]
    modifiers: frozenset[tuple[str, Any]]


# ---- the code object ----
class CodeObject:
    """A linked code object: the bytes of its kernels, and where they lie in the file."""

    def __init__(self, data: bytes) -> None:
        table, entry, count = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58)
        heads = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry) for i in range(count)]
        symbols = next(h for h in heads if h[1] == 11)  # .dynsym: what a loader sees
        names = heads[symbols[6]][4]
        self.data, self.at = data, {}
        for name, _, _, section, value, size in struct.iter_unpack(
            "<IBBHQQ", data[symbols[4] : symbols[4] + symbols[5]]
        ):
            text = data[names + name : data.index(b"\0", names + name)].decode()
            self.at[text] = (heads[section][4] + value - heads[section][3], size)

    def bytes_of(self, name: str) -> bytes:
        first, size = self.at[name]
        return self.data[first : first + size]

    def descriptor(self, kernel: str) -> dict[str, int]:
        """What a dispatch reads beside the code, under the names of the text's .amdhsa directives."""
        b = self.bytes_of(f"{kernel}.kd")
        lds, scratch, arguments = struct.unpack_from("<III", b)
        third, first, second, properties = struct.unpack_from("<IIIH", b, 44)
        names = "private_segment_buffer dispatch_ptr queue_ptr kernarg_segment_ptr dispatch_id".split()
        return {
            "group_segment_fixed_size": lds,
            "private_segment_fixed_size": scratch,
            "kernarg_size": arguments,
            "accum_offset": (third % 64 + 1) * 4,
            "next_free_vgpr": (first % 64 + 1) * 8,
            "user_sgpr_count": second >> 1 & 31,
            **{f"system_sgpr_workgroup_id_{axis}": second >> 7 + n & 1 for n, axis in enumerate("xyz")},
            "system_vgpr_workitem_id": second >> 11 & 3,
            **{f"user_sgpr_{name}": properties >> n & 1 for n, name in enumerate(names)},
        }


# ---- one form for operands ----
_SPECIAL = {v: k for k, v in asm.SPECIAL_SCALARS.items() if k not in ("vcc", "exec")}
_FLOATS = {0.5: 240, -0.5: 241, 1.0: 242, -1.0: 243, 2.0: 244, -2.0: 245, 4.0: 246, -4.0: 247, 0.15915494: 248}
_LITERAL = 255


def _from_text(op: asm.Operand) -> Part:
    signs = (op.negated, op.absolute)
    if op.kind in "vas":
        return (op.kind, op.first, op.registers, *signs)
    if op.kind == "c":
        return ("s", 253, 1, *signs)
    if op.kind == "f":
        return ("constant", _FLOATS[round(float(op.text), 8)])
    if op.kind == "i":
        n = op.first
        inline = 128 + n if 0 <= n <= 64 else 192 - n if -16 <= n < 0 else None
        return ("literal", n & 0xFFFFFFFF) if inline is None else ("constant", inline)
    return ("text", op.text)


class _Fields:
    """The decoded fields of one instruction, as operands."""

    def __init__(self, i: Any) -> None:
        self.i, self.sizes, self.unread = i, i.operands, i._raw
        for name, field in i._fields:
            if name == "op" or isinstance(field, FixedBitField):
                self.raw(name)

    def raw(self, name: str, mask: int = -1) -> int:
        """The bits of a field, or 0 where the encoding has none of that name."""
        field = getattr(type(self.i), name, None)
        if field is None:
            return 0
        self.unread &= ~((field.mask & mask) << field.lo)
        return self.i._raw >> field.lo & field.mask & mask

    def has(self, name: str) -> bool:
        return name in self.sizes

    def registers(self, name: str) -> int:
        return max(1, self.sizes.get(name, (None, 32))[1] // 32)

    def vector(self, name: str, registers: int = 0, accumulator: int = 0) -> Part:
        return ("a" if accumulator else "v", self.raw(name) & 255, registers or self.registers(name), False, False)

    def scalar(self, name: str, registers: int = 0, scale: int = 1) -> Part:
        return ("s", self.raw(name) * scale, registers or self.registers(name), False, False)

    def source(self, name: str, registers: int = 0, accumulator: int = 0, signs: int | None = None) -> Part:
        """A source that may be anything; `signs` is its number among the sign bits, where it has some."""
        code, size = self.raw(name), registers or self.registers(name)
        negated = absolute = False
        if signs is not None:
            negated, absolute = (bool(self.raw(field, 1 << signs)) for field in ("neg", "abs"))
        if code >= 256:
            return ("a" if accumulator else "v", code - 256, size, negated, absolute)
        if code == _LITERAL:
            return ("literal", self.raw("literal"))
        if code < 128 or code == 253:
            return ("s", code, size, negated, absolute)
        return ("constant", code, *(("signed", negated, absolute) if negated or absolute else ()))


VCC: Part = ("s", 106, 2, False, False)


def _flags(f: _Fields, *names: str) -> dict[str, Any]:
    return {name: True for name in names if f.raw(name)}


def _sop(f: _Fields) -> tuple[list[Part], dict[str, Any]]:
    given = [f.scalar("sdst")] if f.has("sdst") else []
    return given + [f.source(name) for name in ("ssrc0", "ssrc1") if f.has(name)], {}


def _sopk(f: _Fields) -> tuple[list[Part], dict[str, Any]]:
    value = f.raw("simm16")
    if "hwreg" in str(f.sizes["simm16"][2]).lower():
        return [f.scalar("sdst"), ("register", value & 63, value >> 6 & 31, (value >> 11) + 1)], {}
    return [f.scalar("sdst"), ("short", value)], {}


def _sopp(f: _Fields) -> tuple[list[Part], dict[str, Any]]:
    name = f.i.op_name.lower()
    if name in ("s_barrier", "s_endpgm"):
        return [], {}
    value = f.raw("simm16", 0xCF7F if name == "s_waitcnt" else -1)
    if name == "s_waitcnt":
        return [("wait", value & 15 | value >> 10 & 48, value >> 4 & 7, value >> 8 & 15)], {}
    if "branch" in name:
        return [("jump", value - (value >> 15 << 16))], {}
    return [("short", value)], {}


def _smem(f: _Fields) -> tuple[list[Part], dict[str, Any]]:
    given = [f.scalar("sdata")] if f.has("sdata") else []
    if not f.has("sbase"):
        return given, {}
    given.append(f.scalar("sbase", 2, scale=2))
    if f.raw("soffset_en"):
        given.append(f.scalar("soffset", 1))
    if f.raw("imm") and (f.raw("offset") or not f.raw("soffset_en")):
        given.append(("offset", f.raw("offset")))
    return given, _flags(f, "glc")


def _carries(f: _Fields, given: list[Part]) -> list[Part]:
    """VCC, which the short encodings imply and the text names."""
    name = f.i.op_name.lower()
    if name.startswith("v_cmp"):
        return [VCC, *given]
    if "_co_" in name:
        given.insert(1, VCC)
    return (
        [*given, VCC]
        if "cndmask" in name or re.match(r"v_(add|sub|subrev)[cb]+_co", name.replace("subbrev", "subb"))
        else given
    )


def _vop_short(f: _Fields) -> tuple[list[Part], dict[str, Any]]:
    name = f.i.op_name.lower()
    given = []
    if f.has("vdst"):
        given.append(f.scalar("vdst", 1) if "readfirstlane" in name else f.vector("vdst"))
    if f.has("src0"):
        given.append(f.source("src0"))
    if f.has("vsrc1"):
        given.append(f.vector("vsrc1"))
    if "madmk" in name or "fmamk" in name:
        given.insert(2, ("literal", f.raw("literal")))
    if "madak" in name or "fmaak" in name:
        given.append(("literal", f.raw("literal")))
    return _carries(f, given), {}


_DPP = [(0x100, "row_shl"), (0x110, "row_shr"), (0x120, "row_ror"), (0x150, "row_newbcast")]
_DPP_ALONE = {
    0x130: ("wave_shl", 1), 0x134: ("wave_rol", 1), 0x138: ("wave_shr", 1), 0x13C: ("wave_ror", 1),
    0x140: ("row_mirror", True), 0x141: ("row_half_mirror", True), 0x142: ("row_bcast", 15), 0x143: ("row_bcast", 31),
}  # fmt: skip


def _vop_dpp(f: _Fields) -> tuple[list[Part], dict[str, Any]]:
    control = f.raw("dpp")
    if control < 0x100:
        pattern: tuple[str, Any] = ("quad_perm", tuple(control >> n & 3 for n in (0, 2, 4, 6)))
    elif control in _DPP_ALONE:
        pattern = _DPP_ALONE[control]
    else:
        pattern = next((name, control - first) for first, name in _DPP if first <= control < first + 16)
    source = ("v", f.raw("vsrc0"), 1, bool(f.raw("src0_neg")), bool(f.raw("src0_abs")))
    given = [f.vector("vdst"), source]
    if f.has("vsrc1"):
        given.append(("v", f.raw("vsrc1"), 1, bool(f.raw("src1_neg")), bool(f.raw("src1_abs"))))
    masks = {name: f.raw(name) for name in ("row_mask", "bank_mask") if f.raw(name) != 15}
    return _carries(f, given), {pattern[0]: pattern[1], **masks, **({"bound_ctrl": True} if f.raw("bc") else {})}


def _vop3(f: _Fields) -> tuple[list[Part], dict[str, Any]]:
    name = f.i.op_name.lower()
    scalar = type(f.i).__name__ == "VOP3_SDST" or "readlane" in name
    given = [f.scalar("vdst") if scalar else f.vector("vdst")] if f.has("vdst") else []
    if f.has("sdst"):
        given.append(f.scalar("sdst"))
    table = "bitop3" in name
    sources = [s for s in ("src0", "src1", "src2") if f.has(s)]
    given += [f.source(s, signs=None if table else n) for n, s in enumerate(sources)]
    select = f.raw("opsel", 8 | (1 << len(sources)) - 1)
    more: dict[str, Any] = {"op_sel": select} if select else {}
    if table:
        more["bitop3"] = f.raw("omod") << 6 | f.raw("abs") << 3 | f.raw("neg")
    elif f.raw("omod"):
        more |= {1: {"mul": 2}, 2: {"mul": 4}, 3: {"div": 2}}[f.raw("omod")]
    return given, more | ({"clamp": True} if f.raw("clmp") else {})


def _vop3p(f: _Fields) -> tuple[list[Part], dict[str, Any]]:
    sources = [s for s in ("src0", "src1", "src2") if f.has(s)]
    every = (1 << len(sources)) - 1
    high = f.raw("opsel_hi", every) | f.raw("opsel_hi2") << 2  # the last bit is set even where there is no third source
    fields = {"op_sel_hi": high ^ (every | 4), **{name: f.raw(field, every) for name, field in _PACKED_FIELDS}}
    more = {name: bits for name, bits in fields.items() if bits}
    return [f.vector("vdst"), *map(f.source, sources)], more | ({"clamp": True} if f.raw("clmp") else {})


_PACKED_FIELDS = (("op_sel", "opsel"), ("neg_lo", "neg"), ("neg_hi", "neg_hi"))


def _mfma(f: _Fields) -> tuple[list[Part], dict[str, Any]]:
    sizes = f.i.op_regs
    a, cd = f.raw("acc"), f.raw("acc_cd")
    given = [f.vector("vdst", accumulator=cd)]
    given += [f.source(f"src{n}", sizes[f"src{n}"], a >> n & 1) for n in (0, 1)]
    given.append(f.source("src2", accumulator=cd))
    fields = {name: f.raw(name) for name in ("cbsz", "abid", "blgp")}
    if f.has("scale_src0"):
        given += [f.source(f"scale_src{n}") for n in (0, 1)]
        # The first half is an instruction of its own, which loads scales; abid in the second says that it is there.
        fields["abid"] ^= 1
        fields["x2encoding"] = f.raw("x2encoding") ^ (0b110100111 << 7 | VOP3POp.V_MFMA_LD_SCALE_B32.value)
        fields |= {"op_sel": f.raw("opsel", 3), "op_sel_hi": f.raw("opsel_hi", 3)}
    return given, {name: value for name, value in fields.items() if value}


def _ds(f: _Fields) -> tuple[list[Part], dict[str, Any]]:
    acc = f.raw("acc")
    given = [f.vector("vdst", accumulator=acc)] if f.has("vdst") else []
    given += [f.vector("addr", 1)] if f.has("addr") else []
    given += [f.vector(name, accumulator=acc) for name in ("data0", "data1") if f.has(name)]
    name, (low, high) = f.i.op_name.lower(), (f.raw("offset0"), f.raw("offset1"))
    two = re.match(r"ds_(read|write|wrxchg)2", name)
    offsets = {"offset0": low, "offset1": high} if two else {"offset": low | high << 8}
    return given, {n: v for n, v in offsets.items() if v} | _flags(f, "gds")


def _global(f: _Fields) -> tuple[list[Part], dict[str, Any]]:
    acc, flat = f.raw("acc"), type(f.i).__name__ == "FLAT"
    base = None if flat or f.raw("saddr") == 127 else f.scalar("saddr", 2)
    to = (
        [f.vector("vdst", accumulator=acc)]
        if f.has("vdst") and ("atomic" not in f.i.op_name.lower() or f.raw("sc0"))
        else []
    )
    address = f.vector("addr", 1 if base else 2)
    data = [f.vector("data", accumulator=acc)] if f.has("data") else []
    given = [*to, address, *data] + ([] if flat else [base or ("text", "off")])
    offset = f.raw("offset")
    offset -= (offset >> 12) << 13
    return given, ({"offset": offset} if offset else {}) | _flags(f, "sc0", "sc1", "nt")


def _mubuf(f: _Fields) -> tuple[list[Part], dict[str, Any]]:
    more = _flags(f, "sc0", "sc1", "nt", "lds", "offen", "idxen") | (
        {"offset": f.raw("offset")} if f.raw("offset") else {}
    )
    if not f.sizes:
        return [], more
    given = [] if f.raw("lds") else [f.vector("vdata", accumulator=f.raw("acc"))]
    count = f.raw("offen") + f.raw("idxen")
    return [
        *given,
        f.vector("vaddr", count) if count else ("text", "off"),
        f.scalar("srsrc", 4, scale=4),
        f.source("soffset"),
    ], more


_BY_CLASS: dict[str, Callable[[_Fields], tuple[list[Part], dict[str, Any]]]] = {
    **dict.fromkeys(("SOP1", "SOP2", "SOPC"), _sop), "SOPK": _sopk, "SOPP": _sopp, "SMEM": _smem,
    **dict.fromkeys(("VOP1", "VOP2", "VOPC"), _vop_short), **dict.fromkeys(("VOP1_DPP16", "VOP2_DPP16"), _vop_dpp),
    **dict.fromkeys(("VOP3", "VOP3_SDST", "VOP3SD"), _vop3), "VOP3P": _vop3p,
    **dict.fromkeys(("VOP3P_MFMA", "VOP3PX2"), _mfma), "DS": _ds,
    **dict.fromkeys(("GLOBAL", "FLAT"), _global), "MUBUF": _mubuf,
}  # fmt: skip


_known: dict[bytes, Line] = {}  # by the bytes of one instruction. They say themselves how many they are


def decode(data: bytes) -> tuple[Line, int]:
    """The instruction that 16 bytes (fewer at a kernel's end) begin with, and its size."""
    for size in (4, 8, 12, 16):
        if line := _known.get(data[:size]):
            return line, size
    line, size = _decode(data)
    _known[data[:size]] = line
    return line, size


def _decode(data: bytes) -> tuple[Line, int]:
    i = decode_inst(data, "cdna")
    name = type(i).__name__.removesuffix("_LIT")
    if name not in _BY_CLASS:
        raise NotImplementedError(f"encoding {name} of {data.hex()}")
    fields = _Fields(i)
    operands, modifiers = _BY_CLASS[name](fields)
    if fields.unread:
        modifiers["unread"] = fields.unread
    mnemonic = re.sub(r"_(e32|e64)$", "", i.op_name.lower())
    alone = re.match(r"v_readfirstlane|v_f?mad?[am]k_", mnemonic)  # have no other encoding
    e32 = name in ("VOP1", "VOP2", "VOPC") and not alone
    short = "dpp" if "DPP" in name else "e32" if e32 else ""
    return Line(mnemonic, short, tuple(operands), frozenset(modifiers.items())), i.size()


def decoded(data: bytes) -> list[Line]:
    """All instructions of a kernel; jumps are ("index", which instruction)."""
    lines: list[tuple[int, Line, int]] = []  # where it begins, itself, where it ends
    at = 0
    while at < len(data):
        line, size = decode(data[at : at + 16])
        lines.append((at, line, at + size))
        at += size
        if line.mnemonic == "s_setpc_b64":
            lines[-4:] = _far_branch(lines[-4:])
    starts = {start: i for i, (start, _, _) in enumerate(lines)}
    return [_jump(line, lambda words, end=end: starts.get(end + 4 * words, -1)) for _, line, end in lines]


def _far_branch(lines: list[tuple[int, Line, int]]) -> list[tuple[int, Line, int]]:
    """One jump of what adds a distance to the program counter and goes there, as the text's reader makes it."""
    (start, getpc, base), (_, low, _), (_, high, _), (_, setpc, end) = lines
    first, registers = getpc.operands[0][1:3]
    pair = [("s", first + i, 1, False, False) for i in range(2)]
    words = ("s", first, registers, False, False)
    added = [_signed(line, name, pair[i]) for i, (line, name) in enumerate(((low, "s_add_u32"), (high, "s_addc_u32")))]
    if (getpc.mnemonic, registers, setpc.operands) != ("s_getpc_b64", 2, (words,)) or None in added:
        return lines
    distance = added[0] + (1 << 32) * added[1]
    return [(start, Line("s_branch", "", (("jump", (base + distance - end) // 4),), frozenset()), end)]


def _signed(line: Line, mnemonic: str, register: Part) -> int | None:
    """The constant that is added to a register: of the low half, not negative."""
    if line.mnemonic != mnemonic or line.operands[:2] != (register, register):
        return None
    kind, n = line.operands[2]
    value = n if kind == "literal" else n - 128 if n <= 192 else 192 - n
    return value & 0xFFFFFFFF if mnemonic == "s_add_u32" else value - (value >> 31 << 32)


def _jump(line: Line, target: Callable[[Any], int]) -> Line:
    if not (line.operands and line.operands[-1][0] in ("jump", "label")):
        return line
    return line._replace(operands=(("index", target(line.operands[-1][1])),))


# ---- the text ----
_LISTS = ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
_NOTHING = {"row_mask": 15, "bank_mask": 15, "offset": 0, "cbsz": 0, "abid": 0, "blgp": 0, "offset0": 0, "offset1": 0}


def _modifier(i: asm.Instruction, name: str, value: str) -> tuple[str, Any] | None:
    if name in _LISTS:
        bits = i.bits(name, 0)
        number = sum(b << n for n, b in enumerate(bits))
        packed = i.mnemonic.startswith(("v_pk_", "v_mfma"))
        if name == "op_sel" and not packed and len(bits) < 4:  # the last one is the result's, bit 3
            number = number & ((1 << len(bits) - 1) - 1) | bits[-1] << 3
        if name == "op_sel_hi" and i.mnemonic.startswith("v_pk_"):
            number ^= (1 << len(bits)) - 1
        return (name, number) if number else None
    if name == "quad_perm":
        return name, tuple(i.bits(name, 4))
    if name == "bound_ctrl":
        return name, True
    number = int(value, 0) if value else True
    return None if _NOTHING.get(name) == number and value else (name, number)


def _wait(text: str) -> Part:
    counts = {name: int(n) for name, n in re.findall(r"(\w+)\((\d+)\)", text)}
    return ("wait", counts.get("vmcnt", 63), counts.get("expcnt", 7), counts.get("lgkmcnt", 15))


def _hardware_register(text: str) -> Part:
    name, *rest = text.removeprefix("hwreg(").removesuffix(")").split(",")
    first, width = map(int, rest) if rest else (0, 32)
    return ("register", HWREG[name].value, first, width)


def written(i: asm.Instruction) -> Line:
    """An instruction of the text, as the emulator's reader took it apart; jumps are ("label", name)."""
    operands = [_from_text(op) for op in i.operands]
    if i.mnemonic == "s_waitcnt":
        first = i.operands[0]
        operands = [_wait(first.text)]
        if first.kind == "i":
            n = first.first
            operands = [("wait", n & 15 | n >> 10 & 48, n >> 4 & 7, n >> 8 & 15)]
    elif i.mnemonic.startswith("s_getreg"):
        operands[1] = _hardware_register(i.text.partition(", ")[2])
    elif "branch" in i.mnemonic:
        operands = [("label", i.operands[0].text)]
    elif i.mnemonic.startswith(("s_load", "s_buffer_load")) and i.operands[-1].kind == "i":
        operands[-1] = ("offset", i.operands[-1].first)
    elif re.match(r"s_(movk|addk|mulk|cmovk|cmpk\w+)_", i.mnemonic) or i.mnemonic in (
        "s_nop",
        "s_sleep",
        "s_setprio",
        "s_trap",
    ):
        operands[-1] = ("short", i.operands[-1].first & 0xFFFF)
    modifiers = (_modifier(i, name, value) for name, value in i.modifiers.items())
    if i.mnemonic.startswith("s_load") and "offset" in i.modifiers:
        operands.append(("offset", i.number("offset")))
        modifiers = (m for m in modifiers if m and m[0] != "offset")
    short = i.form if i.form in ("e32", "dpp") else ""
    return Line(i.mnemonic, short, tuple(operands), frozenset(m for m in modifiers if m))


def of_text(kernel: asm.Kernel) -> list[Line]:
    return [_jump(written(i), lambda label: kernel.labels[label]) for i in kernel.instructions]
