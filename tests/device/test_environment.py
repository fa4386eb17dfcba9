"""What is installed and what the environment says: refused, warned about, explained."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from kosmos_raw.device import open_device, rocm
from kosmos_raw.errors import NotAvailable

from .fakes import MASKS, Fake, Refusal, both


def test_importing_the_package_imports_no_gpu_library():
    modules = "kosmos_raw, kosmos_raw.device.hip, kosmos_raw.device.cuda"
    code = f"import sys, {modules}; print({{'cupy', 'hip'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.parametrize(("name", "extra"), [("hip", "rocm"), ("cuda", "cuda")])
def test_missing_cupy_names_the_extra(name, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NotAvailable, match=rf"kosmos-raw\[{extra}\]"):
        open_device(name, 0, 1)


def test_missing_hip_python_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", Fake(True).cupy())
    monkeypatch.setitem(sys.modules, "hip", None)
    with pytest.raises(NotAvailable, match=r"hip-python.*kosmos-raw\[rocm\]"):
        open_device("hip", 0, 1)


@pytest.mark.parametrize(
    ("name", "is_hip", "words"),
    [("hip", False, "built for CUDA.*device='cuda'"), ("cuda", True, "built for ROCm.*device='hip'")],
)
def test_cupy_of_the_other_vendor_is_named(name, is_hip, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", Fake(is_hip).cupy())
    with pytest.raises(NotAvailable, match=words):
        open_device(name, 0, 1)


def test_cupy_that_does_not_load_says_why(monkeypatch):
    def refuse(name):
        raise ImportError(
            "\n====\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: libamdhip64.so.7: no such file\n===="
        )

    monkeypatch.setattr("kosmos_raw.device.cupy_errors.importlib", SimpleNamespace(import_module=refuse))
    with pytest.raises(NotAvailable, match=r"does not load: ImportError: libamdhip64\.so\.7"):
        open_device("hip", 0, 1)


@both
def test_no_visible_gpu_lists_the_masks(make, name, monkeypatch):
    variables = MASKS[:3] if name == "hip" else MASKS[2:3]
    for i, variable in enumerate(variables):
        monkeypatch.setenv(variable, str(i + 1))
    wanted = ".*".join(f"{variable}={i + 1}" for i, variable in enumerate(variables))
    with pytest.raises(NotAvailable, match=wanted):
        make(name, setup=lambda fake: fake.fail.update(getDeviceCount=Refusal("ErrorNoDevice", 100)))


@both
def test_a_runtime_dead_after_fork_is_explained(make, name):
    with pytest.raises(NotAvailable, match=r"forked process.*spawn"):
        make(name, setup=lambda fake: fake.fail.update(getDeviceCount=Refusal("NotInitialized", 3)))


def test_other_architectures_are_refused(make):
    with pytest.raises(NotAvailable, match=r"is gfx942.*want gfx950"):
        make("hip", setup=lambda fake: setattr(fake, "arch", b"gfx942:sramecc+"))
    with pytest.raises(NotAvailable, match=r"compute capability 10\.0, want 9\.0"):
        make("cuda", setup=lambda fake: setattr(fake, "capability", (10, 0)))


def test_slices_and_compute_modes_are_refused(make):
    with pytest.raises(NotAvailable, match="MIG slice"):
        make("cuda", 0, 2, setup=lambda fake: setattr(fake, "name", b"NVIDIA H200 MIG 1g.18gb"))
    with pytest.raises(NotAvailable, match="compute mode 2, which allows no process"):
        make("cuda", setup=lambda fake: (setattr(fake, "name", b"NVIDIA H200"), setattr(fake, "compute_mode", 2)))
    make("cuda", 0, 2, setup=lambda fake: setattr(fake, "compute_mode", 3))
    with pytest.raises(NotAvailable, match="allows one process, and 2 ranks share it"):
        make("cuda", 0, 4, share=True)


def test_known_bad_rocm_is_warned_about(make, monkeypatch, tmp_path):
    monkeypatch.setenv("HSA_ENABLE_IPC_MODE_LEGACY", "1")
    with pytest.warns(RuntimeWarning, match="HSA_ENABLE_IPC_MODE_LEGACY=1 breaks hipIpcGetMemHandle"):
        make("hip", 0, 2)
    monkeypatch.delenv("HSA_ENABLE_IPC_MODE_LEGACY")
    (tmp_path / ".info").mkdir()
    (tmp_path / ".info" / "version").write_text("7.0.1-42\n")
    assert rocm.rocm_version([str(tmp_path / "lib" / "libamdhip64.so.7")]) == (7, 0, 1)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"ROCm 7\.0\.1.*install ROCm 7\.0\.2"):
        make("hip")


@pytest.mark.parametrize("variable", ["HIP_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL"])
def test_launches_that_wait_are_warned_about(make, variable, monkeypatch, recwarn):
    monkeypatch.setenv(variable, "0")
    make("hip", 0, 2)
    monkeypatch.setenv(variable, "3")
    make("hip", 0, 1)
    assert not recwarn
    with pytest.warns(RuntimeWarning, match=f"{variable}=3 has launches wait"):
        make("hip", 0, 2)


def test_two_hip_runtimes_are_refused(make, monkeypatch):
    device, _ = make("hip")
    monkeypatch.setattr(rocm, "hip_libraries", lambda: ["/a/libamdhip64.so.7", "/b/libamdhip64.so.6"])
    with pytest.raises(NotAvailable, match=r"/a/libamdhip64\.so\.7 and /b/libamdhip64\.so\.6"):
        device._check_device()


def test_ranks_that_are_threads_make_the_first_call_of_hip_python_one_by_one(make):
    device, _ = make("hip")
    inside, most = [], []

    def first_call(index):
        inside.append(index)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    device.hip = SimpleNamespace(hipSetDevice=first_call)
    threads = [threading.Thread(target=device._check_device) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def test_hidden_compute_units_are_refused(make, monkeypatch):
    monkeypatch.setenv("HSA_CU_MASK", "0:0-63")
    with pytest.raises(NotAvailable, match=r"HSA_CU_MASK=0:0-63.*workgroups_cap="):
        make("hip")
    assert make("hip", workgroups_cap=64)[0].max_workgroups == 64
