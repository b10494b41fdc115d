"""Frames between two ends: whole, in order, never over what the other still reads; and an end that is noticed."""

import os
import socket
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helmrec.errors import EngineClosed, QueueFull
from helmrec.serve.ring import Frame, Link, Ring, open_ring, shared_file

SIZE = 4_096


class Pair:
    """Two ends in one process."""

    def __init__(self, size: int = SIZE) -> None:
        one, two = socket.socketpair()
        there, back = shared_file(size), shared_file(size)
        self.front = Link(one, open_ring(there), open_ring(back))
        self.engine = Link(two, open_ring(back), open_ring(there))
        for descriptor in (there, back):
            os.close(descriptor)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.front.close()
        self.engine.close()


def read(link: Link) -> list[tuple[int, int, bytes]]:
    seen = []
    for frame in link.receive():
        seen.append((frame.kind, frame.call, bytes(frame.payload)))
        link.done(frame)
    return seen


def test_a_frame_arrives_as_it_was_sent() -> None:
    with Pair() as pair:
        pair.front.send(3, 7, [b"one ", memoryview(b"frame")])
        pair.front.send(2, 8)
        assert read(pair.engine) == [(3, 7, b"one frame"), (2, 8, b"")]
        assert read(pair.engine) == []
        pair.engine.send(6, 7, [b"answer"])
        assert read(pair.front) == [(6, 7, b"answer")]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1_500)), max_size=120))
def test_frames_come_whole_and_in_order_whatever_their_sizes(steps: list[tuple[bool, int]]) -> None:
    rng = np.random.default_rng(0)
    with Pair() as pair:
        waiting: deque[bytes] = deque()
        held: deque[Frame] = deque()
        for number, (is_send, size) in enumerate(steps):
            payload = rng.bytes(size)
            if is_send:
                try:
                    pair.front.send(1, number, [payload[:5], payload[5:]])
                except QueueFull:
                    continue
                waiting.append(payload)
            else:
                held.extend(pair.engine.receive())
                for _ in range(min(len(held), 1 + size % 3)):
                    frame = held.popleft()
                    assert bytes(frame.payload) == waiting.popleft(), "a frame was changed while it was read"
                    pair.engine.done(frame)
                pair.engine.send(9, 0)  # which also tells how far it has read
                read(pair.front)


def test_a_full_ring_refuses_until_the_other_has_read() -> None:
    with Pair() as pair:
        for _ in range(4):
            pair.front.send(1, 0, [b"x" * 1_024])
        with pytest.raises(QueueFull, match="1024 bytes do not fit 4096"):
            pair.front.send(1, 0, [b"x" * 1_024])
        pair.front.send(1, 1)
        assert len(read(pair.engine)) == 5
        read(pair.front)  # what was read is told without an answer, since it was much
        pair.front.send(1, 2, [b"y" * 1_024])
        assert read(pair.engine) == [(1, 2, b"y" * 1_024)]
        with pytest.raises(QueueFull):
            pair.front.send(1, 3, [b"z" * (SIZE + 1)])


def test_the_end_of_one_is_seen_by_the_other() -> None:
    pair = Pair()
    pair.engine.close()
    with pytest.raises(EngineClosed, match="gone"):
        pair.front.receive()
    with pytest.raises(EngineClosed, match="gone"):
        pair.front.send(1, 0, [b"x"])
    pair.front.close()


def test_messages_cut_in_half_are_put_together() -> None:
    one, two = socket.socketpair()
    rings = [open_ring(shared_file(SIZE)) for _ in range(4)]
    sender, reader = Link(one, rings[0], rings[1]), Link(two, rings[1], rings[0])
    sender.send(5, 6, [b"abc"])
    message = two.recv(1_024)
    for part in (message[:7], message[7:39], message[39:]):
        one.send(part)
        frames = reader.receive()
    assert [(frame.kind, bytes(frame.payload)) for frame in frames] == [(5, b"abc")]
    for each in (one, two):
        each.close()


def test_no_sender_waits_for_a_reader_that_does_not_read() -> None:
    """Both sides send more than a socket takes, as in a burst of requests that are all refused at once."""
    with Pair() as pair:
        for call in range(2_000):
            pair.front.send(1, call)
            pair.engine.send(1, call)
        got: dict[str, list[int]] = {"front": [], "engine": []}
        for _ in range(50):
            for name, link in (("front", pair.front), ("engine", pair.engine)):
                link.flush()
                got[name] += [call for _, call, _ in read(link)]
        assert got["front"] == got["engine"] == list(range(2_000))
        with pytest.raises(QueueFull, match="does not read"):
            for call in range(100_000):
                pair.front.send(1, call)


def test_a_ring_never_gives_out_what_is_not_freed() -> None:
    ring = open_ring(shared_file(SIZE))
    places = [ring.put([bytes([i]) * 640]) for i in range(6)]
    assert all(bytes(ring.view(place)) == bytes([i]) * 640 for i, place in enumerate(places))
    ring.free_to(640)
    with pytest.raises(QueueFull):
        ring.put([b"x" * 1_000])
    ring.free_to(1_280)
    place = ring.put([b"x" * 1_000])
    assert place.start == SIZE, "it begins anew at the start: frames are whole"
    assert isinstance(ring, Ring)
