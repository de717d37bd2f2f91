"""Clears the device code of other GPU architectures in a shared library, so that it packs to a small part of its size.

    python scripts/trim_fatbin.py IN.so OUT.so 90        keep machine code for compute capability 9.0

The library keeps its size and its layout: bytes of code that is not kept become zeros, which xz packs to nothing. It loads and
runs only on a GPU of a kept architecture. PTX goes too, so that nothing is compiled at start for a GPU it was not kept for.
"""

import struct
import sys
from collections import Counter
from pathlib import Path

FATBIN, CONTAINER_MAGIC = b".nv_fatbin", 0xBA55ED50
PTX = 1


def device_code_sections(data: bytearray) -> list[tuple[int, int]]:
    """Returns the start and end of every section of device code in a 64-bit ELF file."""
    table = struct.unpack_from("<Q", data, 0x28)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + index * entry_size) for index in range(count)]
    names = headers[names_index][4]
    return [
        (offset, offset + size)
        for name, _, _, _, offset, size in headers
        if data[names + name : names + name + len(FATBIN)] == FATBIN
    ]


def trim(data: bytearray, keep: set[int]) -> Counter[tuple[str, int, bool]]:
    """Clears in place. Returns bytes by (kind, architecture, kept). Raises ValueError for an unknown layout."""
    sizes: Counter[tuple[str, int, bool]] = Counter()
    for start, end in device_code_sections(data):
        position = start
        while position < end - 16:
            magic, _, header_size, body_size = struct.unpack_from("<IHHQ", data, position)
            if magic != CONTAINER_MAGIC:  # padding between containers
                position += 8
                continue
            entry, stop = position + header_size, position + header_size + body_size
            while entry < stop:
                kind, _, entry_header, size = struct.unpack_from("<HHIQ", data, entry)
                architecture = struct.unpack_from("<I", data, entry + 28)[0]
                if not 32 <= entry_header <= 4096 or entry + entry_header + size > stop:
                    raise ValueError(
                        f"unknown entry of device code at byte {entry:#x}: kind {kind}, header {entry_header}, size {size}"
                    )
                kept = architecture in keep and kind != PTX
                if not kept:
                    data[entry + entry_header : entry + entry_header + size] = bytes(size)
                sizes["PTX" if kind == PTX else "machine code", architecture, kept] += size
                entry += entry_header + size
            position = stop + -stop % 8
    if not any(kept for _, _, kept in sizes):
        raise ValueError(f"no machine code for {sorted(keep)}; it has {sorted({architecture for _, architecture, _ in sizes})}")
    return sizes


def main() -> None:
    source, target, architectures = sys.argv[1:]
    data = bytearray(Path(source).read_bytes())
    sizes = trim(data, {int(architecture) for architecture in architectures.split(",")})
    Path(target).write_bytes(data)
    for (kind, architecture, kept), size in sorted(sizes.items()):
        print(f"sm_{architecture} {kind}: {size / 2**20:.1f} MiB {'kept' if kept else 'cleared'}")


if __name__ == "__main__":
    main()
