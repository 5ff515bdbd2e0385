"""Tool that cuts a CUDA library's machine code down to sm_90: it zeroes other architectures' entries, and all of
FlashAttention-3 but bf16 heads of 64 and 128.

usage: trim_fatbin.py FROM TO (needs zstandard). Zeroed entries stay where they were and are loaded only when a kernel
of theirs is launched.
"""

import re
import struct
import sys
from pathlib import Path

import zstandard

MAGIC = struct.pack("<I", 0xBA55ED50)
KEPT = re.compile(rb"(?<!ILi192EEEEE)ELi(64|128)ENS_10bfloat16_tEf")


def keeps(code: bytes) -> bool:
    if code[:4] == b"\x28\xb5\x2f\xfd":
        code = zstandard.ZstdDecompressor().decompressobj().decompress(code)
    return b"CollectiveMainloopFwdSm90" not in code or bool(KEPT.search(code))


def main(source: str, target: str) -> None:
    data, at, kept, zeroed = bytearray(Path(source).read_bytes()), 0, 0, 0
    while (at := data.find(MAGIC, at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        if version != 1 or header != 16 or size > len(data) - at:
            at += 4
            continue
        entry, end = at + header, at + header + size
        while entry < end:
            _, _, head, length = struct.unpack_from("<HHIQ", data, entry)
            arch = struct.unpack_from("<I", data, entry + 28)[0]
            code = slice(entry + head, entry + head + length)
            if arch == 90 and keeps(bytes(data[code])):
                kept += length
            else:
                data[code] = bytes(length)
                zeroed += length
            entry += head + length
        at = end
    Path(target).write_bytes(data)
    print(f"{target}: kept {kept / 1e6:.1f} MB of machine code, zeroed {zeroed / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
