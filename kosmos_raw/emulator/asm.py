"""Reads gfx950 assembly text as clang writes it: kernels, their metadata, instructions and operands; constant data."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

SPECIAL_SCALARS = {
    "flat_scratch_lo": 102, "flat_scratch_hi": 103, "xnack_mask_lo": 104, "xnack_mask_hi": 105,
    "vcc": 106, "vcc_lo": 106, "vcc_hi": 107, "m0": 124, "exec": 126, "exec_lo": 126, "exec_hi": 127,
}  # fmt: skip
INLINE_FLOATS = {"0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494", "0.15915494309189532"}


class Unsupported(Exception):
    """An instruction, operand or modifier that the emulator does not know. Named, never skipped."""


@dataclass(frozen=True)
class Operand:
    """One operand as written, without sign and bars; `first` is the number of a register, `kind` one of:

    v vector, a accumulation, s scalar register; i integer, f float constant; l label or symbol; x anything else.
    """

    text: str
    kind: str
    first: int = 0
    registers: int = 1
    negated: bool = False
    absolute: bool = False
    sign_extended: bool = False  # sext(...), of SDWA

    @property
    def is_vector(self) -> bool:
        return self.kind in "va"

    @property
    def is_constant(self) -> bool:
        return self.kind in "if"

    def bits(self, size: str) -> int:
        """The constant's bits as an operand of 'u16', 'u32', 'f64', ...: floats take the type of the operand."""
        width = int(size[1:])
        if self.kind == "i":
            if size == "f64" and not -16 <= self.first <= 64:
                return (self.first & 0xFFFFFFFF) << 32  # a literal is the high half of a double
            return self.first & ((1 << width) - 1)
        if self.kind != "f":
            raise Unsupported(f"constant operand {self.text}")
        value = float(self.text)
        if self.text.startswith("0.159"):
            value = 0.15915494309189532
        width = 32 if size == "q64" else width  # 64-bit integer operations take the float's 32 bits
        return int.from_bytes(struct.pack({16: "<e", 32: "<f", 64: "<d"}[width], value), "little")


@dataclass(frozen=True)
class Instruction:
    line: int  # of the file, from 1
    mnemonic: str  # without _e32, _e64, _dpp, _sdwa
    form: str  # what was cut off: "", "e32", "e64", "dpp" or "sdwa"
    operands: tuple[Operand, ...]
    modifiers: dict[str, str]
    text: str

    def bits(self, name: str, count: int, default: int = 0) -> list[int]:
        """A list modifier such as op_sel:[0,1,1], padded with `default`."""
        given = [int(x) for x in self.modifiers.get(name, "[]").strip("[]").split(",") if x]
        return given + [default] * (count - len(given))

    def number(self, name: str, default: int = 0) -> int:
        return int(self.modifiers.get(name, str(default)), 0)


@dataclass
class Kernel:
    name: str
    metadata: dict[str, int] = field(default_factory=dict)  # .amdhsa_NAME
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # name -> index of the instruction behind it
    max_block: int = 1024
    hidden_arguments: dict[str, int] = field(default_factory=dict)  # .value_kind -> offset in the arguments

    def flag(self, name: str) -> int:
        return self.metadata.get(name, 0)


@dataclass
class Program:
    kernels: list[Kernel]
    data: dict[str, bytes]  # constant tables by symbol
    lines: list[str]


_REGISTERS = re.compile(r"([vas])(?:(\d+)|\[(\d+)(?::(\d+))?\])$")
_NUMBER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)$")


def operand(text: str) -> Operand:
    negated = absolute = extended = False
    body = text
    if body.startswith("sext(") and body.endswith(")"):
        extended, body = True, body[5:-1]
    if body.startswith("-") and not _NUMBER.match(body) and body not in INLINE_FLOATS:
        negated, body = True, body[1:]
    if body.startswith("|") and body.endswith("|"):
        absolute, body = True, body[1:-1]
    signs = {"negated": negated, "absolute": absolute, "sign_extended": extended}
    if m := _REGISTERS.match(body):
        first = int(m[2] or m[3])
        return Operand(body, m[1], first, int(m[4]) - first + 1 if m[4] else 1, **signs)
    if body in SPECIAL_SCALARS:
        return Operand(body, "s", SPECIAL_SCALARS[body], 2 if body in ("vcc", "exec") else 1, **signs)
    if body in ("scc", "src_scc"):
        return Operand(body, "c", **signs)
    if _NUMBER.match(body):
        return Operand(body, "i", int(body, 0), **signs)
    if body in INLINE_FLOATS:
        return Operand(body, "f", **signs)
    return Operand(body, "l" if re.fullmatch(r"[.\w$]+(@[\w@]+)?([+-]\d+)?", body) else "x", **signs)


def split_operands(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    parts, depth, current = [], 0, ""
    for ch in text:
        depth += (ch in "[(") - (ch in "])")
        if ch == "," and not depth:
            parts.append(current.strip())
            current = ""
        else:
            current += ch
    return [*parts, current.strip()] if current.strip() else parts


_MODIFIER = re.compile(r"(\w+)(?::(\[[^\]]*\]|[\w.-]+\([^)]*\)|[\w.-]+))?$")


def instruction(line: int, text: str) -> Instruction:
    mnemonic, _, rest = text.replace("\t", " ").strip().partition(" ")
    form = ""
    if m := re.fullmatch(r"(.+)_(e32|e64|dpp|sdwa)", mnemonic):
        mnemonic, form = m[1], m[2]
    if mnemonic.startswith(("s_waitcnt", "s_getreg", "s_setreg", "s_sendmsg")):
        return Instruction(line, mnemonic, form, tuple(map(operand, split_operands(rest))), {}, text.strip())
    parts = split_operands(rest.strip())
    modifiers: dict[str, str] = {}
    if parts:
        words = re.findall(r"(?:\[[^\]]*\]|\([^)]*\)|\|[^|]*\||[^\s\[(|])+", parts[-1])
        parts[-1] = words[0]
        for word in words[1:]:
            m = _MODIFIER.match(word)
            if not m:
                raise Unsupported(f"modifier {word}")
            modifiers[m[1]] = m[2] or ""
    if len(parts) == 1 and ":" in parts[0] and not parts[0].startswith(("s[", "v[", "a[")):
        name, _, value = parts.pop().partition(":")  # a lone modifier, as in buffer_wbl2 sc1
        modifiers[name] = value
    if mnemonic in ("buffer_wbl2", "buffer_inv") and parts:
        modifiers[parts.pop()] = ""
    return Instruction(line, mnemonic, form, tuple(map(operand, parts)), modifiers, text.strip())


def parse(text: str) -> Program:
    """Everything that the translator needs of one file of assembly text."""
    lines = text.split("\n")
    kernels = {}
    for m in re.finditer(r"\.amdhsa_kernel (\S+)\n(.*?)\.end_amdhsa_kernel", text, re.S):
        facts = re.findall(r"\.amdhsa_(\w+) (\d+)$", m[2], re.M)
        kernels[m[1]] = Kernel(m[1], {name: int(value) for name, value in facts})
    _read_launch_facts(text, kernels)
    data: dict[str, bytes] = {}
    current: Kernel | None = None
    symbol = ""
    for number, raw in enumerate(lines, 1):
        line = raw.split(";", 1)[0].rstrip()
        if label := re.match(r"([.\w$]+):", line):
            symbol = label[1]
            if symbol in kernels:
                current = kernels[symbol]
            elif current is not None:
                current.labels[symbol] = len(current.instructions)
            else:
                data[symbol] = b""
        elif line.startswith(("\t.section", "\t.text")):
            current, symbol = None, ""
        elif line.startswith("\t."):
            if current is None and symbol in data:
                data[symbol] += _data_bytes(line.split())
        elif line.startswith("\t") and current is not None:
            try:
                current.instructions.append(instruction(number, line))
            except Unsupported as error:
                raise Unsupported(f"line {number}: {line.strip()}: {error}") from None
            if current.instructions[-1].mnemonic == "s_setpc_b64":
                _fold_far_branch(current)
    return Program(list(kernels.values()), data, lines)


def _fold_far_branch(kernel: Kernel) -> None:
    """What reaches a label further away than 128 KiB, as one branch. It writes two registers and scc besides, of which
    compilers know that nobody reads them. Any other s_setpc_b64 stays, and is not known."""
    last = [i.text.replace("\t", " ") for i in kernel.instructions[-4:]]
    m = re.fullmatch(
        r"s_getpc_b64 s\[(\d+):(\d+)\]\n"
        r"s_add_u32 s\1, s\1, \(([.\w$]+)-([.\w$]+)\)&4294967295\n"
        r"s_addc_u32 s\2, s\2, \(\3-\4\)>>32\ns_setpc_b64 s\[\1:\2\]",
        "\n".join(last),
    )
    if m and kernel.labels.get(m[4]) == len(kernel.instructions) - 3:
        line = kernel.instructions[-1].line
        del kernel.instructions[-4:], kernel.labels[m[4]]
        kernel.instructions.append(instruction(line, f"\ts_branch {m[3]}"))


def _data_bytes(words: list[str]) -> bytes:
    size = {".byte": 1, ".short": 2, ".long": 4, ".quad": 8}.get(words[0])
    if size:
        values = [w for w in "".join(words[1:]).split(",") if w]
        if all(_NUMBER.match(w) for w in values):
            return b"".join((int(w, 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little") for w in values)
        return b"\0" * size * len(values)  # a pointer: nobody has needed one yet
    if words[0] == ".zero":
        return b"\0" * int(words[1].rstrip(","), 0)
    return b""


def _read_launch_facts(text: str, kernels: dict[str, Kernel]) -> None:
    """Block sizes and hidden arguments, from the YAML at the end of the file."""
    for part in re.split(r"^  - \.a", text.partition("amdhsa.kernels:")[2], flags=re.M):
        name = re.search(r"^    \.name: +(\S+)", part, re.M)
        if not name or name[1] not in kernels:
            continue
        kernel = kernels[name[1]]
        if m := re.search(r"\.max_flat_workgroup_size: (\d+)", part):
            kernel.max_block = int(m[1])
        for m in re.finditer(r"\.offset: +(\d+)\n +\.size: +\d+\n +\.value_kind: +(hidden_\w+)", part):
            kernel.hidden_arguments[m[2]] = int(m[1])
