"""Which functions a library wants of others: its .dynsym with versions, read from the file."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_DYNAMIC, _DYNSYM, _VERSIONS, _NEEDED_VERSIONS = 6, 11, 0x6FFFFFFF, 0x6FFFFFFE
_DT_NEEDED = 1


@dataclass(frozen=True)
class Symbol:
    name: str
    version: str  # "" where the library asks for none
    library: str  # soname by its version, "" when there is no version to tell


@dataclass
class Section:
    kind: int
    data: bytes
    link: int
    name: str


@dataclass
class Wanted:
    needed: list[str] = field(default_factory=list)  # sonames
    symbols: list[Symbol] = field(default_factory=list)  # that are not defined in the file


def sections(data: bytes) -> list[Section]:
    """All sections of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit ELF file")
    table, entry, count, names_at = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HHH", data, 58)
    heads = [struct.unpack_from("<IIQQQQII", data, table + i * entry) for i in range(count)]
    names = data[heads[names_at][4] :] if heads else b""
    return [
        Section(kind, b"" if kind == 8 else data[offset : offset + size], link, _string(names, name))
        for name, kind, _, _, offset, size, link, _ in heads
    ]


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def wanted(path: Path) -> Wanted:
    """What the library at `path` needs from others."""
    every = sections(path.read_bytes())
    by_kind = {section.kind: section for section in every}
    out = Wanted()
    if _DYNSYM not in by_kind or _DYNAMIC not in by_kind:
        return out
    dynamic = by_kind[_DYNAMIC]
    strings = every[dynamic.link].data
    for tag, value in struct.iter_unpack("<qQ", dynamic.data):
        if tag == _DT_NEEDED:
            out.needed.append(_string(strings, value))
    versions = dict(_version_names(by_kind.get(_NEEDED_VERSIONS), strings))
    numbers = by_kind[_VERSIONS].data if _VERSIONS in by_kind else b""
    for i, (name, _, _, section, _, _) in enumerate(struct.iter_unpack("<IBBHQQ", by_kind[_DYNSYM].data)):
        if section or not name:
            continue
        number = struct.unpack_from("<H", numbers, 2 * i)[0] & 0x7FFF if numbers else 0
        version, library = versions.get(number, ("", ""))
        out.symbols.append(Symbol(_string(strings, name), version, library))
    return out


def _version_names(section: Section | None, strings: bytes) -> Iterator[tuple[int, tuple[str, str]]]:
    """Number -> (version, soname), from .gnu.version_r."""
    at = 0
    while section is not None:
        _, count, file, aux, following = struct.unpack_from("<HHIII", section.data, at)
        entry = at + aux
        for _ in range(count):
            _, _, number, name, step = struct.unpack_from("<IHHII", section.data, entry)
            yield number & 0x7FFF, (_string(strings, name), _string(strings, file))
            entry += step
        if not following:
            return
        at += following
