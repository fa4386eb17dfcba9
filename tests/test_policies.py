"""Who moves, in which order tiles are taken, and who is late: none of it changes a bit, for any operator."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.bench import policies
from kosmos_raw.build.params import ORDERS
from kosmos_raw.checks.operators import CHECKED, Case
from kosmos_raw.checks.validate import bits_of, merge, report, run
from kosmos_raw.cli import demo
from kosmos_raw.cli.main import main
from kosmos_raw.plan.crew import policies_of
from kosmos_raw.plan.shapes import ORDERS_OF
from tests import programs

SHAPES = {"ragged": ((97, 0, 230, 5), 200, 136), "even": ((110,) * 4, 104, 264)}


def _bits(comm, cases):
    """The bits of all outputs, a case each."""
    comm.device.most_delay_us = cases[0].delay_us
    return [bits_of(comm, case) for case in cases]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", CHECKED)
def test_bits_do_not_depend_on_policies_orders_crews_or_delays(op, shape):
    rows, n, k = SHAPES[shape]
    case = Case(rows, n, k, op, split=3 if op in ("ag_gemm_dgrad", "bulk_rs") else None, delay_us=100)
    combinations = [(policy, order) for policy in policies_of(op, beside=False) for order in ORDERS_OF[op]]
    every = []
    for workgroups, movers in ((2, None), (3, 2), (9, 4), (16, None)):
        cases = [replace(case, policy=policy, order=order, movers=movers) for policy, order in combinations]
        every += zip(*kr.launch(_bits, cases, ranks=4, mode="threads", workgroups=workgroups), strict=True)
    assert len(every) == 4 * len(combinations)
    for of_ranks in every[1:]:
        for first, other in zip(every[0], of_ranks, strict=True):
            assert all(np.array_equal(first[name], other[name]) for name in first)


def test_every_order_is_known_to_some_operator():
    assert {order for orders in ORDERS_OF.values() for order in orders} == set(ORDERS)
    assert all(orders[0] == ORDERS[0] for orders in ORDERS_OF.values())


def test_bench_policies_measures_every_policy_and_order(tmp_path, capsys):
    files = [tmp_path / "policies.csv", tmp_path / "policies.png"]
    shape = ["--shapes", "300,100,64", "--ranks", "2", "--rounds", "2", "--workgroups", "3"]
    assert main(["bench", "policies", "gemm_rs", *shape, "--csv", str(files[0]), "--png", str(files[1]), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    seen = {(row["variant"]["policy"], row["variant"]["order"]) for row in rows}
    assert seen == {(policy, ORDERS[0]) for policy in policies_of("gemm_rs", beside=False)} | {
        ("one_way", x) for x in ORDERS_OF["gemm_rs"]
    }
    switches = {row["variant"]["name"]: row["switches"] for row in rows}
    assert switches["fixed"] == 0 < switches["two_way"]  # those who leave switch nothing
    lines = files[0].read_text().splitlines()
    assert len(lines) == 1 + 2 * len(rows) and files[1].read_bytes().startswith(b"\x89PNG")

    assert main(["bench", "policies", "--redraw", str(files[0]), "--device", "cuda", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [row["variant"] for row in again["rows"]] == [row["variant"] for row in rows]
    assert [row["ms"] for row in again["rows"]] == pytest.approx([row["ms"] for row in rows], abs=1e-5)
    device, ((case, _),) = policies.read_csv(files[0])
    assert (device, case) == ("cpu", Case((150, 150), 100, 64, "gemm_rs"))


def _wrong(comm):
    """A variant of other bits than the first."""
    plain = policies.validate.bits_of

    def bits_of(comm, case, inputs):
        bits = plain(comm, case, inputs)
        return {name: bits + (case.policy == "two_way" and comm.rank == 1) for name, bits in bits.items()}

    policies.validate.bits_of = bits_of
    try:
        return str(programs.error_of(lambda: policies.run(comm, [Case((5, 5), 8, 8)], 1))[1])
    finally:
        policies.validate.bits_of = plain


def test_bench_policies_times_nothing_that_is_wrong():
    for said in kr.launch(_wrong, ranks=2, mode="processes"):
        assert said == "bench policies: ag_gemm, two_way: other bits than one_way"


def test_the_table_of_demo_takes_every_policy():
    cases = [Case((4, 4), 8, 8, policy=policy) for policy in (None, *policies_of("ag_gemm", beside=False))]
    reports = [report(case, "cpu", merge(kr.launch(run, case, ranks=2, mode="threads"))) for case in cases]
    lines = demo._checks_table(reports).splitlines()[2:]
    assert [line.split()[7] for line in lines] == ["default", *policies_of("ag_gemm", beside=False)]
