"""The device of who does not choose one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kosmos_raw import default_device
from kosmos_raw.device import choice, rocm
from kosmos_raw.emulator import node
from tests.hip.tier import REAL

from .fakes import MASKS

ROCM = "/opt/rocm/lib/libamdhip64.so.7"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(mi355x=0, h200=0, rocm=None, packages=...): what this machine seems to have."""

    def seem(mi355x=0, h200=0, rocm_file=None, packages=("cupy-rocm-7-0", "hip-python", "cupy-cuda13x"), emulated=True):
        for i in range(mi355x + 1):  # the CPU is a node too
            place = tmp_path / "kfd" / str(i)
            place.mkdir(parents=True)
            (place / "properties").write_text(f"simd_count 1024\ngfx_target_version {90500 if i else 0}\n")
        for i in range(h200):
            place = tmp_path / "nvidia" / f"0000:{i:02x}:00.0"
            place.mkdir(parents=True)
            (place / "information").write_text(f"Model: \t\t NVIDIA H200\nIRQ:   \t\t {i}\n")
        monkeypatch.setattr(rocm, "KFD", tmp_path / "kfd")
        monkeypatch.setattr(choice, "NVIDIA", tmp_path / "nvidia")
        monkeypatch.setattr(rocm, "real_rocm", lambda: rocm_file)
        monkeypatch.setattr(choice, "has_package", lambda prefix: any(p.startswith(prefix) for p in packages))
        monkeypatch.setattr(node, "why_unavailable", lambda: None if emulated else "no compiler")

    return seem


@pytest.mark.parametrize(
    ("has", "ranks", "chosen"),
    [
        ({}, 8, "emulated"),
        ({"emulated": False}, 8, "cpu"),
        ({"mi355x": 8, "rocm_file": ROCM}, 8, "hip"),
        ({"mi355x": 2, "rocm_file": ROCM}, 8, "cpu"),  # ROCm is there: nothing stands in for it
        ({"mi355x": 2, "rocm_file": ROCM}, 2, "hip"),
        ({"rocm_file": ROCM}, 1, "cpu"),
        ({"mi355x": 8, "rocm_file": ROCM, "packages": ("hip-python",)}, 8, "cpu"),
        ({"h200": 8}, 8, "cuda"),
        ({"h200": 1}, 1, "cuda"),
        ({"h200": 1}, 8, "emulated"),
        ({"h200": 8, "packages": ()}, 8, "emulated"),
        ({"h200": 8, "mi355x": 8, "rocm_file": ROCM}, 8, "hip"),
    ],
    ids=str,
)
def test_the_first_that_can(machine, has, ranks, chosen):
    machine(**has)
    assert default_device(ranks) == chosen


def test_masks_count(machine, monkeypatch):
    machine(mi355x=8, h200=8)
    assert (rocm.count_gpus(), choice.count_hopper()) == (8, 8)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3,1")
    assert (rocm.count_gpus(), choice.count_hopper()) == (2, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (rocm.count_gpus(), choice.count_hopper()) == (0, 0)


@pytest.mark.parametrize("where", ["ROCM_PATH", "LD_LIBRARY_PATH", "wheel"])
def test_a_real_rocm_is_found_and_nothing_is_loaded_over_it(where, tmp_path):
    """Also where only the loader, or a wheel, knows of it."""
    folder = tmp_path / "_rocm_sdk_core" / "lib"
    folder.mkdir(parents=True)
    (folder / "libamdhip64.so.7").touch()
    variables = {"ROCM_PATH": folder.parent, "LD_LIBRARY_PATH": folder, "wheel": tmp_path}
    root = Path(__file__).parents[2]
    env = {name: value for name, value in os.environ.items() if name not in (*MASKS, *rocm.ROOTS, "LD_LIBRARY_PATH")}
    env |= {where: str(variables[where])} if where != "wheel" else {}
    env["PYTHONPATH"] = os.pathsep.join(map(str, [root, *([tmp_path] if where == "wheel" else [])]))
    program = """
import kosmos_raw.emulator.node as node
from kosmos_raw import NotAvailable, default_device
from kosmos_raw.device.rocm import hip_libraries
try:
    node.preload()
except NotAvailable as error:
    print(default_device(), hip_libraries(), error)
"""
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert "[] device emulated: this machine has a real HIP runtime" in done.stdout, done.stdout + done.stderr
    if not REAL:
        assert done.stdout.startswith("cpu ") and f"({folder / 'libamdhip64.so.7'})" in done.stdout


def test_the_python_api_stays_with_the_cpu():
    """A program brings arrays of a library, so the machine must not choose for it."""
    import kosmos_raw as kr

    assert kr.launch(_name, ranks=1, mode="threads") == ["cpu"]


def _name(comm):
    return comm.device.name


def test_an_unknown_device():
    from kosmos_raw.device import open_device

    with pytest.raises(ValueError, match="device is 'tpu', want one of cpu, hip, emulated, cuda"):
        open_device("tpu", 0, 1)
