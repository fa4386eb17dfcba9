"""The gfx950 tile in the emulator: layouts, tails, streams over many tiles, and what weak memory may do to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kosmos_raw import emulator
from kosmos_raw.build import gfx950
from kosmos_raw.emulator import Options

from .gemm import LAYOUTS, MFMA_ROWS, Build, Case, Operand, build, copy_of_sources, faults, mxfp8_operand

pytestmark = [pytest.mark.emulated, pytest.mark.skipif(gfx950.missing() is not None, reason=str(gfx950.missing()))]

Which = tuple[str, int, str, str]  # layout, rows of a matrix instruction, how results are handed over, element
PLAIN: list[Which] = [(layout, rows, "RESULT", "BF16") for layout in LAYOUTS for rows in MFMA_ROWS]
BY_OPERATOR: list[Which] = [
    ("TN", 32, "STORE", "BF16"), ("NT", 16, "STORE", "BF16"),
    ("NN", 32, "FLOATS", "BF16"), ("TN", 16, "FLOATS", "BF16"),
]  # fmt: skip
MXFP8: list[Which] = [("TN", 32, "RESULT", "MXFP8"), ("TN", 16, "FLOATS", "MXFP8")]
EACH = pytest.mark.parametrize("which", PLAIN + BY_OPERATOR + MXFP8, ids=lambda w: "-".join(map(str, w)))

Kernel = tuple[Build, emulator.Module]


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Which], Kernel]:
    """Built and loaded kernels, each made once."""
    folder = tmp_path_factory.mktemp("gfx950")
    root = copy_of_sources(folder / "hip_kernels")
    made: dict[Which, Kernel] = {}

    def get(which: Which) -> Kernel:
        if which not in made:
            b = build(root, folder / f"{'_'.join(map(str, which))}.s", *which)
            made[which] = (b, emulator.Module(b.text))
        return made[which]

    return get


def step_of(which: Which) -> int:
    """Elements of a K step: what cases are multiples of where they must be."""
    return 128 if which[3] == "MXFP8" else 64


def check(kernel: Kernel, *cases: Case, options: Options | None = None) -> None:
    wrong = {str(case): said for case in cases if (said := faults(*kernel, case, options))}
    assert not wrong, f"{kernel[0]}: {wrong}"


@EACH
def test_k(kernel: Callable[[Which], Kernel], which: Which) -> None:
    ks = (128, 256, 384, 640, 0) if which[3] == "MXFP8" else (8, 64, 72, 128, 200, 512)
    check(kernel(which), *(Case(256, 256, k) for k in ks))


@EACH
def test_rows_and_columns(kernel: Callable[[Which], Kernel], which: Which) -> None:
    sizes, k = (1, 7, 33, 255, 256, 257, 300), 128 if which[3] == "MXFP8" else 72
    cases = [Case(m, n, k, wgs=1 + m % 2) for m, n in zip(sizes, (*sizes[3:], *sizes[:3]), strict=True)]
    check(kernel(which), *cases, Case(4, 12, 3 * step_of(which)), Case(260, 4, step_of(which)), Case(1, 1, k))


def test_k_of_wgrad_may_be_any_number(kernel: Callable[[Which], Kernel]) -> None:
    """There K counts tokens, and no operand is contiguous along it."""
    check(kernel(("NT", 32, "RESULT", "BF16")), *(Case(256, 256, k) for k in (1, 63, 65, 131)), Case(300, 40, 77))


@EACH
def test_streams_over_many_tiles(kernel: Callable[[Which], Kernel], which: Which) -> None:
    """Tiles of unlike K that follow without a stop; streams that end, wait and start again; what other WGs see."""
    step, short = step_of(which), 128 if which[3] == "MXFP8" else 8
    check(
        kernel(which),
        Case(1024, 768, 3 * step + step % 128 // 8, wgs=1),
        Case(768, 520, 3 * step, wgs=2, K_odd=step),
        Case(768, 512, short, wgs=2, K_odd=5 * step + step % 128 // 8, stop_every=2, copies=True),
        Case(776, 512, 4 * step, wgs=3, stop_every=3, copies=True),
        options=Options(threads=2),
    )


ALL_LATE = ("direct", "lds", "loads", "stores")


@pytest.mark.parametrize("late", [("direct",), ("lds",), ("stores",), ALL_LATE], ids="+".join)
@EACH
def test_late_memory(kernel: Callable[[Which], Kernel], which: Which, late: tuple[str, ...]) -> None:
    options, step = Options(late_memory=late), step_of(which)
    cases = Case(512, 512, 3 * step + step % 128 // 8), Case(512, 512, 8 * step, wgs=2, copies=True)
    check(kernel(which), *cases, options=options)


@pytest.mark.parametrize("outside", ["zero", "nothing", "garbage"])
@pytest.mark.parametrize("which", PLAIN + MXFP8[:2], ids=lambda w: "-".join(map(str, w)))
def test_direct_loads_outside(kernel: Callable[[Which], Kernel], which: Which, outside: str) -> None:
    """What such a load writes to LDS nobody has documented. Nothing here depends on it."""
    options, step = Options(outside=outside), step_of(which)
    short = step if which[3] == "MXFP8" else 8
    cases = Case(300, 264, short), Case(512, 256, step + step % 128 // 8, K_odd=3 * step + step % 128 // 8)
    check(kernel(which), *cases, options=options)


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("which", [PLAIN[0], PLAIN[5], BY_OPERATOR[2], MXFP8[0]], ids=lambda w: "-".join(map(str, w)))
def test_preemption(kernel: Callable[[Which], Kernel], which: Which, seed: int) -> None:
    options = Options(seed=seed, preempt=1 + seed, late_memory=ALL_LATE, late_by_chance=True, outside="garbage")
    step = step_of(which)
    k, odd = 4 * step + step % 128 // 8, step
    case = Case(768, 512, k, wgs=1 + seed % 3, K_odd=odd, stop_every=seed % 3, copies=seed % 2 == 0)
    check(kernel(which), case, options=options)


@pytest.mark.parametrize("caches", ["xcd", "workgroup"])
@pytest.mark.parametrize("which", [PLAIN[0], BY_OPERATOR[1], MXFP8[0]], ids=lambda w: "-".join(map(str, w)))
def test_caches(kernel: Callable[[Which], Kernel], which: Which, caches: str) -> None:
    options, step = Options(caches=caches, threads=2), step_of(which)
    case = Case(768, 512, 3 * step + step % 128 // 8, wgs=4, copies=True, stop_every=2)
    check(kernel(which), case, options=options)


# ---- scales
def with_scales(rng: np.random.Generator, case: Case, a: np.ndarray, b: np.ndarray) -> tuple[Operand, Operand]:
    return mxfp8_operand(rng, case.M, case.K, a), mxfp8_operand(rng, case.N, case.K, b)


def ones(lines: int, k: int, scale: int) -> Operand:
    made = mxfp8_operand(np.random.default_rng(0), lines, k, np.full((lines, k // 32), scale, np.uint8))
    made.given[:lines, :k] = 0x38
    return Operand(np.full((lines, k), 2.0 ** (scale - 127)), made.given, made.scales)


@pytest.mark.parametrize("which", MXFP8, ids=lambda w: "-".join(map(str, w)))
def test_scales_at_the_ends_of_their_range(kernel: Callable[[Which], Kernel], which: Which) -> None:
    """2^127 times 2^-127 is 1, either way round: a sum of 128 ones."""
    case = Case(256, 256, 128)
    for scale in (0, 254):
        given = ones(256, 128, scale), ones(256, 128, 254 - scale)
        assert (given[0].values @ given[1].values.T == 128).all()
        wrong = faults(*kernel(which), case, given=given, bound=0.0)
        assert not wrong, (scale, wrong)


@pytest.mark.parametrize("which", MXFP8, ids=lambda w: "-".join(map(str, w)))
def test_one_scale_apart(kernel: Callable[[Which], Kernel], which: Which) -> None:
    """Every scale by itself: the block of one line at one place of K is all of that line's sum."""
    rng = np.random.default_rng(17)
    for k in range(2):
        scales_a, scales_b = (np.full((256, 8), 60 + 40 * k, np.uint8) for _ in range(2))
        place = rng.integers(0, 8, 256)
        scales_a[np.arange(256), place] = rng.integers(120, 134, 256)
        scales_b[:] = rng.integers(115, 140, (256, 8))
        case = Case(256, 256, 256)
        wrong = faults(*kernel(which), case, given=with_scales(rng, case, scales_a, scales_b))
        wrong += faults(*kernel(which), case, given=with_scales(rng, case, scales_b, scales_a))
        assert not wrong


@pytest.mark.parametrize("which", MXFP8, ids=lambda w: "-".join(map(str, w)))
def test_a_scale_that_is_no_number_spoils_its_line_alone(kernel: Callable[[Which], Kernel], which: Which) -> None:
    rng = np.random.default_rng(5)
    case = Case(256, 256, 256)
    scales_a, scales_b = (rng.integers(120, 134, (256, 8)).astype(np.uint8) for _ in range(2))
    scales_a[37, 3], scales_a[200, 7], scales_b[129, 0] = 255, 255, 255
    given = with_scales(rng, case, scales_a, scales_b)
    for operand, lines in zip(given, ((37, 200), (129,)), strict=True):
        operand.values[list(lines)] = np.nan
    wrong = faults(*kernel(which), case, given=given)
    assert not wrong


def after_a_tile_of_nans() -> tuple[Case, tuple[Operand, Operand]]:
    """Of the second tile K steps are missing; in their places lie scales of the first, which are no numbers."""
    rng = np.random.default_rng(8)
    case = Case(512, 256, 640, K_odd=128)
    scales = rng.integers(120, 134, (512, 20)).astype(np.uint8)
    scales[:256] = 255
    a, b = mxfp8_operand(rng, 512, 640, scales), mxfp8_operand(rng, 256, 640, scales[256:])
    a.values[:256] = np.nan
    return case, (a, b)


@pytest.mark.parametrize("which", MXFP8, ids=lambda w: "-".join(map(str, w)))
def test_what_scales_are_past_the_end_of_k(kernel: Callable[[Which], Kernel], which: Which) -> None:
    case, given = after_a_tile_of_nans()
    for outside in ("nothing", "garbage"):
        wrong = faults(*kernel(which), case, Options(outside=outside), given=given)
        assert not wrong


def spoilt(name: str, file: str, old: str, new: str, element: str = "BF16") -> object:
    return pytest.param(file, old, new, element, id=name)


WAIT, MEET = "    wait_memory<YOUNGER>();\n", "    meet();\n"
MULTIPLIED = MEET + "    __builtin_amdgcn_s_setprio(0);\n"
FIRST_LOADS = "    wait_memory<0>();\n    meet();\n"
PUBLISH_NOW = "      if (decides) publish({TILE, now.chunk, now.row, now.part});\n"
BARRIER = "DEVICE inline void barrier() {\n  wait_own_stores();\n"
WAIT_LDS = "YOUNGER, bool WITH_SCALES> DEVICE void part_ends() {\n"
PAIR = "both(b_part[h][n][2 * k], b_part[h][n][2 * k + 1]), y = both(a_part[m][2 * k], a_part[m][2 * k + 1])"
NO_PAIR = "both(b_part[h][n][k], b_part[h][n][k + 2]), y = both(a_part[m][k], a_part[m][k + 2])"


@pytest.mark.parametrize(
    ("file", "old", "new", "element"),
    [
        spoilt("no wait for loads before a barrier", "gfx950_tile.h", WAIT, ""),
        spoilt("one load too many allowed", "gfx950_tile.h", "wait_memory<YOUNGER>", "wait_memory<YOUNGER + 1>"),
        spoilt("two stores too many allowed", "gfx950_epilogue.h", "? 16\n", "? 18\n"),
        spoilt("no wait for fragments before a barrier", "gfx950_tile.h", WAIT_LDS + "    wait_lds();\n", WAIT_LDS),
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
        spoilt("no wait for stores before a barrier", "gfx950.h", BARRIER, BARRIER.split("\n")[0] + "\n"),
        spoilt("published before all waves have stored", "gfx950_run.h", "      last = now;\n", PUBLISH_NOW),
        spoilt("tiles in a stream are not published", "gfx950_tile.h", "SECOND_STEP_AT = 3", "SECOND_STEP_AT = 99"),
        spoilt("lanes of scales swapped", "gfx950_scales.h", "g = rare(l) /", "g = 1 - rare(l) /", "MXFP8"),
        spoilt("another byte of the scales", "gfx950_scales.h", "block + 2 * k", "2 * block + k", "MXFP8"),
        spoilt("scales of another line", "gfx950_scales.h", "rare(l) % ROWS", "(rare(l) ^ 1) % ROWS", "MXFP8"),
        spoilt("scales of the other half", "gfx950_tile.h", "scales.of_a[H]", "scales.of_a[0]", "MXFP8"),
        spoilt("32 k of a line in a row", "gfx950_tile.h", PAIR, NO_PAIR, "MXFP8"),
        spoilt("scales past K are what was there", "gfx950_lds.h", "\\n\\tds_write_b32 %5, %6", "", "MXFP8"),
    ],
)
def test_faults_are_noticed(tmp_path: Path, file: str, old: str, new: str, element: str) -> None:
    """The tests above can see: with one wait, barrier or address wrong, some of them fail."""
    root = copy_of_sources(tmp_path / "hip_kernels")
    source = root / "target" / file
    text = source.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file}"
    source.write_text(text.replace(old, new))
    b = build(root, tmp_path / "spoilt.s", "TN", 32, element=element)
    module = emulator.Module(b.text)
    late = Options(late_memory=ALL_LATE, outside="garbage")
    step, more = (128, 0) if element == "MXFP8" else (64, 8)
    tries = [
        (Case(512, 512, 8 * step), Options()),
        (Case(512, 512, 8 * step, wgs=2, copies=True), late),
        (Case(512, 256, step + more, K_odd=3 * step + more), late),
    ]
    case = Case(768, 512, 4 * step + more, wgs=2, copies=True)
    tries += [(case, Options(seed=s, preempt=s, threads=2)) for s in range(1, 6)]
    noticed = any(faults(b, module, case, options) for case, options in tries)
    if not noticed and element == "MXFP8":
        case, given = after_a_tile_of_nans()
        noticed = bool(faults(b, module, case, given=given))
    assert noticed
