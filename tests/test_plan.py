"""Plans, offsets, struct mirrors: pure functions."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kosmos_raw.bench.llama3 import rows_moved
from kosmos_raw.bench.llama3 import shape as layer
from kosmos_raw.build import params, sources, zig
from kosmos_raw.device.base import Link, Tile
from kosmos_raw.memory.allocator import ALIGNMENT, Allocator
from kosmos_raw.numerics import bf16
from kosmos_raw.numerics.tolerance import compare, gemm_bound
from kosmos_raw.plan.ag_gemm import plan_ag_gemm, plan_ag_gemm_dgrad
from kosmos_raw.plan.bulk import plan_bulk_rs
from kosmos_raw.plan.crew import KERNELS, REDUCING, Crew, Grid
from kosmos_raw.plan.gemm_rs import plan_gemm_rs
from kosmos_raw.plan.shapes import MXFP8_FORMAT, split_rows
from kosmos_raw.plan.tiles import tile_time

TILE = Tile(96, 96)
GRID = Grid((TILE,), 8)
LINK = Link(pull=332, push=358, mover=22, tflops=5.6, adder=1.4)
WITH_AGENTS = Grid(tuple(Tile(128, n) for n in (256, 128)), 132, link=LINK, beside=True)  # as on sm_90a


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_rows_are_dealt_evenly(rows, ranks):
    dealt = split_rows(rows, ranks)
    assert sum(dealt) == rows and len(dealt) == ranks
    assert max(dealt) - min(dealt) <= 1 and dealt == sorted(dealt, reverse=True)


def test_rows_of_ten_over_four():
    assert split_rows(10, 4) == [3, 3, 2, 2] and split_rows(3, 4) == [1, 1, 1, 0]


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=8), st.integers(0, 5000), st.integers(0, 5000))
def test_plan_geometry(rows, n, k):
    plan = plan_ag_gemm(rows, n, k, GRID)
    assert plan.first[len(rows)] == plan.m == sum(rows) and len(plan.first) == params.MAX_RANKS + 1
    assert all(b - a == r for a, b, r in zip(plan.first, plan.first[1:], rows, strict=False))
    assert plan.tile_rows_max * TILE.m >= max(rows) > (plan.tile_rows_max - 1) * TILE.m or max(rows) == 0
    assert plan.padded_k % 8 == 0 <= plan.padded_k - k < 8 and plan.padded_n % 8 == 0 <= plan.padded_n - n < 8
    assert plan.shard_bytes == 2 * max(rows) * plan.padded_k


def test_a_queue_of_tiles_for_each_die():
    """By Table B.3, and never more queues than columns."""
    one, eight = (Grid((Tile(256, 256),), 256, dies=dies) for dies in (1, 8))
    assert plan_ag_gemm([2048] * 8, 3584, 4096, eight).queues == 8
    assert plan_ag_gemm([2048] * 8, 3584, 4096, one).queues == 1  # one L2
    assert plan_ag_gemm([1024] * 8, 3584, 4096, eight).queues == 1  # four tile rows a chunk
    assert plan_ag_gemm([8192] * 8, 8192, 4096, eight).queues == 1  # more than 1024 tiles
    assert plan_ag_gemm([2048] * 8, 700, 4096, eight).queues == 3
    assert plan_ag_gemm_dgrad([2048, 0, 2048], 2048, 512, eight).queues == 8
    with pytest.raises(ValueError, match="queues is 9, want 1 to 8"):
        plan_ag_gemm([8], 8, 8, eight, queues=9)


def test_byte_counts_past_32_bits():
    plan = plan_ag_gemm([300_000] * 8, 8192, 7168, Grid((Tile(256, 256),), 256))
    assert plan.gathered_bytes == 34_406_400_000 and plan.shard_bytes == 4_300_800_000
    with pytest.raises(ValueError, match=r"want each below 2\*\*31"):
        plan_ag_gemm([2**30] * 2, 8, 8, GRID)
    with pytest.raises(ValueError, match="queue entries do not fit in 32 bits"):
        plan_ag_gemm([2**30], 2**30, 8, GRID)


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=8),
    st.integers(1, 5000),
    st.integers(0, 5000),
    st.integers(2, 256),
)
def test_plan_of_gemm_rs(rows, n, k, workgroups):
    plan = plan_gemm_rs(rows, n, k, Grid((TILE,), workgroups))
    assert plan.crew.movers < workgroups and 1 <= plan.crew.max_movers <= workgroups and plan.slices >= 1
    assert plan.bands * plan.band_tile_rows >= plan.tile_rows_max > (plan.bands - 1) * plan.band_tile_rows
    assert plan.partial_bytes == plan.m * plan.padded_n * 2 and plan.partial_bytes % 16 == 0
    other = plan_gemm_rs(rows, n, k + 999, Grid((TILE,), workgroups))  # ranks may differ in K, and so in their crews
    assert other.partial_bytes == plan.partial_bytes


def test_what_gemm_rs_refuses():
    for wrong in ({"movers": 0}, {"movers": 8}, {"max_movers": 0}, {"movers": 4, "max_movers": 3}, {"max_movers": 9}):
        with pytest.raises(ValueError, match=r"gemm_rs: .*movers is"):
            plan_gemm_rs([100, 100], 64, 64, GRID, **wrong)


@pytest.mark.parametrize("form", [{}, {"form": MXFP8_FORMAT}], ids=["bf16", "mxfp8"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_bulk_rs_adds_beside_builders_where_it_can(ranks, form):
    rows, shape = [8192 // ranks] * ranks, (3584, 4096, 8192)
    plan = plan_bulk_rs(rows, 4096, shape, WITH_AGENTS, **form)
    assert plan.crew == Crew("beside", 132, 132) and plan.cut.parts == 1
    assert plan.slices % 132 == 0 and 64 <= rows[0] * 4096 * 2 * (ranks - 1) / plan.slices / 1024 <= 128  # KiB pulled
    assert plan_bulk_rs(rows, 4096, shape, WITH_AGENTS, movers=8, **form).crew == Crew("beside", 8, 8)
    assert plan_bulk_rs(rows, 4096, shape, WITH_AGENTS, max_movers=20, **form).crew == Crew("beside", 20, 20)
    few = plan_bulk_rs([3] * ranks, 24, (9, 7, 8192), WITH_AGENTS, policy="beside", **form)
    assert few.slices == 1 and few.cut.parts == 1  # by the table it would be cut
    assert plan_bulk_rs([100], 64, shape, WITH_AGENTS, policy="beside", **form).crew == Crew("one_way", 0, 132)
    for grid in (Grid((TILE,), 132, link=LINK), Grid((TILE,), 132)):
        assert plan_bulk_rs(rows, 4096, shape, grid, **form).crew.policy == "one_way"


def test_bulk_rs_adds_beside_where_the_product_is_long():
    """As measured on two H200s: agents add 185 GB/s while their SMs multiply; movers carry more and take SMs away."""
    for name, policy in (("8B-QKV", "one_way"), ("70B-QKV", "one_way"), ("405B-QKV", "beside"), ("8B-FC1", "beside")):
        of = layer("bulk_rs", f"{name}-MBS1")
        tokens, width = rows_moved("bulk_rs", of)
        plan = plan_bulk_rs([tokens // 2] * 2, width, (of.m, of.n, of.k), WITH_AGENTS)
        assert plan.crew.policy == policy, name


def test_tiles_are_wide_where_the_contraction_is_short():
    """A wide one is asked for half as often, but reads rows again for its second slice."""
    for k, wide in ((512, True), (1024, True), (4096, False), (16384, False)):
        assert (tile_time(256, k) < 2 * tile_time(128, k)) == wide, k


def test_tiles_that_wait_for_the_last_rows_fit_into_one_wave():
    for name in ("70B-QKV", "405B-QKV"):
        of = layer("ag_gemm", f"{name}-MBS1")
        plan = plan_ag_gemm([of.m // 2] * 2, of.n, of.k, WITH_AGENTS)
        halves = 2 if plan.halved else 1
        assert plan.pulls.band * plan.columns * halves <= 132 < (plan.pulls.band + 1) * plan.columns * halves, name


def test_half_a_narrow_tile_takes_as_long_as_a_whole_one():
    """So none is taken in halves: columns are multiplied 128 at a time."""
    assert tile_time(64, 4096) == tile_time(128, 4096) < tile_time(256, 4096)
    narrow = replace(WITH_AGENTS, tiles=(Tile(128, 128),))
    for n in range(128, 1280, 64):
        assert plan_ag_gemm([4096] * 2, n, 4096, narrow).halved == 0


def test_nobody_moves_beside_who_must_tell_of_parts():
    for plan, shape in ((plan_bulk_rs, (64, (3584, 4096, 8192))), (plan_ag_gemm_dgrad, (4096, 8192))):
        op = plan.__name__.removeprefix("plan_")
        cut = plan([4096, 4096], *shape, WITH_AGENTS, split=2)
        assert cut.crew.policy == "one_way" and cut.cut.parts == 2
        with pytest.raises(ValueError, match=f"{op}: split is 2, want 1 under policy 'beside'"):
            plan([4096, 4096], *shape, WITH_AGENTS, split=2, policy="beside")
        with pytest.raises(ValueError, match=f"{op}: policy is 'beside', want one of one_way, fixed, two_way"):
            plan([4096, 4096], *shape, Grid((TILE,), 132, link=LINK), policy="beside")
    with pytest.raises(ValueError, match="all operators but gemm_rs"):
        plan_gemm_rs([100, 100], 64, 64, WITH_AGENTS, policy="beside")


def test_a_cap_takes_builders_from_a_gather_and_both_roles_from_a_reduction():
    """Paper section 3.1.2. Whoever caps leaves the other compute units to a second stream."""
    tile, shape = Tile(256, 256), (65536, 4096, 2048)
    crews = {
        op: [Crew.choose(op, shape, 8, Grid((tile,), cap, 256), "one_way") for cap in (256, 128, 64)] for op in KERNELS
    }
    for op, (whole, half, quarter) in crews.items():
        if op in REDUCING:
            assert half.movers == whole.movers // 2 and abs(quarter.movers - whole.movers / 4) <= 0.5, op
            assert abs(half.max_movers - whole.max_movers / 2) <= 1
        else:  # movers stay, while every one of them has a builder beside it
            assert (half.movers, quarter.movers) == (whole.movers, min(whole.movers, 32)), op
    assert crews["ag_gemm"][0].movers == 42 and crews["gemm_rs"][0].movers == 56
    plan = plan_ag_gemm([8192] * 8, 4096, 2048, Grid((tile,), 64, 256))
    assert plan.workgroups == 64 and plan.crew.movers == 32  # the grid is the cap: all of it is resident


def test_one_rank_has_no_movers():
    for op in KERNELS:
        for policy in params.POLICIES:
            crew = Crew.choose(op, (100, 100, 100), 1, GRID, policy, movers=3)
            assert crew == Crew("one_way", 0, 8)


def test_an_exchanged_buffer_is_kept_when_no_other_fits():
    allocator = Allocator(1 << 16)
    small = allocator.take(1000)
    assert allocator.exchange(small, 1 << 20) is None and allocator.owner_of(small) == small
    large = allocator.exchange(small, 60_000)
    assert large is not None and allocator.taken_bytes == 60_160  # the old one was given back first
    assert allocator.exchange(None, 5000) == large - 5120


@settings(max_examples=200)
@given(st.data())
def test_allocator_never_overlaps(data):
    allocator = Allocator(1 << 16)
    live: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        if live and data.draw(st.booleans()):
            offset = data.draw(st.sampled_from(sorted(live)))
            allocator.give_back(offset)
            del live[offset]
            continue
        size = data.draw(st.integers(0, 20000))
        offset = allocator.take(size)
        if offset is None:
            continue
        assert offset % ALIGNMENT == 0 and offset + size <= allocator.capacity
        assert all(offset + max(size, 1) <= o or o + max(s, 1) <= offset for o, s in live.items())
        assert allocator.owner_of(offset) == offset
        live[offset] = size
    assert allocator.workspace_bytes == min(live, default=allocator.capacity)
    for offset in live:
        allocator.give_back(offset)
    assert allocator.take(allocator.capacity) == 0 and allocator.take(1) is None


def test_mirrors_have_the_sizes_and_offsets_of_the_headers(tmp_path):
    """Every field of every struct, as the compiler lays it out."""
    structs = {
        "Signals": params.SIGNALS,
        "WaitRecord": params.WAIT_RECORD,
        "Group": params.GROUP,
        "Counters": params.COUNTERS,
        "Chunks": params.CHUNKS,
        "Staging": params.STAGING,
        "AgGemmParams": params.AG_GEMM,
        "GemmRsParams": params.GEMM_RS,
        "MoeSignals": params.MOE_SIGNALS,
        "MoeLayout": params.MOE_LAYOUT,
        "MoeWeights": params.MOE_WEIGHTS,
        "MoeRouting": params.MOE_ROUTING,
        "MoeParams": params.MOE_FORWARD,
    }
    wanted, lines = [], []
    for name, dtype in structs.items():
        lines.append(f"sizeof({name})")
        wanted.append(dtype.itemsize)
        for field in dtype.names:
            lines += [f"offsetof({name}, {field})", f"sizeof((({name}*)0)->{field})"]
            wanted += [dtype.fields[field][1], dtype.fields[field][0].itemsize]
    source = tmp_path / "layout.cpp"
    source.write_text(
        f'#include <stddef.h>\n#include "{sources.folder()}/schedule/ag_gemm.h"\n'
        f'#include "{sources.folder()}/schedule/gemm_rs.h"\n#include "{sources.folder()}/schedule/moe_params.h"\n'
        f'extern "C" const unsigned layout[] = {{{", ".join(lines)}}};\n'
    )
    library = ctypes.CDLL(str(zig.shared_library(source)))
    got = list((ctypes.c_uint * len(lines)).in_dll(library, "layout"))
    assert dict(zip(lines, got, strict=True)) == dict(zip(lines, wanted, strict=True))


def test_hidden_padding_is_refused():
    with pytest.raises(TypeError, match="hidden padding before field 'b'"):
        params._struct(("a", "u4"), ("b", "u8"))
    with pytest.raises(TypeError, match="hidden padding after"):
        params._struct(("a", "u8"), ("b", "u4"))


def test_compare_sees_what_is_wrong():
    exact, magnitude = np.array([[1.0, 2.0], [3.0, 400.0]]), np.array([[1.0, 2.0], [3.0, 400.0]])
    bound = gemm_bound(exact, magnitude, 1)
    assert compare(exact, exact, bound).over_bound == 0
    for wrong in (np.nan, np.inf, 3.0 * (1 + 2.0**-7)):
        got = exact.copy()
        got[1, 0] = wrong
        result = compare(got, exact, bound)
        assert not result.passed and result.worst == (1, 0) and result.wanted == 3.0
    got = exact.copy()
    got[1, 0] *= 1 + 2.0**-8  # half a unit in the last place: the most that rounding may do
    assert compare(got, exact, bound).passed
    with pytest.raises(ValueError, match="want"):
        compare(exact[:1], exact, bound)


def test_bf16_conversion_of_the_host_tile(tmp_path):
    """All conversions of kernels and arrays against ml_dtypes: around every bf16 value, ties, subnormals, NaNs."""
    import ml_dtypes

    source = tmp_path / "rounding.cpp"
    source.write_text(
        f'#include "{sources.folder()}/schedule/ag_gemm.h"\n#include "{sources.folder()}/target/host_tile.h"\n'
        'extern "C" void convert(const float* x, unsigned n, unsigned short* one, unsigned short* eight) {\n'
        "  for (unsigned i = 0; i < n; i += 8) {\n"
        "    for (unsigned j = 0; j < 8; j++) one[i + j] = to_bf16(x[i + j]);\n"
        "    target::Float8 f;\n    __builtin_memcpy(&f, x + i, 32);\n"
        "    const target::U16x8 h = target::narrow(f);\n    __builtin_memcpy(eight + i, &h, 16);\n  }\n}\n"
    )
    library = ctypes.CDLL(str(zig.shared_library(source)))
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], np.uint32)
    x = (high | low).ravel().view(np.float32)
    one, eight = np.empty(x.size, np.uint16), np.empty(x.size, np.uint16)
    library.convert(*(ctypes.c_void_p(x.ctypes.data), x.size, *(ctypes.c_void_p(a.ctypes.data) for a in (one, eight))))
    want = np.nan_to_num(x, nan=0, posinf=np.inf, neginf=-np.inf).astype(ml_dtypes.bfloat16).view(np.uint16)
    want[np.isnan(x)] = 0x7FC0
    assert np.array_equal(one, want) and np.array_equal(eight, want)
    assert np.array_equal(bf16.narrow(x), want)
    assert np.array_equal(bf16.widen(want.view(ml_dtypes.bfloat16)), want.view(ml_dtypes.bfloat16), equal_nan=True)
