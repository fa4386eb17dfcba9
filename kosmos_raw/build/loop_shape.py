"""The main loop of the gfx950 GEMM tile, as the compiler left it in the assembly text: what is in it, what must not be.

One turn of the loop is one K step: four parts, each ended by a barrier, by turns load parts (fragments are read, direct
loads started) and multiply parts. A compiler that moves work from one kind to the other, or waits more than the source
asks for, gives right results at half the speed: only the text shows it.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from typing import Any

LOADS = 8  # direct loads of a wave in a K step, and one more of scales: hip_kernels/target/gfx950_tile.h

MFMA, VECTOR, LDS, MEMORY, SCALAR, WAIT, BARRIER = "mfma vector lds memory scalar wait barrier".split()


@lru_cache(maxsize=1 << 17)  # asked again and again of the same few thousand
def kind(instruction: str) -> str:
    """Which unit an instruction goes to."""
    word = instruction.split()[0]
    if word.startswith("v_mfma"):
        return MFMA
    if word.startswith("v_"):
        return VECTOR
    if word.startswith("ds_"):
        return LDS
    if word.startswith(("buffer_", "global_", "flat_", "scratch_")):
        return MEMORY
    return {"s_barrier": BARRIER, "s_waitcnt": WAIT}.get(word, SCALAR)


def is_scaled(instruction: str) -> bool:
    return instruction.startswith("v_mfma_scale")


def is_direct_load(instruction: str) -> bool:
    return instruction.startswith("buffer_load") and instruction.endswith(" lds")


def is_store(instruction: str) -> bool:
    return instruction.startswith(("buffer_store", "global_store"))


def allowed(instruction: str, counter: str) -> int | None:
    """N of counter(N) in an s_waitcnt."""
    found = re.search(counter + r"\((\d+)\)", instruction)
    return int(found[1]) if found else None


Test = Callable[[str], bool]  # of one instruction


@dataclass(frozen=True)
class Graph:
    """Basic blocks of one kernel: their instructions, and which blocks may follow in a wave."""

    blocks: Mapping[str, list[str]]
    after: Mapping[str, list[str]]

    @staticmethod
    def of(text: str, kernel: str) -> Graph:
        body = text.partition(f"\n{kernel}:")[2].partition("\n.Lfunc_end")[0]
        blocks: dict[str, list[str]] = {"entry": []}
        name = "entry"
        for line in body.splitlines():
            line = line.split(";")[0].rstrip()
            if label := re.match(r"(\.LBB\w+):", line):
                name = label[1]
                blocks[name] = []
            elif line.startswith("\t") and not line.startswith("\t."):
                blocks[name].append(line.strip())
                if line.startswith("\ts_cbranch"):
                    name = f"{name}+"
                    blocks[name] = []
        names = list(blocks)
        after: dict[str, list[str]] = {}
        for name, following in zip(names, [*names[1:], None], strict=True):
            last = blocks[name][-1] if blocks[name] else ""
            # Some lane is always there: what is done for some lanes only is never jumped over.
            jump = re.match(r"s_(?!cbranch_execz)c?branch\w*\s+(\S+)", last)
            after[name] = [jump[1]] if jump else []
            if following and not re.match(r"s_branch|s_endpgm|s_cbranch_execnz", last):
                after[name].append(following)
        return Graph(blocks, after)

    def way(
        self,
        start: str,
        ends: Callable[[str], bool],
        *,
        exactly: Mapping[Test, int] | None = None,
        at_least: Mapping[Test, int] | None = None,
        avoid: Test = lambda _: False,
    ) -> list[str] | None:
        """The shortest way from `start` to a block that `ends`, at least one block long and without that last one.

        On it are `exactly` and `at_least` so many instructions that pass a test, and none to `avoid`. (Exactly: where
        the compiler made two branches of one condition, there is a way round what the loop always does.)
        """
        tests = [(t, n, n + 1) for t, n in (exactly or {}).items()]
        tests += [(t, n, n) for t, n in (at_least or {}).items()]
        goal = tuple(n for _, n, _ in tests)
        nothing = (0,) * len(goal)
        numbers = count()  # so that ways, which share their beginnings, are never compared
        queue: list[tuple[int, str, tuple[int, ...], int, Way]] = [(0, start, nothing, next(numbers), None)]
        seen: set[tuple[str, tuple[int, ...]]] = set()
        has: dict[str, tuple[int, ...]] = {}
        closed = {name: any(map(avoid, body)) for name, body in self.blocks.items()}
        while queue:
            cost, name, had, _, way = heapq.heappop(queue)
            if way and had == goal and ends(name):
                return _blocks_of(way)
            if way and (name, had) in seen:
                continue
            body = self.blocks[name]
            if way:
                seen.add((name, had))
            if cost > 4000 or closed[name]:
                continue
            if name not in has:
                has[name] = tuple(sum(map(test, body)) for test, _, _ in tests)
            now = tuple(min(h + n, most) for h, n, (_, _, most) in zip(had, has[name], tests, strict=True))
            if any(n > g for n, g in zip(now, goal, strict=True)):
                continue
            for following in self.after[name]:
                if following in self.blocks and (following, now) not in seen:
                    heapq.heappush(queue, (cost + len(body) + 1, following, now, next(numbers), (way, name)))
        return None

    def instructions(self, path: Iterable[str]) -> list[str]:
        return [instruction for block in path for instruction in self.blocks[block]]


Way = tuple[Any, str] | None  # the way before, and its last block


def _blocks_of(way: Way) -> list[str]:
    blocks = []
    while way:
        way, block = way
        blocks.append(block)
    return blocks[::-1]


def _is_barrier(instruction: str) -> bool:
    return kind(instruction) == BARRIER


def _is_mfma(instruction: str) -> bool:
    return kind(instruction) == MFMA


def _is_vector(instruction: str) -> bool:
    return kind(instruction) == VECTOR


def _is_lds_read(instruction: str) -> bool:
    return instruction.startswith("ds_read")


def _is_made_scalar(instruction: str) -> bool:
    return instruction.startswith("v_readfirstlane")


def _is_atomic(instruction: str) -> bool:
    return instruction.startswith("global_atomic")


def _rare(instruction: str) -> bool:
    """What the common turn of the loop does not do: ask the schedule, mask lanes, store, reload spilled scalars."""
    masks = ("s_mov_b64 exec", "s_and_saveexec", "v_readlane", "v_writelane", "v_readfirstlane", "s_load")
    return is_store(instruction) or instruction.startswith(("global_", *masks))


def _of_a_k_step(instruction: str) -> bool:
    return _is_barrier(instruction) or _is_mfma(instruction) or is_direct_load(instruction)


@dataclass(frozen=True)
class Shape:
    """The tile's code in one kernel."""

    loop: tuple[str, ...]  # one K step, from the instruction behind its last barrier
    border: tuple[
        str, ...
    ]  # from the loop's end, through a tile's epilogue and the next one's first K step, to the loop
    ask: tuple[str, ...]  # what the deciding wave does besides, two K steps before a tile's end; empty if not found
    ask_at: int  # barriers of the K step before it
    turn: tuple[str, ...]  # what all waves do besides when loads turn to the next tile
    turn_at: int

    @cached_property
    def parts(self) -> list[list[str]]:
        """The loop cut behind its barriers; the first is a load part."""
        parts: list[list[str]] = [[]]
        for instruction in self.loop:
            if kind(instruction) == BARRIER:
                parts.append([])
            else:
                parts[-1].append(instruction)
        return parts[:-1]

    def count(self, what: str) -> int:
        return sum(kind(i) == what for i in self.loop)

    @property
    def mfma(self) -> int:
        return self.count(MFMA)

    @property
    def lds_bytes(self) -> int:
        """Read from LDS by a wave in a K step."""
        sizes = {"b128": 16, "b96": 12, "b64": 8, "b32": 4}
        reads = [i.split()[0] for i in self.loop if i.startswith("ds_read")]
        return sum(64 * (1 + ("read2" in i)) * next(n for name, n in sizes.items() if name in i) for i in reads)

    @property
    def global_bytes(self) -> int:
        """Asked of memory by a wave in a K step."""
        loads = [i for i in self.loop if is_direct_load(i)]
        return sum(64 * (16 if "dwordx4" in i else 4) for i in loads)

    @property
    def loads(self) -> int:
        """Direct loads of a wave in a K step, as the source has them."""
        return LOADS + any(map(is_scaled, self.loop))

    @property
    def stores(self) -> int:
        return sum(map(is_store, self.border))


@lru_cache(maxsize=32)
def of_kernel(text: str, kernel: str) -> Shape | None:
    """The tile of a kernel in gfx950 text. None where there is no such loop: no tile, or one that is out of shape."""
    graph = Graph.of(text, kernel)
    loop = _main_loop(graph)
    if loop is None:
        return None
    end = _last_barrier(graph, loop)
    instructions = graph.instructions(loop)
    ask, ask_at = _detour(graph, loop, end, {_is_atomic: 1})
    # The box is read into scalars, and a lane's offsets are computed anew: the end of a stream has neither.
    turned: dict[Test, int] = {_is_lds_read: 1, _is_made_scalar: 4, _is_vector: 16}
    turn, turn_at = _detour(graph, loop, end, turned, avoid=_is_atomic)
    return Shape(
        loop=tuple(instructions[end + 1 :] + instructions[: end + 1]),
        border=tuple(_border(graph, loop)),
        ask=tuple(ask),
        ask_at=ask_at,
        turn=tuple(turn),
        turn_at=turn_at,
    )


def _main_loop(graph: Graph) -> list[str] | None:
    """The shortest cycle with a K step's direct loads and four barriers in it."""
    found = []
    loads = _loads(graph)
    for name, body in graph.blocks.items():
        if sum(map(_is_mfma, body)) >= 4:
            cycle = graph.way(name, name.__eq__, exactly={is_direct_load: loads, _is_barrier: 4}, avoid=_rare)
            found += [cycle] if cycle else []
    return min(found, key=lambda cycle: len(graph.instructions(cycle)), default=None)


def _loads(graph: Graph) -> int:
    return LOADS + any(is_scaled(i) for body in graph.blocks.values() for i in body)


def _last_barrier(graph: Graph, loop: list[str]) -> int:
    """Where in the loop's instructions a K step ends: the barrier behind which a wave reads most fragments."""
    instructions = graph.instructions(loop)
    barriers = [i for i, x in enumerate(instructions) if kind(x) == BARRIER]
    following = [*barriers[1:], barriers[0] + len(instructions)]
    twice = instructions * 2
    reads = [sum(kind(x) == LDS for x in twice[a:b]) for a, b in zip(barriers, following, strict=True)]
    return barriers[reads.index(max(reads))]


def _exits(graph: Graph, loop: list[str]) -> list[tuple[int, str]]:
    """Where the loop may be left: the place in `loop` of the last block inside, and the first block outside."""
    inside = set(loop)
    return [(i, out) for i, block in enumerate(loop) for out in graph.after[block] if out not in inside]


def _border(graph: Graph, loop: list[str]) -> list[str]:
    """From the end of a tile's last K step to the second K step of the next, the shortest way that stores."""
    mfma = sum(map(_is_mfma, graph.instructions(loop)))
    for stores in (32, 16, 8):  # of a wave: as many as there are. Stores of an operator may have branches round them
        found = []
        for _, out in _exits(graph, loop):
            way = graph.way(
                out,
                set(loop).__contains__,
                exactly={is_direct_load: _loads(graph), _is_mfma: mfma},
                at_least={is_store: stores},
                avoid=_is_atomic,
            )
            found += [graph.instructions(way)] if way else []
        if found:
            return min(found, key=len)
    return []


def _detour(
    graph: Graph, loop: list[str], end: int, at_least: Mapping[Test, int], avoid: Test = lambda _: False
) -> tuple[list[str], int]:
    """The shortest way that leaves the loop, does what it must, and comes back; and the K step's barriers before it."""
    found = []
    instructions = graph.instructions(loop)
    for i, out in _exits(graph, loop):
        way = graph.way(out, set(loop).__contains__, at_least=at_least, avoid=lambda x: _of_a_k_step(x) or avoid(x))
        if way:
            left = len(graph.instructions(loop[: i + 1]))
            before = instructions[end + 1 : left] if left > end else instructions[end + 1 :] + instructions[:left]
            found.append((graph.instructions(way), sum(map(_is_barrier, before))))
    return min(found, key=lambda detour: len(detour[0]), default=([], 0))


def faults(shape: Shape) -> list[str]:
    """What is wrong with the shape of the loop; nothing, if the list is empty."""
    wrong = []
    counts = [Counter(map(kind, part)) for part in shape.parts]
    if len(counts) != 4:
        return [f"the main loop has {len(counts)} barriers, want 4"]
    for n, c in enumerate(counts):
        if n % 2 == 0 and (c[MFMA] or not c[LDS] or not c[MEMORY] or c[WAIT] != 2):
            wrong.append(f"load part {n // 2} of the main loop has {dict(c)}, want LDS reads, loads and two waits only")
        if n % 2 == 1 and (not c[MFMA] or c[SCALAR] > 2 or set(c) - {MFMA, SCALAR}):
            wrong.append(f"multiply part {n // 2} of the main loop has {dict(c)}, want matrix instructions only")
    if counts[1][MFMA] != counts[3][MFMA]:
        wrong.append(f"the multiply parts have {counts[1][MFMA]} and {counts[3][MFMA]} matrix instructions")
    waits = [i for i in shape.loop if kind(i) == WAIT]
    lds = [n for n in (allowed(i, "lgkmcnt") for i in waits) if n is not None]
    memory = [n for n in (allowed(i, "vmcnt") for i in waits) if n is not None]
    loads = shape.loads
    if lds != [0, 0] or memory != [loads, loads]:
        wrong.append(f"the main loop waits {waits}, want lgkmcnt(0) and vmcnt({loads}) in each load part")
    if not shape.border:
        wrong.append("no way from a tile to the next was found")
    # Stores of a tile may be on their way through the next tile's first step: as many as are surely issued, or none.
    first = [n for n in (allowed(i, "vmcnt") for i in shape.border if kind(i) == WAIT) if n is not None and n >= loads]
    if shape.border and (len(first) < 2 or max(first[-2:]) > loads + shape.stores):
        wrong.append(f"a tile's first step allows for {first[-2:]} loads and stores; {shape.stores} stores are issued")
    return wrong + hazards(shape.loop)


def instructions_of(text: str) -> list[str]:
    """All instructions of a text, in its order."""
    lines = (line.split(";")[0].strip() for line in text.splitlines() if line.startswith("\t"))
    return [line for line in lines if line and not line.startswith(".")]


def hazards(instructions: Iterable[str]) -> list[str]:
    """What the compiler's own hazard pass cannot see, as the direct loads are inline asm."""
    wrong = []
    window: list[str] = []
    for instruction in instructions:
        if is_direct_load(instruction):
            if window and "m0" in window[-1]:
                wrong.append(f"m0 is written right before {instruction}")
            found = re.search(r"s\[(\d+):(\d+)\]", instruction)
            low, high = (int(found[1]), int(found[2])) if found else (0, -1)
            for before in window[-5:]:
                written = re.match(r"v_readfirstlane_b32 s(\d+)", before)
                if written and low <= int(written[1]) <= high:
                    wrong.append(f"{before} feeds {instruction} without five wait states")
        window.append(instruction)
    return wrong
