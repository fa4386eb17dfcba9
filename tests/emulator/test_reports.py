"""What a run says when something is wrong: deadlocks, masked barriers, faults, wrong launches."""

from __future__ import annotations

import numpy as np
import pytest

from kosmos_raw import emulator
from kosmos_raw.emulator import Launch, Options

from .launching import launch, params
from .text import kernel, module

pytestmark = pytest.mark.emulated

FOREVER = kernel("forever", """
s_load_dwordx2 s[4:5], s[0:1], 0x0
v_mov_b32 v1, 0
v_readfirstlane_b32 s8, v0
s_waitcnt lgkmcnt(0)
s_cmp_lg_u32 s8, 0
s_cbranch_scc1 .Lend
.Lpoll:
global_load_dword v2, v1, s[4:5] sc0 sc1
s_waitcnt vmcnt(0)
v_readfirstlane_b32 s6, v2
s_cmp_eq_u32 s6, 7
s_cbranch_scc1 .Lend
s_sleep 1
s_branch .Lpoll
.Lend:
s_barrier
""")  # fmt: skip
MASKED = kernel("masked_barrier", """
v_cmp_gt_u32 vcc, 9, v0
s_and_saveexec_b64 s[4:5], vcc
s_barrier
s_mov_b64 exec, s[4:5]
s_barrier
""")  # fmt: skip
PAST_LDS = kernel("past_lds", "v_lshlrev_b32 v1, 4, v0\nds_read_b32 v2, v1", lds=512)
BAD_ADDRESS = kernel(
    "bad_address", "v_mov_b32 v2, 64\nv_mov_b32 v3, 0\nglobal_load_dword v1, v[2:3], off\ns_waitcnt vmcnt(0)"
)
TRAP = kernel("trap", "s_trap 2")
START = kernel("start", """
s_load_dwordx2 s[4:5], s[0:1], 0x0
s_getreg_b32 s6, hwreg(HW_REG_XCC_ID)
s_lshl_b32 s7, s2, 9
v_lshl_add_u32 v1, v0, 3, s7
v_mov_b32 v2, v9
v_mov_b32 v3, s6
s_waitcnt lgkmcnt(0)
global_store_dwordx2 v1, v[2:3], s[4:5]
""")  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> emulator.Module:
    return module("reports", FOREVER, MASKED, PAST_LDS, BAD_ADDRESS, TRAP, START)


def line_of(kernels: emulator.Module, text: str) -> int:
    return kernels.text.split("\n").index("\t" + text) + 1


@pytest.mark.parametrize("threads", [1, 2])
def test_a_deadlock_is_reported_with_its_lines(kernels, threads):
    word = np.zeros(4, np.uint32)
    launches = [Launch(kernels, "forever", 2, 192, params(word), rank) for rank in (0, 3)]
    with pytest.raises(emulator.RunError) as error:
        emulator.run(launches, Options(limit_seconds=0.3, threads=threads))
    message = str(error.value)
    assert "time limit" in message
    assert f"forever rank 3 WG 1 wave 0: sleeping, reports.s:{line_of(kernels, 's_sleep 1')} 's_sleep 1'" in message
    assert (
        f"forever rank 0 WG 0 waves 1-2: at a barrier, reports.s:{line_of(kernels, 's_barrier')} 's_barrier'" in message
    )


def test_what_runs_and_what_hangs_are_told_apart(kernels):
    word = np.full(4, 7, np.uint32)
    assert emulator.run([Launch(kernels, "forever", 1, 64, params(word))], Options(limit_seconds=5)).instructions > 8


def test_barriers_with_masked_lanes_are_counted(kernels):
    assert (
        launch(kernels, "masked_barrier", 2, 128).masked_barriers == 4
    )  # of the second wave no lane, of the first nine
    assert launch(kernels, "forever", 1, 64, np.full(4, 7, np.uint32)).masked_barriers == 0


@pytest.mark.parametrize(
    "options", [Options(), Options(late_memory=("lds", "loads"), caches="xcd")], ids=["plain", "cruel"]
)
def test_faults_name_the_place(kernels, options):
    with pytest.raises(
        emulator.RunError,
        match=r"past_lds rank 0 WG 0 wave 0: access past the end of LDS, at 0x200, reports.s:\d+ 'ds_read_b32",
    ):
        launch(kernels, "past_lds", 1, 64, options=options)
    with pytest.raises(emulator.RunError, match=r"bad_address rank 0 WG 0 wave 0: no memory at address 0x"):
        launch(kernels, "bad_address", 1, 64, options=options)
    with pytest.raises(emulator.RunError, match="s_trap 2"):
        launch(kernels, "trap", 1, 64, options=options)


def test_a_fault_stops_the_ranks_that_wait(kernels):
    word = np.zeros(4, np.uint32)
    launches = [Launch(kernels, "forever", 1, 64, params(word), 0), Launch(kernels, "trap", 1, 64, b"", 1)]
    with pytest.raises(emulator.RunError, match="trap rank 1"):
        emulator.run(launches, Options(limit_seconds=30, threads=2))


def test_wrong_launches_are_refused(kernels):
    with pytest.raises(ValueError, match="no such kernel"):
        launch(kernels, "nobody", 1, 64)
    with pytest.raises(ValueError, match="bad shape"):
        launch(kernels, "trap", 1, 4096)
    with pytest.raises(ValueError, match="caches is 'l2'"):
        Options(caches="l2")


def test_what_hardware_does_not_clear_holds_a_pattern_and_xcc_ids_are_permuted(kernels):
    orders = set()
    for seed in range(4):
        out = np.zeros((16, 64, 2), np.uint32)
        launch(kernels, "start", 16, 64, out, options=Options(seed=seed, resident_wgs=3))
        assert (out[..., 0] == 0x5A5A5A5A).all()
        order = tuple(out[:, 0, 1])
        assert sorted(order[:8]) == list(range(8)) and order[:8] == order[8:]
        orders.add(order)
    assert len(orders) == 4 and tuple(range(8)) * 2 in orders
