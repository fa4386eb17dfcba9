"""CuPy's import and its errors, explained."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import KosmosError, NotAvailable

if TYPE_CHECKING:
    from .cupy_common import CupyDevice

# Numbered alike by both vendors: kinds of copies, and errors of the runtime.
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
OUT_OF_MEMORY, NOT_INITIALIZED, PEER_ALREADY_ENABLED = 2, 3, 704
CAPTURE_ERRORS = range(900, 910)


def import_cupy(device: str, extra: str, want_hip: bool) -> ModuleType:
    """CuPy built for the wanted vendor.

    Raises:
        NotAvailable: there is none, it is the other vendor's, or it does not load; names the extra to install.
    """
    install = f"pip install 'kosmos-raw[{extra}]'"
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise NotAvailable(f"device {device}: CuPy does not load ({error}); {install}") from error
        raise NotAvailable(f"device {device}: needs CuPy, which is not installed; {install}") from error
    except ImportError as error:
        cause = next((line.strip() for line in reversed(str(error).splitlines()) if "Error" in line), str(error))
        raise NotAvailable(
            f"device {device}: CuPy is installed but does not load: {cause}; CuPy and the installed driver libraries "
            f"must be of the same vendor and major version ({install}, and see LD_LIBRARY_PATH)"
        ) from error
    if bool(cupy.cuda.runtime.is_hip) != want_hip:
        built = "ROCm" if cupy.cuda.runtime.is_hip else "CUDA"
        other = "cuda" if want_hip else "hip"
        raise NotAvailable(
            f"device {device}: the installed CuPy {cupy.__version__} is built for {built}; uninstall it (pip list | "
            f"grep cupy) and {install}, or use device={other!r}"
        )
    return cupy


class GpuError(KosmosError):
    """A call of the GPU's runtime failed. `status` is the runtime's own number."""

    def __init__(self, message: str, status: int):
        self.status = status
        super().__init__(message)


def status_of(error: BaseException) -> int | None:
    """The runtime's number of an error that CuPy or this module raised, else None."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


class Explained(AbstractContextManager[None]):
    """See CupyDevice.explained. A class, for a generator would cost more than the launch that it surrounds."""

    __slots__ = ("advice", "device", "doing")

    def __init__(self, device: CupyDevice, doing: str, advice: str):
        self.device, self.doing, self.advice = device, doing, advice

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, KosmosError):
            return
        status = status_of(error)
        if status is None:
            return
        if status in CAPTURE_ERRORS:
            raise self.device._capture_error("a stream of this process", error) from error
        where = f"device {self.device.name}:{self.device.index}"
        raise GpuError(
            f"{where}: {self.doing}: {error}" + (f"; {self.advice}" if self.advice else ""), status
        ) from error
