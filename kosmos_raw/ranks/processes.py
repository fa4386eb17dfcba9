"""Ranks as processes spawned here. The parent is the meeting point: it passes what ranks exchange, notices who died,
and brings back results."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from ..errors import RankLost
from .rendezvous import Rendezvous, watch_processes


class ParentRendezvous(Rendezvous):
    """A child's end: every exchange goes through the parent."""

    def __init__(self, rank: int, ranks: int, connection: Connection):
        self.rank, self.ranks = rank, ranks
        self._connection = connection

    def allgather(self, value: Any) -> list[Any]:
        self._connection.send(("gather", value))
        try:
            lost, values = self._connection.recv()
        except EOFError:
            raise RankLost("the parent process is gone") from None
        if lost is not None:
            raise RankLost(f"rank {lost} died or raised while rank {self.rank} waited for it")
        return values

    def watch(self, on_lost: Callable[[int], None]) -> Callable[[], None]:
        return watch_processes(self.allgather(os.getpid()), self.rank, on_lost)


PR_SET_PDEATHSIG = 1
IMPORTABLE = "a rank's process imports the main program: put launch() under  if __name__ == '__main__':"


def _end_with_parent(parent: int) -> None:
    """Has the system kill this process when the parent ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _portable(error: BaseException) -> BaseException:
    """`error`, if the parent can unpickle it without importing what only ranks may have (a GPU library)."""
    try:
        if type(error).__module__.split(".")[0] in ("builtins", "kosmos_raw"):
            pickle.loads(pickle.dumps(error))
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def _child(work: bytes, rank: int, ranks: int, connection: Connection, parent: int) -> None:
    _end_with_parent(parent)
    try:
        run_rank = pickle.loads(work)
        result = run_rank(ParentRendezvous(rank, ranks, connection))
        connection.send(("result", result))
    except BaseException as error:  # everything is the parent's to report
        text = traceback.format_exc()
        error = _portable(error)
        try:
            connection.send(("error", (error, text)))
        except OSError:
            pass  # the parent is gone too
        os._exit(1)  # a rank that raised must not wait for device clean-up that needs its peers


class _Group:
    """The parent's end."""

    def __init__(self, work: bytes, ranks: int):
        context: SpawnContext = multiprocessing.get_context("spawn")
        self.ranks = ranks
        self.results: dict[int, Any] = {}
        self.errors: dict[int, tuple[BaseException, str]] = {}
        self._began: set[int] = set()  # ranks that have said something
        self._waiting: dict[int, Any] = {}  # rank -> what it gave to the exchange that is under way
        self._connections: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_child,
                args=(work, rank, ranks, theirs, os.getpid()),
                name=f"kosmos-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def serve(self) -> None:
        """Until every rank has brought a result or an error, or died."""
        open_ranks: dict[object, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        while open_ranks:
            for ready in wait([self._connections[rank] for rank in open_ranks.values()]):
                rank = open_ranks[ready]
                try:
                    kind, value = self._connections[rank].recv()
                    self._began.add(rank)
                except (EOFError, ConnectionError):
                    kind, value = "died", ""
                if kind == "gather":
                    self._waiting[rank] = value
                    continue
                del open_ranks[ready]
                if kind == "result":
                    self.results[rank] = value
                elif kind == "error":
                    self.errors[rank] = value
                else:
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    how = f"was killed by signal {-code}" if code and code < 0 else f"ended with exit code {code}"
                    when = "and left no result" if rank in self._began else f"before it began; {IMPORTABLE}"
                    self.errors[rank] = (RankLost(f"rank {rank} {how} {when}"), "")
            self._answer()

    def _answer(self) -> None:
        gone = set(self.results) | set(self.errors)
        if gone:  # an exchange that misses a rank can never be complete
            for rank in self._waiting:
                self._reply(rank, (min(gone), None))
            self._waiting.clear()
        elif len(self._waiting) == self.ranks:
            values = [self._waiting[rank] for rank in range(self.ranks)]
            self._waiting.clear()
            for rank in range(self.ranks):
                self._reply(rank, (None, values))

    def _reply(self, rank: int, message: tuple[int | None, list[Any] | None]) -> None:
        try:
            self._connections[rank].send(message)
        except OSError:
            pass  # it died meanwhile; serve() will see that

    def end(self, patience_s: float) -> None:
        for process in self._processes:
            process.join(patience_s)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for connection in self._connections:
            connection.close()


def run_processes(run_rank: Callable[[Rendezvous], Any], ranks: int) -> list[Any]:
    """Runs `run_rank(rendezvous)` in `ranks` new processes; returns their results in rank order.

    Raises what the first rank that failed raised, with the other failures in its notes. No process outlives the call.
    """
    group = _Group(pickle.dumps(run_rank), ranks)
    try:
        group.serve()
    except BaseException:
        for process in group._processes:
            process.kill()
        raise
    finally:
        group.end(patience_s=10)
    raise_first(group.errors)
    return [group.results[rank] for rank in range(ranks)]


def raise_first(errors: dict[int, tuple[BaseException, str]]) -> None:
    """Raises the error that explains the others: the first to come in that does not itself speak of another rank."""
    if not errors:
        return

    def is_a_consequence(item: tuple[int, tuple[BaseException, str]]) -> bool:
        _, (error, text) = item
        return (isinstance(error, RankLost) and bool(text)) or "told to stop" in str(error)

    rank, (error, text) = min(errors.items(), key=is_a_consequence)
    lines = [f"raised on rank {rank} of the group" + (f":\n{text}" if text else "")]
    lines += [f"rank {other}: {type(e).__name__}: {e}" for other, (e, _) in sorted(errors.items()) if other != rank]
    note = "\n".join(lines)
    if hasattr(error, "add_note"):
        error.add_note(note)
        raise error
    raise error from RuntimeError(note)  # Python 3.10 has no notes
