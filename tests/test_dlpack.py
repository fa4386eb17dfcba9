"""memory/dlpack.py against NumPy and against a producer made of ctypes, which can do what NumPy cannot: BF16, odd
strides, both layouts of the protocol, other places of memory. The producer counts calls of its deleter."""

from __future__ import annotations

import ctypes
import gc

import ml_dtypes
import numpy as np
import pytest

from kosmos_raw.device.cpu import CpuDevice
from kosmos_raw.device.hip import HipDevice
from kosmos_raw.memory import dlpack
from kosmos_raw.memory.dlpack import BFLOAT, FLOAT, OPAQUE, UINT

BF16 = np.dtype(ml_dtypes.bfloat16)
CAPSULE_NEW = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_producers: list[object] = []  # a producer lives until its deleter is called; here, to the end


class OldProducer:
    """Exports `storage` as a tensor, by the protocol before version 1."""

    def __init__(
        self, storage, shape, strides=None, *, code=BFLOAT, bits=16, lanes=1, place=(1, 0), offset=0, flags=0, major=1
    ):
        self.storage, self.place, self.flags, self.major = storage, place, flags, major
        self.shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * max(1, len(strides)))(*strides)
        self.fields = (len(shape), code, bits, lanes, offset)
        self.deleted = []
        self.asked = []
        self._deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.deleted.append)

    def _fill(self, managed):
        ndim, code, bits, lanes, offset = self.fields
        tensor = managed.tensor
        tensor.data = self.storage.ctypes.data if self.storage is not None else None
        tensor.device.type, tensor.device.id = self.place
        tensor.ndim, tensor.byte_offset = ndim, offset
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, lanes
        tensor.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        if self.strides is not None:
            tensor.strides = ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64))
        managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        self.managed = managed
        _producers.append((self, managed, self._deleter))
        return ctypes.addressof(managed)

    def __dlpack_device__(self):
        return self.place

    def __dlpack__(self, stream=None):
        self.asked.append(stream)
        return CAPSULE_NEW(self._fill(dlpack._Managed()), b"dltensor", None)


class Producer(OldProducer):
    """The same by version 1 of the protocol."""

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        assert max_version == (1, 0)
        assert copy is False
        self.asked.append(stream)
        managed = dlpack._ManagedVersioned()
        managed.major, managed.flags = self.major, self.flags
        return CAPSULE_NEW(self._fill(managed), b"dltensor_versioned", None)


BOTH = pytest.mark.parametrize("kind", [OldProducer, Producer])


@pytest.fixture(scope="module")
def cpu():
    return CpuDevice()


def bf16(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape).astype(BF16)


@BOTH
def test_bf16_is_read_without_a_copy_and_deleted_once(kind, cpu):
    storage = bf16(3, 4)
    producer = kind(storage.view(np.uint16), (3, 4))
    array = dlpack.as_array(producer, cpu)
    assert array.dtype == BF16
    assert array.flags.c_contiguous
    np.testing.assert_array_equal(array, storage)
    storage[1, 1] = 42
    assert array[1, 1] == 42
    part = array[2:]
    del array
    gc.collect()
    assert producer.deleted == []  # a view of the view still needs it
    assert part[0, 0] == 8
    del part
    gc.collect()
    assert producer.deleted == [ctypes.addressof(producer.managed)]


@BOTH
@pytest.mark.parametrize(
    ("shape", "strides", "start"),
    [((4, 3), (1, 4), 0), ((2, 2), (8, 2), 0), ((3, 4), (-4, 1), 8), ((3, 4), (0, 1), 4), ((2, 2), (-4, -3), 11)],
    ids=["transposed", "every other", "upside down", "broadcast", "both backwards"],
)
def test_strides_are_honoured(kind, cpu, shape, strides, start):
    storage = bf16(4, 4)
    want = np.lib.stride_tricks.as_strided(storage.reshape(-1)[start:], shape, [2 * s for s in strides])
    producer = kind(storage.view(np.uint16), shape, strides, offset=2 * start)
    np.testing.assert_array_equal(dlpack.as_array(producer, cpu), want)
    tensor = dlpack.read(producer)
    assert (tensor.shape, tensor.strides) == (shape, strides)
    assert tensor.address == storage.ctypes.data + 2 * start


def test_public_examples_of_ignored_strides(cpu):
    assert dlpack.as_array(np.arange(6).reshape(2, 3)[:, :2], cpu).tolist() == [[0, 1], [3, 4]]
    assert dlpack.as_array(np.arange(4).reshape(2, 2).T, cpu).tolist() == [[0, 2], [1, 3]]
    assert dlpack.as_array(np.arange(10)[::-3], cpu).tolist() == [9, 6, 3, 0]


@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "?"])
def test_numpy_round_trip(cpu, dtype):
    source = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    array = dlpack.as_array(source, cpu)
    assert array.dtype == source.dtype
    assert array.ctypes.data == source.ctypes.data
    np.testing.assert_array_equal(array, source)
    np.testing.assert_array_equal(np.from_dlpack(array), source)  # and out again


def test_numpy_array_outlives_its_name(cpu):
    array = dlpack.as_array(np.full(1 << 16, 7), cpu)
    gc.collect()
    assert array.min() == array.max() == 7


@pytest.mark.parametrize(
    ("code", "bits", "name"), [(10, 8, "float8_e4m3fn"), (12, 8, "float8_e5m2"), (14, 8, "float8_e8m0fnu")]
)
def test_eight_bit_floats(cpu, code, bits, name):
    array = dlpack.as_array(Producer(np.array([0x38, 0x40], np.uint8), (2,), code=code, bits=bits), cpu)
    assert array.dtype == np.dtype(getattr(ml_dtypes, name))
    assert array.view(np.uint8).tolist() == [0x38, 0x40]


@pytest.mark.parametrize(
    ("code", "bits", "lanes"),
    [(OPAQUE, 64, 1), (FLOAT, 16, 2), (UINT, 4, 1), (17, 4, 1), (BFLOAT, 32, 1), (FLOAT, 24, 1)],
)
def test_unknown_dtypes_are_refused_and_deleted(cpu, code, bits, lanes):
    producer = Producer(np.zeros(8, np.uint64), (2,), code=code, bits=bits, lanes=lanes)
    with pytest.raises(TypeError, match=f"type code {code} with {bits} bits and {lanes} lanes"):
        dlpack.as_array(producer, cpu)
    gc.collect()
    assert len(producer.deleted) == 1


def test_scalar_and_empty(cpu):
    scalar = dlpack.as_array(Producer(np.array([7.0], np.float32), (), code=FLOAT, bits=32), cpu)
    assert scalar.shape == () and scalar == 7
    producer = Producer(None, (0, 5))
    empty = dlpack.as_array(producer, cpu)
    assert empty.shape == (0, 5) and empty.dtype == BF16
    gc.collect()
    assert len(producer.deleted) == 1


def test_read_only(cpu):
    producer = Producer(bf16(2, 2).view(np.uint16), (2, 2), flags=dlpack.READ_ONLY)
    array = dlpack.as_array(producer, cpu)
    assert not array.flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        dlpack.as_array(producer, cpu, writable=True)
    assert dlpack.as_array(OldProducer(bf16(2, 2).view(np.uint16), (2, 2)), cpu, writable=True).flags.writeable


def test_a_newer_major_version_is_refused_and_deleted(cpu):
    producer = Producer(bf16(2, 2).view(np.uint16), (2, 2), major=2)
    with pytest.raises(BufferError, match=r"version 2\.0, want 1\.x"):
        dlpack.as_array(producer, cpu)
    gc.collect()
    assert len(producer.deleted) == 1


def test_a_capsule_is_taken_once(cpu):
    producer = Producer(bf16(2, 2).view(np.uint16), (2, 2))

    class Again:
        capsule = producer.__dlpack__(max_version=(1, 0), copy=False)

        def __dlpack__(self, **_):
            return self.capsule

    first = dlpack.read(Again())
    with pytest.raises(BufferError, match="used up or unknown"):
        dlpack.read(Again())
    del first
    gc.collect()
    assert len(producer.deleted) == 1


def test_no_deleter_is_needed(cpu):
    producer = Producer(bf16(2, 2).view(np.uint16), (2, 2))
    producer._deleter = ctypes.c_void_p(None)
    assert dlpack.as_array(producer, cpu)[1, 1] == 3


@pytest.mark.parametrize(("kind", "words"), [(2, "cuda"), (10, "rocm"), (13, "managed"), (99, "kind 99")])
def test_other_memory_is_refused_before_anything_is_exported(cpu, kind, words):
    producer = Producer(bf16(2, 2).view(np.uint16), (2, 2), place=(kind, 0))
    with pytest.raises(TypeError, match=f"{words}.*want memory of device cpu"):
        dlpack.as_array(producer, cpu)
    assert producer.asked == []


def test_another_gpu_is_refused_with_both_numbers(cpu):
    class Gpu:
        name, index, dlpack_types = "emulated", 1, HipDevice.dlpack_types

    with pytest.raises(TypeError, match=r"lies on GPU 0, and this rank's device is emulated:1"):
        dlpack.as_array(Producer(None, (2, 2), place=(10, 0)), Gpu())
    with pytest.raises(TypeError, match=r"lies in cuda, want memory of device emulated:1"):
        dlpack.as_array(Producer(None, (2, 2), place=(2, 1)), Gpu())


def test_views_on_a_gpu():
    class Pointer(int):
        pass

    class Array:
        def __init__(self, shape, dtype, data=0, strides=None):
            if np.dtype(dtype) not in (BF16, np.dtype("u1")):  # as CuPy refuses FP8
                raise ValueError(f"Unsupported dtype {dtype}")
            self.shape, self.dtype, self.data, self.strides = shape, np.dtype(dtype), data, strides

    class Library:
        ndarray = empty = Array

    class Gpu:
        name, index, dlpack_types, xp, spans = "emulated", 1, HipDevice.dlpack_types, Library, []

        def dlpack_stream(self):
            return 0

        def array(self, address, shape, dtype, owner):
            self.spans.append((address, shape, owner))
            return Array(shape, dtype, Pointer(address))

    storage, place, gpu = np.zeros(16, np.uint16), (10, 1), Gpu()
    producer = Producer(storage, (3, 4), (-4, 1), offset=16, place=place)
    array = dlpack.as_array(producer, gpu)
    assert (array.dtype, array.shape, array.strides) == (BF16, (3, 4), (-8, 2))
    assert array.data == storage.ctypes.data + 16
    assert producer.asked == [0]
    assert gpu.spans[0][:2] == (storage.ctypes.data, (24,))  # from the lowest element to the end of the highest
    assert dlpack.as_array(Producer(storage, (4,), code=10, bits=8, place=place), gpu).dtype == np.uint8
    gpu.spans.clear()
    del array
    gc.collect()
    assert len(producer.deleted) == 1


def test_objects_without_the_protocol(cpu):
    with pytest.raises(TypeError, match="list has no __dlpack"):
        dlpack.as_array([1, 2], cpu)
    with pytest.raises(TypeError, match="list has no __dlpack__"):
        dlpack.read([1, 2])


def test_the_stream_reaches_the_producer():
    for kind in (OldProducer, Producer):
        producer = kind(bf16(2, 2).view(np.uint16), (2, 2))
        dlpack.read(producer, stream=7)
        dlpack.read(producer)
        assert producer.asked == [7, None]


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_bf16_of_other_libraries(cpu, library):
    other = pytest.importorskip(library)
    source = other.arange(6, dtype=other.bfloat16).reshape(2, 3)
    array = dlpack.as_array(source, cpu)
    assert array.dtype == BF16
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
