"""Streams, events and callbacks: order, and its absence."""

from __future__ import annotations

import ctypes
import threading
import time

import cupy
import numpy as np
import pytest
from cupy.cuda.runtime import CUDARuntimeError
from hip import hip

rt = cupy.cuda.runtime
Stream, Event = cupy.cuda.Stream, cupy.cuda.Event


class Gate:
    """An operation on a stream that ends when the test lets it."""

    def __init__(self, stream):
        self.opened = threading.Event()
        stream.launch_host_func(lambda _: self.opened.wait(60), None)


def test_a_stream_keeps_its_order_and_does_not_hold_the_host():
    stream, seen = Stream(non_blocking=True), []
    gate = Gate(stream)
    for i in range(20):
        stream.launch_host_func(seen.append, i)
    assert not stream.done and seen == []
    gate.opened.set()
    stream.synchronize()
    assert stream.done and seen == list(range(20))


def test_non_blocking_streams_do_not_wait_for_each_other_nor_for_the_null_stream():
    first, second = Stream(non_blocking=True), Stream(non_blocking=True)
    gates = [Gate(first), Gate(Stream.null)]
    second.launch_host_func(lambda _: None, None)
    second.synchronize()
    assert not first.done
    for gate in gates:
        gate.opened.set()
    cupy.cuda.Device(0).synchronize()


def test_blocking_streams_and_the_null_stream_wait_for_each_other():
    blocking = Stream()
    gate = Gate(Stream.null)
    blocking.launch_host_func(lambda _: None, None)
    time.sleep(0.02)
    assert not blocking.done
    gate.opened.set()
    blocking.synchronize()
    gate = Gate(blocking)
    Stream.null.launch_host_func(lambda _: None, None)
    time.sleep(0.02)
    assert not Stream.null.done
    gate.opened.set()
    Stream.null.synchronize()


def test_null_streams_of_two_gpus_are_two():
    gate = Gate(Stream.null)
    with cupy.cuda.Device(1):
        Stream.null.launch_host_func(lambda _: None, None)
        Stream.null.synchronize()
    gate.opened.set()
    Stream.null.synchronize()


def test_a_stream_waits_for_an_event():
    first, second, event = Stream(non_blocking=True), Stream(non_blocking=True), Event()
    gate = Gate(first)
    event.record(first)
    second.wait_event(event)
    second.launch_host_func(lambda _: None, None)
    time.sleep(0.02)
    assert not event.done and not second.done
    gate.opened.set()
    second.synchronize()
    assert event.done


def test_an_event_that_was_never_recorded_holds_nobody():
    event = Event()
    event.synchronize()
    assert event.done
    Stream(non_blocking=True).wait_event(event)


def test_events_measure_time():
    stream, start, end = Stream(non_blocking=True), Event(), Event()
    start.record(stream)
    stream.launch_host_func(lambda _: time.sleep(0.05), None)
    end.record(stream)
    end.synchronize()
    assert 50 <= cupy.cuda.get_elapsed_time(start, end) < 5000
    assert hip.hipEventElapsedTime(Event(disable_timing=True).ptr, end.ptr)[0] != 0


def test_an_event_may_go_before_it_is_reached():
    stream = Stream(non_blocking=True)
    gate, event = Gate(stream), Event()
    event.record(stream)
    event.record(stream)
    del event
    gate.opened.set()
    stream.synchronize()


def test_callbacks():
    stream, seen = Stream(non_blocking=True), []
    stream.add_callback(lambda _, error, data: seen.append((error, data)), "data")
    stream.synchronize()
    assert seen == [(0, "data")]


def test_a_destroyed_stream_is_recognised():
    error, stream = hip.hipStreamCreateWithFlags(1)
    assert not int(error) and not int(hip.hipStreamDestroy(stream)[0])
    assert hip.hipStreamSynchronize(stream)[0] == hip.hipError_t.hipErrorInvalidHandle


def test_facts_about_streams():
    stream = hip.hipStreamCreateWithPriority(1, -1)[1]
    assert hip.hipStreamGetFlags(stream)[1] == 1 and hip.hipStreamGetPriority(stream)[1] == -1
    with cupy.cuda.Device(3):
        other = Stream()
    assert hip.hipStreamGetDevice(other.ptr)[1] == 3
    hip.hipStreamDestroy(stream)


def test_a_masked_stream_says_its_mask():
    mask = [0xFF, 0, 0, 0, 0, 0, 0, 0x80000000]
    error, stream = hip.hipExtStreamCreateWithCUMask(8, mask)
    assert not int(error)
    seen = (ctypes.c_uint32 * 8)()
    assert int(hip.hipExtStreamGetCUMask(stream, 8, ctypes.addressof(seen))[0]) == 0
    assert list(seen) == mask
    hip.hipStreamDestroy(stream)


def test_a_copy_from_pageable_memory_ends_before_the_call_returns():
    stream, memory = Stream(non_blocking=True), rt.malloc(4096)
    for i in range(20):
        data = np.full(4096, i, np.uint8)
        rt.memcpyAsync(memory, data.ctypes.data, 4096, 1, stream.ptr)
        data[:] = 255
        out = np.zeros(4096, np.uint8)
        rt.memcpyAsync(out.ctypes.data, memory, 4096, 2, stream.ptr)
        assert (out == i).all()
    rt.free(memory)


def test_a_copy_from_pinned_memory_does_not():
    stream = Stream(non_blocking=True)
    gate = Gate(stream)
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(4096), np.uint8, 4096)
    pinned[:] = 9
    array = cupy.empty(4096, np.uint8)
    array.set(pinned, stream)
    assert not stream.done
    gate.opened.set()
    stream.synchronize()
    assert (array.get() == 9).all()


def test_capture_is_not_there(stubs_called):
    stubs_called.add("libamdhip64:hipStreamBeginCapture")
    stream = Stream(non_blocking=True)
    with pytest.raises(CUDARuntimeError):
        stream.begin_capture()
    assert not stream.is_capturing()
