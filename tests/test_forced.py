"""Operators under forced interleavings: right setups are never bad, and each broken rule of a protocol is noticed.

A history is five launches of all ranks, with other shapes and data in each; every element is checked, and so is the
order of every data access (hip_kernels/target/forced_memory.h). A failure prints how to replay it.
"""

from __future__ import annotations

import pytest

from .forced import forced
from .forced.forced import OPS, Setup, amiss, play, right
from .forced.mutations import MUTATIONS, WITHOUT_EFFECT

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
