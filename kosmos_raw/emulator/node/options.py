"""How the emulated node behaves: KOSMOS_EMULATOR, a list like "caches,preempt=7,jitter=500"."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..machine import CACHES, LATE

VARIABLE = "KOSMOS_EMULATOR"
LOG = "KOSMOS_EMULATOR_LOG"
FAULTS = (
    *("ipc_keeps_offset", "ipc_legacy", "ipc_36", "no_peer", "no_memory", "launch_fails", "ipc_closed", "ipc_not_lazy"),
    "load_waits",
)
MAX_GPUS = 8


@dataclass(frozen=True)
class NodeOptions:
    """What an environment variable or a test may choose.

    gpus: how many there are, before masks.
    threads: host threads that run the workgroups of one process; 0: as many as there are CPUs, at most 8.
    caches: "none", "xcd" or "workgroup": caches as unhelpful as the memory model allows. A bare "caches" means "xcd".
    late: which memory instructions take effect only when a wait demands it: "direct+lds+loads+stores", or some of them.
    preempt: a wave gives way at one in so many memory waits; 0: never.
    jitter: each operation of a stream starts up to so many microseconds late: a missing stream or event wait shows.
    seed: of all that happens by chance.
    limit: seconds after which a kernel that has not ended is stopped, and all that runs with it.
    resident: workgroups of a kernel that run at a time; 0: as many as fit on the compute units.
    faults: what a real node is known to get wrong, or may refuse: names in FAULTS, joined by "+". See node.h.
    trace: print every call.
    """

    gpus: int = MAX_GPUS
    threads: int = 0
    caches: str = "none"
    late: str = ""
    preempt: int = 0
    jitter: int = 0
    seed: int = 1
    limit: float = 300.0
    resident: int = 0
    faults: str = ""
    trace: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.gpus <= MAX_GPUS:
            raise ValueError(f"{VARIABLE}: gpus is {self.gpus}, want 0 to {MAX_GPUS}")
        for name, given, known in (
            ("caches", self.caches, CACHES),
            ("late", self.late, LATE),
            ("faults", self.faults, FAULTS),
        ):
            unknown = set(given.split("+")) - set(known) - {""}
            if unknown:
                raise ValueError(f"{VARIABLE}: {name} is {given!r}, want {', '.join(known)}")

    def to_c(self) -> NodeOptionsC:
        faults = sum(1 << FAULTS.index(name) for name in self.faults.split("+") if name)
        late = sum(LATE[name] for name in self.late.split("+") if name)
        threads = self.threads or min(os.cpu_count() or 1, 8)
        return NodeOptionsC(
            self.limit, self.gpus, threads, CACHES[self.caches], late, self.preempt, self.seed, self.jitter, faults,
            self.resident, self.trace,
        )  # fmt: skip


class NodeOptionsC(ctypes.Structure):
    """NodeOptions in node.h."""

    _fields_ = [
        ("limit_seconds", ctypes.c_double),
        *(
            (name, ctypes.c_uint32)
            for name in "gpus threads caches late preempt_one_in seed jitter_us faults resident_wgs trace".split()
        ),
    ]


_BARE = {"caches": "xcd", "preempt": "7", "jitter": "500", "late": "direct+lds+loads+stores", "trace": "1"}


def from_environment(environ: Mapping[str, str] = os.environ) -> NodeOptions:
    """The options that KOSMOS_EMULATOR names; a word without a value stands for a usual one.

    Raises: ValueError for a word or a value that it does not know.
    """
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(NodeOptions)}
    given: dict[str, Any] = {}
    for word in environ.get(VARIABLE, "").replace(" ", "").split(","):
        name, _, value = word.partition("=")
        if not name:
            continue
        value = value or _BARE.get(name, "")
        try:
            given[name] = bool(int(value)) if kinds[name] is bool else kinds[name](value)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{VARIABLE}: {word!r}, want one of {', '.join(kinds)}, as in {VARIABLE}=caches,preempt=7"
            ) from error
    return NodeOptions(**given)
