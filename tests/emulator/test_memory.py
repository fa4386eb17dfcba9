"""Memory instructions: widths and addresses, LDS, direct loads, atomics, lane exchange; and that waits are needed."""

from __future__ import annotations

import numpy as np
import pytest

from kosmos_raw import emulator
from kosmos_raw.emulator import Options

from .launching import launch
from .text import kernel, module

pytestmark = pytest.mark.emulated

LATE = ("direct", "lds", "loads", "stores")
MODES = [
    Options(),
    Options(caches="xcd"),
    Options(late_memory=LATE),
    Options(late_memory=LATE, late_by_chance=True, seed=7, caches="workgroup", preempt=2),
]
LANE = np.arange(64)

# Every width in and out of memory; a load's extension; 16-bit halves.
WIDTHS = kernel("widths", """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v1, 4, v0
v_mov_b32 v20, -1
v_mov_b32 v21, -1
s_waitcnt lgkmcnt(0)
v_mov_b32 v2, s4
v_mov_b32 v3, s5
v_lshl_add_u64 v[2:3], v[2:3], 0, 16
v_lshl_add_u32 v2, v0, 4, v2
global_load_ubyte v10, v1, s[4:5] offset:1
global_load_sbyte v11, v1, s[4:5] offset:2
global_load_ushort v12, v1, s[4:5] offset:4
global_load_sshort v13, v1, s[4:5] offset:6
global_load_dwordx3 v[14:16], v[2:3], off offset:-16
global_load_short_d16 v20, v1, s[4:5] offset:8
global_load_short_d16_hi v21, v1, s[4:5] offset:8
s_waitcnt vmcnt(0)
v_mul_u32_u24 v4, 48, v0
global_store_dwordx4 v4, v[10:13], s[6:7]
global_store_dwordx3 v4, v[14:16], s[6:7] offset:16
global_store_byte v4, v10, s[6:7] offset:28
global_store_short v4, v12, s[6:7] offset:30
global_store_short_d16_hi v4, v16, s[6:7] offset:32
global_store_dwordx2 v4, v[20:21], s[6:7] offset:40
""")  # fmt: skip

LDS = kernel("lds", """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v1, 4, v0
s_waitcnt lgkmcnt(0)
global_load_dwordx4 v[2:5], v1, s[4:5]
s_waitcnt vmcnt(0)
ds_write_b128 v1, v[2:5]
v_lshlrev_b32 v6, 3, v0
ds_write2_b32 v6, v2, v3 offset0:0 offset1:1
ds_write_b64 v6, v[4:5] offset:2048
s_waitcnt lgkmcnt(0)
v_xor_b32 v7, 0x1f8, v6
ds_read2_b32 v[10:11], v7 offset0:1 offset1:0
ds_read2st64_b32 v[12:13], v6 offset0:0 offset1:8
ds_read_u16 v14, v7 offset:2
ds_read_i8 v15, v7 offset:1
ds_read_b64_tr_b16 v[16:17], v6
ds_read_b96 v[18:20], v1 offset:2048
s_waitcnt lgkmcnt(0)
v_mul_u32_u24 v8, 48, v0
global_store_dwordx4 v8, v[10:13], s[6:7]
global_store_dwordx4 v8, v[14:17], s[6:7] offset:16
global_store_dwordx3 v8, v[18:20], s[6:7] offset:32
""", lds=4096)  # fmt: skip

# Direct loads of 4, 12 and 16 bytes a lane; through a buffer with 40 lanes inside.
DIRECT = kernel("direct", """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32 v1, 4, v0
v_xor_b32 v2, 0x3f0, v1
s_mov_b32 s10, 640
s_mov_b32 s11, 0x20000
s_waitcnt lgkmcnt(0)
s_mov_b32 s8, s4
s_mov_b32 s9, s5
s_mov_b32 m0, 0
s_nop 1
global_load_lds_dwordx4 v2, s[4:5]
s_mov_b32 m0, 1024
s_nop 1
buffer_load_dwordx4 v1, s[8:11], 0 offen lds
s_movk_i32 m0, 0x800
s_nop 1
global_load_lds_dword v2, s[4:5] offset:4
s_waitcnt vmcnt(0)
v_lshlrev_b32 v3, 2, v0
ds_read_b128 v[10:13], v1
ds_read_b128 v[14:17], v1 offset:1024
ds_read_b32 v18, v3 offset:2052
s_waitcnt lgkmcnt(0)
v_mul_u32_u24 v8, 48, v0
global_store_dwordx4 v8, v[10:13], s[6:7]
global_store_dwordx4 v8, v[14:17], s[6:7] offset:16
global_store_dword v8, v18, s[6:7] offset:32
buffer_load_dwordx2 v[20:21], v1, s[8:11], 0 offen
s_mov_b32 s8, s6
s_mov_b32 s9, s7
s_movk_i32 s10, 3000
s_waitcnt vmcnt(0)
buffer_store_dwordx2 v[20:21], v8, s[8:11], 0 offen offset:36
""", lds=4096)  # fmt: skip

EXCHANGE = kernel("exchange", """
s_load_dwordx2 s[6:7], s[0:1], 0x0
v_mov_b32 v1, 0x1000
v_add_u32 v1, v1, v0
v_mov_b32 v10, -1
v_mov_b32 v11, -1
v_mov_b32 v12, -1
v_mov_b32 v13, -1
v_mov_b32 v14, -1
v_mov_b32 v15, -1
s_nop 1
v_mov_b32_dpp v10, v1 row_shr:3 row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v11, v1 row_ror:1 row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v12, v1 quad_perm:[3,2,1,0] row_mask:0x5 bank_mask:0xf
v_mov_b32_dpp v13, v1 row_half_mirror row_mask:0xf bank_mask:0x3
v_add_u32_dpp v14, v1, v1 row_bcast:15 row_mask:0xa bank_mask:0xf
v_mov_b32_dpp v15, v1 row_shl:4 row_mask:0xf bank_mask:0xf bound_ctrl:0
v_mul_u32_u24 v2, 20, v0
ds_bpermute_b32 v16, v2, v1
v_sub_u32 v3, 63, v0
v_lshlrev_b32 v3, 2, v3
ds_permute_b32 v17, v3, v1
ds_swizzle_b32 v18, v1 offset:0x041f
s_waitcnt lgkmcnt(0)
v_mul_u32_u24 v8, 48, v0
s_waitcnt lgkmcnt(0)
global_store_dwordx4 v8, v[10:13], s[6:7]
global_store_dwordx4 v8, v[14:17], s[6:7] offset:16
global_store_dword v8, v18, s[6:7] offset:32
""")  # fmt: skip

ATOMICS = kernel("atomics", """
s_load_dwordx4 s[4:7], s[0:1], 0x0
v_mov_b32 v1, 0
v_mov_b32 v2, 3
v_lshlrev_b32 v3, 3, v0
v_mov_b32 v4, v0
v_mov_b32 v5, 1
v_mov_b32 v16, 1.0
s_waitcnt lgkmcnt(0)
global_atomic_add v10, v1, v2, s[4:5] sc0
global_atomic_umax v1, v0, s[4:5] offset:4
global_atomic_smin v1, v0, s[4:5] offset:8
global_atomic_add_x2 v[12:13], v1, v[4:5], s[4:5] offset:16 sc0 sc1
global_atomic_add_f32 v1, v16, s[4:5] offset:24
global_atomic_or v1, v0, s[4:5] offset:28
v_mov_b32 v6, 100
v_mov_b32 v7, 0
global_atomic_cmpswap v14, v1, v[6:7], s[4:5] offset:32 sc0
v_mov_b32 v9, 0
ds_write_b32 v9, v9
s_waitcnt vmcnt(0) lgkmcnt(0)
s_barrier
ds_add_rtn_u32 v15, v9, v2
ds_max_u32 v9, v0 offset:4
s_waitcnt lgkmcnt(0)
v_mul_u32_u24 v8, 24, v0
global_store_dwordx2 v8, v[10:11], s[6:7]
global_store_dwordx4 v8, v[12:15], s[6:7] offset:8
""", lds=64)  # fmt: skip

SCALARS = kernel("scalar_memory", """
s_load_dwordx8 s[8:15], s[0:1], 0x0
s_waitcnt lgkmcnt(0)
s_load_dwordx16 s[16:31], s[8:9], 0x4
s_movk_i32 s4, 0x80
s_load_dwordx2 s[32:33], s[8:9], s4
s_waitcnt lgkmcnt(0)
v_mov_b32 v1, s16
v_mov_b32 v2, s31
v_mov_b32 v3, s33
v_lshlrev_b32 v8, 4, v0
global_store_dwordx3 v8, v[2:4], s[10:11]
global_store_dword v8, v1, s[10:11] offset:12
""")  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> emulator.Module:
    return module("memory", WIDTHS, LDS, DIRECT, EXCHANGE, ATOMICS, SCALARS)


@pytest.fixture(params=MODES, ids=["plain", "caches", "late", "all by chance"])
def options(request) -> Options:
    return request.param


def test_every_width(kernels, options):
    x = np.random.default_rng(1).integers(0, 1 << 32, (64, 4), np.uint32)
    out = np.zeros((64, 12), np.uint32)
    launch(kernels, "widths", 1, 64, x, out, options=options)
    bytes_, halves = x.view(np.uint8), x.view(np.uint16)
    want = [bytes_[:, 1], bytes_[:, 2].view(np.int8), halves[:, 2], halves[:, 3].view(np.int16), *x[:, :3].T]
    for n, column in enumerate(want):
        np.testing.assert_array_equal(out[:, n], column.astype(np.int64).astype(np.uint32))
    got = out.view(np.uint8).reshape(64, 48)
    np.testing.assert_array_equal(got[:, 28], bytes_[:, 1])
    np.testing.assert_array_equal(
        out.view(np.uint16).reshape(64, 24)[:, 15:17], np.stack([halves[:, 2], halves[:, 5]], axis=1)
    )
    np.testing.assert_array_equal(out[:, 10], halves[:, 4].astype(np.uint32) | 0xFFFF0000)
    np.testing.assert_array_equal(out[:, 11], halves[:, 4].astype(np.uint32) << 16 | 0xFFFF)


def test_lds(kernels, options):
    x = np.random.default_rng(2).integers(0, 1 << 32, (64, 4), np.uint32)
    out = np.zeros((64, 12), np.uint32)
    launch(kernels, "lds", 1, 64, x, out, options=options)
    lds = np.full(4096, 0xA5, np.uint8).view(np.uint32)
    lds[:256] = x.ravel()
    lds[:128] = x[:, :2].ravel()
    lds[512:640] = x[:, 2:].ravel()
    halves, bytes_ = lds.view(np.uint16), lds.view(np.int8)
    other = 2 * (63 - LANE)
    np.testing.assert_array_equal(out[:, 0:2], np.stack([lds[other + 1], lds[other]], axis=1))
    np.testing.assert_array_equal(out[:, 2:4], np.stack([lds[2 * LANE], lds[2 * LANE + 512]], axis=1))
    np.testing.assert_array_equal(out[:, 4], halves[2 * other + 1])
    np.testing.assert_array_equal(out[:, 5], bytes_[4 * other + 1].astype(np.int64).astype(np.uint32))
    transposed = np.stack([halves[4 * ((LANE & ~15) + 4 * n + LANE % 16 // 4) + LANE % 4] for n in range(4)], axis=1)
    np.testing.assert_array_equal(out[:, 6:8].view(np.uint16), transposed)
    np.testing.assert_array_equal(out[:, 8:11], lds[512 + 4 * LANE[:, None] + np.arange(3)])


def test_direct_loads_and_buffers(kernels, options):
    x = np.random.default_rng(3).integers(0, 1 << 32, (66, 4), np.uint32)
    out = np.zeros((64, 12), np.uint32)
    launch(kernels, "direct", 1, 64, x, out, options=options)
    np.testing.assert_array_equal(out[:, 0:4], x[63 - LANE])
    np.testing.assert_array_equal(out[:40, 4:8], x[:40])
    assert not out[40:, 4:8].any()  # outside the buffer
    np.testing.assert_array_equal(out[:, 8], x[63 - LANE, 1])
    inside = 48 * LANE + 36 + 8 <= 3000
    np.testing.assert_array_equal(out[:, 9:11][inside], np.where(LANE[:, None] < 40, x[:64, :2], 0)[inside])
    assert not out[:, 9:11][~inside].any()


def test_what_direct_loads_leave_outside_is_an_option(kernels):
    x = np.ones((66, 4), np.uint32)
    for outside, want in (("nothing", 0xA5A5A5A5), ("garbage", 0x7F7F7F7F)):
        out = np.zeros((64, 12), np.uint32)
        launch(kernels, "direct", 1, 64, x, out, options=Options(outside=outside))
        assert (out[40:, 4:8] == want).all()


def test_lane_exchange(kernels, options):
    out = np.zeros((64, 12), np.uint32)
    launch(kernels, "exchange", 1, 64, out, options=options)
    v, row, r, none = LANE + 0x1000, LANE & ~15, LANE & 15, 0xFFFFFFFF
    np.testing.assert_array_equal(out[:, 0], np.where(r >= 3, v - 3, none))
    np.testing.assert_array_equal(out[:, 1], 0x1000 + (row | (r - 1) & 15))
    np.testing.assert_array_equal(out[:, 2], np.where(LANE // 16 % 2 == 0, v ^ 3, none))
    np.testing.assert_array_equal(out[:, 3], np.where(LANE // 4 % 4 < 2, v ^ 7, none))
    np.testing.assert_array_equal(out[:, 4], np.where(LANE // 16 % 2 == 1, v + 0x1000 + row - 1, none))
    np.testing.assert_array_equal(out[:, 5], np.where(r + 4 < 16, v + 4, 0))
    np.testing.assert_array_equal(out[:, 6], 0x1000 + 5 * LANE % 64)
    np.testing.assert_array_equal(out[:, 7], 0x1000 + 63 - LANE)
    np.testing.assert_array_equal(out[:, 8], v ^ 1)


def test_atomics(kernels, options):
    memory = np.zeros(16, np.uint32)
    memory[2], memory[8] = 50, 0
    waves = 4
    out = np.zeros((64 * waves, 6), np.uint32)
    launch(kernels, "atomics", 1, 64 * waves, memory, out, options=options)
    n = 64 * waves
    assert memory[0] == 3 * n and sorted(out[:, 0]) == list(range(0, 3 * n, 3))
    assert memory[1] == n - 1 and memory[2] == 0
    total = sum(range(n)) + (n << 32)
    assert memory[4:6].view(np.uint64)[0] == total
    assert memory[6:7].view(np.float32)[0] == n
    assert memory[7] == n - 1
    assert memory[8] == 100 and sorted(out[:, 4]) == [0] + [100] * (n - 1)
    old = out[:, 2].astype(np.uint64) | out[:, 3].astype(np.uint64) << np.uint64(32)
    assert len(set(old.tolist())) == n and old.min() == 0
    assert sorted(out[:, 5]) == list(range(0, 3 * n, 3))  # LDS


def test_scalar_loads(kernels, options):
    x, out = np.arange(100, 164, dtype=np.uint32), np.zeros((64, 4), np.uint32)
    launch(kernels, "scalar_memory", 1, 64, x, out, options=options)
    assert (out[:, [0, 1, 3]] == [116, 133, 101]).all()


# ---- waits ----
NEEDED = {
    "a load into registers": ("""
global_load_dword v2, v1, s[4:5]
s_waitcnt vmcnt(0)
global_store_dword v1, v2, s[6:7]
""", "s_waitcnt vmcnt(0)"),
    "a counted load": ("""
global_load_dword v2, v1, s[4:5]
global_load_dword v3, v1, s[4:5]
s_waitcnt vmcnt(1)
global_store_dword v1, v2, s[6:7]
""", "s_waitcnt vmcnt(1)"),
    "a direct load": ("""
v_readfirstlane_b32 s10, v1
s_mov_b32 m0, s10
s_nop 1
global_load_lds_dword v1, s[4:5]
s_waitcnt vmcnt(0)
ds_read_b32 v2, v1
s_waitcnt lgkmcnt(0)
global_store_dword v1, v2, s[6:7]
""", "s_waitcnt vmcnt(0)"),
    "an LDS read": ("""
global_load_dword v2, v1, s[4:5]
s_waitcnt vmcnt(0)
ds_write_b32 v1, v2
ds_read_b32 v3, v1
s_waitcnt lgkmcnt(0)
global_store_dword v1, v3, s[6:7]
""", "s_waitcnt lgkmcnt(0)"),
    "an LDS write before a barrier": ("""
global_load_dword v2, v1, s[4:5]
s_waitcnt vmcnt(0)
ds_write_b32 v1, v2
s_waitcnt lgkmcnt(0)
s_barrier
v_xor_b32 v3, 0x100, v1
ds_read_b32 v4, v3
s_waitcnt  lgkmcnt(0)
global_store_dword v3, v4, s[6:7]
""", "s_waitcnt lgkmcnt(0)"),
    "a scalar load": ("""
s_load_dword s10, s[4:5], 0x0
s_waitcnt  lgkmcnt(0)
v_lshrrev_b32 v2, 2, v1
v_add_u32 v2, s10, v2
global_store_dword v1, v2, s[6:7]
""", "s_waitcnt  lgkmcnt(0)"),
    "a store before a barrier": ("""
global_load_dword v2, v1, s[4:5]
s_waitcnt vmcnt(0)
global_store_dword v1, v2, s[8:9]
s_waitcnt  vmcnt(0)
s_barrier
v_xor_b32 v3, 0x100, v1
global_load_dword v4, v3, s[8:9]
s_waitcnt   vmcnt(0)
global_store_dword v3, v4, s[6:7]
""", "s_waitcnt  vmcnt(0)"),
}  # fmt: skip
_BEGIN = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dwordx2 s[8:9], s[0:1], 0x10
s_waitcnt lgkmcnt(0)
v_lshlrev_b32 v1, 2, v0
"""


def _name(n: int, deleted: bool) -> str:
    return f"wait_{n}_{'deleted' if deleted else 'there'}"


@pytest.fixture(scope="module")
def waits() -> emulator.Module:
    texts = []
    for n, (body, wait) in enumerate(NEEDED.values()):
        for deleted in (False, True):
            changed = body.replace(wait + "\n", "", 1) if deleted else body
            assert deleted == (changed != body)
            texts.append(kernel(_name(n, deleted), _BEGIN + changed, lds=512))
    return module("waits", *texts)


@pytest.mark.parametrize("n", range(len(NEEDED)), ids=list(NEEDED))
def test_a_deleted_wait_is_noticed(waits, n):
    x = np.arange(1000, 1128, dtype=np.uint32)

    def right(deleted: bool, options: Options) -> bool:
        out, between = np.zeros(128, np.uint32), np.zeros(128, np.uint32)
        launch(waits, _name(n, deleted), 1, 128, x, out, between, options=options)
        return bool((out == x).all())

    late = Options(late_memory=LATE)
    by_chance = [Options(late_memory=LATE, late_by_chance=True, seed=seed) for seed in range(8)]
    assert right(False, Options()) and right(False, late) and all(right(False, o) for o in by_chance)
    assert right(True, Options())  # memory that answers at once hides it
    assert not right(True, late)
    assert not all(right(True, o) for o in by_chance)
