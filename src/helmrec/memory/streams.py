"""A context that makes a CUDA stream the current one; without a stream it does nothing."""

import torch


class InStream:
    """As `torch.cuda.stream`, without its lookups of device and environment, which cost 20 µs a step."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = torch.cuda.current_stream(self._stream.device)
            torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._before)
