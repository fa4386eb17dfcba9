"""gfx950 assembly text to C++: each kernel becomes one function that can stop and go on.

The function returns to the scheduler at barriers, at s_sleep, when its budget of backward branches is used up, and now
and then at memory waits (random preemption); `w.resume` says where it goes on. Each instruction is one call or a few
statements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from . import asm, matrix, memory, scalar, vector
from .asm import Instruction, Kernel, Operand, Unsupported
from .context import Context, identifier, refuse_modifiers, vector_registers
from .scalar_ops import BRANCHES

_FAMILIES = (vector.translate, scalar.translate, memory.translate, matrix.translate)
_MEMORY = re.compile(r"(global|flat|buffer|scratch|ds|s_load|s_buffer)_")
_ROUNDING = ("float_round_mode_32", "float_round_mode_16_64")
_POINTERS_NOT_GIVEN = ("dispatch_ptr", "queue_ptr", "dispatch_id", "kernarg_preload_length", "private_segment_size")


@dataclass(frozen=True)
class Translation:
    source: str  # C++
    kernels: tuple[Kernel, ...]
    mnemonics: frozenset[str]
    instructions: int
    warnings: tuple[str, ...]


class UnknownInstructions(ValueError):
    """The text has instructions that the emulator does not know; the message lists each kind with its first line."""


def translate(text: str, name: str) -> Translation:
    """C++ of every kernel in the assembly text; `name` is what messages call the file."""
    program = asm.parse(text)
    if not program.kernels:
        raise ValueError(f"{name}: no kernel in it")
    helpers: dict[str, str] = {}
    functions: list[str] = []
    unknown: dict[str, tuple[int, str, str]] = {}
    used: set[str] = set()
    addressed: set[str] = set()
    warnings: list[str] = []
    for kernel in program.kernels:
        context = Context(kernel, helpers, program.data)
        functions.append(_function(context, unknown))
        used |= context.used
        addressed |= context.addressed
        warnings += context.warnings
    if unknown:
        what = "\n".join(f"  line {line}: {text}  ({why})" for line, text, why in unknown.values())
        raise UnknownInstructions(f"{name}: the emulator does not know {len(unknown)} kinds of instruction:\n{what}")
    count = sum(len(k.instructions) for k in program.kernels)
    parts = [
        '#include "module.h"\n',
        *_constant_data(program.data, addressed),
        *helpers.values(),
        *functions,
        _tables(program.kernels, name),
    ]
    return Translation("\n".join(parts), tuple(program.kernels), frozenset(used), count, tuple(warnings))


class _Body:
    """The statements of one kernel function."""

    def __init__(self, kernel: Kernel) -> None:
        self.lines: list[str] = []
        self.counted = 0
        targets = {op.text for i in kernel.instructions if i.mnemonic in BRANCHES for op in i.operands}
        self.label_number = {name: n for n, name in enumerate(sorted(targets & set(kernel.labels)), 1)}
        self.resume_points = len(self.label_number)

    def add(self, code: str) -> None:
        self.lines.append(code)

    def count_instructions(self) -> None:
        if self.counted:
            self.add(f"w.instructions += {self.counted};")
            self.counted = 0

    def new_resume_point(self) -> int:
        self.resume_points += 1
        return self.resume_points


def _function(c: Context, unknown: dict[str, tuple[int, str, str]]) -> str:
    kernel = c.kernel
    for name in _POINTERS_NOT_GIVEN:
        if kernel.flag(f"user_sgpr_{name}"):
            raise Unsupported(f"{kernel.name} asks for {name}: pass sizes as ordinary arguments")
    if any(map(kernel.flag, _ROUNDING)):
        raise Unsupported(f"{kernel.name} rounds otherwise than to the nearest")
    keeps = kernel.flag("float_denorm_mode_32") == 3  # the assembler's default is 0: flush them
    c.flushes = not keeps or any(i.mnemonic.startswith("s_setreg") for i in kernel.instructions)
    body = _Body(kernel)
    labels_at: dict[int, list[str]] = {}
    for name, index in kernel.labels.items():
        if name in body.label_number:
            labels_at.setdefault(index, []).append(name)
    for index, i in enumerate(kernel.instructions):
        for name in labels_at.get(index, ()):
            body.count_instructions()
            if c.indexed:
                raise Unsupported(f"line {i.line}: a branch into a stretch of indexed registers")
            body.add(f"case {body.label_number[name]}: L{body.label_number[name]}:;")
        body.counted += 1
        c.used.add(i.mnemonic)
        try:
            _instruction(c, body, index, i)
        except Unsupported as error:
            unknown.setdefault(f"{i.mnemonic} {error}", (i.line, i.text, str(error) or "not in any table"))
    head = f"// {kernel.name}\nstatic Stop run_{identifier(kernel.name)}(Wave& w) {{\nswitch (w.resume) {{\ncase 0:;\n"
    return head + "\n".join(body.lines) + "\n}\nreturn ENDED;\n}\n"


def _instruction(c: Context, body: _Body, index: int, i: Instruction) -> None:
    control = _CONTROL.get(i.mnemonic)
    if control:
        control(c, body, index, i)
        return
    for family in _FAMILIES:
        code = family(c, i)
        if code is not None:
            place = f"w.at = {i.line}; " if _MEMORY.match(i.mnemonic) else ""
            if code:
                body.add(f"{place}{code}  // {i.text}")
            return
    raise Unsupported("not in any table")


# ---- control flow, and what may stop a wave ----
def _branch(c: Context, body: _Body, index: int, i: Instruction) -> None:
    target = i.operands[0].text
    if target not in body.label_number:
        raise Unsupported(f"branch to {target}")
    n = body.label_number[target]
    body.count_instructions()
    backward = c.kernel.labels[target] <= index
    stop = f"if (--w.budget < 0) {{ w.at = {i.line}; w.resume = {n}; return YIELDED; }} " if backward else ""
    body.add(f"if ({BRANCHES[i.mnemonic]}) {{ {stop}goto L{n}; }}  // {i.text}")


def _end(c: Context, body: _Body, index: int, i: Instruction) -> None:
    body.count_instructions()
    body.add(f"w.at = {i.line}; if (!w.plain) w.services->wait(w, 0, 0);\nreturn ENDED;")


def _barrier(c: Context, body: _Body, index: int, i: Instruction) -> None:
    body.count_instructions()
    n = body.new_resume_point()
    body.add(
        f"w.at = {i.line}; w.masked_barriers += w.exec() != w.launched_lanes; w.resume = {n}; "
        "return AT_BARRIER;  // s_barrier"
    )
    body.add(f"case {n}:;")


def _sleep(c: Context, body: _Body, index: int, i: Instruction) -> None:
    body.count_instructions()
    n = body.new_resume_point()
    body.add(f"w.at = {i.line}; w.resume = {n}; return SLEEPING;  // {i.text}\ncase {n}:;")


def _may_preempt(body: _Body, i: Instruction) -> None:
    body.count_instructions()
    n = body.new_resume_point()
    body.add(f"w.at = {i.line}; if (w.preempted()) {{ w.resume = {n}; return YIELDED; }}\ncase {n}:;")


def _wait(c: Context, body: _Body, index: int, i: Instruction) -> None:
    vector_memory, lds = _wait_counts(i.operands[0])
    _may_preempt(body, i)
    body.add(f"if (!w.plain) w.services->wait(w, {vector_memory}, {lds});  // {i.text}")


def _wait_counts(op: Operand) -> tuple[int, int]:
    """How many may be left of vmcnt and lgkmcnt."""
    if op.kind == "i":
        return (op.first & 15) | (op.first >> 14 & 3) << 4, op.first >> 8 & 15
    counts = {name: int(n) for name, n in re.findall(r"(\w+)\((\d+)\)", op.text)}
    if not counts or counts.keys() - {"vmcnt", "lgkmcnt", "expcnt"}:
        raise Unsupported(f"wait for {op.text}")
    return counts.get("vmcnt", 63), counts.get("lgkmcnt", 15)


def _fence(c: Context, body: _Body, index: int, i: Instruction) -> None:
    refuse_modifiers(i, "sc0", "sc1", "nt")
    scope = "WORKGROUP" if "sc1" not in i.modifiers else "SYSTEM" if "sc0" in i.modifiers else "DEVICE"
    write_back = i.mnemonic == "buffer_wbl2"
    _may_preempt(body, i)
    flags = "true, false" if write_back else "false, true"
    body.add(f"if (!w.plain) w.services->fence(w, {flags}, {scope});  // {i.text}")


def _trap(c: Context, body: _Body, index: int, i: Instruction) -> None:
    body.add(f'w.at = {i.line}; w.services->fault(w, "{i.text}", 0);')


_CONTROL = {
    **dict.fromkeys(BRANCHES, _branch),
    "s_endpgm": _end,
    "s_barrier": _barrier,
    "s_sleep": _sleep,
    "s_waitcnt": _wait,
    "buffer_wbl2": _fence,
    "buffer_inv": _fence,
    "s_trap": _trap,
}


# ---- the rest of the file ----
def _mode(k: Kernel) -> int:
    """MODE at the start, with the assembler's defaults."""
    fields = {"float_round_mode_32": (0, 0), "float_round_mode_16_64": (2, 0), "float_denorm_mode_32": (4, 0)}
    fields |= {"float_denorm_mode_16_64": (6, 3), "dx10_clamp": (8, 1), "ieee_mode": (9, 1)}
    return sum(k.metadata.get(name, default) << at for name, (at, default) in fields.items())


def _constant_data(data: dict[str, bytes], addressed: set[str]) -> Iterable[str]:
    for name in sorted(addressed):
        yield f"alignas(64) static const u8 data_{identifier(name)}[] = {{{', '.join(map(str, data[name]))}}};"


def _tables(kernels: Iterable[Kernel], name: str) -> str:
    rows = []
    for k in kernels:
        dims = sum(k.flag(f"system_sgpr_workgroup_id_{axis}") << n for n, axis in enumerate("xyz"))
        numbers = [
            vector_registers(k),
            k.flag("group_segment_fixed_size"),
            k.flag("private_segment_fixed_size"),
            k.flag("kernarg_size"),
            k.flag("user_sgpr_count"),
            dims,
            k.max_block,
            _mode(k),
        ]
        rows.append(f"    {{{json.dumps(k.name)}, run_{identifier(k.name)}, {', '.join(map(str, numbers))}}},\n")
    table = f"static const KernelInfo kernels[] = {{\n{''.join(rows)}}};\n"
    info = f"ABI, sizeof kernels / sizeof *kernels, {json.dumps(name)}, kernels"
    module = f"static const ModuleInfo module_info = {{{info}}};\n"
    return table + module + 'extern "C" const ModuleInfo* emulator_module() { return &module_info; }\n'
