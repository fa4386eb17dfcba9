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
HISTORIES_AMISS = {2: 300, 3: 300, 8: 60}

FORMS = pytest.mark.parametrize("run_ahead", [False, True], ids=["serial", "ahead"])
EACH_OP = pytest.mark.parametrize("op", OPS)
RIGHT = [(op, name) for op in OPS for name in right(op)]
AMISS = [(op, name) for op in OPS for name in amiss(op)]


@EACH_OP
def test_right_setups_are_20000_histories(op: str) -> None:
    assert sum(HISTORIES[setup.ranks] for setup in right(op).values()) >= 20_000


@pytest.mark.parametrize(("op", "name"), RIGHT)
def test_right_setup(op: str, name: str) -> None:
    setup = right(op)[name]
    result = play(setup, HISTORIES[setup.ranks])
    assert result.histories == HISTORIES[setup.ranks]
    assert result.bad == 0, result


@pytest.mark.parametrize(("op", "name"), AMISS)
def test_every_rank_ends_and_says_why(op: str, name: str) -> None:
    """One rank makes another call, never launches, or the host says stop: nobody hangs, and records say what it was."""
    setup = amiss(op)[name]
    result = play(setup, HISTORIES_AMISS[setup.ranks])
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
        ("DRAINS_EMPTY_SHARDS", "DEADLOCK", {}),
        ("NEVER_DRAINS", "WRONG_VALUE RACE", {}),
        ("ANNOUNCES_EPOCH_FIRST", "WRONG_END", {}),  # a right call is taken for another one
        ("ONE_FINGERPRINT", "WRONG_END", {}),  # and so, where a peer is in the next launch already
        ("BUILDS_BEFORE_IT_MOVES", "DEADLOCK", {}),
        ("COMPARES_UNSIGNED", "WRONG_VALUE RACE", {"near_wrap": True}),
        ("FORGETS_PEERS", "DEADLOCK", {}),
        ("POLLS_IN_DEVICE_SCOPE", "NARROW_SCOPE", {}),
        ("BUILDS_UNREADY", "DEADLOCK", {"policy": "two_way"}),
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
        ("STORES_BESIDE", "WRONG_VALUE OUTSIDE", {}),
        *COMMON[:-1],
    ],
}
# No word whose place depends on the shape decides anything there.
WITHOUT_EFFECT = {"bulk_ag": {"CLEARS_BY_THIS_SHAPE"}, "bulk_rs": {"CLEARS_BY_THIS_SHAPE"}}
EACH_MUTATION = [
    pytest.param(op, mutation, shows, {"run_ahead": run_ahead, **setup}, id=f"{op}-{mutation}-{form}")
    for op in OPS
    for mutation, shows, setup in MUTATIONS[op]
    for form, run_ahead in forced.FORMS.items()
    if setup.get("run_ahead", run_ahead) == run_ahead
]


@pytest.mark.parametrize(("op", "mutation", "shows", "setup"), EACH_MUTATION)
def test_mutation_is_noticed(op: str, mutation: str, shows: str, setup: dict) -> None:
    histories = setup.pop("histories", 200)
    result = play(Setup(op, mutation=mutation, **setup), histories)
    assert all(result.symptoms[symptom] for symptom in shows.split()), result


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
        "gather.h wait_landed acquire device": "WRONG_VALUE RACE",
        "gather.h finish_pull release device": "WRONG_VALUE RACE",
        "gather.h finish_pull acquire device": "RACE",
        "gather.h finish_pull release system": "RACE",
        "gather.h landed acquire device": "",  # wait_inputs comes after it here; gfx950 goes on without
    },
    "ag_gemm_dgrad": {
        "group.h announce_start release system": "WRONG_VALUE RACE",
        "group.h wait_started acquire system": "WRONG_VALUE RACE",
        "gather.h wait_landed acquire device": "WRONG_VALUE RACE",
        "gather.h finish_pull release device": "WRONG_VALUE RACE",
        "gather.h finish_pull acquire device": "RACE",
        "gather.h finish_pull release system": "RACE",
        "gather.h landed acquire device": "",  # wait_inputs comes after it here; gfx950 goes on without
        "ag_gemm_dgrad.h wait_inputs acquire device": "WRONG_VALUE RACE",
        "ag_gemm_dgrad.h finish release device": "WRONG_VALUE RACE",
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
    "gemm_rs": {
        "group.h announce_start release system": "RACE",
        "group.h wait_started acquire system": "RACE",
        "gemm_rs.h band_is_made acquire system": "RACE",
    },
}
TWO_WAY_FENCES = {"gather.h landed acquire device", "gemm_rs.h band_is_made acquire system"}  # of that policy alone
EACH_FENCE = [(op, fence) for op in OPS for fence in FENCES[op]]


@EACH_OP
def test_all_fences_are_known(op: str) -> None:
    found = forced.fences(op)
    assert len(set(found)) == len(found), "two fences of one name: tell them apart"
    assert set(found) == FENCES[op].keys()


@FORMS
@pytest.mark.parametrize(("op", "fence"), EACH_FENCE)
def test_without_one_fence(op: str, fence: str, run_ahead: bool) -> None:
    policy, histories = ("two_way", 1000) if fence in TWO_WAY_FENCES else ("one_way", 300)
    result = play(Setup(op, policy=policy, run_ahead=run_ahead, without_fence=fence), histories)
    for symptom in FENCES[op][fence].split():
        assert result.symptoms[symptom], result
    if not FENCES[op][fence]:
        assert result.bad == 0, f"now it is noticed: {result}"
    if FENCES[op][fence] == "RACE":
        assert result.symptoms["WRONG_VALUE"] == 0, f"now a value shows it: {result}"


@pytest.mark.parametrize(("op", "fence"), [(op, fence) for op, fence in EACH_FENCE if fence.endswith("system")])
def test_device_scope_is_too_narrow(op: str, fence: str) -> None:
    """A fence between ranks that orders for its own device only."""
    policy, histories = ("two_way", 1000) if fence in TWO_WAY_FENCES else ("one_way", 150)
    result = play(Setup(op, policy=policy, narrow_fence=fence), histories)
    assert result.symptoms["RACE"], result


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
