"""An emulator of gfx950: runs the assembly text of which the shipped code objects are made, on the CPU.

Static translation: assembly text to C++ (translate.py and its families), compiled once and kept (module.py), run by a
small runtime (runtime/, a C library) that schedules waves, and has memory with all the faults that hardware may show:
private caches, late loads, delayed stores. What it does not have: time, hazards between instructions, the last bits of
transcendental functions and of sums inside matrix instructions.
"""

from .asm import Unsupported
from .machine import Launch, Machine, Options, RunError, Running, RunReport, run
from .module import Module
from .translate import UnknownInstructions

__all__ = [
    "Launch",
    "Machine",
    "Module",
    "Options",
    "RunError",
    "RunReport",
    "Running",
    "UnknownInstructions",
    "Unsupported",
    "run",
]
