"""`python -m helmrec_bench` is `helmrec bench`, also where the package is on the path but not installed."""

from helmrec_bench.cli.bench import bench_app

bench_app()
