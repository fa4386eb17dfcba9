"""The symmetric arena of one rank, and its peers' arenas as this process sees them."""

from __future__ import annotations

from ..device.base import Device, Memory
from ..errors import ArenaFull
from ..ranks.rendezvous import Rendezvous
from .allocator import Allocator

# Of a rank: Signals, then words of operators that need more. Fixed, for peers open it once.
SIGNAL_BYTES = 4 << 20
TILE_SIGNALS = 1 << 17  # words behind them: of tiles that peers store into its memory


class Arena:
    """Signals and data, each one raw allocation a rank.

    They are apart because signals must not be held back by any cache, while data should be cached. Creating and closing
    an arena are collective: every rank does it.
    """

    def __init__(self, device: Device, rendezvous: Rendezvous, nbytes: int):
        self.device = device
        self.nbytes = nbytes
        self.rank, self.ranks = rendezvous.rank, rendezvous.ranks
        self._rendezvous = rendezvous
        self._own = [
            device.allocate(SIGNAL_BYTES + TILE_SIGNALS * 4, signals=True, shared=True),
            device.allocate(nbytes, shared=True),
        ]
        handles = rendezvous.allgather([device.export(memory) for memory in self._own])
        self._regions: list[list[Memory]] = [
            self._own if q == self.rank else [device.open(handle) for handle in theirs]
            for q, theirs in enumerate(handles)
        ]
        rendezvous.barrier()  # nobody may die or free before everybody has opened
        self.allocator = Allocator(nbytes)
        self._regions_of_operators: dict[str, tuple[int, int]] = {}  # name -> (offset, bytes)
        self.workspace_used = 0  # bytes from offset 0 that calls have asked for so far

    def signals(self, rank: int) -> int:
        """Address of the signals of `rank`."""
        return self._regions[rank][0].address

    def tile_signals(self, rank: int) -> int:
        """Address of the signals of tiles that peers store into the memory of `rank`: TILE_SIGNALS words, each
        written by one rank alone."""
        return self.signals(rank) + SIGNAL_BYTES

    def address(self, rank: int, offset: int = 0) -> int:
        """Address of byte `offset` of the data of `rank`."""
        return self._regions[rank][1].address + offset

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """The offset of a buffer of this rank, or None when it does not lie in the arena."""
        offset = address - self.address(self.rank)
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None

    @property
    def owner(self) -> Memory:
        """What arrays over this rank's data must keep alive."""
        return self._own[1]

    def take(self, nbytes: int, what: str) -> int:
        """The offset of a new buffer for the caller, the same on every rank that has made the same calls."""
        offset = self.allocator.take(nbytes)
        if offset is None:
            raise ArenaFull(
                f"{what}: needs {nbytes:,} bytes of the arena, which has {self.nbytes:,} bytes, "
                f"{self.allocator.taken_bytes:,} of them taken; pass arena_bytes= to launch() or Communicator"
            )
        return offset

    def workspace(self, nbytes: int, what: str) -> int:
        """The offset of `nbytes` that one call may use until it ends. Calls follow each other, so they share it."""
        if nbytes > self.allocator.workspace_bytes:
            raise ArenaFull(
                f"{what}: needs {nbytes:,} bytes of the arena for this call; {self.allocator.workspace_bytes:,} of "
                f"{self.nbytes:,} bytes are left below the buffers of empty(); "
                f"pass arena_bytes={nbytes + self.allocator.taken_bytes:,} or more to launch() or Communicator"
            )
        self.workspace_used = max(self.workspace_used, nbytes)
        return 0

    def region(self, name: str, nbytes: int, what: str) -> tuple[int, bool]:
        """The offset of at least `nbytes` that operators keep from call to call under `name`, and whether they are new.

        Ranks that make the same calls get the same offsets. New ones may overlap what `name`, or a caller, had before:
        no kernel of any rank may run then that was told of the old ones.
        """
        offset, size = self._regions_of_operators.get(name, (None, -1))
        if offset is not None and size >= nbytes:
            return offset, False
        new = self.allocator.exchange(offset, nbytes)
        if new is None:
            raise ArenaFull(
                f"{what}: needs {nbytes:,} bytes of the arena for {name}, which it keeps; the arena has "
                f"{self.nbytes:,} bytes, {self.allocator.taken_bytes:,} of them taken; "
                "pass arena_bytes= to launch() or Communicator"
            )
        self._regions_of_operators[name] = (new, nbytes)
        return new, True

    def regions(self) -> dict[str, tuple[int, int]]:
        """Offset and bytes of every region of operators, by name."""
        return dict(self._regions_of_operators)

    def need_signals(self, nbytes: int, what: str) -> None:
        """Raises ArenaFull when an operator's signals, Signals in front of them, do not fit."""
        if nbytes > SIGNAL_BYTES:
            raise ArenaFull(
                f"{what}: needs {nbytes:,} bytes of signals, there are {SIGNAL_BYTES:,}; give fewer tokens a call"
            )

    def zero_signals(self) -> None:
        self.device.zero(self._own[0].address, self._own[0].nbytes)

    def close(self) -> None:
        """Undoes the opening, waits until all ranks have, and frees. Collective."""
        self.close_peers()
        self._rendezvous.barrier()
        self.free()

    def close_peers(self) -> None:
        for q, regions in enumerate(self._regions):
            if q != self.rank:
                for memory in regions:
                    self.device.close(memory)
        self._regions = []

    def free(self) -> None:
        """Frees this rank's memory. No peer may still have it open."""
        for memory in self._own:
            self.device.free(memory)
        self._own = []
