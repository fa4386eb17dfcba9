"""Text that every machine with Python has: sources of the standard library, one token a byte."""

from __future__ import annotations

import importlib.util

import numpy as np

VOCABULARY = 256
MODULES = (
    "argparse ast bdb calendar cmd codecs configparser copy csv datetime decimal difflib dis doctest enum fractions "
    "ftplib functools gettext glob heapq imaplib inspect ipaddress locale mailbox ntpath optparse os pdb pickle "
    "pickletools platform plistlib posixpath pprint pydoc random shutil smtplib socket socketserver ssl statistics "
    "string subprocess tarfile tempfile textwrap threading tokenize traceback typing uuid warnings weakref zipfile"
).split()


def text() -> np.ndarray:
    """All bytes of these modules, uint8. Equal on all ranks that run the same Python; modules that are not there, or
    have no source, are left out."""
    sources = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        get_source = getattr(spec.loader, "get_source", None) if spec else None
        source = get_source(name) if get_source else None
        if source:
            sources.append(source)
    found = np.frombuffer("\n".join(sources).encode(), np.uint8)
    if len(found) < 100_000:
        raise ValueError(
            f"data: the standard library has {len(found)} bytes of source here, want 100000 or more; install Python "
            "with its sources"
        )
    return found


def batch(corpus: np.ndarray, seed: int, step: int, sequences: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, targets), [length * sequences] each, of random places; they depend on seed and step alone, so that a
    resumed run goes on with what it would have read.

    Position is the outer index: dealt to ranks by rows, it is sequences that are cut.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(corpus) - length, sequences)
    taken = corpus[starts[None, :] + np.arange(length + 1)[:, None]].astype(np.int64)
    return taken[:-1].reshape(-1), taken[1:].reshape(-1)
