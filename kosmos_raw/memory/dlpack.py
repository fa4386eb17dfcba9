"""Reads arrays of other libraries through DLPack, with ctypes alone.

NumPy and CuPy read DLPack too, but refuse BF16, which is most of what is passed to these operators. Both layouts of the
protocol are read, the versioned one and the one before. Giving arrays out is left to NumPy and CuPy.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from ..device.base import Device

# DLDeviceType: where memory lies.
PLACES = {
    1: "cpu",
    2: "cuda",
    3: "pinned host memory (CUDA)",
    4: "opencl",
    7: "vulkan",
    8: "metal",
    10: "rocm",
    11: "pinned host memory (ROCm)",
    13: "managed memory (CUDA)",
    14: "oneapi",
}

# DLDataTypeCode
INT, UINT, FLOAT, OPAQUE, BFLOAT, COMPLEX, BOOL = range(7)
ML_DTYPES = {  # (code, bits) -> name in ml_dtypes
    (BFLOAT, 16): "bfloat16",
    (8, 8): "float8_e4m3",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}
READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
VERSION = (1, 0)  # the newest that is read here; all of major version 1 have its layout


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


# Keeps the GIL: some libraries' deleters let Python objects go without asking for it.
_DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)

# A capsule's name, and the name it gets once somebody has taken what is in it. Capsules keep the pointer to the text.
_NAMES = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}
_USED = {name: ctypes.c_char_p(used) for name, used in _NAMES.items()}

_api = ctypes.pythonapi
_get_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", _api))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))


class _Taken:
    """What was taken out of a capsule. When it dies the producer's deleter runs, once."""

    def __init__(self, address: int, deleter: int | None):
        self._address: int | None = address
        self._deleter = deleter

    def __del__(self) -> None:
        address, self._address = self._address, None
        if address is not None and self._deleter:
            _DELETER(self._deleter)(address)


@dataclass(frozen=True)
class Tensor:
    """An array of another library. Valid while `keep` lives."""

    address: int  # of the first element; 0 is possible when there are no elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    code: int  # DLDataTypeCode
    bits: int
    lanes: int
    device_type: int  # DLDeviceType
    device_id: int
    read_only: bool
    keep: Any = field(repr=False)

    @property
    def dtype(self) -> np.dtype:
        """NumPy's, or that of ml_dtypes. TypeError when neither has one."""
        if self.lanes == 1:
            if (self.code, self.bits) in ML_DTYPES:
                import ml_dtypes

                found = getattr(ml_dtypes, ML_DTYPES[self.code, self.bits], None)
                if found is not None:
                    return np.dtype(found)
            kind = {INT: "i", UINT: "u", FLOAT: "f", COMPLEX: "c", BOOL: "b"}.get(self.code)
            try:
                if kind and self.bits % 8 == 0 and (kind != "b" or self.bits == 8):
                    return np.dtype(f"{kind}{self.bits // 8}")
            except TypeError:
                pass
        raise TypeError(
            f"DLPack: no dtype here for type code {self.code} with {self.bits} bits and {self.lanes} lanes; give BF16 "
            "as bfloat16 or as its bits in uint16"
        )


def read(x: Any, stream: int | None = None) -> Tensor:
    """Takes the array behind `x.__dlpack__()`. Nothing is copied, and strides are as they are.

    Args:
        x: an object with __dlpack__.
        stream: on which the memory will be used, by DLPack's numbers; None on the CPU.
    Raises:
        TypeError: x does not export itself.
        BufferError: x cannot export this array, or does it in a way that is not known here.
    """
    if not hasattr(x, "__dlpack__"):
        raise TypeError(f"DLPack: {type(x).__name__} has no __dlpack__")
    capsule = _export(x, {} if stream is None else {"stream": stream})
    name = _get_name(capsule)
    if name not in _NAMES:
        raise BufferError(f"DLPack: {type(x).__name__}.__dlpack__() gave a capsule named {name!r}, used up or unknown")
    address = _get_pointer(capsule, name)
    _set_name(capsule, _USED[name])  # from here on the deleter is ours to call
    if name == b"dltensor":
        old = _Managed.from_address(address)
        return _tensor(old.tensor, False, _Taken(address, old.deleter))
    new = _ManagedVersioned.from_address(address)
    keep = _Taken(address, new.deleter)
    if new.major != VERSION[0]:
        raise BufferError(f"DLPack: {type(x).__name__} exports version {new.major}.{new.minor}, want {VERSION[0]}.x")
    return _tensor(new.tensor, bool(new.flags & READ_ONLY), keep)


def _export(x: Any, stream: dict[str, int]) -> Any:
    try:
        return x.__dlpack__(max_version=VERSION, copy=False, **stream)
    except TypeError:  # written before version 1
        return x.__dlpack__(**stream)


def _tensor(t: _DLTensor, read_only: bool, keep: _Taken) -> Tensor:
    shape = tuple(t.shape[i] for i in range(t.ndim))
    if t.strides:
        strides = tuple(t.strides[i] for i in range(t.ndim))
    else:  # none means rows after rows
        strides = tuple(prod(shape[i + 1 :]) for i in range(t.ndim))
    return Tensor(
        address=(t.data or 0) + t.byte_offset,
        shape=shape,
        strides=strides,
        code=t.dtype.code,
        bits=t.dtype.bits,
        lanes=t.dtype.lanes,
        device_type=t.device.type,
        device_id=t.device.id,
        read_only=read_only,
        keep=keep,
    )


def as_array(x: Any, device: Device, *, writable: bool = False) -> Any:
    """A view of `x` as an array of the device's library, without a copy.

    BF16 becomes ml_dtypes.bfloat16. A dtype that CuPy does not have (FP8) becomes unsigned integers of its size. On a
    GPU the caller's current stream waits for what the owner has queued; what is not for writing cannot be marked so.

    Args:
        x: an object with __dlpack__ and __dlpack_device__, in the memory of `device`.
        writable: whether the view will be written.
    Raises:
        TypeError: in other memory than the device's, of an unknown dtype, or not exported at all; says which.
        BufferError: `x` refuses, or is read-only and `writable` is asked for.
    """
    _check_place(x, device)
    tensor = read(x, device.dlpack_stream())
    if writable and tensor.read_only:
        raise BufferError(f"DLPack: the {type(x).__name__} is read-only")
    xp, dtype = device.xp, tensor.dtype
    if prod(tensor.shape) == 0:
        return xp.empty(tensor.shape, _known(xp, dtype))
    reach = [(n - 1) * s * dtype.itemsize for n, s in zip(tensor.shape, tensor.strides, strict=True)]
    below = -sum(r for r in reach if r < 0)  # bytes before the first element
    nbytes = below + sum(r for r in reach if r > 0) + dtype.itemsize
    strides = tuple(s * dtype.itemsize for s in tensor.strides)
    flat = device.array(tensor.address - below, (nbytes,), np.uint8, tensor.keep)
    if xp is np:
        view = np.ndarray(tensor.shape, dtype, flat, below, strides)
        view.flags.writeable = not tensor.read_only
        return view
    return xp.ndarray(tensor.shape, _known(xp, dtype), flat.data + below, strides=strides)


def _known(xp: Any, dtype: np.dtype) -> np.dtype:
    """The dtype, or unsigned integers of its size where the array library does not take it."""
    try:
        xp.empty((0,), dtype)
    except (TypeError, ValueError):
        return np.dtype(f"u{dtype.itemsize}")
    return dtype


def _check_place(x: Any, device: Device) -> None:
    if not hasattr(x, "__dlpack_device__"):
        raise TypeError(f"DLPack: {type(x).__name__} has no __dlpack_device__")
    kind, ordinal = (int(part) for part in x.__dlpack_device__())
    here = f"{device.name}:{device.index}" if device.name != "cpu" else "cpu"
    if kind not in device.dlpack_types:
        raise TypeError(
            f"DLPack: the {type(x).__name__} lies in {PLACES.get(kind, f'memory of kind {kind}')}, want memory of "
            f"device {here}; copy it there first"
        )
    if device.name != "cpu" and ordinal != device.index:
        raise TypeError(
            f"DLPack: the {type(x).__name__} lies on GPU {ordinal}, and this rank's device is {here}; copy it there "
            "first"
        )
