"""Every rank runs the same tests; the first one tells about them, and the others only when something fails."""

from __future__ import annotations

import pytest

from kosmos_raw.ranks.mpi import world_rank


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """In place of the check of all other tests: MPI opens files of its own when it starts, and keeps them."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if world_rank() and reporter:
        config.pluginmanager.unregister(reporter)


def pytest_runtest_logreport(report):
    if world_rank() and report.failed:
        print(f"rank {world_rank()}: {report.nodeid}\n{report.longreprtext}", flush=True)
