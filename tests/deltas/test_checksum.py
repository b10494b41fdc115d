"""The compiled checksum is XXH64."""

import numpy as np
import pytest

from helmrec.deltas.checksum import xxh64

P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
MASK = 2**64 - 1


def rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & MASK


def one_round(lane: int, word: int) -> int:
    return rotated((lane + word * P2) & MASK, 31) * P1 & MASK


def plain(data: bytes) -> int:
    """The same, byte by byte as the specification has it."""
    at, found = 0, P5
    if len(data) >= 32:
        lanes = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        while at + 32 <= len(data):
            for i in range(4):
                lanes[i] = one_round(lanes[i], int.from_bytes(data[at + 8 * i : at + 8 * i + 8], "little"))
            at += 32
        found = sum(rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            found = ((found ^ one_round(0, lane)) * P1 + P4) & MASK
    found = (found + len(data)) & MASK
    while at + 8 <= len(data):
        found = (rotated(found ^ one_round(0, int.from_bytes(data[at : at + 8], "little")), 27) * P1 + P4) & MASK
        at += 8
    if at + 4 <= len(data):
        word = int.from_bytes(data[at : at + 4], "little")
        found = (rotated(found ^ (word * P1 & MASK), 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        found = rotated(found ^ (byte * P5 & MASK), 11) * P1 & MASK
    for shift, factor in ((33, P2), (29, P3)):
        found = (found ^ found >> shift) * factor & MASK
    return found ^ found >> 32


@pytest.mark.parametrize(
    ("data", "published"), [(b"", 0xEF46DB3751D8E999), (b"a", 0xD24EC4F1A98C6E5B), (b"abc", 0x44BC2CF5AD770999)]
)
def test_published_values(data: bytes, published: int) -> None:
    assert xxh64(data) == plain(data) == published


def test_it_equals_its_plain_twin_at_every_length_and_alignment() -> None:
    data = np.random.default_rng(0).integers(0, 256, 300, np.uint8).tobytes()
    for size in range(len(data)):
        assert xxh64(data[:size]) == plain(data[:size])
        assert xxh64(memoryview(data)[3 : 3 + size]) == plain(data[3 : 3 + size])
        assert xxh64(bytearray(data[:size])) == plain(data[:size])
