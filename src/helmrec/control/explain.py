"""What each layer of a decision said: as a value, as a log line, as lines of JSON."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from helmrec.errors import ConfigError

_VERDICTS = ("calm", "hold", "hedge", "chase", "return", "wait")
_CAUSES = ("base and residual", *(f"burst: {verdict}" for verdict in _VERDICTS[1:]))


def cause(is_aside: float, verdict: float) -> str:
    """Which layer had the last word."""
    return "guardrail: best constant" if is_aside else _CAUSES[int(verdict)]


class Explanation(NamedTuple):
    """One window's decision, layer by layer. Splits are EMB shares; a named tuple, as one is made per decision."""

    time_s: float
    alpha: float  # aimed at so far
    base_step: float
    base_alpha: float  # where the base alone would be now
    residual: float  # added to it
    verdict: float  # of the burst layer: a place in its words
    burst_alpha: float  # where that layer would go
    burst_left_s: float  # how long it expects the burst to stay
    is_aside: float  # 1: the guardrail has put adapting aside
    static_alpha: float  # the best constant lately
    wanted: float  # what was decided
    expected_ms: float  # mean latency there
    expected_gain_ms: float  # per request, against staying
    expected_cost_ms: float  # of the move, latency over all requests it delays
    measured_ms: float  # mean latency of the window
    fresh_best: float  # least reckoned by the newest seconds
    lasting_best: float  # and by all the curves remember
    rate: float  # requests per second

    @property
    def burst(self) -> str:
        return _VERDICTS[int(self.verdict)]

    @property
    def cause(self) -> str:
        """Which layer had the last word."""
        return cause(self.is_aside, self.verdict)

    def line(self) -> str:
        """For a log."""
        guard = f"aside for {self.static_alpha:.3f}" if self.is_aside else f"best constant {self.static_alpha:.3f}"
        burst = self.burst if self.verdict == 0 else f"{self.burst} {self.burst_alpha:.3f} ({self.burst_left_s:.0f} s)"
        return (
            f"t={self.time_s:.1f} alpha {self.alpha:.3f} -> {self.wanted:.3f} by {self.cause} | "
            f"base {self.base_step:+.2f} to {self.base_alpha:.3f} | residual {self.residual:+.4f} | burst {burst} | "
            f"guardrail {guard} | least by fresh curves {self.fresh_best:.3f}, lasting {self.lasting_best:.3f} | "
            f"gain {self.expected_gain_ms:+.3f} ms a request, cost {self.expected_cost_ms:.1f} ms | "
            f"measured {self.measured_ms:.2f} ms at {self.rate:.0f}/s"
        )

    def as_json(self) -> str:
        return json.dumps({name: round(float(value), 6) for name, value in self._asdict().items()})


def read_explanations(path: Path) -> Iterator[Explanation]:
    """From a file with one per line, as `as_json` writes them."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read decisions {path}: {error}") from None
    for number, line in enumerate(lines, start=1):
        try:
            values = {name: float(value) for name, value in json.loads(line).items()}
            yield Explanation(**values)
        except (TypeError, ValueError, AttributeError):
            raise ConfigError(f"{path}, line {number}: not a decision, got {line[:60]!r}") from None
