"""The loop that ranks and the single process have in common, and checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import kosmos_raw as kr

from . import data
from .model import RankModel, on_host
from .parameters import AdamW, LMConfig, Schedule, initial, joined, own_part
from .reference import ReferenceModel


@dataclass(frozen=True)
class Run:
    """What decides every number of a run; equal on all ranks."""

    config: LMConfig = field(default_factory=LMConfig)
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    dtype: str = "bf16"  # of the ranks' products: "bf16" or "mxfp8"


@dataclass
class State:
    """Of a run between steps. Arrays are whole in a checkpoint and in one process, else this rank's part."""

    step: int
    losses: list[float]
    params: dict[str, Any]
    first: dict[str, Any]  # AdamW's moments
    second: dict[str, Any]


ARRAYS = ("params", "first", "second")


def save(path: Path, run: Run, state: State) -> None:
    """One file with whole arrays, so that another number of ranks may go on with it. It is there in full or not."""
    arrays = {f"{group}/{name}": array for group in ARRAYS for name, array in getattr(state, group).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("wb") as file:
        np.savez(
            file, run=json.dumps(asdict(run)), step=state.step, losses=np.array(state.losses, np.float64), **arrays
        )
    os.replace(unfinished, path)


def load(path: Path, run: Run) -> State:
    """Raises ValueError where the checkpoint is another run's."""
    with np.load(path, allow_pickle=False) as file:
        was, now = json.loads(str(file["run"])), json.loads(json.dumps(asdict(run)))
        if was != now:
            other = {key: (was.get(key), now[key]) for key in now if was.get(key) != now[key]}
            raise ValueError(f"train_lm: {path} is of another run; (its, this one's) {other}; give the same arguments")
        groups: dict[str, dict[str, np.ndarray]] = {group: {} for group in ARRAYS}
        for key in file.files:
            group, _, name = key.partition("/")
            if group in groups:
                groups[group][name] = file[key]
        return State(int(file["step"]), file["losses"].tolist(), **groups)


def steps(model: RankModel | ReferenceModel, optimiser: AdamW, run: Run, state: State, until: int) -> Iterator[float]:
    """Trains to step `until`, in place; yields each step's loss, before its update."""
    corpus, config = data.text(), run.config
    while state.step < until:
        batch = data.batch(corpus, run.seed, state.step, config.sequences, config.length)
        loss, grads = model.gradients(*batch)
        grads = {name: grad.astype(np.float32) for name, grad in grads.items()}
        optimiser.update(grads, state.step, run.schedule.at(state.step))
        if isinstance(model, RankModel):
            model.take_parameters()
        state.losses.append(loss)
        state.step += 1
        yield loss


def on_rank(
    comm: kr.Communicator, run: Run, until: int, folder: str, resume: str | None, every: int, progress: bool
) -> list[float]:
    """Trains from a checkpoint, or from the start. Writes one after every `every` steps, and the last; 0: none.

    Returns: losses of all steps.
    """
    xp, config = comm.device.xp, run.config
    before = load(Path(resume), run) if resume else None
    if before and before.step >= until:
        raise ValueError(f"train_lm: {resume} is of step {before.step}, want one before {until}; give --until more")
    model = RankModel(comm, config, before.params if before else initial(config, run.seed), run.dtype)
    optimiser = AdamW(xp, model.params)
    state = State(0, [], model.params, optimiser.first, optimiser.second)
    if before:
        state.step, state.losses = before.step, before.losses
        for group in ("first", "second"):
            for name, array in getattr(state, group).items():
                array[...] = xp.asarray(getattr(before, group)[name][own_part(config, name, comm.rank, comm.ranks)])
    bar = tqdm(
        steps(model, optimiser, run, state, until),
        desc=f"{comm.ranks} ranks",
        total=until,
        initial=state.step,
        disable=None if progress and comm.rank == 0 else True,
    )
    for loss in bar:
        bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        if every and (state.step % every == 0 or state.step == until):
            whole = _whole(comm, state)
            if comm.rank == 0:
                save(Path(folder) / f"step-{state.step:06}.npz", run, whole)
    return state.losses


def _whole(comm: kr.Communicator, state: State) -> State:
    mine = [{name: on_host(array) for name, array in getattr(state, group).items()} for group in ARRAYS]
    everywhere = comm.allgather(mine)
    groups = [
        {name: joined(name, [of_rank[i][name] for of_rank in everywhere]) for name in mine[i]} for i in range(len(mine))
    ]
    return State(state.step, state.losses, *groups)


def in_one_process(run: Run, ranks: int, until: int, progress: bool = False) -> list[float]:
    """Losses of the run that so many ranks make, in NumPy."""
    params = initial(run.config, run.seed)
    model, optimiser = ReferenceModel(run.config, params, ranks), AdamW(np, params)
    state = State(0, [], params, optimiser.first, optimiser.second)
    found = steps(model, optimiser, run, state, until)
    return list(tqdm(found, desc="one process", total=until, disable=None if progress else True))
