"""Matrix instructions to C++ calls of runtime/mfma.h."""

from __future__ import annotations

import re

from .asm import Instruction, Unsupported
from .context import Context, refuse_modifiers

_ELEMENTS = ("FP8", "BF8", "FP6", "BF6", "FP4")  # by number, in cbsz and blgp
_BITS = {"F32": 32, "F16": 16, "BF16": 16, "FP8": 8, "BF8": 8, "FP6": 6, "BF6": 6, "FP4": 4}
_SHAPES = {(16, 4), (16, 16), (16, 32), (16, 128), (32, 2), (32, 8), (32, 16), (32, 64)}
_NAME = re.compile(r"v_mfma_(scale_)?f32_(\d+)x(\d+)x(\d+)_?(bf16|f16|f32|f8f6f4|[fb][pf]8_[fb][pf]8)(_1k)?")


def translate(c: Context, i: Instruction) -> str | None:
    m = _NAME.fullmatch(i.mnemonic)
    if not m:
        return None
    rows, k = int(m[2]), int(m[4])
    if rows != int(m[3]) or (rows, k) not in _SHAPES:
        return None
    a, b = _element_types(i, m[5])
    scales = _scales(c, i) if m[1] else "-1, 0, 0, 0"
    registers = [k * rows // 64 * _BITS[t] // 32 for t in (a, b)]
    results = rows * rows // 64
    d = c.vector(i.operands[0], results)
    sources = [c.vector(op, n) for op, n in zip(i.operands[1:3], registers, strict=True)]
    if i.operands[3].negated:
        raise Unsupported("negated accumulator")
    kind, accumulator = c.source(i.operands[3], "f32", results)
    _warn_of_overlap(c, i, d, results, list(zip(sources, registers, strict=True)))
    return f"mfma<{rows}, {k}, {a}, {b}, {kind}>(w, {d}, {sources[0]}, {sources[1]}, {accumulator}, {scales});"


def _element_types(i: Instruction, name: str) -> tuple[str, str]:
    if name == "f8f6f4":
        refuse_modifiers(i, "cbsz", "blgp", "op_sel", "op_sel_hi")
        a, b = i.number("cbsz"), i.number("blgp")
        if max(a, b) >= len(_ELEMENTS):
            raise Unsupported("element type")
        return _ELEMENTS[a], _ELEMENTS[b]
    refuse_modifiers(i)  # cbsz, abid and blgp would permute the operands
    first, _, second = name.upper().partition("_")
    return first, second or first


def _scales(c: Context, i: Instruction) -> str:
    """Which byte of which register. Vector registers only: hardware reads the wrong bits of a scalar or constant."""
    low, high = i.bits("op_sel", 3), i.bits("op_sel_hi", 3)
    return ", ".join(f"{c.vector(i.operands[4 + n])}, {low[n] + 2 * high[n]}" for n in (0, 1))


def _warn_of_overlap(c: Context, i: Instruction, d: int, results: int, sources: list[tuple[int, int]]) -> None:
    """A large result over a source that hardware may still be reading; here all sources are read first."""
    accumulator = i.operands[3]
    if results <= 4 or (accumulator.is_vector and c.vector(accumulator, results) == d):
        return
    if any(first < d + results and d < first + n for first, n in sources):
        c.warnings.append(f"line {i.line}: {i.text}: the result overlaps a source")
