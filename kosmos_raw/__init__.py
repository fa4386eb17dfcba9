"""KOSMOS kernels without a framework: collectives and their GEMMs in one self-scheduling kernel."""

from .errors import (
    ArenaFull,
    CommunicatorBroken,
    KosmosError,
    NotAvailable,
    RankLost,
    WaitError,
    WaitRecord,
)
from .ops.ag_gemm import ag_gemm
from .plan.ag_gemm import split_rows
from .ranks.communicator import Communicator
from .ranks.launch import launch

__version__ = "0.1.0"

__all__ = [
    "ArenaFull",
    "Communicator",
    "CommunicatorBroken",
    "KosmosError",
    "NotAvailable",
    "RankLost",
    "WaitError",
    "WaitRecord",
    "ag_gemm",
    "launch",
    "split_rows",
]
