"""Kernels, their launches, streams and events."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kosmos_raw.build import params, report
from kosmos_raw.device.cupy_errors import GpuError
from kosmos_raw.errors import KosmosError, NotAvailable

from .fakes import OP, Refusal, both

ONE = np.zeros(1, np.dtype([("x", "u8")]))


@both
def test_a_kernel_is_loaded_at_once_on_the_right_gpu(make, name):
    device, fake = make(name, 1, 2)
    fake.current_device = 0
    kernel = device.kernel(OP)
    assert fake.of("RawModule") == [({"path": f"/built/{OP}.bin"},)]
    assert fake.of("get_function") == [(1, f"{OP}_main")]
    assert fake.current_device == 0
    threads = 512 if name == "hip" else 384
    shared = report.target_constants(device.target).get("DYNAMIC_SHARED_BYTES", 0)
    assert fake.of("occupancy") == [(0xF00, threads, shared)]
    assert (kernel.tile.m, kernel.tile.n) == tuple(
        report.target_constants(device.target)[constant] for constant in ("TILE_M", "TILE_N")
    )
    kernel.launch(ONE, 7)
    assert fake.of("launch") == [(1, (7,), (threads,), bytes(8), shared, device.stream.ptr)]


def test_constants_of_the_devices(make):
    hip, _ = make("hip")
    assert (hip.tick_hz, hip.trace_rows) == (100_000_000, 1)
    cuda, _ = make("cuda")
    assert (cuda.tick_hz, cuda.trace_rows) == (1_000_000_000, 4)


@both
def test_source_goes_to_the_run_time_compiler_when_nothing_is_built(make, name, monkeypatch):
    device, fake = make(name)
    module = importlib.import_module(f"kosmos_raw.device.{name}")
    monkeypatch.setattr(module.gfx950 if name == "hip" else module.sm90, "missing", lambda: "no compiler")
    code = type(device)._code(device, OP)
    assert code.path is None
    assert f"KOSMOS_KERNEL({OP}," in code.text
    assert '#include "' not in code.text  # CuPy's cache does not look into headers
    assert code.params_bytes == params.AG_GEMM.itemsize
    monkeypatch.setattr(device, "_code", lambda op: code)
    device.kernel(OP)
    (how,) = fake.of("RawModule")[0]
    assert how["backend"] == "nvrtc" and "-std=c++20" in how["options"]


@pytest.mark.parametrize(("chosen", "source"), [("object", False), ("source", True), ("", False)])
def test_code_is_chosen_by_the_environment(make, chosen, source, monkeypatch):
    device, _ = make("hip")
    monkeypatch.setenv("KOSMOS_HIP_CODE", chosen)
    assert (type(device)._code(device, OP).path is None) == source
    monkeypatch.setenv("KOSMOS_HIP_CODE", "objects")
    with pytest.raises(ValueError, match="KOSMOS_HIP_CODE is 'objects', want object or source"):
        type(device)._code(device, OP)


def test_params_are_measured_by_the_code_object(make, monkeypatch):
    device, _ = make("hip")
    hip = importlib.import_module("kosmos_raw.device.hip")
    monkeypatch.setattr(hip.gfx950, "missing", lambda: None)
    monkeypatch.setattr(hip.gfx950, "code_object", lambda op: SimpleNamespace(code_object=Path("/x.hsaco")))
    monkeypatch.setattr(hip.report, "gfx950_arguments", lambda build, kernel: {f"{OP}_main": (416,)}[kernel])
    code = type(device)._code(device, OP)
    assert (code.path, code.params_bytes) == (Path("/x.hsaco"), 416)


def test_params_are_measured_by_the_cuda_driver(make, monkeypatch):
    class Driver:
        @staticmethod
        def cuFuncGetParamInfo(function, index, offset, size):
            assert (function.value, index.value) == (0xF00, 0)
            size._obj.value = 24
            return 0

        @staticmethod
        def cuDeviceGetP2PAttribute(value, attribute, device, peer):
            assert (attribute, device, peer) == (3, 0, 1)
            value._obj.value = 0
            return 0

    device, _ = make("cuda", 0, 2)
    monkeypatch.setattr("kosmos_raw.device.cuda._driver", Driver)
    assert device.kernel(OP).params_bytes == 24
    with pytest.warns(RuntimeWarning, match="GPUs 0 and 1 have no native atomics"):
        device._reach(1, "0000:01:00.0")


@both
def test_dynamic_shared_memory_of_the_target(make, name, monkeypatch):
    device, fake = make(name)
    constants = {"TILE_M": 1, "TILE_N": 2, "WG_THREADS": 64, "DYNAMIC_SHARED_BYTES": 100_000}
    monkeypatch.setattr("kosmos_raw.device.cupy_kernel.report.target_constants", lambda target: constants)
    kernel = device.kernel(OP)
    kernel.launch(ONE, 1)
    assert fake.of("occupancy") == [(0xF00, 64, 100_000)]
    assert fake.of("launch")[0][4] == 100_000
    if name == "cuda":  # HIP takes it without being told
        assert fake.raw.max_dynamic_shared_size_bytes == 100_000


@both
def test_a_struct_of_another_size_is_refused(make, name):
    device, fake = make(name)
    kernel = device.kernel(OP)
    for wrong in (np.zeros(1, np.dtype([("x", "u4")])), np.zeros(2, ONE.dtype), np.zeros(2, np.dtype("u4"))):
        with pytest.raises(KosmosError, match=rf"{OP}: params has .* the compiled kernel wants one of 8"):
            kernel.launch(wrong, 1)
    assert fake.of("launch") == []


@both
def test_a_grid_that_cannot_be_resident_is_refused(make, name):
    device, fake = make(name)
    kernel = device.kernel(OP)
    for workgroups in (0, device.max_workgroups + 1):
        with pytest.raises(NotAvailable, match=rf"{workgroups} workgroups, want 1 to {device.max_workgroups}"):
            kernel.launch(ONE, workgroups)
    assert fake.of("launch") == []
    fake.occupancy = 0
    with pytest.raises(NotAvailable, match=f"{OP}: no WG of .* threads .* fits"):
        device.kernel(OP)


@both
def test_captured_streams_are_refused(make, name):
    device, fake = make(name)
    kernel = device.kernel(OP)
    fake.capturing = {device.stream.ptr}
    with pytest.raises(KosmosError, match="the device's stream is being captured into a graph"):
        kernel.launch(ONE, 1)
    fake.capturing = {0}
    with pytest.raises(KosmosError, match="the current stream is being captured into a graph"):
        device.wait_for_caller()
    fake.fail["is_capturing"] = Refusal("StreamCaptureImplicit", 906)
    with pytest.raises(KosmosError, match=r"captured into a graph .StreamCaptureImplicit"):
        kernel.launch(ONE, 1)
    assert fake.of("launch") == []
    fake.fail["is_capturing"] = Refusal("NotSupported", 801)  # a runtime that does not know
    kernel.launch(ONE, 1)


@both
def test_events_order_the_two_streams(make, name):
    device, fake = make(name)
    own = device.stream.ptr
    fake.calls.clear()
    device.wait_for_caller()
    device.caller_waits()
    (_, theirs, one), (_, two, waits), (_, mine, three), (_, four, waits_too) = fake.calls
    assert fake.names() == ["record", "wait_event", "record", "wait_event"]
    assert (one, two, waits) == (0, own, theirs)
    assert (three, four, waits_too) == (own, 0, mine)
    fake.calls.clear()
    fake.caller = device.stream
    device.wait_for_caller()
    device.caller_waits()
    assert fake.calls == []


@both
def test_timing(make, name):
    device, fake = make(name)
    a, b = device.record(), device.record()
    assert a.timing and b.timing
    assert device.elapsed_ms(a, b) == 1.5
    assert fake.of("eventSynchronize") == [(b.number,)]


@both
def test_errors_say_what_was_being_done(make, name):
    device, fake = make(name)
    kernel = device.kernel(OP)
    fake.fail["launch"] = Refusal("invalid configuration", 9)
    with pytest.raises(GpuError, match=rf"{name}:0: launching {OP} in workgroups of .*: invalid configuration"):
        kernel.launch(ONE, 3)
    fake.fail = {"streamSynchronize": Refusal("unspecified launch failure", 719)}
    with pytest.raises(GpuError, match="waiting for the GPU: unspecified launch failure; after a fault"):
        device.synchronize()
    fake.fail = {"get_function": Refusal("no binary for GPU", 209)}
    with pytest.raises(GpuError, match=f"loading {OP}: no binary for GPU; the code is built for {device.target}"):
        device.kernel(OP)


@both
def test_closed_and_forked_devices_refuse(make, name, monkeypatch):
    device, _ = make(name)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(KosmosError, match=r"this is its fork -1.*spawn"):
        device.allocate(1)
    monkeypatch.undo()
    device.close_device()
    with pytest.raises(KosmosError, match="GPU 0 is closed"):
        device.allocate(1)


@both
def test_streams_by_dlpack_s_numbers(make, name):
    device, fake = make(name)
    assert device.dlpack_stream() == (0 if name == "hip" else 1)  # the null stream
    fake.caller = device.stream
    assert device.dlpack_stream() == device.stream.ptr
