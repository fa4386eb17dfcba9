"""Started by mpirun on every rank: make test-8, or tests/test_mpi.py."""

from __future__ import annotations

import os

import pytest

import kosmos_raw as kr
from kosmos_raw.checks.operators import Case
from kosmos_raw.checks.validate import merge, run_all
from kosmos_raw.ranks.mpi import world_rank, world_size
from tests import programs

pytestmark = pytest.mark.mpi


def test_every_rank_gets_all_results():
    results = kr.launch(programs.world)
    assert [(rank, ranks) for rank, ranks, _ in results] == [(q, world_size()) for q in range(world_size())]
    assert results[world_rank()][2] == os.getpid() and len({pid for _, _, pid in results}) == world_size()


def test_matches_oracle():
    cases = [
        Case(tuple(kr.split_rows(501, world_size())), 130, 72),
        Case((97,) + (0,) * (world_size() - 1), 40, 16, policy="fixed", arena=True),
    ]
    for outcomes in zip(*kr.launch(run_all, cases), strict=True):
        assert merge(outcomes).passed, merge(outcomes).problems


def test_many_calls():
    assert kr.launch(programs.back_to_back, 60, 5) == [60] * world_size()


def test_absent_rank_is_named_and_rebuild_helps():
    results = kr.launch(programs.absent_rank, 1, timeout_s=0.5)
    assert results[1] is None
    for result in results[:1] + results[2:]:
        assert result[1].reason == "waited too long"


def test_other_numbers_of_ranks_are_refused():
    with pytest.raises(ValueError, match=f"ranks is {world_size() + 1}, but mpirun or srun started {world_size()}"):
        kr.launch(programs.world, ranks=world_size() + 1)
