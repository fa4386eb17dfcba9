"""Memory of other ranks."""

from __future__ import annotations

import pickle

import pytest

from kosmos_raw.device.base import Handle
from kosmos_raw.errors import NotAvailable

from .fakes import Refusal, both


def other(device, memory, pid=1):
    """The handle as a process `pid` would have sent it."""
    handle = pickle.loads(pickle.dumps(device.export(memory)))
    return Handle(pid, handle.address, handle.nbytes, handle.token)


@both
def test_a_handle_is_opened_once_and_closed_by_its_last_user(make, name):
    owner, fake = make(name, 0, 2)
    importer, _ = make(name, 1, 2)
    handle = other(owner, owner.allocate(100, shared=True))
    first, second = importer.open(handle), importer.open(handle)
    assert first.address == second.address
    assert fake.of("ipcOpenMemHandle") == [(1, handle.token.handle, 1)]  # on the importer's GPU, lazy peer access
    assert fake.of("deviceEnablePeerAccess")[0] == (1, 0)
    order = fake.names("deviceEnablePeerAccess", "ipcOpenMemHandle", "memcpy")
    assert order[:3] == ["deviceEnablePeerAccess", "ipcOpenMemHandle", "memcpy"]  # probed before the first use
    importer.close(first)
    importer.close(first)
    assert fake.of("ipcCloseMemHandle") == []
    importer.close(second)
    assert fake.of("ipcCloseMemHandle") == [(second.address,)]
    importer.open(handle)
    assert len(fake.of("ipcOpenMemHandle")) == 2


@both
def test_two_processes_that_share_a_gpu_need_no_peer_access(make, name):
    device, fake = make(name, 0, 3, share=True)
    device.open(other(device, device.allocate(1)))
    assert fake.of("deviceEnablePeerAccess") == []
    assert len(fake.of("ipcOpenMemHandle")) == 1


@both
def test_two_processes_that_have_one_gpu_by_mistake(make, name):
    device, _ = make(name, 0, 2)
    with pytest.raises(NotAvailable, match=r"process 1 have the same GPU, 0000:00:00\.0.*every rank the same masks"):
        device.open(other(device, device.allocate(1)))


@both
def test_a_mapping_of_other_memory_is_noticed(make, name):
    owner, fake = make(name, 0, 2)
    importer, _ = make(name, 1, 2)
    memory = owner.allocate(100, shared=True)
    fake.memory[memory.address + memory.nbytes - len(memory.tag)] = bytes(len(memory.tag))
    with pytest.raises(NotAvailable, match=r"opens other memory than it names, GPUs 0000:01:00\.0 .*0 others open"):
        importer.open(other(owner, memory))
    assert fake.of("ipcCloseMemHandle") != []


def test_another_order_of_gpus_is_warned_about(make):
    owner, _ = make("hip", 0, 2)
    importer, _ = make("hip", 1, 2)
    handle = other(owner, owner.allocate(100, shared=True))
    with pytest.warns(RuntimeWarning, match="process 1 sees GPUs in another order"):
        importer.open(Handle(1, handle.address, handle.nbytes, handle.token._replace(ordinal=1)))


@both
def test_the_own_process_is_never_opened(make, name):
    owner, fake = make(name, 0, 2)
    thread, _ = make(name, 1, 2)
    memory = owner.allocate(100, shared=True)
    handle = owner.export(memory)
    fake.fail["deviceEnablePeerAccess"] = Refusal("already enabled", 704)
    opened = thread.open(handle)
    assert opened.address == memory.address
    assert fake.of("deviceEnablePeerAccess") == [(1, 0)]
    owner.close(owner.open(handle))  # ranks on one GPU: nothing to enable
    thread.close(opened)
    assert fake.names("ipcOpenMemHandle", "ipcCloseMemHandle") == []
    assert len(fake.of("deviceEnablePeerAccess")) == 1


@both
def test_memory_of_others_is_closed_and_own_memory_freed(make, name):
    device, _ = make(name, 0, 3, share=True)
    memory = device.allocate(1)
    opened = device.open(other(device, memory))
    with pytest.raises(ValueError, match="another rank's; close it"):
        device.free(opened)
    with pytest.raises(ValueError, match="this rank's own; free it"):
        device.close(memory)
    with pytest.raises(ValueError, match="want a whole allocation"):
        device.export(opened)
    device.free(memory)
    with pytest.raises(ValueError, match="not freed"):
        device.export(memory)


@both
def test_failures_of_ipc_say_which_pair_and_what_to_look_at(make, name):
    owner, fake = make(name, 0, 2)
    importer, _ = make(name, 1, 2)
    memory = owner.allocate(1)
    handle = other(owner, memory)
    look = "HSA_ENABLE_IPC_MODE_LEGACY" if name == "hip" else "shared IPC and PID namespaces"
    fake.fail["ipcOpenMemHandle"] = Refusal("invalid device", 101)
    with pytest.raises(NotAvailable, match=rf"0000:01:00\.0 .*0000:00:00\.0 .process 1.*invalid device.*{look}"):
        importer.open(handle)
    fake.fail = {"deviceGetByPCIBusId": Refusal("no device", 100)}
    with pytest.raises(NotAvailable, match=r"0000:00:00\.0 of process 1 is not visible.*CUDA_VISIBLE_DEVICES=not set"):
        importer.open(handle)
    fake.fail = {}
    fake.peers = False
    with pytest.raises(NotAvailable, match=r"cannot use memory of GPU 0"):
        importer.open(handle)
    fake.fail = {"ipcGetMemHandle": Refusal("invalid argument", 1)}
    refused = other(owner, memory)  # ranks that are threads never need it
    with pytest.raises(NotAvailable, match=rf"process 1 could not export its memory: invalid argument.*{look}"):
        importer.open(refused)
