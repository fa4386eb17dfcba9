"""Who moves, in which order tiles are taken, and who is late: none of it changes a bit, for any operator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kosmos_raw as kr
from kosmos_raw.build.params import ORDERS, POLICIES
from kosmos_raw.checks.operators import CHECKED, Case
from kosmos_raw.plan.shapes import ORDERS_OF

SHAPES = {"ragged": ((97, 0, 230, 5), 200, 136), "even": ((110,) * 4, 104, 264)}


def _bits(comm, cases):
    """The bits of all outputs, a case each."""
    comm.device.most_delay_us = cases[0].delay_us
    found = []
    for case in cases:
        operator = CHECKED[case.op]
        inputs = {name: x.view(np.uint16) for name, x in operator.inputs(case, comm.rank, 0).items()}
        outputs = {name: np.zeros(shape, np.uint16) for name, shape in operator.outputs(case, comm.rank).items()}
        operator.call(comm, case, inputs, outputs)
        found.append(outputs)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", CHECKED)
def test_bits_do_not_depend_on_policies_orders_crews_or_delays(op, shape):
    rows, n, k = SHAPES[shape]
    case = Case(rows, n, k, op, split=3 if op in ("ag_gemm_dgrad", "bulk_rs") else None, delay_us=100)
    combinations = [(policy, order) for policy in POLICIES for order in ORDERS_OF[op]]
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
