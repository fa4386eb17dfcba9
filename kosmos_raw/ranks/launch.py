"""launch(): the same function on every rank, however the ranks come to be."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from ..build.params import MAX_RANKS
from .communicator import Communicator
from .mpi import run_mpi, started_by_mpi
from .processes import run_processes
from .rendezvous import Rendezvous
from .threads import run_threads

MODES = ("processes", "threads", "mpi")


def launch(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int | None = None,
    device: str = "cpu",
    mode: str | None = None,
    arena_bytes: int | None = None,
    timeout_s: float | None = None,
    workgroups: int | None = None,
) -> list[Any]:
    """Runs `fn(comm, *args)` on every rank and returns the results in rank order.

    Args:
        fn: gets the rank's Communicator first. With processes it must be importable (defined at the top of a module),
            and so must its arguments and results be picklable.
        ranks: how many; None means 8, or as many as mpirun or srun started.
        device: "cpu", "emulated", "hip" or "cuda". Always "cpu" when left out, whatever the machine has, because `fn`
            must bring arrays of the device's library, `comm.device.xp`: NumPy's for "cpu", CuPy's for all others.
            `kosmos_raw.default_device()` is what commands take when nobody chooses.
        mode: "processes" (spawned here), "threads" (of this process) or "mpi"; None takes "mpi" in a process that
            mpirun or srun started, else "processes". With "mpi" every process returns all results.
        arena_bytes, timeout_s, workgroups: see Communicator.
    Raises:
        What the rank that failed first raised. The other ranks are told, leave their kernels, and end.
    """
    mode = mode or ("mpi" if started_by_mpi() else "processes")
    if mode not in MODES:
        raise ValueError(f"launch: mode is {mode!r}, want one of {', '.join(MODES)}")
    if ranks is not None and not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"launch: ranks is {ranks}, want 1 to {MAX_RANKS}")
    options = {"device": device, "arena_bytes": arena_bytes, "timeout_s": timeout_s, "workgroups": workgroups}
    run_rank = partial(_run_rank, fn, args, options)
    if mode == "mpi":
        return run_mpi(run_rank, ranks)
    if mode == "threads":
        return run_threads(run_rank, ranks or MAX_RANKS)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "launch: called while a rank's process was importing the main program, which would start ranks without "
            "end; put the call under  if __name__ == '__main__':"
        )
    try:
        pickle.dumps(run_rank)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"launch: {getattr(fn, '__qualname__', fn)} or its arguments cannot be sent to another process ({error}); "
            "define the function at the top of a module, or use mode='threads'"
        ) from error
    return run_processes(run_rank, ranks or MAX_RANKS)


def _run_rank(fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], rendezvous: Rendezvous) -> Any:
    comm = Communicator(rendezvous, **options)
    result = fn(comm, *args)
    comm.close()
    return result
