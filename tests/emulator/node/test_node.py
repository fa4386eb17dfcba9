"""The emulated node from outside: the tests of inside/, what a process sees of it, and bugs that it must show."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.hip import mutants

from .conftest import INSIDE

MPIRUN = Path(sys.executable).parent / "mpirun"
HERE = "tests/emulator/node"
PROGRAM = ("-m", f"{HERE.replace('/', '.')}.programs")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short")


def test_everything_inside(on_node):
    done = on_node(*PYTEST, f"{HERE}/inside", **{INSIDE: "1"})
    assert done.status == 0 and re.search(r"^\d+ passed in", done.out, re.M), done.out


# -- ag_gemm, the whole way through the command line
EVEN, RAGGED, FIVE = "64,64,64 --n 256 --k 64", "70,0,129 --n 77 --k 72", "3,64,0,61,1 --n 250 --k 200"


@pytest.mark.parametrize(
    ("mode", "rows", "options"),
    [
        ("processes", "64,64,64,64 --n 256 --k 64", "caches"),
        ("processes", RAGGED, "preempt=7,jitter=500"),
        ("threads", FIVE, "caches,preempt=5"),
        ("threads", EVEN, "late,preempt=5,jitter=200,seed=3"),
        ("mpirun", EVEN, "caches,preempt=7,jitter=300"),
    ],
)
def test_ag_gemm(on_node, mode, rows, options):
    ranks = rows.count(",") + 1
    how = f"--device emulated --workgroups 4 --timeout 120 --iters 1 --json --rows {rows}"
    command = ["-m", "kosmos_raw", "validate", "ag_gemm", *how.split()]
    if mode == "mpirun":
        if not MPIRUN.is_file():
            pytest.skip("no mpirun beside this Python: pip install 'kosmos-raw[mpi]'")
        run = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
        command = ["-c", run, str(MPIRUN), "-n", str(ranks), sys.executable, *command]
    else:
        command += ["--mode", mode]
    done = on_node(*command, options=options)
    assert done.status == 0, done.out
    report = json.loads(done.out)
    assert report["passed"] and report["bitwise_repeat"] and report["device"] == "emulated"
    assert done.stub_calls == {}
    assert done.calls["hipModuleLaunchKernel"] >= 2 * ranks


def test_sources_through_hiprtc(on_node):
    """Where there is neither a shipped code object nor the compiler, CuPy hands hiprtc the sources."""
    done = on_node(*PROGRAM, "validate(mode='threads')", KOSMOS_HIP_CODE="source")
    assert done.status == 0 and "right" in done.out, done.out


def test_a_cap_by_a_mask(on_node):
    """Fewer compute units than workgroups are refused; on so many as there are, all is right."""
    mask = {"KOSMOS_COMPUTE_UNITS": "8"}
    done = on_node(*PROGRAM, "validate(mode='threads', workgroups=8)", **mask)
    assert done.status == 0 and "right" in done.out, done.out
    assert done.calls["hipExtStreamCreateWithCUMask"] == 3
    done = on_node(*PROGRAM, "validate(mode='threads', workgroups=9)", **mask)
    assert "workgroups is 9, want 2 to 8" in done.out, done.out


# -- bugs that must show
BUGS = {
    "out of bounds": ("out_of_bounds()", "", "no memory at address"),
    "use after free": ("use_after_free()", "", "no memory at address"),
    "no peer access": ("peer_access(False)", "", "GPU 0 has no peer access to GPU 1, whose memory is at"),
    "never ends": ("never_ends()", "limit=2", "did not end in 2 s"),
    "fence deleted": ("validate(fence_deleted, timeout_s=20)", "caches", "got|waited too long"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_shows(on_node, name):
    call, options, words = BUGS[name]
    done = on_node(*PROGRAM, call, options=options)
    assert done.status != 0 and re.search(words, done.out), done.out


# Of tests/hip/mutants.py, where it takes a process of its own. Each program is right without its mutant.
MUTANTS = [
    ("no_wait_for_the_caller", "read_at_once()", "jitter=3000", "result was not there"),
    ("no_wait_for_the_kernel", "read_at_once()", "jitter=3000", "result was not there"),
    ("no_peer_access", "validate(mode='threads')", "faults=load_waits", "has no peer access to GPU"),
    ("no_peer_access", "validate()", "faults=ipc_not_lazy", "has no peer access to GPU"),
    ("functions_fetched_late", "validate(mode='threads', timeout_s=2)", "faults=load_waits", "waited too long"),
    ("offset_not_sent", "validate(case=IN_ARENA, mode='threads')", "", "got"),
    ("size_by_the_mirror", "validate(mode='threads')", "", "the compiled kernel wants"),
    ("forked_ranks", "after_a_device()", "", "does not work in a forked process"),
    ("host_words_on_the_gpu", "drill('a rank is killed', 6.0)", "", "a rank is killed"),
]


@pytest.mark.parametrize(("name", "call", "options", "words"), MUTANTS)
def test_a_mutant_shows(on_node, name, call, options, words):
    done = on_node(*PROGRAM, call, options=options, **{mutants.VARIABLE: name})
    assert done.status != 0 and re.search(words, done.out), done.out


@pytest.mark.parametrize(("call", "options"), sorted({(call, options) for _, call, options, _ in MUTANTS}))
def test_without_a_mutant_all_is_well(on_node, call, options):
    done = on_node(*PROGRAM, call, options=options)
    assert done.status == 0 and "right" in done.out, done.out
    assert done.stub_calls == {}


def test_with_peer_access(on_node):
    assert "read 7" in on_node(*PROGRAM, "peer_access(True)").out


@pytest.mark.parametrize(("wait", "wrong"), [(False, True), (True, False)])
def test_a_missing_stream_wait_shows_with_late_streams(on_node, wait, wrong):
    done = on_node(*PROGRAM, f"missing_stream_wait({wait})", options="jitter=500")
    assert done.status == 0, done.out
    assert (int(re.search(r"wrong (\d+)", done.out)[1]) > 0) == wrong


# -- memory of other processes
@pytest.mark.parametrize(
    ("call", "faults", "says"),
    [
        ("share()", "", "read 2"),
        ("share()", "ipc_keeps_offset", "read 2"),
        ("share(inner_pointer, offset=0)", "", "opens other memory than it names"),  # the offset is lost
        ("share(inner_pointer, offset=0)", "ipc_keeps_offset", "read 2"),
        ("share(mask='0,2,1')", "", "read 2"),
        ("share(mask='2,3,0')", "", r"sees GPUs in another order(.|\n)*read 2"),
        ("share(mask='1,0')", "", "have the same GPU, 0000:05:00.0"),
        ("share(mask='2,1')", "", "is not visible in this process"),
        ("share(flags=0)", "", "hipErrorInvalidValue"),
        ("share(freed)", "", "cannot open memory of another process"),
        ("share()", "ipc_legacy", "HSA_ENABLE_IPC_MODE_LEGACY"),
        ("share()", "ipc_closed", "cannot open memory of another process"),
        ("share()", "ipc_not_lazy", "read 2"),
        ("share()", "no_peer", "ranks need GPUs that are linked"),
        ("many_handles(40)", "", "right 40"),
        ("many_handles(40)", "ipc_36", "opens other memory than it names.*36 others open"),
        ("fork()", "", "hipErrorNotInitialized"),
    ],
)
def test_memory_of_other_processes(on_node, call, faults, says):
    done = on_node(*PROGRAM, call, options=f"faults={faults}" if faults else "")
    assert re.search(says, done.out), done.out
    assert done.stub_calls == {}


# -- faults that the device meets with a clear error, or with a right result
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("faults=no_memory", "no room for .* bytes: 0 of"),
        ("faults=launch_fails", "launching ag_gemm"),
        ("faults=no_peer", "ranks need GPUs that are linked"),
        ("gpus=2", r"3 ranks, but this process sees 2 GPU\(s\)"),
        ("gpus=0", "no GPU is visible"),
        ("nonsense", "'nonsense', want one of"),
        ("faults=nonsense", "faults is 'nonsense'"),
    ],
)
def test_faults_are_explained(on_node, options, says):
    done = on_node(*PROGRAM, "validate(mode='threads')", options=options)
    assert done.status != 0 and re.search(says, done.out), done.out


def test_faults_that_do_not_matter(on_node):
    done = on_node(*PROGRAM, "validate()", options="faults=ipc_keeps_offset+ipc_36+ipc_not_lazy")
    assert done.status == 0, done.out


@pytest.mark.parametrize(
    ("masks", "seen"),
    [
        ({}, ["05", "15", "25", "35", "45", "55", "65", "75"]),
        ({"HIP_VISIBLE_DEVICES": "3,1"}, ["35", "15"]),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2,0"}, ["65", "45"]),
        ({"CUDA_VISIBLE_DEVICES": "7"}, ["75"]),
        ({"HIP_VISIBLE_DEVICES": "1,9,2"}, ["15"]),
    ],
)
def test_masks(on_node, masks, seen):
    done = on_node(*PROGRAM, "visible()", **masks)
    assert f"sees {seen}" in done.out, done.out


def test_a_real_rocm_is_never_replaced(on_node, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libamdhip64.so.7").touch()
    done = on_node(*PROGRAM, "visible()", ROCM_PATH=str(tmp_path))
    assert done.status != 0
    assert "this machine has a real HIP runtime" in done.out and str(tmp_path) in done.out


def test_nothing_is_loaded_before_it_is_asked_for(on_node):
    program = """
import sys, kosmos_raw.device.emulated, kosmos_raw.device.rocm as rocm
print([m for m in ("cupy", "hip", "rocm") if m in sys.modules], rocm.hip_libraries())
"""
    done = on_node("-c", program)
    assert done.out.strip() == "[] []", done.out
