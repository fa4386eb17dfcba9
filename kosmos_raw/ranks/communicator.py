"""One rank's end of a group of ranks: device, arena, epoch, and the launch that every operator goes through."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..build.params import GROUP, MAX_RANKS, SENTINEL, WAIT_RECORD
from ..device import open_device
from ..device.base import Kernel, Matrix, Memory
from ..errors import CommunicatorBroken, KosmosError, NotAvailable, RankLost, WaitError
from ..memory.arena import TILE_SIGNALS, Arena
from . import records
from .prepared import Prepared, Remembered
from .rendezvous import Rendezvous
from .uncollected import uncollected

DEFAULT_TIMEOUT_S = 30.0
POISON = 0x7FA5  # a signalling NaN: what nobody wrote must not look like a result
REBUILD = "call rebuild() on the communicator of every rank, or make a new one"


@dataclass
class TraceBuffer:
    """Trace events of the launches made inside `Communicator.tracing()`; the last launch's are kept."""

    rows: int
    events_per_row: int
    tick_hz: int
    rows_per_wg: int
    memory: Memory = field(repr=False)
    events: np.ndarray | None = field(default=None, repr=False)  # [rows, events_per_row, 2] uint64


class Communicator:
    """What an operator needs of its rank. Made by `kosmos_raw.launch`, or directly from a rendezvous.

    Creating, `empty`, `free`, `barrier`, `rebuild`, `close` and every operator are collective: all ranks make the same
    calls in the same order. One communicator belongs to one stream and one thread.

    Args:
        rendezvous: how the ranks meet on the host.
        device: "cpu", "emulated", "hip" or "cuda".
        arena_bytes: symmetric memory of each rank, for operators and for `empty`.
        timeout_s: how long one wait inside a kernel may last before it gives up. KOSMOS_TIMEOUT_S changes the default.
        workgroups: WGs of each launch; None takes the device's own number.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        device: str = "cpu",
        *,
        arena_bytes: int | None = None,
        timeout_s: float | None = None,
        workgroups: int | None = None,
    ):
        self.rank, self.ranks = rendezvous.rank, rendezvous.ranks
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"Communicator: ranks is {self.ranks}, want 1 to {MAX_RANKS} (the GPUs of one node)")
        self.timeout_s = float(timeout_s or os.environ.get("KOSMOS_TIMEOUT_S") or DEFAULT_TIMEOUT_S)
        self.device = open_device(device, self.rank, self.ranks)
        self.workgroups = self._checked_workgroups(workgroups)
        self._rendezvous = rendezvous
        self._arena = Arena(self.device, rendezvous, arena_bytes or self.device.default_arena_bytes)
        self._launches_together = self._must_launch_together()
        self._kernels: dict[str, Kernel] = {}
        self._remembered = Remembered()
        self._local: dict[str, Memory] = {}
        self._control = [self.device.allocate(256, signals=True)]  # abort word at 0, record at 64
        self._host_abort, self._host_abort_address = self.device.host_words(1)
        self._epoch = 0
        self._counters_used = 0  # words that the last launch dirtied
        self._staging_turn = 0  # launches that used staging
        self._staging_dirty = 0  # bytes that the last of them wrote into its buffer
        self._trace: TraceBuffer | None = None
        self._unchecked: str | None = None  # the operator of a launch whose end was not looked at yet
        self._broken: str | None = None
        self._lost: list[int] = []
        self._group = self._make_group()
        self._stop_watch = rendezvous.watch(self._on_lost)
        rendezvous.at_end(self._release)

    def _checked_workgroups(self, workgroups: int | None) -> int:
        most = self.device.max_workgroups
        chosen = self.device.default_workgroups if workgroups is None else workgroups
        fewest = 1 if self.ranks == 1 else 2
        if not fewest <= chosen <= most:
            raise NotAvailable(
                f"Communicator: workgroups is {chosen}, want {fewest} to {most}: all WGs of a kernel must be resident "
                f"at once on {self.device.describe()}, and a mover needs a builder beside it"
            )
        return chosen

    def _must_launch_together(self) -> bool:
        """Whether ranks meet before and after each launch: all of them, if one must.

        Ranks that share a GPU must. So must ranks of one process: what its runtime does for one of them (allocating,
        loading) may wait for the GPU of another, whose kernel waits for a launch of the first.
        """
        asked = self._rendezvous.allgather((self.device.launches_together, os.getpid()))
        one_process = self.device.queues_launches and len({pid for _, pid in asked}) < self.ranks
        return one_process or any(must for must, _ in asked)

    def _make_group(self) -> np.ndarray:
        group = np.zeros(1, GROUP)
        group["signals_of"][0, : self.ranks] = [self._arena.signals(q) for q in range(self.ranks)]
        group["abort"] = self._control[0].address
        group["record"] = self._control[0].address + 64
        group["host_abort"] = self._host_abort_address
        group["limit_ticks"] = int(self.timeout_s * self.device.tick_hz)
        group["rank"], group["ranks"], group["wgs"] = self.rank, self.ranks, self.workgroups
        return group

    # -- memory of the caller

    def empty(self, shape: tuple[int, ...], dtype: Any = "bfloat16") -> Any:
        """An uninitialised array in the symmetric arena, at the same offset on every rank: operators use it without a
        copy. Collective; the size in bytes must be equal on all ranks. It lives until `free` or `close`.

        Raises:
            ArenaFull: the arena has no such room left.
        """
        self._check_usable("empty")
        dtype = self.dtype(dtype)
        offset = self._arena.take(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, "empty")
        return self.device.array(self._arena.address(self.rank, offset), tuple(shape), dtype, self._arena.owner)

    def free(self, array: Any) -> None:
        """Gives an array of `empty` back. Collective; no kernel may still use it."""
        offset = self._arena.offset_of(self.device.address_of(array), 0)
        start = None if offset is None else self._arena.allocator.owner_of(offset)
        if start is None:
            raise ValueError("free: the array does not come from this communicator's empty()")
        self._arena.allocator.give_back(start)

    @staticmethod
    def dtype(dtype: Any) -> np.dtype:
        """NumPy's dtype, with "bfloat16" known by name."""
        if isinstance(dtype, str) and dtype == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(dtype)

    # -- for operators

    @property
    def arena(self) -> Arena:
        return self._arena

    def kernel(self, op: str) -> Kernel:
        """The operator's kernel, loaded on all ranks before any of them launches: a rank that compiles while its peers'
        kernels wait would use up their patience."""
        if op not in self._kernels:
            self._check_usable(op)
            self._kernels[op] = self.device.kernel(op)
            self._rendezvous.barrier()
        return self._kernels[op]

    def local(self, name: str, nbytes: int) -> int:
        """Address of at least `nbytes` of this rank's own device memory, kept under `name` between calls."""
        memory = self._local.get(name)
        if memory is None or memory.nbytes < nbytes:
            if memory is not None:
                self._remembered.forget()
                self.device.synchronize()  # a queued kernel may still use the old one
                self.device.free(memory)
            memory = self._local[name] = self.device.allocate(nbytes)
        return memory.address

    def forget(self, prefix: str) -> None:
        """Frees the memory of `local` whose names begin so. No launch may use it any more."""
        self.device.synchronize()
        for name in [name for name in self._local if name.startswith(prefix)]:
            self.device.free(self._local.pop(name))

    def symmetric_region(self, name: str, nbytes: int, op: str) -> tuple[int, int]:
        """Offset and bytes of at least `nbytes` that operators keep in every rank's arena under `name`.

        Raises: ArenaFull, on all ranks alike.
        """
        self._check_usable(op)
        _, new = self._arena.region(name, nbytes, op)
        if new:  # its place may have been another's
            self._remembered.forget()
            self.synchronize()
            self._rendezvous.barrier()  # no rank's launch is still reading there
        return self._arena.regions()[name]

    def fill_staging(self, staging: np.ndarray, nbytes: int, op: str) -> int:
        """Fills a Staging struct for a launch that writes `nbytes` of partial results; equal on all ranks.

        Returns: the turn, which must be equal on all ranks too: part of `call`.
        Raises: ArenaFull, on all ranks alike.
        """
        before = self._arena.regions().get("staging")
        offset, size = self.symmetric_region("staging", 2 * nbytes, op)
        if (offset, size) != before:
            self._poison_staging()
        capacity = size // 2
        staging["of"][0, : self.ranks] = [self._arena.address(q, offset) for q in range(self.ranks)]
        staging["buffer_words"], staging["dirty_words"] = capacity // 16, self._staging_dirty // 16
        self._staging_turn = (self._staging_turn + 1) & 0xFFFFFFFF
        self._staging_dirty = nbytes
        staging["turn"] = self._staging_turn
        return self._staging_turn

    @property
    def tile_signals(self) -> int:
        """Tiles of this rank's rows that each rank can tell it of in one launch."""
        return TILE_SIGNALS // self.ranks

    def fill_inbox(self, inbox: np.ndarray, nbytes: int, op: str) -> int:
        """Fills an Inbox struct for a launch whose partial tiles take `nbytes` at each owner; equal on all ranks.

        Returns: its offset in the arena, which must be equal on all ranks too: part of `call`.
        Raises: ArenaFull, on all ranks alike.
        """
        self._check_usable(op)
        offset, new = self._arena.region("inbox", nbytes, op)
        if new:  # its place may have been another's
            self._remembered.forget()
            self.synchronize()
            self._rendezvous.barrier()  # no rank's launch is still reading or writing there
        inbox["of"][0, : self.ranks] = [self._arena.address(q, offset) for q in range(self.ranks)]
        inbox["arrived_of"][0, : self.ranks] = [self._arena.tile_signals(q) for q in range(self.ranks)]
        inbox["per_rank"] = self.tile_signals
        return offset

    def _poison_staging(self) -> None:
        """Makes both buffers as before the first turn. No kernel of any rank may use them now; whoever reads them next
        waits for a later launch of this rank, so nobody has to wait for this."""
        offset, nbytes = self._arena.regions().get("staging", (0, 0))
        address = self._arena.address(self.rank, offset)
        self.device.fill(address, nbytes, SENTINEL)
        self._staging_dirty = 0
        self.device.synchronize()

    def launch(
        self,
        op: str,
        params: np.ndarray,
        call: tuple[Any, ...],
        counter_words: int,
        operands: Sequence[Matrix] = (),
        *,
        kernel: str | None = None,
        key: Hashable | None = None,
    ) -> None:
        """Launches `op` once, as the next epoch.

        Args:
            params: the operator's 1-element params struct; its fields `g` and `counters` are filled here.
            call: what must be equal on all ranks; a rank that calls with something else is reported, not waited for.
            counter_words: words of one counter set that this launch uses.
            operands: the matrices that its output tiles read; some devices need to know.
            kernel: its name, where an operator has several; ranks may use different ones.
            key: as prepared.key_of makes it, where a call with equal arguments may be made again just so: its params
                name no workspace of this call alone.
        Raises:
            CommunicatorBroken: the communicator is closed, or an earlier launch gave up.
            WaitError: this launch gave up (on devices that queue launches, raised by `synchronize` or the next call).
        """
        loaded = self._loaded(kernel or op, params)
        params["g"] = self._group
        begin = loaded.prepare(params, operands)
        prepared = Prepared(op, params, zlib.crc32(repr((op, *call)).encode()), counter_words, begin)
        if key is not None:
            self._remembered.keep(key, prepared)
        self._start(prepared)

    def launch_again(self, key: Hashable) -> bool:
        """Makes the launch that was made with this key before; False if there was none, or workspace has moved."""
        prepared = self._remembered.get(key)
        if prepared is None:
            return False
        self._check_usable(prepared.op)
        self._start(prepared)
        return True

    def _start(self, prepared: Prepared) -> None:
        self._epoch = (self._epoch + 1) & 0xFFFFFFFF
        trace = self._trace
        events = (trace.memory.address, trace.events_per_row) if trace else (0, 0)
        prepared.fill(self._epoch, self._counters(prepared.counter_words), events)
        if trace:
            self.device.zero(trace.memory.address, trace.memory.nbytes)
        self._unchecked = prepared.op
        # Streams wait for each other outside of the meeting: callers may have one stream, the null stream, which must
        # not wait for a kernel before all kernels have been launched.
        begin = partial(self._begin_together, prepared.begin) if self._launches_together else prepared.begin
        self.device.in_order(begin, self.workgroups)
        if not self.device.queues_launches:
            self.synchronize()

    def _begin_together(self, begin: Callable[[int], None], workgroups: int) -> None:
        """Ranks that must meet do so before and after a launch."""
        with uncollected():
            self._rendezvous.barrier()
            begin(workgroups)
            self._rendezvous.barrier()

    def launch_plain(self, op: str, params: np.ndarray) -> None:
        """Launches a kernel that waits for nobody, in stream order: no epoch, and no other rank need launch it. Its
        field `wgs` is filled here."""
        loaded = self._loaded(op, params)
        params["wgs"] = workgroups = self.workgroups * loaded.wgs_per_unit
        self.device.in_order(loaded.prepare(params), workgroups)

    def _loaded(self, op: str, params: np.ndarray) -> Kernel:
        self._check_usable(op)
        loaded = self.kernel(op)
        if params.dtype.itemsize != loaded.params_bytes:
            raise KosmosError(
                f"{op}: params struct has {params.dtype.itemsize} bytes, the compiled kernel wants "
                f"{loaded.params_bytes}; the kernel was built from other sources than this package's"
            )
        return loaded

    def _counters(self, words: int) -> tuple[int, int, int]:
        """The fields of Counters, for a launch that uses so many words of a set."""
        memory = self._local.get("counters")
        if memory is None or memory.nbytes < 8 * words:
            self.local("counters", 8 * max(words, 4096))  # new memory is zeroed: both sets are clear
            memory, self._counters_used = self._local["counters"], 0
        to_clear, self._counters_used = self._counters_used, words
        return memory.address, memory.nbytes // 8, to_clear

    def synchronize(self) -> None:
        """Waits until everything launched has ended; raises WaitError when it gave up."""
        self.device.synchronize()
        op, self._unchecked = self._unchecked, None
        if op is None:
            return
        abort = int(np.frombuffer(self.device.to_host(self._control[0].address, 4), np.uint32)[0])
        if abort:
            raw = self.device.to_host(self._control[0].address + 64, WAIT_RECORD.itemsize)
            counters = self._local.get("counters")
            record = records.decode(op, raw, self.rank, self.ranks, self._arena, counters)
            self._broken = f"{op} gave up" if record is None else str(record)
            lost = f"{self._who_is_lost()}; " if self._lost else ""
            raise WaitError(record, f"{lost}outputs are undefined; {REBUILD}")
        if self._trace:
            raw = self.device.to_host(self._trace.memory.address, self._trace.memory.nbytes)
            shape = (self._trace.rows, self._trace.events_per_row, 2)
            self._trace.events = np.frombuffer(raw, np.uint64, count=int(np.prod(shape))).reshape(shape).copy()

    @contextmanager
    def tracing(self, events_per_row: int = 512) -> Iterator[TraceBuffer]:
        """Launches inside the block write trace events; `events` of the yielded buffer holds the last launch's."""
        rows = self.workgroups * self.device.trace_rows
        memory = self.device.allocate(rows * events_per_row * 16)
        buffer = TraceBuffer(rows, events_per_row, self.device.tick_hz, self.device.trace_rows, memory)
        self._trace = buffer
        try:
            yield buffer
            self.synchronize()
        finally:
            self._trace = None
            self.device.synchronize()
            self.device.free(memory)

    # -- the group

    def barrier(self) -> None:
        """Waits on the host until every rank is here."""
        self._rendezvous.barrier()

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order, over the host."""
        return self._rendezvous.allgather(value)

    def poison(self) -> None:
        """Fills every workspace that operators have used, in the arena and outside, with NaNs: what a launch reads
        before it was written then shows. Collective; arrays of `empty` are left alone."""
        self.synchronize()
        self._check_usable("poison")
        self._rendezvous.barrier()
        used = min(self._arena.workspace_used, self._arena.allocator.workspace_bytes)  # buffers may have come since
        places = [(self._arena.address(self.rank), used)]
        places += [(m.address, m.nbytes) for name, m in self._local.items() if name != "counters"]
        if "inbox" in self._arena.regions():
            offset, nbytes = self._arena.regions()["inbox"]
            places.append((self._arena.address(self.rank, offset), nbytes))
        for address, nbytes in places:
            self.device.fill(address, nbytes, POISON)
        self.device.synchronize()
        self._rendezvous.barrier()

    def rebuild(self) -> None:
        """Makes the communicator usable again after a WaitError: all ranks together, none of them lost.

        Clears signals, counters and abort words, and agrees on an epoch that no rank has used.
        """
        self.device.synchronize()
        self._check_open("rebuild")
        epochs = self._rendezvous.allgather(self._epoch)  # from here on no kernel of any rank runs
        self._epoch = max(epochs)
        self._arena.zero_signals()
        self.device.zero(self._control[0].address, self._control[0].nbytes)
        if "counters" in self._local:
            self.device.zero(self._local["counters"].address, self._local["counters"].nbytes)
        self._counters_used = 0
        self._staging_turn = 0
        self._poison_staging()
        self._host_abort[0] = 1 if self._lost else 0
        self._unchecked = self._broken = None
        self.device.synchronize()
        self._rendezvous.barrier()  # nobody may signal before everybody has cleared

    def close(self) -> None:
        """Gives everything back. Collective. Arrays of `empty` become invalid.

        When a rank was lost nobody is waited for, and what peers may still be reading is kept until their end.
        """
        if self._broken == "closed":
            return
        self.device.synchronize()
        try:
            if not self._lost:
                self._rendezvous.barrier()  # after it nobody's end is a loss
                self._stop_watch()
                self._arena.close()
                self._release()
        except RankLost:
            pass
        finally:
            self._broken = "closed"

    def _release(self) -> None:
        """Frees what is left, once: at the end of close, or when no rank of the group runs any more."""
        self._broken = "closed"
        self._stop_watch()
        self._arena.free()
        for memory in (*self._local.values(), *self._control):
            self.device.free(memory)
        self._local.clear()
        self._control.clear()
        self.device.close_device()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_lost(self, rank: int) -> None:
        self._lost.append(rank)
        self._host_abort[0] = 1  # kernels that wait for it leave at their next look

    def _check_open(self, what: str) -> None:
        if self._broken == "closed":
            raise CommunicatorBroken(f"{what}: the communicator is closed; make a new one")
        if self._lost:
            raise CommunicatorBroken(f"{what}: {self._who_is_lost()}; make a new communicator without it")

    def _who_is_lost(self) -> str:
        return f"rank{'s' * (len(self._lost) > 1)} {', '.join(map(str, self._lost))} died or raised"

    def _check_usable(self, what: str) -> None:
        self._check_open(what)
        if self._unchecked is not None:
            self._peek()
        if self._broken:
            raise CommunicatorBroken(f"{what}: an earlier launch here gave up ({self._broken}); {REBUILD}")

    def _peek(self) -> None:
        """Looks, without waiting, whether a queued launch has been told to stop from here."""
        if self._host_abort[0]:
            self.synchronize()
