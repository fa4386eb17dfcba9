"""An in-order issue model of one gfx950 compute unit: an ESTIMATE of how busy the tile keeps the matrix cores.

It compares loops; its absolute numbers are no evidence of speed. Modelled:
    a wave issues at most one instruction in four cycles; a SIMD at most one vector or matrix instruction in four, from
    the wave of higher priority first; the matrix core is busy for the published cycles;
    one LDS server, with a queue of eight for each pair of SIMDs;
    direct loads pass an address stage, take a fixed round trip with a limit on the bytes on their way, and write LDS;
    vmcnt and lgkmcnt count in order; a barrier opens some cycles after the last wave has come.
Left out: bank conflicts (the swizzles have none), instruction fetch, and clocks that fall under load.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from . import loop_shape
from .loop_shape import BARRIER, LDS, MEMORY, MFMA, SCALAR, VECTOR, WAIT, Shape, allowed, kind

WAVES, SIMDS = 8, 4


@dataclass(frozen=True)
class Machine:
    """Cycles, unless said otherwise. Published or measured by others, but for those marked as guesses."""

    lds_read: tuple[tuple[str, int], ...] = (("b128", 4), ("b64", 2), ("b32", 1))  # of the server, a wave
    lds_latency: int = 64
    lds_queue: int = 8  # entries a pair of SIMDs
    lds_write: int = 8  # 1 KiB of a direct load: 128 bytes a cycle, a guess
    address: int = 16  # 1 KiB through the L1 stage: 64 bytes a cycle, a guess
    round_trip: int = 1000
    in_flight: int = 44 << 10  # bytes a compute unit
    barrier: int = 16  # from the last arrival to the next instruction: a guess, to be varied
    issue: int = 4


@dataclass(frozen=True)
class Estimate:
    """One K step of the main loop, and what a tile costs besides its K steps."""

    cycles: float  # a K step
    ideal: int  # the matrix cores' cycles in it
    busy: float  # ideal / cycles
    stalls: dict[str, int] = field(default_factory=dict)  # cycles that wave 0 could not issue in a K step, by reason
    outside: float | None = None  # cycles that a tile takes beyond its K steps: epilogue, asking, turning


def mfma_cycles(instruction: str) -> int:
    """Cycles of the matrix core, from the instruction's name."""
    found = re.search(r"f32_(\d+)x\d+x\d+", instruction)
    cycles = 32 if found and found[1] == "32" else 16
    return cycles * 2 if "f8f6f4" in instruction else cycles


class _Wave:
    def __init__(self, number: int, program: Sequence[str], machine: Machine) -> None:
        self.number, self.simd = number, number % SIMDS
        self.code = [(i, kind(i), _cost(i, machine)) for i in program]
        self.at = self.turns = self.next_issue = self.priority = 0
        self.lds: deque[float] = deque()  # when each outstanding access completes
        self.memory: deque[float] = deque()
        self.at_barrier = False
        self.why: Counter[str] = Counter()


def _cost(instruction: str, machine: Machine) -> int:
    what = kind(instruction)
    if what == MFMA:
        return mfma_cycles(instruction)
    if what == LDS:
        return (1 + ("read2" in instruction)) * next((n for name, n in machine.lds_read if name in instruction), 1)
    if what == MEMORY:
        return 1024 if "x4" in instruction or "b128" in instruction else 512 if "x2" in instruction else 256
    return 0


def simulate(
    programs: Sequence[Sequence[str]], machine: Machine, turns: int, warm: int
) -> tuple[float, float, Counter[str]]:
    """Runs every wave's program over and over. The second half of the waves begins one barrier behind.

    Returns: cycles a turn, share of them in which matrix cores are busy, and wave 0's stalls a turn. Measured from turn
    `warm` to `turns` of wave 0. Raises RuntimeError if the programs cannot go on.
    """
    waves = [_Wave(n, program, machine) for n, program in enumerate(programs)]
    behind = {w.number for w in waves[WAVES // 2 :]}
    arrived = set(behind)
    opens: float | None = None
    core_free, core_busy = [0] * SIMDS, 0
    server_free = stage_free = 0.0
    queues: list[deque[float]] = [deque(), deque()]
    flying: deque[tuple[float, int]] = deque()
    flying_bytes = now = turned = 0
    marks: list[tuple[int, int, Counter[str]]] = []
    while waves[0].turns < turns:
        if opens is not None and now >= opens:
            for w in waves:
                if w.number in arrived:
                    w.at_barrier = False
                    w.next_issue = max(w.next_issue, now)
            behind -= arrived
            arrived.clear()
            opens = None
        simd, vector_used = now % SIMDS, False
        for w in sorted((w for w in waves if w.simd == simd), key=lambda w: (-w.priority, w.number)):
            if w.number in behind or w.at_barrier or w.next_issue > now:
                continue
            instruction, what, cost = w.code[w.at]
            while w.lds and w.lds[0] <= now:
                w.lds.popleft()
            while w.memory and w.memory[0] <= now:
                w.memory.popleft()
            stall = ""
            if what in (MFMA, VECTOR):
                if vector_used:
                    stall = "the other wave issues"
                elif what == MFMA and core_free[simd] > now:
                    stall = "matrix core busy"
                else:
                    vector_used = True
                    if what == MFMA:
                        core_free[simd] = now + cost
                        core_busy += cost
            elif what == LDS:
                queue = queues[simd // 2]
                while queue and queue[0] <= now:
                    queue.popleft()
                if len(queue) >= machine.lds_queue:
                    stall = "LDS queue"
                else:
                    server_free = max(server_free, now + 4) + cost
                    queue.append(server_free)
                    done = server_free - cost + machine.lds_latency
                    w.lds.append(max(done, w.lds[-1] if w.lds else 0))
            elif what == MEMORY:
                if len(w.memory) >= 63:
                    stall = "too many loads"
                else:
                    start = max(stage_free, now + 4)
                    while flying and flying[0][0] <= start:
                        flying_bytes -= flying.popleft()[1]
                    while flying and flying_bytes + cost > machine.in_flight:
                        start = max(start, flying[0][0])
                        flying_bytes -= flying.popleft()[1]
                    stage_free = start + machine.address * cost / 1024
                    done = stage_free + machine.round_trip
                    flying.append((done, cost))
                    flying_bytes += cost
                    if loop_shape.is_direct_load(instruction):
                        done += machine.lds_write
                        server_free += machine.lds_write * cost / 1024
                    w.memory.append(max(done, w.memory[-1] if w.memory else 0))
            elif what == WAIT:
                for counter, outstanding in (("vmcnt", w.memory), ("lgkmcnt", w.lds)):
                    limit = allowed(instruction, counter)
                    if limit is not None and len(outstanding) > limit:
                        stall = f"wait for {counter}"
            if stall:
                w.why[stall] += 4
                continue
            if what == BARRIER:
                w.at_barrier = True
                arrived.add(w.number)
                if len(arrived) == WAVES:
                    opens = now + machine.barrier
            if instruction.startswith("s_setprio"):
                w.priority = int(instruction.split()[1])
            w.next_issue = now + (machine.issue if what in (SCALAR, WAIT, BARRIER) else 4)
            w.at += 1
            if w.at == len(w.code):
                w.at = 0
                w.turns += 1
                if w.number == 0:
                    turned = now
                    marks.append((now, core_busy, w.why.copy()))
        now += 1
        if now - turned > 100 * (machine.round_trip + len(waves[0].code)):
            raise RuntimeError("the issue model makes no progress: waves wait for each other")
    (t0, busy0, why0), (t1, busy1, why1) = marks[warm - 1], marks[turns - 1]
    cycles = (t1 - t0) / (turns - warm)
    stalls = Counter({k: round((n - why0[k]) / (turns - warm)) for k, n in why1.items() if n > why0[k]})
    return cycles, (busy1 - busy0) / SIMDS / (t1 - t0), stalls


def _tile(shape: Shape, steps: int, asks: bool) -> list[str]:
    """One wave's instructions for one tile of a stream, from its second K step to the end of the next tile's first."""
    loop = list(shape.loop)

    def with_detour(detour: Sequence[str], barriers: int) -> list[str]:
        at = 0
        for _ in range(barriers):
            at = loop.index("s_barrier", at) + 1
        return [*loop[:at], *detour, *loop[at:]]

    look = with_detour(shape.ask, shape.ask_at) if asks else loop
    turn = with_detour(shape.turn, shape.turn_at)
    # Asked in the first part of the step in whose third part the loads turn: one K step has both.
    third = [i for i, x in enumerate(look) if kind(x) == BARRIER][1]
    both = look[: third + 1] + turn[[i for i, x in enumerate(turn) if kind(x) == BARRIER][1] + 1 :]
    return loop * (steps - 3) + both + loop + list(shape.border)


def estimate(shape: Shape, barrier: int = 16, outside: bool = False, machine: Machine | None = None) -> Estimate:
    """What the model says of a tile's loop at a barrier cost; `outside` adds a tile's cycles beyond its K steps."""
    machine = replace(machine or Machine(), barrier=barrier)
    cycles, busy, stalls = simulate([shape.loop] * WAVES, machine, 10, 4)
    ideal = sum(mfma_cycles(i) for i in shape.loop if kind(i) == MFMA) * WAVES // SIMDS
    more = None
    if outside and shape.border:
        steps = 8
        tiles = [_tile(shape, steps, asks=w == 0) for w in range(WAVES)]
        more = simulate(tiles, machine, 3, 1)[0] - steps * cycles
    return Estimate(cycles, ideal, busy, dict(stalls), more)
