"""All operators on the HIP device, however the ranks come to be."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.checks.drills import DRILLS
from kosmos_raw.checks.operators import CHECKED, Case
from kosmos_raw.checks.validate import arena_bytes, merge, run_all
from tests.test_layers import check_mlp
from tests.test_layers_mxfp8 import check_mlp as check_mlp_in_mxfp8

from .tier import DEVICE

pytestmark = pytest.mark.hip
MPIRUN = Path(sys.executable).parent / "mpirun"


def check(cases: list[Case], mode: str) -> None:
    options = {"ranks": cases[0].ranks, "device": DEVICE, "mode": mode, "workgroups": 4, "timeout_s": 60.0}
    outcomes = kr.launch(run_all, cases, arena_bytes=arena_bytes(cases), **options)
    for case, *of_ranks in zip(cases, *outcomes, strict=True):
        outcome = merge(of_ranks)
        assert outcome.passed and outcome.bitwise_repeat, (case, outcome.problems)


@pytest.mark.parametrize("mode", ["processes", "threads"])
def test_all_operators_on_three_ranks(mode):
    case = Case((130, 0, 71), 136, 72, iters=1)
    check([replace(case, op=op) for op in CHECKED], mode)


def test_mxfp8():
    """An all-gather, which quantises in the arena. (tests/emulator has the gradients.)"""
    check([Case((130, 0, 71), 136, 200, "ag_gemm", arena=True, iters=1, dtype="mxfp8")], "processes")


def test_ag_gemm_on_eight_processes():
    rows = tuple(kr.split_rows(512, 8))
    whole, ragged = Case(rows, 256, 64, iters=1), Case((40, 0, 1, 97, 0, 64, 33, 5), 130, 72, iters=1)
    check([whole, replace(whole, policy="fixed", arena=True), ragged, replace(ragged, policy="two_way")], "processes")


def test_one_rank():
    check([Case((257,), 100, 40, iters=1, op=op) for op in CHECKED], "threads")


@pytest.mark.parametrize("grads", ["float32", "bf16"])
def test_layers(grads):
    """Forward and backward, with gradients that are added to buffers."""
    check_mlp((30, 0, 5), grads, device=DEVICE, mode="threads", arena_bytes=4 << 20, workgroups=4, timeout_s=60)


def test_layers_in_mxfp8():
    """A row-parallel one: its bias gradient is gathered, as bits of float32. (A column-parallel one: on the CPU.)"""
    options = {"device": DEVICE, "mode": "threads", "arena_bytes": 4 << 20, "workgroups": 4, "timeout_s": 60}
    check_mlp_in_mxfp8((30, 5), 1, "none", hidden=40, width=24, dtypes=("bf16", "mxfp8"), **options)


def test_nothing_is_kept_of_a_communicator():
    """Memory of the GPU and opened handles, of all ranks."""
    options = {"ranks": 3, "device": DEVICE, "mode": "threads", "workgroups": 4, "arena_bytes": 8 << 20}
    free = [kr.launch(free_bytes, **options)[0] for _ in range(4)]
    assert len(set(free[1:])) == 1, free


def free_bytes(comm: kr.Communicator) -> int:
    comm.empty((100, 8))
    comm.kernel("ag_gemm")
    comm.barrier()
    return comm.device.cupy.cuda.runtime.memGetInfo()[0]


@pytest.mark.parametrize("what", ["a", "out"])
def test_arrays_of_the_host_are_refused(what):
    with pytest.raises(TypeError, match=f"{what}.*ndarray|lies in cpu, want memory of device {DEVICE}:0"):
        kr.launch(host_array, what, ranks=1, device=DEVICE, mode="threads", workgroups=4)


def host_array(comm: kr.Communicator, what: str) -> None:
    shapes = {"a": (8, 16), "b": (24, 16), "out": (8, 24)}
    given = {name: comm.device.xp.zeros(shape, np.uint16) for name, shape in shapes.items()}
    kr.ag_gemm(comm, **{**given, what: np.zeros(shapes[what], np.uint16)})


def test_under_mpirun():
    if not MPIRUN.is_file():
        pytest.skip("no mpirun beside this Python: pip install 'kosmos-raw[mpi]'")
    validate = f"validate ag_gemm --device {DEVICE} --m 300 --n 136 --k 64 --workgroups 4 --iters 1 --json"
    command = [str(MPIRUN), "-n", "3", sys.executable, "-m", "kosmos_raw", *validate.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] and report["bitwise_repeat"]
    assert (report["device"], report["ranks"]) == (DEVICE, 3)


@pytest.mark.parametrize("name", DRILLS)
def test_what_goes_wrong_is_reported(name):
    passed, seen = DRILLS[name](3, 60.0, DEVICE)
    assert passed, seen
