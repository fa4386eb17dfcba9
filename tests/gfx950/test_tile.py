"""The gfx950 tile in the emulator: layouts, tails, streams over many tiles, and what weak memory may do to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kosmos_raw import emulator
from kosmos_raw.build import gfx950
from kosmos_raw.emulator import Options

from .gemm import LAYOUTS, MFMA_ROWS, Build, Case, build, copy_of_sources, faults

pytestmark = [pytest.mark.emulated, pytest.mark.skipif(gfx950.missing() is not None, reason=str(gfx950.missing()))]

PLAIN = [(layout, rows, "RESULT") for layout in LAYOUTS for rows in MFMA_ROWS]
BY_OPERATOR = [("TN", 32, "STORE"), ("NT", 16, "STORE"), ("NN", 32, "FLOATS"), ("TN", 16, "FLOATS")]

Kernel = tuple[Build, emulator.Module]


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Kernel]:
    """Built and loaded kernels, each made once."""
    folder = tmp_path_factory.mktemp("gfx950")
    root = copy_of_sources(folder / "hip_kernels")
    made: dict[tuple[str, int, str], Kernel] = {}

    def get(layout: str, rows: int, handed: str) -> Kernel:
        key = (layout, rows, handed)
        if key not in made:
            b = build(root, folder / f"{layout}_{rows}_{handed}.s", *key)
            made[key] = (b, emulator.Module(b.text))
        return made[key]

    return get


def check(kernel: Kernel, *cases: Case, options: Options | None = None) -> None:
    wrong = {str(case): said for case in cases if (said := faults(*kernel, case, options))}
    assert not wrong, f"{kernel[0]}: {wrong}"


@pytest.mark.parametrize(("layout", "rows", "handed"), PLAIN + BY_OPERATOR)
def test_k(kernel: Callable[..., Kernel], layout: str, rows: int, handed: str) -> None:
    check(kernel(layout, rows, handed), *(Case(256, 256, k) for k in (8, 64, 72, 128, 200, 512)))


@pytest.mark.parametrize(("layout", "rows", "handed"), PLAIN + BY_OPERATOR)
def test_rows_and_columns(kernel: Callable[..., Kernel], layout: str, rows: int, handed: str) -> None:
    sizes = (1, 7, 33, 255, 256, 257, 300)
    cases = [Case(m, n, 72, wgs=1 + m % 2) for m, n in zip(sizes, (*sizes[3:], *sizes[:3]), strict=True)]
    check(kernel(layout, rows, handed), *cases, Case(4, 12, 200), Case(260, 4, 64), Case(1, 1, 8))


@pytest.mark.parametrize("layout", ["NT"])
def test_k_of_wgrad_may_be_any_number(kernel: Callable[..., Kernel], layout: str) -> None:
    """There K counts tokens, and no operand is contiguous along it."""
    check(kernel(layout, 32, "RESULT"), *(Case(256, 256, k) for k in (1, 63, 65, 131)), Case(300, 40, 77))


@pytest.mark.parametrize(("layout", "rows", "handed"), PLAIN + BY_OPERATOR)
def test_streams_over_many_tiles(kernel: Callable[..., Kernel], layout: str, rows: int, handed: str) -> None:
    """Tiles of unlike K that follow without a stop; streams that end, wait and start again; what other WGs see."""
    check(
        kernel(layout, rows, handed),
        Case(1024, 768, 200, wgs=1),
        Case(768, 520, 192, wgs=2, K_odd=64),
        Case(768, 512, 8, wgs=2, K_odd=328, stop_every=2, copies=True),
        Case(776, 512, 256, wgs=3, stop_every=3, copies=True),
        options=Options(threads=2),
    )


ALL_LATE = ("direct", "lds", "loads", "stores")


@pytest.mark.parametrize("late", [("direct",), ("lds",), ("stores",), ALL_LATE], ids="+".join)
@pytest.mark.parametrize(("layout", "rows", "handed"), PLAIN + BY_OPERATOR)
def test_late_memory(kernel: Callable[..., Kernel], layout: str, rows: int, handed: str, late: tuple[str, ...]) -> None:
    options = Options(late_memory=late)
    check(kernel(layout, rows, handed), Case(512, 512, 200), Case(512, 512, 512, wgs=2, copies=True), options=options)


@pytest.mark.parametrize("outside", ["zero", "nothing", "garbage"])
@pytest.mark.parametrize(("layout", "rows", "handed"), PLAIN)
def test_direct_loads_outside(kernel: Callable[..., Kernel], layout: str, rows: int, handed: str, outside: str) -> None:
    """What such a load writes to LDS nobody has documented. Nothing here depends on it."""
    options = Options(outside=outside)
    check(kernel(layout, rows, handed), Case(300, 264, 8), Case(512, 256, 72, K_odd=200), options=options)


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize(("layout", "rows", "handed"), [PLAIN[0], PLAIN[5], BY_OPERATOR[2]])
def test_preemption(kernel: Callable[..., Kernel], layout: str, rows: int, handed: str, seed: int) -> None:
    options = Options(seed=seed, preempt=1 + seed, late_memory=ALL_LATE, late_by_chance=True, outside="garbage")
    case = Case(768, 512, 264, wgs=1 + seed % 3, K_odd=64, stop_every=seed % 3, copies=seed % 2 == 0)
    check(kernel(layout, rows, handed), case, options=options)


@pytest.mark.parametrize("caches", ["xcd", "workgroup"])
@pytest.mark.parametrize(("layout", "rows", "handed"), [PLAIN[0], BY_OPERATOR[1]])
def test_caches(kernel: Callable[..., Kernel], layout: str, rows: int, handed: str, caches: str) -> None:
    options = Options(caches=caches, threads=2)
    check(kernel(layout, rows, handed), Case(768, 512, 200, wgs=4, copies=True, stop_every=2), options=options)


def spoilt(name: str, file: str, old: str, new: str) -> object:
    return pytest.param(file, old, new, id=name)


WAIT, MEET = "    wait_memory<YOUNGER>();\n", "    meet();\n"
MULTIPLIED = MEET + "    __builtin_amdgcn_s_setprio(0);\n"
FIRST_LOADS = "    wait_memory<0>();\n    meet();\n"
PUBLISH_NOW = "      if (decides) publish({TILE, now.chunk, now.row, now.part});\n"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        spoilt("no wait for loads before a barrier", "gfx950_tile.h", WAIT, ""),
        spoilt("one load too many allowed", "gfx950_tile.h", "wait_memory<YOUNGER>", "wait_memory<YOUNGER + 1>"),
        spoilt("two stores too many allowed", "gfx950_epilogue.h", "? 16 : 0", "? 18 : 0"),
        spoilt("no wait for fragments before a barrier", "gfx950_tile.h", "    wait_lds();\n" + WAIT, WAIT),
        spoilt("no barrier behind a multiply part", "gfx950_tile.h", MULTIPLIED, MULTIPLIED.replace(MEET, "")),
        spoilt("no wait for a stream's first loads", "gfx950_tile.h", FIRST_LOADS, MEET),
        spoilt("swizzle on one side only", "gfx950_lds.h", "l % CHUNKS ^ swizzle(line);", "l % CHUNKS + line * 0;"),
        spoilt(
            "rows of the result in another order",
            "gfx950_epilogue.h",
            "+ l % ROWS);\n      const u32 row_b",
            "+ (l ^ 1) % ROWS);\n      const u32 row_b",
        ),
        spoilt(
            "the buffers of K steps swapped", "gfx950_tile.h", "load_rest(buffer ^ BUFFER_BYTES)", "load_rest(buffer)"
        ),
        spoilt("what is past K is not zeroed", "gfx950_lds.h", "\\n\\tds_write_b128 %5, %6", ""),
        spoilt("published before all waves have stored", "gfx950_run.h", "      last = now;\n", PUBLISH_NOW),
        spoilt("tiles in a stream are not published", "gfx950_tile.h", "SECOND_STEP_AT = 3", "SECOND_STEP_AT = 99"),
    ],
)
def test_faults_are_noticed(tmp_path: Path, file: str, old: str, new: str) -> None:
    """The tests above can see: with one wait, barrier or address wrong, some of them fail."""
    root = copy_of_sources(tmp_path / "hip_kernels")
    source = root / "target" / file
    text = source.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file}"
    source.write_text(text.replace(old, new))
    b = build(root, tmp_path / "spoilt.s", "TN", 32)
    module = emulator.Module(b.text)
    late = Options(late_memory=ALL_LATE, outside="garbage")
    tries = [
        (Case(512, 512, 512), Options()),
        (Case(512, 512, 512), late),
        (Case(512, 256, 72, K_odd=200), late),
        *((Case(768, 512, 264, wgs=2, copies=True), Options(seed=s, preempt=s, threads=2)) for s in range(1, 6)),
    ]
    assert any(faults(b, module, case, options) for case, options in tries)
