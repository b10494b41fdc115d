"""What scripts keep of long runs; `helmrec.experiments.kept` has it, for them and for `helmrec bench`."""

from helmrec.experiments.kept import Store, Unit, digest_of, finish

__all__ = ["Store", "Unit", "digest_of", "finish"]
