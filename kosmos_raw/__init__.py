"""KOSMOS kernels without a framework: collectives and their GEMMs in one self-scheduling kernel."""

from .device import default_device
from .errors import (
    ArenaFull,
    CommunicatorBroken,
    KosmosError,
    NotAvailable,
    RankLost,
    WaitError,
    WaitRecord,
)
from .layers import ColumnParallelLinear, RowParallelLinear
from .ops.ag_gemm import ag_gemm
from .ops.ag_gemm_dgrad import ag_gemm_dgrad
from .ops.ag_gemm_grads import ag_gemm_grads
from .ops.bulk_ag import bulk_ag
from .ops.bulk_rs import bulk_rs, gemm_wgrad
from .ops.gemm_rs import gemm_rs
from .ops.moe_forward import MoELayer
from .ops.moe_gradients import MoEGradients
from .ops.moe_saved import MoESaved
from .ops.moe_weights import MoEWeights
from .ops.quantize import MxArray, quantize_mxfp8
from .plan.moe.config import MoEConfig
from .plan.moe.sizes import Rings
from .plan.shapes import split_rows
from .ranks.communicator import Communicator
from .ranks.launch import launch

__version__ = "0.1.0"

__all__ = [
    "ArenaFull",
    "ColumnParallelLinear",
    "Communicator",
    "CommunicatorBroken",
    "KosmosError",
    "MoEConfig",
    "MoEGradients",
    "MoELayer",
    "MoESaved",
    "MoEWeights",
    "MxArray",
    "NotAvailable",
    "RankLost",
    "Rings",
    "RowParallelLinear",
    "WaitError",
    "WaitRecord",
    "ag_gemm",
    "ag_gemm_dgrad",
    "ag_gemm_grads",
    "bulk_ag",
    "bulk_rs",
    "default_device",
    "gemm_rs",
    "gemm_wgrad",
    "launch",
    "quantize_mxfp8",
    "split_rows",
]
