"""Checks on ranks that are threads, where one that fails must not end those that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kosmos_raw as kr
from kosmos_raw.checks.moe import MoeCase
from kosmos_raw.checks.operators import Case
from kosmos_raw.checks.validate import Outcome, merge


def launched(check: Callable[..., Outcome], case: Case | MoeCase, **options: Any) -> Outcome:
    """What all ranks found. An error is a problem, of numbers that nobody knows."""
    try:
        return merge(kr.launch(check, case, ranks=case.ranks, mode="threads", **options))
    except Exception as error:
        nan = float("nan")
        return Outcome(False, False, nan, nan, nan, problems=[f"{type(error).__name__}: {error}"])
