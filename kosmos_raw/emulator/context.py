"""What the translation of one instruction needs to know, and how operands become C++."""

from __future__ import annotations

from dataclasses import dataclass, field

from .asm import Instruction, Kernel, Operand, Unsupported

APERTURES = {"src_shared_base": "SHARED_APERTURE", "src_private_base": "PRIVATE_APERTURE"}  # of flat addresses


@dataclass
class Context:
    """One kernel being translated. `helpers` is shared by all kernels of a module: C++ definition by name."""

    kernel: Kernel
    helpers: dict[str, str]
    data: dict[str, bytes] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # mnemonics
    addressed: set[str] = field(default_factory=set)  # symbols of constant data
    warnings: list[str] = field(default_factory=list)  # right here, but doubtful on hardware
    flushes: bool = False  # MODE may say that float32 subnormals are zero
    indexed: frozenset[str] = frozenset()  # which register numbers M0 is added to: see s_set_gpr_idx_on

    def vector(self, op: Operand, registers: int = 1) -> int:
        """Row of the vector register file; accumulation registers follow the vector registers."""
        if not op.is_vector:
            raise Unsupported(f"operand {op.text}: a vector register is needed")
        first = op.first + (self.kernel.flag("accum_offset") if op.kind == "a" else 0)
        if first + registers > vector_registers(self.kernel):
            raise Unsupported(
                f"operand {op.text}: the kernel declares {vector_registers(self.kernel)} vector registers"
            )
        return first

    def vector_or_none(self, op: Operand) -> int:
        """For an address that may be absent: -1 for `off`."""
        return -1 if op.text == "off" else self.vector(op)

    def scalar(self, op: Operand) -> int:
        """Number of a scalar register."""
        if op.kind != "s":
            raise Unsupported(f"operand {op.text}: a scalar register is needed")
        return op.first

    def scalar_value(self, op: Operand, size: str = "u32") -> str:
        """A scalar source as a C++ expression; size as in Operand.bits."""
        wide = size[1:] == "64"
        if op.kind == "s":
            return f"w.s64({op.first})" if wide else f"w.s[{op.first}]"
        if op.kind == "c":
            return "w.scc"
        if op.is_constant:
            return f"{op.bits(size)}{'ull' if wide else 'u'}"
        if op.kind == "l" and "@rel32@" in op.text:
            return self._address_part(op.text)
        if wide and op.text in APERTURES:
            return APERTURES[op.text]
        raise Unsupported(f"scalar operand {op.text}")

    def _address_part(self, text: str) -> str:
        """symbol@rel32@lo+4: s_getpc gives 0 here, so the parts of the absolute address are added to it."""
        symbol, _, part = text.partition("@rel32@")
        if not self.data.get(symbol):
            raise Unsupported(f"address of {symbol}, which has no constant data in this file")
        self.addressed.add(symbol)
        return f"(u32)((u64)data_{identifier(symbol)} >> {32 if part.startswith('hi') else 0})"

    def source(self, op: Operand, size: str, registers: int = 1) -> tuple[str, str]:
        """A vector instruction's source as (class, number): see runtime/lanes.h."""
        if op.is_vector:
            return self._wrapped(op, "V"), str(self.vector(op, registers))
        if op.kind == "s":
            return self._wrapped(op, "S"), str(op.first)
        if op.kind == "c":
            return "Scc", "0"
        if op.is_constant:
            return "K", f"{op.bits(size)}ull"
        raise Unsupported(f"vector operand {op.text}")

    @staticmethod
    def _wrapped(op: Operand, name: str) -> str:
        name = f"Abs<{name}>" if op.absolute else name
        return f"Neg<{name}>" if op.negated else name


def vector_registers(kernel: Kernel) -> int:
    """Rows of the register file: a multiple of eight, as hardware gives them out."""
    return -(-kernel.metadata.get("next_free_vgpr", 512) // 8) * 8


def identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def refuse_modifiers(i: Instruction, *known: str) -> None:
    """Raises when the instruction has a modifier that its translation would ignore."""
    for name in i.modifiers:
        if name not in known:
            raise Unsupported(f"modifier {name}")
