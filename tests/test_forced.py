"""Operators under forced interleavings: right setups are never bad, and each broken rule of a protocol is noticed.

A history is five launches of all ranks, with other shapes and data in each; every element is checked, and so is the
order of every data access (hip_kernels/target/forced_memory.h). A failure prints how to replay it.
"""

from __future__ import annotations

import pytest

from .forced import forced
from .forced.forced import OPS, Setup, amiss, play, right

# Histories of each right setup, by ranks.
HISTORIES = {1: 200, 2: 1000, 3: 1200, 8: 100}
# Of operators whose histories take several times as long, or whose protocol is for the most part another's: a sample.
# More: tests/forced/forced.py moe_forward --histories 20000
SAMPLE = {op: {1: 30, 2: 75, 3: 125, 8: 10} for op in ("moe_forward", "ag_gemm_grads")}
SAMPLE["moe_backward"] = {1: 50, 2: 80, 3: 150, 8: 10}
LEAST = {"moe_forward": 1_500, "ag_gemm_grads": 1_500, "moe_backward": 1_000}
HISTORIES_AMISS = {2: 300, 3: 300, 8: 60}

FORMS = pytest.mark.parametrize("run_ahead", [False, True], ids=["serial", "ahead"])
EACH_OP = pytest.mark.parametrize("op", OPS)
RIGHT = [(op, name) for op in OPS for name in right(op)]
AMISS = [(op, name) for op in OPS for name in amiss(op)]


def histories(setup: Setup) -> int:
    return SAMPLE.get(setup.op, HISTORIES)[setup.ranks]


@EACH_OP
def test_right_setups_are_many_histories(op: str) -> None:
    assert sum(map(histories, right(op).values())) >= LEAST.get(op, 20_000)


@pytest.mark.parametrize(("op", "name"), RIGHT)
def test_right_setup(op: str, name: str) -> None:
    setup = right(op)[name]
    result = play(setup, histories(setup))
    assert result.histories == histories(setup)
    assert result.bad == 0, result


@pytest.mark.parametrize(("op", "name"), AMISS)
def test_every_rank_ends_and_says_why(op: str, name: str) -> None:
    """One rank makes another call, never launches, or the host says stop: nobody hangs, and records say what it was."""
    setup = amiss(op)[name]
    result = play(setup, HISTORIES_AMISS[setup.ranks] // (6 if op == "moe_backward" else 1))
    assert result.bad == 0, result


# What is broken, how it must show, and in which setup: of both forms, unless that says which; `histories` if 200 are
# too few. The rule that each breaks is in tests/forced/*mutants.h.
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
EACH_MUTATION = [
    pytest.param(op, mutation, shows, {"run_ahead": run_ahead, **setup}, id=f"{op}-{mutation}-{form}")
    for op in OPS
    for mutation, shows, setup in MUTATIONS[op]
    for form, run_ahead in forced.FORMS.items()
    if setup.get("run_ahead", run_ahead) == run_ahead
]


def until_all_show(setup: Setup, shows: str, most: int) -> None:
    """Plays until each symptom of `shows` has been seen: what is broken may run wild, and then takes long."""
    missing, first, more = set(shows.split()), 0, 4
    while missing and first < most:
        result = play(setup, more, first)
        missing -= {symptom for symptom, n in result.symptoms.items() if n}
        first, more = first + more, 2 * more
    if missing:
        raise AssertionError(f"{missing} did not show in {first} histories of {setup}; at last: {result}")


@pytest.mark.parametrize(("op", "mutation", "shows", "setup"), EACH_MUTATION)
def test_mutation_is_noticed(op: str, mutation: str, shows: str, setup: dict) -> None:
    most = setup.pop("histories", 200)
    until_all_show(Setup(op, mutation=mutation, **setup), shows, most)


@EACH_OP
def test_every_mutation_is_tested(op: str) -> None:
    tested = {"NONE", *(m[0] for m in MUTATIONS[op])} | WITHOUT_EFFECT.get(op, set())
    assert tested == set(forced.names("mutation", forced.default_library(op)))


# Every fence, and how it shows that it is gone. The last two of ag_gemm order only loads before a signal: no value
# shows that, for the model never delays a load; the order of accesses does. In gemm_rs a fence orders the reads of one
# turn before the poison of the next, and again only the order of accesses shows it.
FENCES = {
    "ag_gemm": {
        "group.h announce_start release system": "WRONG_VALUE RACE",
        "group.h wait_started acquire system": "WRONG_VALUE RACE",
        "gather.h wait_slab acquire device": "WRONG_VALUE RACE",
        "gather.h finish_pull release device": "WRONG_VALUE RACE",
        "gather.h finish_pull acquire device": "RACE",
        "gather.h finish_pull release system": "RACE",
        "gather.h landed acquire device": "",  # wait_inputs comes after it here; gfx950 goes on without
    },
    "ag_gemm_dgrad": {
        "group.h announce_start release system": "WRONG_VALUE RACE",
        "group.h wait_started acquire system": "WRONG_VALUE RACE",
        "gather.h wait_slab acquire device": "WRONG_VALUE RACE",
        "gather.h finish_pull release device": "WRONG_VALUE RACE",
        "gather.h finish_pull acquire device": "RACE",
        "gather.h finish_pull release system": "RACE",
        "gather.h landed acquire device": "",  # wait_inputs comes after it here; gfx950 goes on without
        "ag_gemm_dgrad.h wait_inputs acquire device": "WRONG_VALUE RACE",
        "ag_gemm_dgrad.h finish release device": "WRONG_VALUE RACE",
    },
    "ag_gemm_grads": {
        "group.h announce_start release system": "WRONG_VALUE RACE",
        "group.h wait_started acquire system": "WRONG_VALUE RACE",
        "gather.h wait_slab acquire device": "WRONG_VALUE RACE",
        "gather.h wait_columns acquire device": "WRONG_VALUE RACE",
        "gather.h finish_pull release device": "WRONG_VALUE RACE",
        "gather.h finish_pull acquire device": "RACE",
        "gather.h finish_pull release system": "RACE",
        "gather.h landed acquire device": "",  # wait_inputs comes after it here; gfx950 goes on without
        "gather.h columns_have_landed acquire device": "",  # as the one before
    },
    "bulk_ag": {
        "group.h announce_start release system": "WRONG_VALUE RACE",
        "group.h wait_started acquire system": "WRONG_VALUE RACE",
        "gather.h finish_pull release device": "RACE",
        "gather.h finish_pull acquire device": "RACE",
        "gather.h finish_pull release system": "RACE",
    },
    "bulk_rs": {
        "group.h announce_start release system": "WRONG_VALUE RACE",
        "group.h wait_started acquire system": "WRONG_VALUE RACE",
        "bulk_rs.h wait_inputs acquire device": "WRONG_VALUE RACE",
        "bulk_rs.h finish release device": "WRONG_VALUE RACE",
        "bulk_rs.h reads_end release device": "RACE",
        "bulk_rs.h reads_end acquire device": "RACE",
        "bulk_rs.h reads_end release system": "RACE",
    },
    "gemm_rs_push": {
        "group.h announce_start release system": "DEADLOCK WRONG_END",
        "group.h wait_started acquire system": "DEADLOCK WRONG_END",
        "gemm_rs_push.h finish release system": "WRONG_VALUE RACE",
        "gemm_rs_push.h wait_to_store acquire system": "WRONG_VALUE RACE",
    },
    "moe_forward": {
        "group.h announce_start release system": "DEADLOCK WRONG_END",
        "group.h wait_started acquire system": "DEADLOCK WRONG_END",
        "moe_forward.h acquire_inputs acquire device": "RACE OUTSIDE",
        "moe_forward.h acquire_inputs acquire system": "WRONG_VALUE RACE",
        "moe_forward.h before_plan acquire device": "RACE OUTSIDE",
        "moe_forward.h count release device": "RACE OUTSIDE",
        "moe_forward.h counts_are_out release system": "WRONG_VALUE RACE",
        "moe_forward.h finish release system": "WRONG_VALUE RACE",
        "moe_forward.h list_is_complete acquire device": "WRONG_VALUE RACE",
        "moe_forward.h list_is_complete release system": "WRONG_VALUE RACE",
        "moe_forward.h row_is_out release system": "WRONG_VALUE RACE",
        "moe_forward.h rows_are_out acquire device": "WRONG_VALUE RACE",
        "moe_forward.h rows_are_out release system": "WRONG_VALUE RACE",
        "moe_forward.h slot_is_free acquire device": "RACE",
        "moe_forward.h slot_is_free release system": "RACE",
    },
    "moe_backward": {
        "group.h announce_start release system": "DEADLOCK WRONG_END",
        "group.h wait_started acquire system": "DEADLOCK WRONG_END",
        "moe_backward.h acquire_inputs acquire device": "WRONG_VALUE RACE",
        "moe_backward.h acquire_inputs acquire system": "WRONG_VALUE RACE",
        "moe_backward.h count release device": "RACE OUTSIDE",
        "moe_backward.h finish release system": "WRONG_VALUE RACE",
        "moe_backward.h is_planned acquire device": "RACE OUTSIDE",
        "moe_backward.h rows_are_out acquire device": "WRONG_VALUE RACE",
        "moe_backward.h rows_are_out release system": "WRONG_VALUE RACE",
        "moe_backward.h round_is_free acquire device": "RACE",
        "moe_backward.h round_is_free release system": "RACE",
        "moe_backward.h row_is_out release system": "WRONG_VALUE RACE",
        "moe_backward.h rows_are_through acquire device": "RACE",
        "moe_backward.h rows_are_through release device": "RACE",
    },
    "gemm_rs": {
        "group.h announce_start release system": "RACE",
        "group.h wait_started acquire system": "RACE",
        "gemm_rs.h band_is_made acquire system": "RACE",
    },
}
# In system scope for the sake of caches, of which this model knows nothing.
WIDE_FOR_CACHES = {"moe_forward.h row_is_out release system", "moe_backward.h row_is_out release system"}
# A start signal that carries nothing but the fingerprint: without its fence right calls are taken for others.
START_SIGNAL_ALONE = {"moe_forward", "moe_backward", "gemm_rs_push"}
NARROW = {
    "group.h announce_start release system": "DEADLOCK WRONG_END",
    "group.h wait_started acquire system": "DEADLOCK WRONG_END",
}
TWO_WAY_FENCES = {  # of that policy alone
    "gather.h landed acquire device",
    "gather.h columns_have_landed acquire device",
    "gemm_rs.h band_is_made acquire system",
}
EACH_FENCE = [(op, fence) for op in OPS for fence in FENCES[op]]


@EACH_OP
def test_all_fences_are_known(op: str) -> None:
    found = forced.fences(op)
    assert len(set(found)) == len(found), "two fences of one name: tell them apart"
    if op == "moe_backward":  # between launches of moe_forward, whose fences are tested there
        found = [fence for fence in found if not fence.startswith("moe_forward.h")]
    assert set(found) == FENCES[op].keys()


@FORMS
@pytest.mark.parametrize(("op", "fence"), EACH_FENCE)
def test_without_one_fence(op: str, fence: str, run_ahead: bool) -> None:
    policy, most = ("two_way", 1000) if fence in TWO_WAY_FENCES else ("one_way", 80 if op.startswith("moe_") else 300)
    setup = Setup(op, policy=policy, run_ahead=run_ahead, without_fence=fence)
    shows = FENCES[op][fence]
    until_all_show(setup, shows, most)
    if shows not in ("", "RACE"):
        return
    result = play(setup, most)
    if not shows:
        assert result.bad == 0, f"now it is noticed: {result}"
    if shows == "RACE":
        assert result.symptoms["WRONG_VALUE"] == 0, f"now a value shows it: {result}"


@pytest.mark.parametrize(("op", "fence"), [(op, fence) for op, fence in EACH_FENCE if fence.endswith("system")])
def test_device_scope_is_too_narrow(op: str, fence: str) -> None:
    """A fence between ranks that orders for its own device only."""
    policy, most = ("two_way", 1000) if fence in TWO_WAY_FENCES else ("one_way", 150)
    setup = Setup(op, policy=policy, narrow_fence=fence)
    if fence in WIDE_FOR_CACHES:
        assert play(setup, most).bad == 0
    else:
        until_all_show(setup, NARROW.get(fence, "RACE") if op in START_SIGNAL_ALONE else "RACE", most)


@EACH_OP
@FORMS
def test_a_seed_replays_exactly(op: str, run_ahead: bool) -> None:
    setup = Setup(op, run_ahead=run_ahead)
    alone = [play(setup, 1, seed).digest for seed in range(20)]
    play(Setup(op, ranks=8, mutation="NO_RELEASE"), 3)  # leaves histories in the middle
    assert alone == [play(setup, 1, seed).digest for seed in range(20)]
    assert len(set(alone)) == len(alone)


def test_the_log_changes_nothing_and_says_what_happened(capfd: pytest.CaptureFixture[str]) -> None:
    setup = Setup(mutation="ONE_SLICE_TOO_MANY")
    quiet = play(setup, 1)
    logged = play(setup, 1, log=True)
    assert quiet.digest == logged.digest
    text = capfd.readouterr().out
    assert "claimed pull" in text and "ready   tile" in text  # what was done, in order
    assert "polls rank" in text  # and who waited for what at the end


def test_portable_fibers_do_the_same() -> None:
    """The stack switch of machines other than x86-64."""
    lib = forced.library("ag_gemm", "-DKOSMOS_FORCED_UCONTEXT")
    for setup in (Setup(), Setup(run_ahead=True)):
        assert play(setup, 20, lib=lib).digest == play(setup, 20).digest
