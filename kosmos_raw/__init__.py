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
from .ops.gemm_rs import gemm_rs
from .plan.shapes import split_rows
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
    "gemm_rs",
    "launch",
    "split_rows",
]
