"""Ranks as threads of this process: for tests, sanitizers, and programs that drive several devices from one process."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import RankLost
from .processes import raise_first
from .rendezvous import Rendezvous


class _Meeting:
    """Where the threads of one group meet."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.changed = threading.Condition()
        self.round = 0
        self.given: dict[int, Any] = {}
        self.taken: list[Any] = []
        self.lost: set[int] = set()
        self.watchers: dict[int, Callable[[int], None]] = {}
        self.at_end: list[Callable[[], None]] = []

    def leave(self, rank: int) -> None:
        """`rank` raised: whoever waits for it must learn that."""
        with self.changed:
            self.lost.add(rank)
            self.changed.notify_all()
            watchers = [on_lost for other, on_lost in self.watchers.items() if other != rank]
        for on_lost in watchers:
            on_lost(rank)


class ThreadRendezvous(Rendezvous):
    def __init__(self, rank: int, meeting: _Meeting):
        self.rank, self.ranks = rank, meeting.ranks
        self._meeting = meeting

    def at_end(self, release: Callable[[], None]) -> None:
        self._meeting.at_end.append(release)

    def allgather(self, value: Any) -> list[Any]:
        m = self._meeting
        with m.changed:
            round_ = m.round
            m.given[self.rank] = value
            if len(m.given) == m.ranks:
                m.taken = [m.given[q] for q in range(m.ranks)]
                m.given = {}
                m.round += 1
                m.changed.notify_all()
            while m.round == round_:
                if m.lost:
                    raise RankLost(f"rank {min(m.lost)} raised while rank {self.rank} waited for it")
                m.changed.wait()
            # The next exchange cannot complete before this rank has joined it, so the list is still this one's.
            return list(m.taken)

    def watch(self, on_lost: Callable[[int], None]) -> Callable[[], None]:
        with self._meeting.changed:
            self._meeting.watchers[self.rank] = on_lost
            lost = set(self._meeting.lost)
        for rank in lost:
            on_lost(rank)
        return lambda: self._meeting.watchers.pop(self.rank, None) and None


def run_threads(run_rank: Callable[[Rendezvous], Any], ranks: int) -> list[Any]:
    """Runs `run_rank(rendezvous)` in `ranks` threads; returns their results in rank order, or raises as
    `run_processes` does."""
    meeting = _Meeting(ranks)
    results: dict[int, Any] = {}
    errors: dict[int, tuple[BaseException, str]] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = run_rank(ThreadRendezvous(rank, meeting))
        except BaseException as error:
            errors[rank] = (error, traceback.format_exc())
            meeting.leave(rank)

    threads = [threading.Thread(target=body, args=(rank,), name=f"kosmos-rank-{rank}") for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for release in meeting.at_end:
        release()
    raise_first(errors)
    return [results[rank] for rank in range(ranks)]
