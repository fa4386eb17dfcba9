"""What each rank of 8 multiplies in the layers of Llama 3, for each operator: arXiv 2611.07477, tables C.3 to C.7."""

from __future__ import annotations

from dataclasses import dataclass

HIDDEN = {"8B": 4096, "70B": 8192, "405B": 16384}
FFN = {"8B": 14336, "70B": 28672, "405B": 53248}
KEYS_AND_VALUES = 2 * 1024
RANKS = 8
SEQUENCE = 8192

BATCHES = ("MBS1", "MBS2", "MBS4", "MBS8")

COLUMN, ROW = ("FC1", "QKV"), ("Down", "OProj")  # layers by how their weights are divided
LAYERS = {"ag_gemm": COLUMN, "bulk_ag": COLUMN, "bulk_rs": COLUMN, "gemm_rs": ROW, "ag_gemm_dgrad": ROW}


@dataclass(frozen=True)
class Shape:
    """M x N is a product's output, K its contraction."""

    name: str
    m: int
    n: int
    k: int


def shape(op: str, name: str) -> Shape:
    """The product of `op` in a layer like "70B-FC1-MBS1".

    Raises: ValueError when there is no such layer, or it has no such operator.
    """
    model, layer, batch = (*name.split("-"), "", "")[:3]
    if model not in HIDDEN or layer not in LAYERS[op] or batch not in BATCHES:
        raise ValueError(f"{op}: {name!r} is no layer, want like {next(iter(HIDDEN))}-{LAYERS[op][0]}-MBS1")
    hidden, ffn, tokens = HIDDEN[model], FFN[model], SEQUENCE * int(batch.removeprefix("MBS"))
    widths = {"FC1": 2 * ffn, "QKV": hidden + KEYS_AND_VALUES, "Down": ffn, "OProj": hidden}
    width = widths[layer] // RANKS
    sizes = {
        "ag_gemm": (tokens, width, hidden),
        "gemm_rs": (tokens, hidden, width),
        "ag_gemm_dgrad": (tokens, width, hidden),
        "bulk_ag": (tokens, hidden, width),
        "bulk_rs": (width, hidden, tokens),
    }
    return Shape(name, *sizes[op])


def layers(op: str) -> list[Shape]:
    """The products of `op` in all 24 layers that have it."""
    names = (f"{model}-{layer}-{batch}" for batch in BATCHES for model in reversed(HIDDEN) for layer in LAYERS[op])
    return [shape(op, name) for name in names]


def rows_moved(op: str, of: Shape) -> tuple[int, int]:
    """Rows, of all ranks, that are gathered or reduced beside that product, and their width."""
    return {
        "ag_gemm": (of.m, of.k),
        "gemm_rs": (of.m, of.n),
        "ag_gemm_dgrad": (of.m, of.k),
        "bulk_ag": (of.m, of.n),
        "bulk_rs": (of.k, of.n),
    }[op]
