"""One symmetric arena a rank: allocated once, exported once, opened once by each peer; sub-buffers are offsets."""

from .allocator import Allocator
from .arena import Arena

__all__ = ["Allocator", "Arena"]
