"""How ranks meet on the host: exchange small objects, wait for each other, and learn that one is gone."""

from __future__ import annotations

import os
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Rendezvous(ABC):
    """Collective calls: every rank makes the same ones in the same order. They raise RankLost when a rank is gone."""

    rank: int
    ranks: int

    def at_end(self, release: Callable[[], None]) -> None:
        """Calls `release` when no rank of the group runs any more. Where ranks are processes their end releases all."""

    @abstractmethod
    def allgather(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order."""

    def barrier(self) -> None:
        self.allgather(None)

    @abstractmethod
    def watch(self, on_lost: Callable[[int], None]) -> Callable[[], None]:
        """Calls `on_lost(rank)` from another thread when a rank dies or raises. Returns what ends the watch; a rank
        ends its watch after the last barrier, so that an orderly end is no loss."""


def watch_processes(pids: list[int], own: int, on_lost: Callable[[int], None]) -> Callable[[], None]:
    """A watch over the processes of all other ranks, by file descriptors that become readable when one ends.

    Where the system has no pidfd, a lost rank is noticed by the time limit of waits alone.
    """
    if not hasattr(os, "pidfd_open"):
        return lambda: None
    poll = select.poll()
    ranks: dict[int, int] = {}
    for rank, pid in enumerate(pids):
        if rank == own:
            continue
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            on_lost(rank)
            continue
        except OSError:  # not permitted, or an old kernel
            continue
        ranks[fd] = rank
        poll.register(fd, select.POLLIN)
    wake_read, wake_write = os.pipe()
    poll.register(wake_read, select.POLLIN)

    def run() -> None:
        while True:
            for fd, _ in poll.poll():
                if fd == wake_read:
                    return
                poll.unregister(fd)
                on_lost(ranks[fd])

    thread = threading.Thread(target=run, name="kosmos-watch", daemon=True)
    thread.start()

    def stop() -> None:
        if not thread.is_alive():
            return
        os.write(wake_write, b"x")
        thread.join()
        for fd in (*ranks, wake_read, wake_write):
            os.close(fd)

    return stop
