"""Ranks as the processes of mpirun or srun, through mpi4py."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from ..errors import NotAvailable
from .rendezvous import Rendezvous, watch_processes

# Set by the launchers themselves for every process that they start: Open MPI, MPICH and Intel MPI, srun.
_WORLDS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def started_by_mpi() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return world_size() > 1


def world_size() -> int:
    """How many ranks the launcher started, by its word; 1 without one."""
    return _world()[0]


def world_rank() -> int:
    """Which of them this process is; 0 without a launcher."""
    return _world()[1]


def _world() -> tuple[int, int]:
    for size, rank in _WORLDS:
        if os.environ.get(size, "").isdigit() and os.environ.get(rank, "").isdigit():
            return int(os.environ[size]), int(os.environ[rank])
    return 1, 0


class MpiRendezvous(Rendezvous):
    """The processes of MPI.COMM_WORLD, all on one node."""

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise NotAvailable(
                f"started by mpirun or srun, but mpi4py does not load ({error}); pip install 'kosmos-raw[mpi]'"
            ) from error
        self._world = MPI.COMM_WORLD
        self.rank, self.ranks = self._world.Get_rank(), self._world.Get_size()
        if self.ranks != world_size():  # an mpi4py that belongs to another MPI than the launcher sees itself alone
            raise NotAvailable(
                f"the launcher started {world_size()} ranks, but mpi4py sees {self.ranks} "
                f"({MPI.Get_library_version()[:60]}...); start with the mpirun of the MPI that mpi4py loads"
            )
        nodes = set(self._world.allgather(socket.gethostname()))
        if len(nodes) > 1:
            raise NotAvailable(
                f"ranks run on {len(nodes)} nodes ({', '.join(sorted(nodes))}); kosmos_raw needs one node"
            )

    def allgather(self, value: Any) -> list[Any]:
        return self._world.allgather(value)

    def watch(self, on_lost: Callable[[int], None]) -> Callable[[], None]:
        return watch_processes(self.allgather(os.getpid()), self.rank, on_lost)

    def abort(self) -> None:
        """Ends all processes of the world: MPI has no other way when one of them cannot go on."""
        self._world.Abort(1)


def run_mpi(run_rank: Callable[[Rendezvous], Any], ranks: int | None) -> list[Any]:
    """Runs `run_rank(rendezvous)` in this process, as its rank of the world; returns the results of all ranks."""
    rendezvous = MpiRendezvous()
    if ranks is not None and ranks != rendezvous.ranks:
        raise ValueError(
            f"launch: ranks is {ranks}, but mpirun or srun started {rendezvous.ranks}; leave ranks out or start as many"
        )
    try:
        result = run_rank(rendezvous)
    except BaseException:
        if rendezvous.ranks > 1:
            import sys
            import traceback

            print(f"kosmos_raw: rank {rendezvous.rank} of {rendezvous.ranks} raised; ending all ranks", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            rendezvous.abort()
        raise
    return rendezvous.allgather(result)
