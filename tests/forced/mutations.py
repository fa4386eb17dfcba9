"""What is broken on purpose, in each operator, and how it must show."""

from __future__ import annotations

# The mutation's name, symptoms that must all show, and in which setup: of both forms, unless that says which;
# `histories` if 200 are too few. The rule that each breaks is in tests/forced/*mutants.h.
COMMON = [
    ("NO_START_WAIT", "WRONG_VALUE RACE", {}),  # reads the peer's last data, or what it is just writing
    ("NOT_CLEARED", "WRONG_VALUE DEADLOCK", {}),  # queue heads and counts go on from two launches ago
    ("ONE_COUNTER_SET", "DEADLOCK", {}),  # a late WG clears a head that is in use
    ("SAME_FINGERPRINT", "WRONG_VALUE WRONG_END", {"kind": "OTHER_CALL"}),  # different calls take each other's rows
    ("ANNOUNCES_LATE", "DEADLOCK", {}),
]
MUTATIONS = {
    "ag_gemm": [
        ("NO_RELEASE", "WRONG_VALUE RACE", {}),  # rows, inputs and fingerprints arrive after what announces them
        ("NO_ACQUIRE", "WRONG_VALUE RACE", {}),  # old rows and inputs are read after the signals have been seen
        ("CLEARS_BY_THIS_SHAPE", "WRONG_VALUE", {}),  # what a larger launch counted is taken for this one's
        ("NO_READS_DONE_WAIT", "WRONG_VALUE RACE", {}),  # the caller's next input overwrites what peers still read
        ("NO_SLICES_LANDED_WAIT", "WRONG_VALUE RACE", {}),  # multiplies rows that are not there
        ("ALL_ARE_MOVERS", "WRONG_VALUE", {"policy": "fixed"}),  # nobody builds
        ("NONE_IS_MOVER", "DEADLOCK", {}),  # nobody moves
        ("COUNTS_BEFORE_RELEASE", "WRONG_VALUE RACE", {}),
        ("FIRST_PULL_REPORTS_READS", "WRONG_VALUE RACE", {}),
        ("ONE_SLICE_TOO_FEW", "WRONG_VALUE RACE", {}),
        ("ONE_SLICE_TOO_MANY", "DEADLOCK", {}),
        ("WAITS_FOR_FIRST_SLAB", "WRONG_VALUE RACE", {}),
        ("COUNTS_SLABS_TOGETHER", "DEADLOCK", {}),
        ("DRAINS_EMPTY_SHARDS", "DEADLOCK", {}),
        ("NEVER_DRAINS", "WRONG_VALUE RACE", {}),
        ("ANNOUNCES_EPOCH_FIRST", "WRONG_END", {}),  # a right call is taken for another one
        ("ONE_FINGERPRINT", "WRONG_END", {}),  # and so, where a peer is in the next launch already
        ("BUILDS_BEFORE_IT_MOVES", "DEADLOCK", {}),
        ("COMPARES_UNSIGNED", "WRONG_VALUE RACE", {"near_wrap": True}),
        ("FORGETS_PEERS", "DEADLOCK", {}),
        ("POLLS_IN_DEVICE_SCOPE", "NARROW_SCOPE", {}),
        ("BUILDS_UNREADY", "DEADLOCK", {"policy": "two_way"}),
        ("MOVES_TWICE", "WRONG_VALUE RACE", {"policy": "beside", "run_ahead": True}),
        ("ALL_MOVE_BESIDE", "WRONG_VALUE RACE", {"policy": "beside", "run_ahead": True}),
        ("KEEPS_TO_ITS_QUEUE", "WRONG_VALUE", {}),  # tiles of a queue that is nobody's own are not built
        ("QUEUES_OVERLAP", "WRONG_VALUE RACE", {}),  # one tile is built twice, another one never
        ("STORES_BESIDE", "WRONG_VALUE OUTSIDE", {}),  # the tests' own guards
        *COMMON,
    ],
    "gemm_rs": [
        ("NO_RELEASE", "RACE DEADLOCK WRONG_END", {}),
        ("NO_ACQUIRE", "RACE DEADLOCK WRONG_END", {}),
        ("CLEARS_BY_THIS_SHAPE", "WRONG_VALUE", {"mixed": True}),
        ("POISONS_WITHOUT_WAIT", "WRONG_VALUE RACE DEADLOCK", {}),  # wipes what a slow peer still reads
        ("REDUCES_BEFORE_START", "WRONG_VALUE RACE", {}),  # takes the partial of two turns ago for this one's
        ("ONE_BUFFER", "WRONG_VALUE DEADLOCK", {}),  # rotation by one: poison meets data
        ("NEVER_POISONS", "WRONG_VALUE", {}),
        ("POISONS_BY_THIS_SHAPE", "WRONG_VALUE", {}),  # what a larger launch left is taken for this one's
        ("TURNS_ARE_EPOCHS", "WRONG_VALUE", {"mixed": True}),  # launches of other operators poison nothing
        ("ALL_ARE_MOVERS", "DEADLOCK", {}),
        ("NOBODY_REDUCES", "WRONG_VALUE", {}),
        ("BUILDS_AFTER_REDUCING", "DEADLOCK", {}),  # claims past work that can block
        ("JOINS_TOO_EARLY", "DEADLOCK", {}),
        ("FORGETS_LAST_BAND", "WRONG_VALUE", {}),
        ("TRUSTS_THE_HINT", "WRONG_VALUE RACE", {}),
        ("STORES_INTO_CACHES", "RACE", {}),
        ("STORES_A_SENTINEL", "DEADLOCK", {}),
        ("STORES_BESIDE", "WRONG_VALUE DEADLOCK", {}),
        ("REDUCES_UNMADE_BANDS", "DEADLOCK", {"policy": "two_way", "run_ahead": True, "histories": 1000}),
        ("ASKS_FOR_THE_SLICE", "DEADLOCK", {"policy": "two_way", "ranks": 2, "run_ahead": True, "histories": 6000}),
        ("ASKS_BEFORE_START", "RACE", {"policy": "two_way"}),
        *COMMON,
    ],
    "gemm_rs_push": [
        ("NO_RELEASE", "WRONG_VALUE RACE", {}),
        ("NO_ACQUIRE", "WRONG_VALUE RACE", {}),
        ("PUSHES_BEFORE_START", "WRONG_VALUE RACE", {}),  # over what its owner still adds
        ("ADDS_BEFORE_ARRIVAL", "WRONG_VALUE RACE", {}),
        ("FORGETS_LAST_PEER", "WRONG_VALUE RACE", {}),
        ("SIGNALS_BEFORE_RELEASE", "WRONG_VALUE RACE", {}),
        ("OWN_TILES_FIRST", "DEADLOCK", {}),
        ("NEVER_DRAINS", "WRONG_END", {}),  # a rank two launches ahead is taken for one with another call
        ("ONE_SLOT", "WRONG_VALUE RACE", {}),
        ("STORES_BESIDE", "WRONG_VALUE OUTSIDE", {}),
        ("NO_START_WAIT", "WRONG_VALUE RACE", {}),
        ("NOT_CLEARED", "WRONG_VALUE DEADLOCK", {}),
        ("ONE_COUNTER_SET", "RACE", {}),
        ("SAME_FINGERPRINT", "WRONG_VALUE WRONG_END", {"kind": "OTHER_CALL"}),
        ("ANNOUNCES_LATE", "DEADLOCK", {}),
    ],
    "ag_gemm_dgrad": [
        ("NO_RELEASE", "WRONG_VALUE RACE", {}),
        ("NO_ACQUIRE", "WRONG_VALUE RACE", {}),
        ("CLEARS_BY_THIS_SHAPE", "WRONG_VALUE", {}),
        ("SUMS_TOO_EARLY", "WRONG_VALUE RACE", {}),  # adds parts that are not there
        ("COUNTS_PARTS_BEFORE_RELEASE", "WRONG_VALUE RACE", {}),
        ("NEVER_DRAINS", "WRONG_VALUE RACE", {}),
        ("BUILDS_UNREADY", "DEADLOCK", {"policy": "two_way"}),
        ("STORES_BESIDE", "WRONG_VALUE OUTSIDE", {}),
        *COMMON[:-1],
    ],
    "ag_gemm_grads": [
        ("NO_RELEASE", "WRONG_VALUE RACE", {}),
        ("NO_ACQUIRE", "WRONG_VALUE RACE", {}),
        ("CLEARS_BY_THIS_SHAPE", "WRONG_VALUE", {}),
        ("WGRAD_BEFORE_COLUMNS", "WRONG_VALUE RACE", {}),
        ("ONE_PEER_IS_ENOUGH", "WRONG_VALUE RACE", {}),
        ("COUNTS_ABSENT_PEERS", "DEADLOCK", {}),
        ("COLUMNS_COUNT_AS_ROWS", "RACE DEADLOCK", {}),
        ("ROWS_REPORT_READS", "WRONG_VALUE RACE", {}),
        ("HEADS_OVER_COUNTS", "WRONG_VALUE RACE", {}),
        ("FORGETS_COLUMNS", "DEADLOCK", {}),
        ("NEVER_DRAINS", "WRONG_VALUE RACE", {}),
        ("BUILDS_UNREADY", "DEADLOCK", {"policy": "two_way"}),
        ("STORES_BESIDE", "WRONG_VALUE OUTSIDE", {}),
        *COMMON[:-1],
    ],
    "bulk_ag": [
        ("NO_RELEASE", "WRONG_VALUE RACE", {}),
        ("NO_ACQUIRE", "WRONG_VALUE RACE", {}),
        ("NEVER_DRAINS", "WRONG_VALUE RACE", {}),
        ("PULLS_BEFORE_START", "WRONG_VALUE RACE", {}),
        ("BUILDERS_NEVER_PULL", "WRONG_VALUE DEADLOCK", {}),
        ("STORES_BESIDE", "WRONG_VALUE OUTSIDE", {}),
        *COMMON[:-1],
    ],
    "bulk_rs": [
        ("NO_RELEASE", "WRONG_VALUE RACE", {}),
        ("NO_ACQUIRE", "WRONG_VALUE RACE", {}),
        ("NEVER_DRAINS", "WRONG_VALUE RACE", {}),
        ("NO_READS_DONE_WAIT", "WRONG_VALUE RACE", {}),
        ("REDUCES_BEFORE_START", "WRONG_VALUE RACE", {}),
        ("FIRST_REDUCE_REPORTS", "WRONG_VALUE RACE", {}),
        ("WAITS_FOR_WHO_GETS_NOTHING", "DEADLOCK", {}),
        ("SUMS_TOO_EARLY", "WRONG_VALUE RACE", {}),
        ("ALL_ARE_MOVERS", "WRONG_VALUE", {"policy": "fixed"}),
        ("MOVES_TWICE", "WRONG_VALUE DEADLOCK", {"policy": "beside", "run_ahead": True}),
        ("TURNS_BESIDE", "DEADLOCK", {"policy": "beside", "run_ahead": True}),
        ("CUTS_BESIDE", "DEADLOCK", {"policy": "beside", "run_ahead": True}),
        ("STORES_BESIDE", "WRONG_VALUE OUTSIDE", {}),
        *COMMON[:-1],
    ],
    "moe_forward": [
        ("NO_RELEASE", "RACE OUTSIDE", {}),
        ("NO_ACQUIRE", "RACE OUTSIDE", {}),
        ("NOT_CLEARED", "DEADLOCK CRASH", {}),
        ("CLEARS_BY_THIS_SHAPE", "WRONG_VALUE RACE", {}),
        ("ONE_COUNTER_SET", "DEADLOCK", {}),
        ("SAME_FINGERPRINT", "WRONG_VALUE WRONG_END", {"kind": "OTHER_CALL"}),
        ("PLANS_WITHOUT_COUNTS", "RACE DEADLOCK", {}),  # ranks disagree on where rows lie
        ("ONE_COUNTS_BUFFER", "RACE DEADLOCK", {}),  # a peer's next counts overwrite those that are still read
        ("SAYS_NOTHING_OF_NOTHING", "DEADLOCK", {}),
        ("COMPARES_EQUAL", "DEADLOCK", {}),  # a peer may be a launch ahead
        ("TOPK_BEFORE_LOGITS", "WRONG_VALUE RACE", {}),
        ("SCAN_BEFORE_TOPK", "RACE OUTSIDE", {}),
        ("PUSH_BEFORE_SORT", "WRONG_VALUE RACE", {}),
        ("PASSES_THE_GATE", "OUTSIDE DEADLOCK", {}),
        ("SORTS_BACKWARDS", "WRONG_VALUE", {}),
        ("GEMM1_BEFORE_ROWS", "WRONG_VALUE RACE", {}),
        ("LEAVES_PADDING", "WRONG_VALUE", {}),
        ("PUSH_WITHOUT_CREDIT", "WRONG_VALUE RACE", {}),
        ("CREDITS_FIRST_COLUMN", "WRONG_VALUE RACE", {}),
        ("CREDITS_OLD_SOURCES", "DEADLOCK", {}),
        ("CREDITS_BY_ONE_WORD", "WRONG_VALUE DEADLOCK", {}),
        ("CREDITS_MOVE_WITH_THE_SHAPE", "TWO_WRITERS", {}),  # another layer's arrivals lie there
        ("GEMM1_BEFORE_ITS_SLOT", "WRONG_VALUE RACE", {}),
        ("GEMM2_BEFORE_GEMM1", "WRONG_VALUE RACE", {}),
        ("GEMM2_BEFORE_ITS_SLOT", "WRONG_VALUE RACE", {}),
        ("SEND_BEFORE_GEMM2", "WRONG_VALUE RACE", {}),
        ("SENDS_AFTER_ONE_COLUMN", "WRONG_VALUE RACE", {}),
        ("ALL_GEMM1_FIRST", "DEADLOCK", {}),
        ("TILES_BEFORE_MOVES", "DEADLOCK", {}),
        ("TILES_BEFORE_SENDS", "DEADLOCK", {}),
        ("LEAVES_BEFORE_MOVES", "DEADLOCK", {}),
        ("FOLDS_BEFORE_SENDS", "DEADLOCK", {}),
        ("CREW_WAITS_FOR_SENDS", "DEADLOCK", {}),
        ("CREW_WAITS_FOR_CREDIT", "DEADLOCK", {}),
        ("X_RING_TOO_SHORT", "DEADLOCK", {}),  # each by one tile row: the bounds are tight
        ("H_RING_TOO_SHORT", "DEADLOCK", {}),
        ("Y_RING_TOO_SHORT", "DEADLOCK", {}),
        ("FOLD_BEFORE_ROWS", "WRONG_VALUE RACE", {}),
        ("FORGETS_WHAT_IS_DEALT", "DEADLOCK", {}),
        ("LANDS_EARLY", "WRONG_VALUE RACE", {}),
        ("SAW_IT_BEFORE", "WRONG_VALUE RACE", {}),
        ("SHARED2_BEFORE_SHARED1", "WRONG_VALUE RACE", {}),
        ("FOLD_BEFORE_SHARED", "WRONG_VALUE RACE", {}),
        ("PULL_BEFORE_SORT", "WRONG_VALUE RACE", {}),
        ("PULL_BEFORE_ITS_SLOT", "WRONG_VALUE RACE", {}),
        ("NOBODY_BUILDS", "DEADLOCK", {}),
        ("FOLDS_BACKWARDS", "WRONG_VALUE", {}),
        ("STORES_BESIDE", "WRONG_VALUE OUTSIDE", {}),  # the tests' own guards
    ],
    "moe_backward": [
        ("NO_RELEASE", "RACE OUTSIDE", {}),
        ("NO_ACQUIRE", "RACE OUTSIDE", {}),
        ("NO_START_WAIT", "WRONG_VALUE RACE", {}),
        ("NOT_CLEARED", "OUTSIDE DEADLOCK", {}),
        ("CLEARS_BY_THIS_SHAPE", "WRONG_VALUE RACE", {}),
        ("ONE_COUNTER_SET", "DEADLOCK", {}),
        ("SAME_FINGERPRINT", "WRONG_VALUE WRONG_END", {"kind": "OTHER_CALL"}),
        ("PUSHES_BEFORE_START", "WRONG_VALUE RACE", {}),  # over what its owner still reads
        ("PLANS_BEFORE_START", "RACE", {}),  # a peer is told of a free round while it is in another launch
        ("READS_UNPLANNED", "RACE OUTSIDE", {}),
        ("PUSHES_INTO_USED_SLOTS", "WRONG_VALUE RACE", {}),
        ("REPLAYS_BEFORE_ROWS", "WRONG_VALUE RACE", {}),
        ("DGRAD2_BEFORE_ROWS", "WRONG_VALUE RACE", {}),
        ("DGRAD2_BEFORE_REPLAY", "WRONG_VALUE RACE", {}),
        ("WGRAD2_BEFORE_DGRAD2", "WRONG_VALUE RACE", {}),
        ("WGRAD2_OUT_OF_TURN", "WRONG_VALUE RACE", {}),  # a round is added before the one above it
        ("WGRAD1_BEFORE_DGRAD2", "WRONG_VALUE RACE", {}),
        ("WGRAD1_OUT_OF_TURN", "WRONG_VALUE RACE", {}),
        ("COUNTS_COLUMNS", "WRONG_VALUE RACE", {}),
        ("DGRAD1_BEFORE_DGRAD2", "WRONG_VALUE RACE", {}),
        ("SENDS_BEFORE_DGRAD1", "WRONG_VALUE RACE", {}),
        ("OWN_BEFORE_DLOGITS", "WRONG_VALUE RACE", {}),
        ("OWN_BEFORE_SHARED", "WRONG_VALUE RACE", {"run_ahead": True}),
        ("ROUTER_BEFORE_DLOGITS", "WRONG_VALUE RACE", {}),
        ("ROUTER_OUT_OF_TURN", "WRONG_VALUE RACE", {}),
        ("SHARED_W_BEFORE_D2", "WRONG_VALUE RACE", {}),
        ("DWEIGHTS_BEFORE_ROWS", "WRONG_VALUE RACE", {}),
        ("FOLDS_BEFORE_ROWS", "WRONG_VALUE RACE", {}),
        ("FOLDS_BEFORE_OWN", "WRONG_VALUE RACE", {}),
        ("FREES_WITHOUT_SENDS", "RACE", {"histories": 400}),  # all three are needed
        ("FREES_WITHOUT_WEIGHTS", "WRONG_VALUE RACE", {}),
        ("FREES_AFTER_ONE_TILE", "WRONG_VALUE RACE", {}),
        ("TELLS_OLD_SOURCES", "DEADLOCK", {}),
        ("FREES_BY_ONE_WORD", "RACE", {"histories": 1000}),  # rounds end in any order
        ("LANDS_EARLY", "WRONG_VALUE RACE", {}),
        ("TILES_BEFORE_PUSHES", "DEADLOCK", {}),  # the guards, one by one
        ("TILES_BEFORE_SENDS", "DEADLOCK", {}),
        ("PUSHES_BEFORE_SENDS", "DEADLOCK", {"histories": 400}),
        ("FOLDS_BEFORE_SENDS", "DEADLOCK", {}),
        ("FOLDS_BEFORE_PUSHES", "DEADLOCK", {}),
        ("ROUTER_BEFORE_DWEIGHTS", "DEADLOCK", {}),
        ("OWN_BEFORE_FILLER", "DEADLOCK", {}),
        ("CREW_WAITS_FOR_SENDS", "DEADLOCK", {}),
        ("CREW_WAITS_FOR_SLOTS", "DEADLOCK", {}),
        ("FORGETS_WHAT_IS_DEALT", "DEADLOCK", {}),
        ("DEALS_USED_SLOTS", "DEADLOCK", {}),
        ("FORGETS_USED_SLOTS", "DEADLOCK", {}),
        ("TILES_BEFORE_DEALT_SENDS", "DEADLOCK", {}),
        ("FOLDS_BEFORE_DEALT_SENDS", "DEADLOCK", {}),
        ("SAW_IT_BEFORE", "WRONG_VALUE RACE", {}),
        ("PUSHES_RISE", "DEADLOCK", {}),
        ("SENDS_RISE", "DEADLOCK", {}),
        ("WGRAD2_FIRST", "DEADLOCK", {}),
        ("DGRAD1_FIRST", "DEADLOCK", {}),
        ("QUANT_BEFORE_ROWS", "WRONG_VALUE RACE", {}),  # of launches that multiply copies
        ("REPLAYS_BEFORE_QUANT", "WRONG_VALUE RACE", {}),
        ("DGRAD2_BEFORE_QUANT", "WRONG_VALUE RACE", {}),
        ("ONE_PART_IS_ENOUGH", "WRONG_VALUE RACE", {}),
        ("COUNTS_COPIES_AT_ONCE", "WRONG_VALUE RACE", {}),
        ("COPIES_BEHIND_THE_COUNT", "WRONG_VALUE RACE", {}),  # of h and dpre
        ("QUANT_BEHIND_DGRAD2", "DEADLOCK", {}),
        ("QUANT_AFTER_ALL", "DEADLOCK", {}),  # its guards: of its round, neither of the last nor of none
        ("QUANT_BEFORE_PUSHES", "DEADLOCK", {}),
        ("KEEPS_OLD_X_COPIES", "WRONG_VALUE", {}),
        ("FORGETS_IDLE_EXPERTS", "WRONG_VALUE", {}),
        ("ADDS_WHAT_IS_MISSING", "WRONG_VALUE", {}),
        ("KEEPS_OLD_X", "WRONG_VALUE", {}),
        ("LEAVES_GAPS", "WRONG_VALUE", {}),
        ("ROUNDS_EACH_TURN", "WRONG_VALUE", {}),
        ("FORGETS_THE_REST", "WRONG_VALUE", {}),
        ("ADDS_BACKWARDS", "WRONG_VALUE", {"histories": 400}),
        ("STORES_ROWS_BESIDE", "WRONG_VALUE OUTSIDE", {}),  # the tests' own guards
        ("STORES_WEIGHTS_BESIDE", "WRONG_VALUE OUTSIDE", {}),
    ],
}
# No word whose place depends on the shape decides anything in the first three. In moe_forward the counts are the start
# signal: whoever has them knows that their rank has begun.
WITHOUT_EFFECT = {
    "bulk_ag": {"CLEARS_BY_THIS_SHAPE"},
    "bulk_rs": {"CLEARS_BY_THIS_SHAPE"},
    "gemm_rs_push": {"CLEARS_BY_THIS_SHAPE"},
    "moe_forward": {"NO_START_WAIT"},
}
