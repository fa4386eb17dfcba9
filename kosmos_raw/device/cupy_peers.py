"""Memory of other ranks: opened by IPC handles where ranks are processes, reached by peer access where they are one.

A handle names a whole allocation, and a process opens each of a peer's once, however many communicators use it.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import NotAvailable
from .base import Device, Handle, Memory
from .cupy_errors import DEVICE_TO_HOST, PEER_ALREADY_ENABLED, status_of

LAZY_PEER_ACCESS = 1  # the only flag that opening a handle accepts, on both vendors

_lock = threading.Lock()


class IpcToken(NamedTuple):
    """What another process needs to open an allocation."""

    handle: bytes | None  # 64 bytes; None: the runtime refused to make one
    pci: str  # of the owner's GPU: ordinals differ between processes with different masks
    ordinal: int  # in the owner's process
    why_none: str
    tag: bytes  # the last bytes of the memory


@dataclass
class _Opened:
    memory: Memory
    users: int


_opened: dict[tuple[int, int, bytes], _Opened] = {}  # (ordinal here, owner's pid, handle): opened once a process


class PeerMemory(Device):
    """The part of CupyDevice that deals with peers."""

    _runtime: Any  # cupy.cuda.runtime
    sharers: int  # ranks on this GPU

    @property
    @abstractmethod
    def pci(self) -> str: ...

    @abstractmethod
    def current(self) -> AbstractContextManager[Any]: ...

    @abstractmethod
    def explained(self, doing: str, advice: str = "") -> AbstractContextManager[None]: ...

    @abstractmethod
    def _masks_in_words(self) -> str: ...

    def _ipc_advice(self) -> str:
        """What to look at when IPC fails."""
        return "ranks of different containers need shared IPC and PID namespaces"

    def _export_token(self, memory: Memory) -> IpcToken:
        if memory.opened or memory.keep is None:
            raise ValueError("export: want a whole allocation of this device, not freed; a peer's cannot be passed on")
        handle, why = None, ""
        with self.current():
            try:
                handle = bytes(self._runtime.ipcGetMemHandle(memory.address))
            except RuntimeError as error:  # told to whoever needs the handle: ranks that are threads do not
                why = str(error)
        return IpcToken(handle, self.pci, self.index, why, memory.tag)

    def _open_token(self, handle: Handle) -> Memory:
        token: IpcToken = handle.token
        if token.handle is None:
            raise NotAvailable(
                f"device {self.name}: process {handle.pid} could not export its memory: {token.why_none}; "
                f"{self._ipc_advice()}"
            )
        with self.current():
            try:
                ordinal = int(self._runtime.deviceGetByPCIBusId(token.pci))
            except RuntimeError as error:
                raise NotAvailable(
                    f"device {self.name}: the GPU {token.pci} of process {handle.pid} is not visible in this process "
                    f"({error}); {self._masks_in_words()}; every rank must see the GPUs of all ranks"
                ) from error
            if ordinal == self.index and self.sharers == 1:
                raise NotAvailable(
                    f"device {self.name}: this process and process {handle.pid} have the same GPU, {token.pci}, as "
                    f"they see GPUs in different orders; {self._masks_in_words()}; give every rank the same masks"
                )
            self._reach(ordinal, token.pci)
            key = (self.index, handle.pid, token.handle)
            with _lock:
                known = _opened.get(key)
                if known is None:
                    known = _opened[key] = _Opened(self._open_new(handle, token), 0)
                known.users += 1
            return Memory(known.memory.address, handle.nbytes, keep=key, opened=True)

    def _open_new(self, handle: Handle, token: IpcToken) -> Memory:
        pair = f"{self.pci} (this process) and {token.pci} (process {handle.pid})"
        try:
            address = int(self._runtime.ipcOpenMemHandle(token.handle, LAZY_PEER_ACCESS))
        except RuntimeError as error:
            raise NotAvailable(
                f"device {self.name}: cannot open memory of another process, GPUs {pair}: {error}; {self._ipc_advice()}"
            ) from error
        seen = np.zeros(max(1, len(token.tag)), np.uint8)
        with self.explained(f"reading memory over IPC, GPUs {pair}", self._ipc_advice()):
            # A mapping that cannot be read, or is of other memory, should fail here, not in a kernel.
            last = address + handle.nbytes - seen.nbytes
            self._runtime.memcpy(seen.ctypes.data, last, seen.nbytes, DEVICE_TO_HOST)
        if token.tag and seen.tobytes() != token.tag:
            self._runtime.ipcCloseMemHandle(address)
            raise NotAvailable(
                f"device {self.name}: a handle opens other memory than it names, GPUs {pair}; this process has "
                f"{len(_opened)} others open, and from 36 on some runtimes mix them up: close communicators that are "
                f"done; {self._ipc_advice()}"
            )
        return Memory(address, handle.nbytes, opened=True)

    def _reach_own(self, handle: Handle) -> None:
        """Ranks as threads of one process: no IPC, only peer access to another GPU."""
        with self.current():
            self._reach(handle.token.ordinal, handle.token.pci)

    def _reach(self, ordinal: int, pci: str) -> None:
        """Lets kernels of this GPU use memory of GPU `ordinal`; called with this GPU current."""
        if ordinal == self.index:
            return
        if not self._runtime.deviceCanAccessPeer(self.index, ordinal):
            raise NotAvailable(
                f"device {self.name}: GPU {self.index} ({self.pci}) cannot use memory of GPU {ordinal} ({pci}); ranks "
                "need GPUs that are linked (NVLink, XGMI or PCIe without ACS), whole ones rather than slices"
            )
        try:
            self._runtime.deviceEnablePeerAccess(ordinal)
        except RuntimeError as error:
            if status_of(error) != PEER_ALREADY_ENABLED:
                raise NotAvailable(
                    f"device {self.name}: enabling peer access from GPU {self.index} to {ordinal}: {error}"
                ) from error

    def close(self, memory: Memory) -> None:
        """Undoes `open`; the last user of a mapping unmaps it. A second call does nothing."""
        if not memory.opened:
            raise ValueError(f"close: the memory at {memory.address:#x} is this rank's own; free it")
        key, memory.keep = memory.keep, None
        if key is None:  # of this process, or closed already
            return
        with self.current(), _lock:
            known = _opened[key]
            known.users -= 1
            if known.users == 0:
                del _opened[key]
                with self.explained("closing memory of another process"):
                    self._runtime.ipcCloseMemHandle(known.memory.address)
