"""Transfer of bytes between two processes: payloads in shared memory, their positions through a socket.

Each direction is a ring with one writer and one reader, and as much memory again for arrays that the reader may keep.
Positions only grow; the offset of a frame is its position modulo the ring's size. Positions go through the socket and
never through shared memory, so there are no data races, and each process sees the end of the other as the end of the
socket. Knows frames, not their contents.
"""

import asyncio
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from helmrec.errors import EngineClosed, QueueFull
from helmrec.serve.loans import Borrower, Lender, Loan
from helmrec.types import IntArray

_MESSAGE = struct.Struct("<QQQQQQQ")  # kind, call, start, length, how far the sender has read, a loan or two zeros
_CREDIT = 0  # a message without a frame: the read position, and a loan that comes back
_NO_LOAN = Loan(0, 0)
_LEAST_LENT = 1 << 16  # bytes of arrays; to copy fewer costs less than to account for them
_ALIGNMENT = 64
_MOST_AT_ONCE = 1_024 * _MESSAGE.size
_MOST_WAITING = 1 << 20  # bytes of messages the socket has not accepted yet
Bytes = bytes | memoryview


class FrameSpan(NamedTuple):
    """Position and length of a frame."""

    start: int
    length: int


class Ring:
    """One direction of a link, on the side of its writer or of its reader."""

    def __init__(self, memory: mmap.mmap) -> None:
        """memory: its first half is the ring, the second is for loans."""
        self._view, self.loans = memoryview(memory)[: len(memory) // 2], memoryview(memory)[len(memory) // 2 :]
        self._written = 0
        self._freed = 0

    @property
    def size(self) -> int:
        return len(self._view)

    def put(self, parts: Sequence[Bytes]) -> FrameSpan:
        """Write the parts as one frame; QueueFull if the reader has not freed enough space."""
        length = sum(len(part) for part in parts)
        start = self._written
        if start % self.size + length > self.size:  # a frame is contiguous: skip the end of the ring
            start += self.size - start % self.size
        end = start + -(-length // _ALIGNMENT) * _ALIGNMENT
        if end - self._freed > self.size:
            raise QueueFull(f"the ring between front and engine is full: {length} bytes do not fit {self.size}")
        at = start % self.size
        for part in parts:
            self._view[at : at + len(part)] = part
            at += len(part)
        self._written = end
        return FrameSpan(start, length)

    def free_to(self, position: int) -> None:
        """Free everything before `position`, which the reader has read."""
        assert self._freed <= position <= self._written
        self._freed = position

    def view(self, place: FrameSpan) -> memoryview:
        at = place.start % self.size
        return self._view[at : at + place.length]

    def release(self) -> None:
        self._view.release()


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that was received; `payload` is valid until `Link.done`."""

    kind: int  # at least 1
    call: int
    payload: memoryview
    end: int  # position up to which `Link.done` frees the ring
    arrays: IntArray | None = None  # lent with it, for as long as they are used; None: they follow in the payload


class Link:
    """One end of a pair of rings. Used in one thread; frames must be passed to `done` in order.

    Never blocks: messages that the socket does not accept at once are sent later.
    """

    def __init__(self, end: socket.socket, outgoing: Ring, incoming: Ring) -> None:
        self.socket = end
        end.setblocking(False)
        self._outgoing = outgoing
        self._incoming = incoming
        self._lender, self._borrower = Lender(outgoing.loans), Borrower(incoming.loans)
        self._rest = b""
        self._waiting = bytearray()  # messages the socket has not accepted yet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read = self._reported = 0

    @property
    def max_frame_bytes(self) -> int:
        """Largest frame: a quarter of the ring, so that several fit."""
        return self._outgoing.size // 4

    def send(self, kind: int, call: int, parts: Sequence[Bytes] = (), arrays: Sequence[Bytes] = ()) -> None:
        """Send a frame. Raise QueueFull if the ring is full, EngineClosed if the other process has ended.

        arrays: numbers of 64 bits, which the reader need not copy; part of the payload if they are few, or if it keeps
        so many that no place is left.
        """
        assert kind != _CREDIT
        if len(self._waiting) > _MOST_WAITING:
            raise QueueFull("the other process does not read what is sent to it")
        loan = self._lender.lend(arrays) if sum(len(each) for each in arrays) >= _LEAST_LENT else None
        try:
            place = self._outgoing.put([*parts, *arrays] if loan is None else parts)
        except QueueFull:
            if loan is not None:
                self._lender.take_back(loan)
            raise
        self._post(kind, call, place, loan or _NO_LOAN)

    def receive(self) -> list[Frame]:
        """Return all frames that have arrived; EngineClosed at the end of the socket."""
        try:
            data = self.socket.recv(_MOST_AT_ONCE)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EngineClosed(f"the other process is gone ({error.strerror})") from None
        if not data:
            raise EngineClosed("the other process is gone")
        data = self._rest + data
        whole = len(data) - len(data) % _MESSAGE.size
        self._rest = data[whole:]
        return [frame for message in _MESSAGE.iter_unpack(data[:whole]) if (frame := self._frame(*message))]

    def _frame(self, kind: int, call: int, start: int, length: int, read: int, *lent: int) -> Frame | None:
        self._outgoing.free_to(read)
        loan = Loan(*lent)
        if kind == _CREDIT:
            if loan != _NO_LOAN:
                self._lender.take_back(loan)
            return None
        arrays = None if loan == _NO_LOAN else self._borrower.use(loan)
        end = start + -(-length // _ALIGNMENT) * _ALIGNMENT
        return Frame(kind, call, self._incoming.view(FrameSpan(start, length)), end, arrays)

    def done(self, frame: Frame) -> None:
        """Release a frame's payload and free its space."""
        frame.payload.release()
        self._read = frame.end
        if self._read - self._reported > self._incoming.size // 8:  # do not wait for the next answer to say so
            self._post(_CREDIT, 0, FrameSpan(0, 0))

    def _post(self, kind: int, call: int, place: FrameSpan, loan: Loan = _NO_LOAN) -> None:
        """Send a message, with the position up to which this side has read; before it, loans that come back."""
        self._reported = self._read
        for returned in self._borrower.take_returned():
            self._waiting += _MESSAGE.pack(_CREDIT, 0, 0, 0, self._read, *returned)
        self._waiting += _MESSAGE.pack(kind, call, *place, self._read, *loan)
        self.flush()

    def flush(self) -> None:
        """Send waiting messages, as far as the socket accepts them."""
        try:
            while self._waiting:
                del self._waiting[: self.socket.send(self._waiting)]
        except BlockingIOError:
            if self._loop is not None:
                self._loop.add_writer(self.socket, self._flush_later)
        except OSError as error:
            raise EngineClosed(f"the other process is gone ({error.strerror})") from None

    def _flush_later(self) -> None:
        assert self._loop is not None
        self._loop.remove_writer(self.socket)
        with suppress(EngineClosed):  # the reader will see it
            self.flush()

    def attach(self, loop: asyncio.AbstractEventLoop, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` when there is something to receive, and send waiting messages, until `detach`."""
        self._loop = loop
        loop.add_reader(self.socket, on_readable)

    def detach(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.socket)
            self._loop.remove_writer(self.socket)
            self._loop = None

    def close(self) -> None:
        self.detach()
        self.socket.close()
        self._lender.release()
        self._borrower.release()
        self._outgoing.release()
        self._incoming.release()


def shared_file(size: int) -> int:
    """Return a descriptor of shared memory for a ring of this size, and as much again for loans.

    The system gives it memory where it is used, and frees it when the last process closes it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("helmrec-ring", 0)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.set_inheritable(descriptor, True)
    os.ftruncate(descriptor, 2 * size)
    return descriptor


def open_ring(descriptor: int) -> Ring:
    """Map a shared file as a ring. The descriptor may be closed afterwards."""
    return Ring(mmap.mmap(descriptor, 0))
