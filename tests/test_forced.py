"""ag_gemm under forced interleavings: right setups are never bad, and each broken rule of the protocol is noticed.

A history is five launches of all ranks, with other shapes and data in each; every element is checked, and so is the
order of every data access (hip_kernels/target/forced_memory.h). A failure prints how to replay it.
"""

from __future__ import annotations

import dataclasses

import pytest

from .forced import forced
from .forced.forced import AMISS, RIGHT, Setup, play

# Histories of each right setup, by ranks.
HISTORIES = {1: 500, 2: 2000, 3: 2500, 8: 300}
HISTORIES_AMISS = {2: 300, 3: 300, 8: 60}

THREE = Setup(ranks=3)
FORMS = pytest.mark.parametrize("run_ahead", [False, True], ids=["serial", "ahead"])


def test_right_setups_are_40000_histories() -> None:
    assert sum(HISTORIES[setup.ranks] for setup in RIGHT.values()) >= 40_000


@pytest.mark.parametrize("name", RIGHT)
def test_right_setup(name: str) -> None:
    result = play(RIGHT[name], HISTORIES[RIGHT[name].ranks])
    assert result.histories == HISTORIES[RIGHT[name].ranks]
    assert result.bad == 0, result


@pytest.mark.parametrize("name", AMISS)
def test_every_rank_ends_and_says_why(name: str) -> None:
    """One rank makes another call, never launches, or the host says stop: nobody hangs, and records say what it was."""
    result = play(AMISS[name], HISTORIES_AMISS[AMISS[name].ranks])
    assert result.bad == 0, result


# What is broken, how it must show, and in which setup. The rule that each breaks is in tests/forced/mutants.h.
MUTATIONS = [
    ("NO_RELEASE", "WRONG_VALUE RACE", {}),  # rows, inputs and fingerprints arrive after the signals that announce them
    ("NO_ACQUIRE", "WRONG_VALUE RACE", {}),  # old rows and inputs are read after the signals have been seen
    ("NO_START_WAIT", "WRONG_VALUE RACE", {}),  # pulls the peer's last inputs, or what it is just writing
    ("NO_READS_DONE_WAIT", "WRONG_VALUE RACE", {}),  # the caller's next input overwrites what peers still read
    ("NO_SLICES_LANDED_WAIT", "WRONG_VALUE RACE", {}),  # multiplies rows that are not there
    ("NOT_CLEARED", "WRONG_VALUE DEADLOCK", {}),  # queue heads and counts go on from two launches ago
    ("CLEARS_BY_THIS_SHAPE", "WRONG_VALUE", {}),  # what a larger launch counted is taken for this one's
    ("ONE_COUNTER_SET", "DEADLOCK", {}),  # a late WG clears a head that is in use
    ("ALL_ARE_MOVERS", "WRONG_VALUE", {"policy": "fixed"}),  # nobody builds
    ("NONE_IS_MOVER", "DEADLOCK", {}),  # nobody moves
    ("SAME_FINGERPRINT", "WRONG_VALUE OUTSIDE", {"kind": "OTHER_CALL"}),  # two different calls take each other's rows
    ("COUNTS_BEFORE_RELEASE", "WRONG_VALUE RACE", {}),
    ("FIRST_PULL_REPORTS_READS", "WRONG_VALUE RACE", {}),
    ("ONE_SLICE_TOO_FEW", "WRONG_VALUE RACE", {}),
    ("ONE_SLICE_TOO_MANY", "DEADLOCK", {}),
    ("DRAINS_EMPTY_SHARDS", "DEADLOCK", {}),
    ("NEVER_DRAINS", "WRONG_VALUE RACE", {}),
    ("ANNOUNCES_LATE", "DEADLOCK", {}),
    ("ANNOUNCES_EPOCH_FIRST", "WRONG_END", {}),  # a right call is taken for another one
    ("BUILDS_BEFORE_IT_MOVES", "DEADLOCK", {}),
    ("COMPARES_UNSIGNED", "WRONG_VALUE RACE", {"near_wrap": True}),
    ("FORGETS_PEERS", "DEADLOCK", {}),
    ("POLLS_IN_DEVICE_SCOPE", "NARROW_SCOPE", {}),
    ("STORES_BESIDE", "WRONG_VALUE OUTSIDE", {}),  # the tests' own guards
]


@FORMS
@pytest.mark.parametrize(("mutation", "shows", "setup"), MUTATIONS, ids=[m[0] for m in MUTATIONS])
def test_mutation_is_noticed(mutation: str, shows: str, setup: dict, run_ahead: bool) -> None:
    result = play(dataclasses.replace(THREE, run_ahead=run_ahead, mutation=mutation, **setup), 150)
    assert all(result.symptoms[symptom] for symptom in shows.split()), result


def test_every_mutation_is_tested() -> None:
    assert {"NONE", *(m[0] for m in MUTATIONS)} == set(forced.names("mutation"))


# Every fence of ag_gemm, and how it shows that it is gone. The last two order only loads before a signal: no value
# shows that, for the model never delays a load; the order of accesses does.
FENCES = {
    "group.h announce_start release system": "WRONG_VALUE RACE",
    "group.h wait_started acquire system": "WRONG_VALUE RACE",
    "ag_gemm.h wait_inputs acquire device": "WRONG_VALUE RACE",
    "ag_gemm.h finish release device": "WRONG_VALUE RACE",
    "ag_gemm.h finish acquire device": "RACE",
    "ag_gemm.h finish release system": "RACE",
}
UNNOTICED: dict[str, str] = {}  # a fence whose loss this model cannot notice, and why. There is none.


def test_all_fences_are_known() -> None:
    found = forced.fences()
    assert len(set(found)) == len(found), "two fences of one name: tell them apart"
    assert set(found) == FENCES.keys() | UNNOTICED.keys()


@FORMS
@pytest.mark.parametrize("fence", [*FENCES, *UNNOTICED])
def test_without_one_fence(fence: str, run_ahead: bool) -> None:
    result = play(dataclasses.replace(THREE, run_ahead=run_ahead, without_fence=fence), 300)
    for symptom in FENCES.get(fence, "").split():
        assert result.symptoms[symptom], result
    if fence in UNNOTICED:
        assert result.bad == 0, f"now it is noticed: {result}"
    elif FENCES[fence] == "RACE":
        assert result.symptoms["WRONG_VALUE"] == 0, f"now a value shows it: {result}"


@pytest.mark.parametrize("fence", [fence for fence in FENCES if fence.endswith("system")])
def test_device_scope_is_too_narrow(fence: str) -> None:
    """A fence between ranks that orders for its own device only."""
    result = play(dataclasses.replace(THREE, narrow_fence=fence), 150)
    assert result.symptoms["RACE"], result


@FORMS
def test_a_seed_replays_exactly(run_ahead: bool) -> None:
    setup = dataclasses.replace(THREE, run_ahead=run_ahead)
    alone = [play(setup, 1, seed).digest for seed in range(20)]
    play(Setup(ranks=8, mutation="NO_RELEASE"), 3)  # leaves histories in the middle
    assert alone == [play(setup, 1, seed).digest for seed in range(20)]
    assert len(set(alone)) == len(alone)


def test_the_log_changes_nothing_and_says_what_happened(capfd: pytest.CaptureFixture[str]) -> None:
    setup = dataclasses.replace(THREE, mutation="ONE_SLICE_TOO_MANY")
    quiet = play(setup, 1)
    logged = play(setup, 1, log=True)
    assert quiet.digest == logged.digest
    text = capfd.readouterr().out
    assert "claimed pull" in text and "ready   tile" in text  # what was done, in order
    assert "polls rank" in text  # and who waited for what at the end


def test_portable_fibers_do_the_same() -> None:
    """The stack switch of machines other than x86-64."""
    lib = forced.library("-DKOSMOS_FORCED_UCONTEXT")
    for setup in (THREE, dataclasses.replace(THREE, run_ahead=True)):
        assert play(setup, 20, lib=lib).digest == play(setup, 20).digest
