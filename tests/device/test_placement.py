"""Which GPU a rank gets, how many workgroups, on which stream."""

from __future__ import annotations

import pytest

from kosmos_raw.errors import NotAvailable

from .fakes import both


@both
def test_more_ranks_than_gpus(make, name, monkeypatch):
    for index in (0, 2):  # the rank that would have a GPU refuses too: all ranks fail alike
        with pytest.raises(NotAvailable, match=r"3 ranks, but this process sees 2 GPU\(s\).*KOSMOS_SHARE_GPU=1"):
            make(name, index, 3)
    units = 256 if name == "hip" else 132
    monkeypatch.setenv("KOSMOS_SHARE_GPU", "1")
    devices = [make(name, index, 3)[0] for index in range(3)]
    assert [device.index for device in devices] == [0, 1, 0]
    assert [device.max_workgroups for device in devices] == [units // 2, units, units // 2]
    assert "shared by 2 ranks" in devices[2].describe()


@both
def test_workgroups_follow_the_gpu_and_the_cap(make, name):
    def units(n):
        return lambda fake: setattr(fake, "units", n)

    assert make(name, setup=units(32))[0].max_workgroups == 32  # a partition, or a smaller GPU
    assert make(name, workgroups_cap=8)[0].default_workgroups == 8
    with pytest.raises(NotAvailable, match="1 compute units, too few for 4 ranks"):
        make(name, 0, 8, share=True, setup=units(1))
    with pytest.raises(ValueError, match="workgroups_cap is 0"):
        make(name, workgroups_cap=0)
    with pytest.raises(ValueError, match="index is 2 of 2 ranks"):
        make(name, 2, 2)


@both
def test_hardware_queues_bound_the_ranks_of_one_process(make, name, monkeypatch):
    variable = {"hip": "GPU_MAX_HW_QUEUES", "cuda": "CUDA_DEVICE_MAX_CONNECTIONS"}[name]
    make(name, 0, 6, share=True)
    monkeypatch.setenv(variable, "2")
    second, _ = make(name, 2, 6, share=True)
    make(name, 1, 6, share=True)  # another GPU
    with pytest.raises(NotAvailable, match=f"{variable}=3 or use processes"):
        make(name, 4, 6, share=True)
    second.close_device()
    make(name, 4, 6, share=True)


def test_a_cu_mask_makes_the_stream(make):
    device, fake = make("hip", compute_units=range(8, 72))
    assert fake.of("hipExtStreamCreateWithCUMask") == [(8, [0xFFFFFF00, 0xFFFFFFFF, 0xFF, 0, 0, 0, 0, 0])]
    assert device.max_workgroups == 64
    assert device.stream.ptr == 0x5000
    device.close_device()
    device.close_device()
    assert fake.of("hipStreamDestroy") == [(0x5000,)]
    with pytest.raises(ValueError, match="want numbers from 0 to 255"):
        make("hip", compute_units=range(250, 260))


def test_compute_units_by_the_environment(make, monkeypatch):
    monkeypatch.setenv("KOSMOS_COMPUTE_UNITS", "40")
    device, fake = make("hip")
    assert fake.of("hipExtStreamCreateWithCUMask") == [(8, [0xFFFFFFFF, 0xFF, 0, 0, 0, 0, 0, 0])]
    assert device.max_workgroups == 40
    for wrong in ("0", "-1", "all", "257"):
        monkeypatch.setenv("KOSMOS_COMPUTE_UNITS", wrong)
        with pytest.raises(ValueError, match=r"want how many compute units|want numbers from 0 to 255"):
            make("hip")


@both
def test_ordinary_streams_are_non_blocking_and_on_the_right_gpu(make, name):
    _, fake = make(name, 1, 2)
    assert fake.of("Stream") == [(1, True)]
