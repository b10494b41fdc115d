"""Formats of values in eight bits. A scale of their own lets the values of a head, or of a row, use all of a format."""

from typing import NamedTuple


class CodeFormat(NamedTuple):
    """How values become codes: scaled so that the largest one fits, then rounded to the nearest code, ties to even."""

    top: int  # exponent of the largest code, which is c * 2**top with 1 <= c < 2
    carry: int  # 2**23 - 1 less the 23 bits of c after its leading one: added to a float32, it carries beyond c
    lowest: int  # smallest exponent of a scale: the smallest step is 2**-24, which float16 still holds


NAN_EXPONENT = 255  # as a scale it reads as infinity, and infinity times a code of zero is NaN
CODE_FORMATS = {
    "fp8_e4m3": CodeFormat(top=8, carry=0x1FFFFF, lowest=-15),  # up to 448
    "int8": CodeFormat(top=6, carry=0x1FFFF, lowest=-24),  # up to 127
}
