"""Steps as they would be timed on a device whose costs are known."""

import numpy as np

from helmrec.calibrate.cases import Case, make_cases
from helmrec.calibrate.replay import replay
from helmrec.calibrate.timed import Measured, MeasuredWork, Timed
from helmrec.costs.calibrated import CostTerms, host_ms
from helmrec.model.profiles import profile

ROW_BYTES, TOKEN_BYTES = 1_024, 10 * 1_024


def made_up(name: str, terms: CostTerms, *, overlaps: bool = True, noise: float = 0.0) -> Measured:
    """Every case of a profile, as long as these terms say, give or take `noise` of it."""
    rng, model = np.random.default_rng(0), profile(name)
    num_rows = len(model.features)
    timed = [
        _time(case, terms, num_rows, rng=rng, overlaps=overlaps, noise=noise)
        for case in make_cases(model, is_quick=False)
        for _ in range(1 if case.num_steps > 1 else 3)
    ]
    return Measured(
        device="made up",
        profile=name,
        rows_per_token=num_rows,
        row_bytes=ROW_BYTES,
        overlaps=overlaps,
        sorted_from_rows=int(terms.sorted_from_rows),
        hit_gb_per_s=terms.hit_gb_per_s,
        intake_ms=terms.intake_ms,
        made={},
        timed=tuple(timed),
    )


def _time(
    case: Case, terms: CostTerms, num_rows: int, *, rng: np.random.Generator, overlaps: bool, noise: float
) -> Timed:
    steps = tuple(_work(case, num_rows, rng) for _ in range(case.num_steps))
    blank = Measured("", "", num_rows, ROW_BYTES, overlaps, 0, 1.0, 0.0, {}, (Timed("", steps, (0.0,) * len(steps)),))
    ends = replay(terms, blank.works(), np.array([0, len(steps)]), overlaps)
    ends = ends * (1 + noise * rng.standard_normal(len(steps) if case.num_steps == 1 else 1))
    host = host_ms(terms, case.num_requests, steps[0].num_tokens, steps[0].hit_rows + steps[0].missed_rows)
    is_burst = case.num_steps > 1
    return Timed(
        case.name,
        steps,
        tuple(ends.tolist()),
        host_ms=None if is_burst else host,
        background_ms=None if is_burst else terms.background_ms,
    )


def _work(case: Case, num_rows: int, rng: np.random.Generator) -> MeasuredWork:
    new = np.array(case.spread(case.new, 14_000))
    resident = np.array(case.spread(case.resident, 14_000))
    tokens = int(new.sum()) + case.num_requests * case.candidates
    pairs = float((new * (resident + new / 2) + case.candidates * (resident + new)).sum())
    missed = int(rng.binomial(tokens * num_rows, case.fresh * 0.8))
    loaded = float(resident.sum() * TOKEN_BYTES) if case.is_reloaded else 0.0
    return MeasuredWork(case.num_requests, tokens, pairs, tokens * num_rows - missed, missed, loaded)
