"""The cache of built files, when many build at once and some are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from kosmos_raw.build import cache, zig


def _make(to):
    (to.parent / "side").write_text("side")
    time.sleep(0.05)
    to.write_text("made")
    with open(cache.folder() / "count", "a") as count:
        count.write("x")


def _ask(start, key):
    start.wait()
    made = cache.cached("thing", [key], _make)
    assert made.read_text() == "made" and (made.parent / "side").read_text() == "side"


def _be_killed(to):
    to.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)


def test_many_at_once_build_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KOSMOS_CACHE_DIR", str(tmp_path))
    context = multiprocessing.get_context("fork")
    for round_ in range(3):
        start = context.Barrier(8)
        ranks = [context.Process(target=_ask, args=(start, str(round_))) for _ in range(8)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0
    assert (tmp_path / "count").read_text() == "xxx"


def test_a_killed_build_leaves_nothing_that_looks_finished(tmp_path, monkeypatch):
    monkeypatch.setenv("KOSMOS_CACHE_DIR", str(tmp_path))
    context = multiprocessing.get_context("fork")
    victim = context.Process(target=cache.cached, args=("thing", ["k"], _be_killed))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    assert cache.cached("thing", ["k"], _make).read_text() == "made"


def test_a_failed_build_raises_each_time(tmp_path, monkeypatch):
    monkeypatch.setenv("KOSMOS_CACHE_DIR", str(tmp_path))
    source = tmp_path / "wrong.cpp"
    source.write_text("this is no C++")
    for _ in range(2):
        with pytest.raises(zig.BuildError, match=r"compiler failed .*wrong\.cpp"):
            zig.shared_library(source)


def test_keys_do_not_run_into_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("KOSMOS_CACHE_DIR", str(tmp_path))
    made = {cache.cached("thing", key, _make) for key in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""])}
    assert len(made) == 4
