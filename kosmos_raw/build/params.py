"""NumPy mirrors of the structs that kernels take by value or write for the host.

One dtype a struct, field by field as in hip_kernels/schedule/*.h. The headers assert their sizes; the tests compare
every size and offset with what the compiler made of the header.
"""

from __future__ import annotations

import numpy as np

MAX_RANKS = 8  # hip_kernels/target/target.h

KINDS = (
    *"leave pull pull_columns drain poison reduce sum topk scan plan sort gate push send fold dweight quant".split(),
    *"tile half wgrad route shared1 shared2 gemm1 gemm2".split(),
    *"dgrad2 wgrad2 dgrad1 wgrad1 shared_d2 shared_w2 shared_w1 own_dx router_dw".split(),
)
POLICIES = ("one_way", "fixed", "two_way", "beside")
ORDERS = ("as_consumed", "chunk_major", "rank_order", "not_own_first")
GAVE_UP = {1: "waited too long", 2: "told to stop", 3: "different call"}
EVENTS = ("claimed", "ready", "done", "placed")


def _struct(*fields: tuple[str, str | np.dtype] | tuple[str, str, tuple[int, ...]]) -> np.dtype:
    dtype = np.dtype(list(fields), align=True)
    names = dtype.names or ()
    end = 0
    for name in names:  # hidden padding shifts a mirror silently: name it in the header instead
        field, offset = dtype.fields[name][:2]  # type: ignore[index]
        if offset != end:
            raise TypeError(f"hidden padding before field {name!r} of {names}")
        end = offset + field.itemsize
    if end != dtype.itemsize:
        raise TypeError(f"hidden padding after the last field of {names}")
    return dtype


def _more(base: np.dtype, *fields: tuple[str, str | np.dtype] | tuple[str, str, tuple[int, ...]]) -> np.dtype:
    """The mirror of a struct that is derived from another one."""
    return _struct(*((name, base[name]) for name in base.names or ()), *fields)


SIGNALS = _struct(
    ("started", "u4", (MAX_RANKS,)),
    ("call", "u4", (2, MAX_RANKS)),
    ("reads_done", "u4", (MAX_RANKS,)),
)

WAIT_RECORD = _struct(
    ("signal", "u8"),
    *((name, "u4") for name in "reason rank wg kind chunk row part want seen zero".split()),
)

GROUP = _struct(
    ("signals_of", "u8", (MAX_RANKS,)),
    ("abort", "u8"),
    ("host_abort", "u8"),
    ("record", "u8"),
    ("trace", "u8"),
    ("limit_ticks", "u8"),
    *((name, "u4") for name in "rank ranks epoch call wgs trace_events".split()),
)

COUNTERS = _struct(("sets", "u8"), ("per_set", "u4"), ("to_clear", "u4"))

CHUNKS = _struct(("first", "u4", (MAX_RANKS + 1,)), ("tile_m", "u4"), ("tile_rows_max", "u4"), ("side_by_side", "u4"))

PULLS = _struct(*((name, "u4") for name in "slices slabs slab_words band".split()))

STAGING = _struct(
    ("of", "u8", (MAX_RANKS,)),
    ("buffer_words", "u8"),
    ("dirty_words", "u8"),
    ("turn", "u4"),
    ("zero", "u4"),
)
SENTINEL = 0x7FA5  # a bf16 that no kernel stores: "not here yet"

SPLIT = _struct(("sums", "u8"), ("parts", "u4"), ("step", "u4"))
INTO = ("set_bf16", "add_bf16", "set_f32", "add_f32")  # hip_kernels/work/sum.h

AG_GEMM = _struct(
    ("g", GROUP),
    ("counters", COUNTERS),
    ("shard_of", "u8", (MAX_RANKS,)),
    ("gathered", "u8"),
    ("b", "u8"),
    ("c", "u8"),
    ("m", CHUNKS),
    *((name, "u4") for name in "N K ldc tile_n movers policy order queues together halved".split()),
    ("pulls", PULLS),
    ("split", SPLIT),
)
AG_GEMM_DGRAD = AG_GEMM_DGRAD_SPLIT = AG_GEMM

GEMM_RS = _struct(
    ("g", GROUP),
    ("counters", COUNTERS),
    *((name, "u8") for name in "a b c".split()),
    ("staging", STAGING),
    ("m", CHUNKS),
    *((name, "u4") for name in "N K tile_n movers max_movers band_tile_rows slices policy order zero".split()),
)

INBOX = _struct(
    ("of", "u8", (MAX_RANKS,)),
    ("arrived_of", "u8", (MAX_RANKS,)),
    ("per_rank", "u4"),
    ("zero", "u4"),
)

GEMM_RS_PUSH = _struct(
    ("g", GROUP),
    ("counters", COUNTERS),
    *((name, "u8") for name in "a b c".split()),
    ("inbox", INBOX),
    ("m", CHUNKS),
    *((name, "u4") for name in "N K tile_n band_tile_rows order halved lead zero".split()),
)

BULK_AG = _struct(
    ("g", GROUP),
    ("counters", COUNTERS),
    ("shard_of", "u8", (MAX_RANKS,)),
    *((name, "u8") for name in "gathered a b c".split()),
    ("m", CHUNKS),
    *((name, "u4") for name in "width M N K ldc tile_n movers policy".split()),
    ("pulls", PULLS),
    ("halved", "u4"),
    ("zero", "u4"),
)

BULK_RS = _struct(
    ("g", GROUP),
    ("counters", COUNTERS),
    ("x_of", "u8", (MAX_RANKS,)),
    *((name, "u8") for name in "out a b c".split()),
    ("split", SPLIT),
    ("m", CHUNKS),
    *((name, "u4") for name in "width M N K lda ldc tile_n movers max_movers slices into policy halved zero".split()),
)

# hip_kernels/schedule/mx.h
MX_SCALES = _struct(("words", "u8"), ("ld", "u4"), ("zero", "u4"))
MX_GATHERED = _struct(("scales_of", "u8", (MAX_RANKS,)), ("scales", "u8"), ("values", "u8"))
MX_COLUMNS = _struct(
    ("of", "u8", (MAX_RANKS,)),
    ("gathered", "u8"),
    ("mx", MX_GATHERED),
    ("first", "u4", (MAX_RANKS + 1,)),
    ("ld", "u4"),
)

AG_GEMM_MXFP8 = _more(AG_GEMM, ("mx", MX_GATHERED), ("b_scales", MX_SCALES))
AG_GEMM_GRADS = _more(
    AG_GEMM_MXFP8,
    ("column_m", CHUNKS),
    ("column_pulls", PULLS),
    ("columns", MX_COLUMNS),
    ("x", "u8"),
    ("gradient", "u8"),
    ("x_scales", MX_SCALES),
    *((name, "u4") for name in "features gradient_N gradient_ld into".split()),
)
_FACTORS = (("a_scales", MX_SCALES), ("b_scales", MX_SCALES))
GEMM_RS_MXFP8 = _more(GEMM_RS, *_FACTORS)
GEMM_RS_PUSH_MXFP8 = _more(GEMM_RS_PUSH, *_FACTORS)
BULK_AG_MXFP8 = _more(BULK_AG, ("x", MX_COLUMNS), *_FACTORS)
BULK_RS_MXFP8 = _more(BULK_RS, *_FACTORS)

MX_COPY = _struct(("elements", "u8"), ("scales", "u8"), ("depth", "u4"), ("ld_scales", "u4"))

QUANTIZE_MXFP8 = _struct(
    ("x", "u8"),
    ("by_row", MX_COPY),
    ("by_column", MX_COPY),
    ("m", CHUNKS),
    *((name, "u4") for name in "columns ld rule wgs".split()),
)
DEQUANTIZE_MXFP8 = _struct(
    *((name, "u8") for name in "elements scales to".split()),
    *((name, "u4") for name in "lines depth ld_scales ld wgs zero".split()),
)

MOE_SCANS = 8
MOE_SIGNALS_ROW = _struct(("arrived", "u4", (MAX_RANKS,)), ("freed", "u4", (MAX_RANKS,)))
MOE_SIGNALS = _struct(  # with the first of as many rows as there may be tile rows
    ("common", SIGNALS),
    ("counts_in", "u4", (MAX_RANKS, MOE_SCANS)),
    ("sorted_in", "u4", (MAX_RANKS,)),
    ("landed", "u4", (MAX_RANKS,)),
    ("rows", MOE_SIGNALS_ROW),
)
MOE_LAYOUT = _struct(
    ("tables", "u8"),
    *(
        (name, "u4")
        for name in "rank ranks experts per_rank tile_m pad step_rows strided pull row_cap move_cap send_cap".split()
    ),
)
MOE_WEIGHTS = _struct(*((name, "u8") for name in "router bias gate_up down shared_gate_up shared_down".split()))
MOE_ROUTING = _struct(
    *((name, "u4") for name in "top_k score normalise groups top_groups group_top".split()),
    *((name, "f4") for name in "eps scale aux_scale".split()),
    ("weigh_inputs", "u4"),
)
MOE_FORWARD = _struct(
    ("g", GROUP),
    ("counters", COUNTERS),
    ("layout", MOE_LAYOUT),
    ("arena_of", "u8", (MAX_RANKS,)),
    *((name, "u8") for name in "counts_at counts_words x_at combine_at source_at list_at x out".split()),
    ("weights", MOE_WEIGHTS),
    *((name, "u8") for name in "pre h y shared_pre shared_h shared_y logits scores choices token_scratch".split()),
    *((name, "u8") for name in "places aux_parts aux_sums aux_loss list row_of_slot scan_room".split()),
    ("routing", MOE_ROUTING),
    ("clamp", "f4"),
    *((name, "u4") for name in "tokens block H I S router_rows router_parts logit_ld gate_column given".split()),
    *((name, "u4") for name in "tile_n columns0 columns1 columns2 shared_columns scans".split()),
    *((name, "u4") for name in "x_slots h_slots y_slots lag side_by_side".split()),
    *((name, "u4") for name in "movers senders crew crew_tiles".split()),
)
MOE_MXFP8 = _struct(
    ("x_scales_at", "u8"),
    *((name, MX_COPY) for name in "gate_up down h".split()),
    *((name, "u4") for name in "depth zero".split()),
)
MOE_FORWARD_MXFP8 = _more(MOE_FORWARD, ("mx", MOE_MXFP8))
MOE_GRADIENT = _struct(("to", "u8"), ("sums", "u8"), ("into", "u4"), ("zero", "u4"))
MOE_GRADIENTS = tuple("d_router d_gate_up d_down d_shared_gate_up d_shared_down".split())
MOE_BACKWARD = _more(
    MOE_FORWARD,
    *((name, "u8") for name in "dy_at dx_at dout dx dpre dx_rows dweights dlogits partials".split()),
    *((name, "u8") for name in "own_left own_right own_dx pieces".split()),
    *((name, MOE_GRADIENT) for name in MOE_GRADIENTS),
    ("aux_grad", "f4"),
    *((name, "u4") for name in "round_rows replays_all router_copies router_ld own_ld piece_cap".split()),
    *((name, "u4") for name in "cols_h cols_i cols_2i cols_s rows_h rows_2i rows_2s rows_r tile_m".split()),
    *((name, "u4") for name in "quants lead".split()),
)
MOE_BACKWARD_COPIES = tuple("dy dy_columns h_columns dpre dpre_columns".split())
MOE_BACKWARD_MXFP8 = _more(
    MOE_BACKWARD,
    ("mx", MOE_MXFP8),
    *((name, "u8") for name in "x_columns_at x_column_scales_at".split()),
    *((f"{name}_copy", MX_COPY) for name in MOE_BACKWARD_COPIES),
    *((name, MX_COPY) for name in "gate_up_columns down_columns".split()),
    *((name, "u4") for name in "quant_width tile_k".split()),
)
MOE_NOBODY = 0xFFFFFFFF  # no column
MOE_GIVEN = ("no_choices", "experts", "experts_and_weights")
MOE_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
