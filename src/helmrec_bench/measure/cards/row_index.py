"""What a lookup costs in each form of the index of resident rows, and how many rows a compact one refuses.

helmrec bench run row-index                           # on a machine with a card with 8 GB free
helmrec bench run row-index --device cpu --quick      # a trial of the script itself; its times mean nothing

Only indexes are made, no row data, so that tables of a billion rows fit. Every slot is used, which is the fullest that
an index can be, and then rows drawn at random replace each other. A lookup is what the engine does with the rows of a
step before it reads any: find their slots, and list the missed rows, each once, in buckets of addresses.
"""

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helmrec.kernels.row_index import IndexForm
from helmrec.kernels.row_kernels import RowKernels, row_kernels
from helmrec.kernels.row_lookup import Lookup
from helmrec.kernels.row_table import EMPTY, Admission, Claims, RowTable, RowTally, Victims
from helmrec_bench.lab.provenance import write_measurement
from helmrec_bench.measure.cards.kernels import times_ms

CHUNK = 131_072  # rows admitted at once, as a step of the engine may
TURNOVERS = 4  # rows admitted for each slot after all were used
NUM_SETS = 8  # of rows, in turn, so that no lookup finds the entries of the one before in a cache


class IndexSize(NamedTuple):
    num_rows: int
    num_slots: int


SIZES = (IndexSize(8 << 20, 84_000), IndexSize(10**8, 4_000_000), IndexSize(10**9, 40_000_000))
QUICK_SIZES = (IndexSize(20_000, 1_000),)


def admit(table: RowTable, kernels: RowKernels, slots: Tensor) -> None:
    """Admit rows drawn at random into these slots; what is refused leaves its slot empty."""
    rows = torch.randint(0, table.num_rows, (len(slots),), device=slots.device).unique().int()
    rows = rows[torch.randperm(len(rows), device=slots.device)]
    claims = Claims.allocate(len(rows), slots.device)
    claims.rows.copy_(rows)
    claims.count.fill_(len(rows))
    victims = Victims(slots[: len(rows)], torch.full((len(rows),), EMPTY, device=slots.device))
    kernels.publish(table, claims, victims, torch.empty(len(rows), dtype=torch.int32, device=slots.device))


def turn_over(table: RowTable, kernels: RowKernels, num_slots: int, times: int) -> float:
    """Admit a row to every slot, so many times, in random order; return the share of rows that were refused."""
    before = table.tally.clone()
    for _ in range(times):
        for slots in torch.randperm(num_slots, device=table.heat.device).split(CHUNK):
            admit(table, kernels, slots)
    admitted, refused = (table.tally - before)[[RowTally.ADMITTED, RowTally.REFUSED]].tolist()
    return round(refused / (admitted + refused), 6)


def asked_rows(table: RowTable, num: int, share: float) -> Tensor:  # (num,) int32
    """A share of resident rows, the rest any; in random order."""
    device = table.heat.device
    resident = table.row_of[table.row_of >= 0]
    hits = resident[torch.randint(0, len(resident), (round(share * num),), device=device)]
    others = torch.randint(0, table.num_rows, (num - len(hits),), dtype=torch.int32, device=device)
    return torch.cat([hits, others])[torch.randperm(num, device=device)]


def lookup_ms(table: RowTable, kernels: RowKernels, num: int, share: float) -> float:
    """Median time of a lookup of `num` rows; every slot it finds is checked first."""
    sets = [asked_rows(table, num, share) for _ in range(NUM_SETS)]
    lookup = Lookup.allocate(num, table.heat.device)

    def run() -> None:
        for rows in sets:
            kernels.find(table, rows, lookup, is_lru=True)

    for rows in sets:
        kernels.find(table, rows, lookup, is_lru=True)
        hits = lookup.sources >= 0
        assert torch.equal(table.row_of[lookup.sources[hits].long()], rows[hits]), "a slot holds another row"
        assert hits.sum() >= round(share * num), "a resident row was not found"
    return statistics.median(_times_ms(run, is_card=table.heat.is_cuda)) / NUM_SETS


def _times_ms(run: Callable[[], None], *, is_card: bool) -> list[float]:
    if is_card:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return times_ms(graph.replay)
    started = time.perf_counter()
    run()
    return [1e3 * (time.perf_counter() - started)]


def measure(size: IndexSize, form: IndexForm, device: torch.device, num: int) -> dict[str, Any]:
    kernels = row_kernels("triton" if device.type == "cuda" else "torch")
    table = RowTable.allocate(*size, device, Admission.ALWAYS, form)
    torch.manual_seed(0)
    refused = [turn_over(table, kernels, size.num_slots, times) for times in (1, TURNOVERS)]
    times = {f"ms_hits_{share:.0%}": round(lookup_ms(table, kernels, num, share), 4) for share in (1.0, 0.8, 0.0)}
    return {
        **size._asdict(),
        "form": form.value,
        "index_bytes": table.index.data.nbytes,
        "resident": int((table.row_of >= 0).sum()),
        "refused_while_filling": refused[0],
        "refused_while_full": refused[1],
        "lookups": num,
        **times,
    }


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")


def main(flags: Namespace) -> None:
    results, num = [], 512 if flags.quick else 65_536
    for size in QUICK_SIZES if flags.quick else SIZES:
        for form in IndexForm:
            results.append(measure(size, form, torch.device(flags.device), num))
            print(results[-1], flush=True)
    write_measurement(flags.out, {"indexes": results})
    for each in results:
        lookups = "  ".join(f"{name} {value}" for name, value in each.items() if name.startswith(("ms_", "refused_")))
        print(f"{each['num_rows']:>13} rows {each['form']:8}{each['index_bytes'] / 2**20:>8.1f} MiB  {lookups}")
