"""Imports point one way, as docs/architecture.md says: RANKS holds who stands above whom."""

import ast
from pathlib import Path

import pytest

import helmrec

SOURCE = Path(helmrec.__file__).parent
BASE = ("types", "config", "errors", "clock", "failures", "pauses", "collector", "redaction", "steps")
RANKS = {
    **dict.fromkeys(BASE, 0),
    "console": 1,
    "kernels": 1,
    "memory": 2,
    "model": 3,
    "control": 3,
    "router": 3,
    "history": 3,
    "engine": 4,
    "ppo": 4,
    "traffic": 4,
    "sim": 5,
    "load": 5,
    "policies": 5,
    "loadgen": 5,
    "serve": 6,
    "demo": 6,
    "bench": 6,
    "experiments": 6,
    "train": 6,
    "train_cli": 6,
    "explain_cli": 6,
    "calibrate": 6,
    "simulate_cli": 6,
    "trace_cli": 6,
    "load_cli": 6,
    "loadgen_cli": 6,
    "serve_cli": 6,
    "import_cli": 6,
    "cluster": 6,
    "plan_cli": 6,
    "cli": 7,
}
MAY_IMPORT_TORCH_IN_MEMORY = {
    f"helmrec.memory.{name}" for name in ("arena", "device_rows", "host_pages", "host_tier", "streams")
}
SEEN_BY_CONTROL = {f"helmrec.memory{name}" for name in ("", ".curve_shape", ".miss_curves", ".stats")}
MAY_IMPORT_CLI = {"helmrec.cli", "helmrec.__main__"}


def module_name(path: Path) -> str:
    parts = ("helmrec", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(source: str) -> set[str]:
    """Full names a module imports, wherever the statement stands; `from a import b` counts as a and as a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where a name comes from"
            assert node.module is not None
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


IMPORTS = {module_name(path): imported_names(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def layer(module: str) -> str:
    """The part of the house a module of ours belongs to; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def ours(module: str) -> set[str]:
    """Modules of this package that `module` imports."""
    return {name for name in IMPORTS[module] if name in IMPORTS and name != "helmrec"}


def uses(module: str, library: str) -> bool:
    return any(name.split(".")[0] == library for name in IMPORTS[module])


def reach(module: str) -> set[str]:
    found, todo = set[str](), [module]
    while todo:
        new = ours(todo.pop()) - found
        found |= new
        todo.extend(new)
    return found


def test_every_module_has_a_layer() -> None:
    unknown = {module for module in IMPORTS if layer(module) not in {"", "__main__", *RANKS}}
    assert not unknown, "say in RANKS where these stand"


@pytest.mark.parametrize("module", [module for module in IMPORTS if layer(module) in RANKS])
def test_imports_point_down(module: str) -> None:
    upwards = {name for name in ours(module) if RANKS[layer(name)] > RANKS[layer(module)]}
    assert not upwards


def test_base_knows_only_itself() -> None:
    for name in BASE:
        assert {layer(other) for other in ours(f"helmrec.{name}")} <= set(BASE)


def test_what_controls_sees_values_only() -> None:
    for module in (m for m in IMPORTS if layer(m) == "control"):
        assert {layer(other) for other in ours(module)} <= {*BASE, "memory", "control"}
        assert {m for m in ours(module) if layer(m) == "memory"} <= SEEN_BY_CONTROL


def test_routing_sees_base_and_the_sampling_hash_only() -> None:
    for module in (m for m in IMPORTS if layer(m) == "router"):
        assert {layer(other) for other in ours(module)} <= {*BASE, "memory", "router"}
        assert {m for m in ours(module) if layer(m) == "memory"} <= {"helmrec.memory", "helmrec.memory.sampling"}
        for seen in (module, *reach(module)):
            assert not any(uses(seen, library) for library in ("torch", "ray", "socket", "time", "random"))


def test_baselines_of_the_bench_serve_only_comparisons() -> None:
    users = {layer(m) for m in IMPORTS if any(layer(o) == "bench" for o in ours(m))}
    assert users <= {"bench", "cli", "experiments", "simulate_cli"}


def test_torch_stays_out_of_base_and_of_bookkeeping() -> None:
    pure = {
        m for m in IMPORTS if layer(m) in (*BASE, "memory", "control", "history", "traffic", "sim")
    } - MAY_IMPORT_TORCH_IN_MEMORY
    assert {"helmrec.memory.pool", "helmrec.memory.kv_cache", "helmrec.types"} <= pure
    for module in pure:
        for seen in (module, *reach(module)):
            assert not uses(seen, "torch"), f"{module} reaches torch through {seen}"


def test_torch_stays_out_of_what_only_decides() -> None:
    for module in ("helmrec.engine.scheduler", "helmrec.engine.intake", "helmrec.engine.assemble"):
        assert not any(uses(seen, "torch") for seen in (module, *reach(module)))


@pytest.mark.parametrize("library", ["triton", "cutlass"])
def test_kernel_languages_stay_in_kernels(library: str) -> None:
    assert {layer(module) for module in IMPORTS if uses(module, library)} <= {"kernels"}


def test_ray_stays_in_the_cluster() -> None:
    assert {layer(module) for module in IMPORTS if uses(module, "ray")} <= {"cluster"}
    names = ("config", "dispatch", "environment", "hint", "merge", "port", "replica", "report")
    decide = {f"helmrec.cluster.{name}" for name in names}
    assert decide <= IMPORTS.keys()
    assert not [seen for module in decide for seen in (module, *reach(module)) if uses(seen, "ray")]


def test_a_single_node_needs_nothing_of_a_cluster() -> None:
    assert {layer(m) for m in IMPORTS if any(layer(o) == "cluster" for o in ours(m))} <= {"cluster", "serve_cli"}


def test_pickle_is_imported_nowhere() -> None:
    assert not [m for m in IMPORTS if any(uses(m, library) for library in ("pickle", "dill", "joblib", "shelve"))]


def test_nothing_imports_the_command_line() -> None:
    users = {module for module in IMPORTS if "helmrec.cli" in IMPORTS[module]}
    assert users <= MAY_IMPORT_CLI


def test_modules_import_modules_never_the_package_itself() -> None:
    """`from helmrec import Engine` inside the package would tie every layer to the top one."""
    exports = {f"helmrec.{name}" for name in helmrec.__all__}
    below = [module for module in IMPORTS if layer(module) in RANKS and RANKS[layer(module)] < RANKS["demo"]]
    assert [module for module in below if exports & IMPORTS[module]] == []


def test_the_rules_see_imports_inside_functions() -> None:
    assert imported_names("def f():\n    import torch.nn as nn\n    from a.b import c") == {"torch.nn", "a.b", "a.b.c"}
