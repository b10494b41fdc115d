"""Imports point one way, as docs/architecture.md says: who stands later in an order may import who stands earlier.

Each unit, a package or a module right below `helmrec` or `helmrec_bench`, has a place of its own.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import helmrec
import helmrec_bench

SOURCE = Path(helmrec.__file__).parents[1]
PACKAGES = ("helmrec", "helmrec_bench")
BASE = (
    *("types", "errors", "redaction", "clock", "collector", "pauses", "steps", "extensions", "jit"),
    *("codes", "config", "failures", "queueing", "user_ids"),
)
PRODUCT = (
    *BASE,
    *("costs", "kernels", "memory", "model"),
    *("control", "router", "history", "engine", "deltas", "ppo", "policies"),
    *("traffic", "load", "sim", "serve"),
    *("calibrate", "cluster", "demo", "cli", "__main__"),
)
EVALUATION = (
    *("scenarios", "report", "traces", "baselines", "judging", "map", "lab"),
    *("cascade", "drawn", "loadgen", "train", "experiments", "measure", "registry", "cli", "__main__"),
)
RANKS = {("helmrec", name): rank for rank, name in enumerate(PRODUCT)}
RANKS |= {("helmrec_bench", name): len(PRODUCT) + rank for rank, name in enumerate(EVALUATION)}
MAY_IMPORT_TORCH_IN_MEMORY = {
    f"helmrec.memory.{name}" for name in ("arena", "device_rows", "host_pages", "row_master", "streams", "tiered_rows")
}
SEEN_BY_CONTROL = {f"helmrec.memory{name}" for name in ("", ".curve_shape", ".miss_curves", ".stats")}
SEEN_BY_SIMULATOR = {f"helmrec.engine{name}" for name in ("", ".relay", ".relay.trigger")}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
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


PATHS = {module_name(path): path for package in PACKAGES for path in sorted((SOURCE / package).rglob("*.py"))}
IMPORTS = {module: imported_names(path.read_text()) for module, path in PATHS.items()}


def unit(module: str) -> tuple[str, str]:
    """The package and the part of it that a module of ours belongs to; "" for the package itself."""
    parts = module.split(".")
    return parts[0], parts[1] if len(parts) > 1 else ""


def layer(module: str) -> str:
    """The part of the product that a module belongs to; "" for the package itself and for the evaluation."""
    package, name = unit(module)
    return name if package == "helmrec" else ""


def ours(module: str) -> set[str]:
    """Modules of ours that `module` imports."""
    return {name for name in IMPORTS[module] if name in IMPORTS and name not in PACKAGES}


def uses(module: str, library: str) -> bool:
    return any(name.split(".")[0] == library for name in IMPORTS[module])


def reach(module: str) -> set[str]:
    found, todo = set[str](), [module]
    while todo:
        new = ours(todo.pop()) - found
        found |= new
        todo.extend(new)
    return found


def test_both_packages_are_looked_at() -> None:
    assert Path(helmrec_bench.__file__).parents[1] == SOURCE
    assert {unit(module)[0] for module in IMPORTS} == set(PACKAGES)


def test_every_module_has_a_place() -> None:
    unknown = {module for module in IMPORTS if unit(module) not in {*RANKS, *((package, "") for package in PACKAGES)}}
    assert not unknown, "say in PRODUCT or EVALUATION where these stand"


@pytest.mark.parametrize("module", [module for module in IMPORTS if unit(module) in RANKS])
def test_imports_point_down(module: str) -> None:
    others = {name for name in ours(module) if unit(name) != unit(module)}
    assert not {name for name in others if RANKS[unit(name)] >= RANKS[unit(module)]}


def test_the_product_does_not_know_the_evaluation() -> None:
    """Not even by name, in text that could be imported later."""
    assert [module for module in IMPORTS if unit(module)[0] == "helmrec" and uses(module, "helmrec_bench")] == []
    assert [m for m, path in PATHS.items() if unit(m)[0] == "helmrec" and "helmrec_bench" in path.read_text()] == []


def test_base_knows_only_itself() -> None:
    for name in BASE:
        assert {layer(other) for other in ours(f"helmrec.{name}")} <= set(BASE)


def test_what_controls_sees_values_only() -> None:
    for module in (m for m in IMPORTS if layer(m) == "control"):
        assert {layer(other) for other in ours(module)} <= {*BASE, "costs", "memory", "control"}
        assert {m for m in ours(module) if layer(m) == "memory"} <= SEEN_BY_CONTROL


def test_routing_sees_base_and_the_sampling_hash_only() -> None:
    for module in (m for m in IMPORTS if layer(m) == "router"):
        assert {layer(other) for other in ours(module)} <= {*BASE, "costs", "memory", "router"}
        assert {m for m in ours(module) if layer(m) == "memory"} <= {"helmrec.memory", "helmrec.memory.sampling"}
        for seen in (module, *reach(module)):
            assert not any(uses(seen, library) for library in ("torch", "ray", "socket", "time", "random"))


def test_serving_knows_nothing_of_the_simulator() -> None:
    for module in (m for m in IMPORTS if layer(m) in ("engine", "serve", "cluster", "router", "control", "costs")):
        assert not [other for other in reach(module) if layer(other) == "sim"]


def test_the_simulator_knows_of_the_engine_only_the_rule_of_the_relay() -> None:
    for module in (m for m in IMPORTS if layer(m) == "sim"):
        assert {m for m in ours(module) if layer(m) == "engine"} <= SEEN_BY_SIMULATOR


def test_torch_stays_out_of_base_and_of_bookkeeping() -> None:
    pure = {
        m for m in IMPORTS if layer(m) in (*BASE, "memory", "control", "history", "traffic", "sim")
    } - MAY_IMPORT_TORCH_IN_MEMORY
    assert {"helmrec.memory.pool", "helmrec.memory.kv_cache", "helmrec.types"} <= pure
    for module in pure:
        for seen in (module, *reach(module)):
            assert not uses(seen, "torch"), f"{module} reaches torch through {seen}"


def test_simulating_does_not_import_torch() -> None:
    """Nor does the `__init__` of a package on the way, which the rules above do not follow."""
    code = "import sys, helmrec.sim.simulate, helmrec.sim.plan, helmrec.traffic.generate; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_the_keeper_of_tables_is_small() -> None:
    code = "import sys, helmrec.serve.keeper_process; print([m for m in ('torch', 'numba') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_torch_stays_out_of_what_only_decides() -> None:
    for module in ("helmrec.engine.scheduler", "helmrec.engine.intake", "helmrec.engine.assemble"):
        assert not any(uses(seen, "torch") for seen in (module, *reach(module)))


@pytest.mark.parametrize("library", ["triton", "cutlass"])
def test_kernel_languages_stay_in_kernels(library: str) -> None:
    assert {layer(module) for module in IMPORTS if uses(module, library)} <= {"kernels"}


def test_ray_stays_in_the_cluster() -> None:
    assert {layer(module) for module in IMPORTS if uses(module, "ray") and unit(module)[0] == "helmrec"} <= {"cluster"}
    names = ("config", "dispatch", "environment", "hint", "merge", "port", "replica", "report")
    decide = {f"helmrec.cluster.{name}" for name in names}
    assert decide <= IMPORTS.keys()
    assert not [seen for module in decide for seen in (module, *reach(module)) if uses(seen, "ray")]


def test_a_single_node_needs_nothing_of_a_cluster() -> None:
    product = [module for module in IMPORTS if unit(module)[0] == "helmrec"]
    users = {m for m in product if any(layer(o) == "cluster" for o in ours(m)) and layer(m) != "cluster"}
    assert users == {"helmrec.cli.serve", "helmrec.cli.serving"}


def test_pickle_is_imported_nowhere() -> None:
    assert not [m for m in IMPORTS if any(uses(m, library) for library in ("pickle", "dill", "joblib", "shelve"))]


def test_nothing_imports_the_command_line() -> None:
    """The evaluation uses its console, since its commands are commands of `helmrec`."""
    users = {module for module in IMPORTS if any(layer(name) == "cli" for name in ours(module))}
    assert {layer(module) for module in users} <= {"cli", "__main__", ""}
    seen = {name for module in users if not layer(module) for name in ours(module) if layer(name) == "cli"}
    assert seen <= {"helmrec.cli", "helmrec.cli.console"}


def test_modules_import_modules_never_the_package_itself() -> None:
    """`from helmrec import Engine` inside the package would tie every layer to the top one."""
    exports = {f"helmrec.{name}" for name in helmrec.__all__}
    below = [module for module in IMPORTS if RANKS.get(unit(module), len(RANKS)) < RANKS["helmrec", "serve"]]
    assert below
    assert [module for module in below if exports & IMPORTS[module]] == []


def test_the_rules_see_imports_inside_functions() -> None:
    assert imported_names("def f():\n    import torch.nn as nn\n    from a.b import c") == {"torch.nn", "a.b", "a.b.c"}
