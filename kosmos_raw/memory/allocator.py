"""Offsets in an arena. The same sequence of calls gives the same offsets, so ranks that make the same calls agree."""

from __future__ import annotations

ALIGNMENT = 256  # bytes; a multiple of every cache line and vector here


class Allocator:
    """First fit over `capacity` bytes.

    The space has two ends: the caller's buffers are taken from the top downwards, so that the workspace of operators,
    which starts at offset 0 and only lives during a call, can be as large as what is left below them.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity - capacity % ALIGNMENT
        self._taken: dict[int, int] = {}  # offset -> bytes

    def take(self, nbytes: int) -> int | None:
        """The offset of a new buffer, the highest that fits; None when nothing does."""
        size = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        end = self.capacity
        for offset in sorted(self._taken, reverse=True):
            if end - (offset + self._taken[offset]) >= size:
                break
            end = offset
        if end < size:
            return None
        self._taken[end - size] = size
        return end - size

    def exchange(self, offset: int | None, nbytes: int) -> int | None:
        """Gives the buffer at `offset` back and takes another one; None, and nothing changes, when nothing fits."""
        size = None if offset is None else self._taken.pop(offset)
        new = self.take(nbytes)
        if new is None and size is not None:
            self._taken[offset] = size  # type: ignore[index]
        return new

    def give_back(self, offset: int) -> None:
        """Frees the buffer at `offset`. KeyError when there is none."""
        del self._taken[offset]

    def owner_of(self, offset: int) -> int | None:
        """The offset of the buffer that `offset` lies in, if any."""
        for start, size in self._taken.items():
            if start <= offset < start + size:
                return start
        return None

    @property
    def taken_bytes(self) -> int:
        return sum(self._taken.values())

    @property
    def workspace_bytes(self) -> int:
        """Bytes from offset 0 up to the lowest buffer."""
        return min(self._taken, default=self.capacity)
