"""What can go wrong, with the numbers that say why."""

from __future__ import annotations

from dataclasses import asdict, dataclass


class KosmosError(RuntimeError):
    """Base of every error of this package that is not a plain ValueError or TypeError."""


class NotAvailable(KosmosError):
    """Something this machine or installation does not have: a device, an extra, enough compute units."""


class ArenaFull(KosmosError):
    """The symmetric arena is too small for what was asked; the message says by how much."""


class RankLost(KosmosError):
    """Another rank died or raised, so that what was asked of it will never come."""


@dataclass(frozen=True)
class WaitRecord:
    """The first wait inside a kernel that gave up (hip_kernels/schedule/group.h)."""

    op: str
    reason: str  # "waited too long", "told to stop", "different call"
    rank: int
    wg: int
    kind: str  # what the WG was about to do: pull, tile, drain
    chunk: int
    row: int
    part: int
    signal: str  # what it waited for, by name
    want: int
    seen: int

    def __str__(self) -> str:
        return (
            f"{self.op}: {self.reason}: rank={self.rank} wg={self.wg} {self.kind} chunk={self.chunk} row={self.row} "
            f"part={self.part} signal={self.signal} want={self.want} seen={self.seen}"
        )

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class WaitError(KosmosError):
    """A kernel left because a wait gave up. Its outputs are undefined, and the communicator refuses calls until
    `Communicator.rebuild()` has been called on every rank."""

    def __init__(self, record: WaitRecord | None, advice: str):
        self.record = record
        super().__init__(f"{record}; {advice}" if record else advice)


class CommunicatorBroken(KosmosError):
    """A call on a communicator whose last launch gave up and that was not rebuilt, or that is closed."""
