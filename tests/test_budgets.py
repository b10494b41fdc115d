"""Size budgets of STYLE.md. An exception is listed with its reason, and must still be needed."""

import ast
from collections.abc import Iterator
from pathlib import Path

import helmrec

SOURCE = Path(helmrec.__file__).parents[1]
PACKAGES = ("helmrec", "helmrec_bench")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6

LONG_FILES: dict[str, str] = {
    "helmrec/cluster/engines.py": "one port: who is asked, routed to and lost is decided from one state of each engine",
    "helmrec/engine/engine.py": "one class: the loop, and the background work between its steps",
    "helmrec_bench/drawn.py": "one draw: a node, its mixes, its load and what its traffic does depend on each other",
    "helmrec/memory/kv_cache.py": "one set of books: what is resident, pinned, written and trusted changes together",
}
LONG_FUNCTIONS: dict[str, str] = {
    "helmrec/cli/serve.py:serve": "one line per flag, twice",
    "helmrec/kernels/triton_attention.py:_attend_item": "one tile: every part of it would need the same twenty locals",
}
MANY_PARAMETERS = {
    "helmrec/cli/calibrate.py:calibrate": "one per flag",
    "helmrec/cli/load.py:load": "one per flag",
    "helmrec/cli/import_model.py:dlrmv3": "one per flag",
    "helmrec/cli/import_model.py:research": "one per flag",
    "helmrec/cli/import_model.py:nvidia": "one per flag",
    "helmrec_bench/cli/loadgen.py:loadgen": "one per flag",
    "helmrec_bench/cli/bench.py:all_": "one parameter per flag",
    "helmrec/cli/rank.py:rank": "one parameter per flag",
    "helmrec/kernels/attention.py:attend": "six tensors and two scalars are the operation",
    "helmrec/kernels/row_gather.py:gather_rows": "two places to read, entries, a place to write, the forms of rows",
    "helmrec/kernels/triton_row_gather.py:gather_rows": "what its twin takes, and how it is launched",
    "helmrec/kernels/triton_row_recode.py:gather_rows": "what its twin takes, and how it is launched",
    "helmrec/kernels/triton_row_recode.py:write_rows": "what its twin takes, and how it is launched",
    "helmrec/kernels/triton_attention.py:attend": "the operation, and what a caller may fix of its work list",
    "helmrec/cli/plan.py:plan": "one parameter per flag",
    "helmrec/cli/serve.py:serve": "one parameter per flag",
    "helmrec/cli/trace.py:import_csv": "one parameter per flag",
    "helmrec/cli/trace.py:import_parquet": "one parameter per flag",
    "helmrec/cli/trace.py:import_published": "one parameter per flag",
    "helmrec/cli/trace.py:make": "one parameter per flag",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (SOURCE / package).rglob("*.py"))


def functions() -> Iterator[tuple[str, Function]]:
    """Every function as path:Class.name, nested ones too."""
    for path in sources():
        file = path.relative_to(SOURCE).as_posix()
        yield from _functions(ast.parse(path.read_text()), f"{file}:")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if isinstance(child, Function):
                yield name, child
            yield from _functions(child, f"{name}.")
        else:
            yield from _functions(child, prefix)


def num_lines(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def num_parameters(function: Function) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def is_device_code(function: Function) -> bool:
    """Kernels take pointers, strides and block sizes one by one: their language has nothing to bundle them in."""
    return any(ast.unparse(decorator).startswith(("triton.jit", "gluon.jit")) for decorator in function.decorator_list)


def held(over: dict[str, int], exceptions: dict[str, str], limit: int) -> None:
    unlisted = {name: size for name, size in over.items() if name not in exceptions}
    assert not unlisted, f"over {limit}: make it smaller, or list it with a reason"
    assert not exceptions.keys() - over.keys(), "no longer needed: take these exceptions off the list"
    assert all(reason.strip() for reason in exceptions.values())


def test_files_stay_short() -> None:
    sizes = {p.relative_to(SOURCE).as_posix(): len(p.read_text().splitlines()) for p in sources()}
    held({name: size for name, size in sizes.items() if size > MAX_FILE_LINES}, LONG_FILES, MAX_FILE_LINES)


def test_functions_stay_short() -> None:
    sizes = {name: num_lines(function) for name, function in functions()}
    held({n: size for n, size in sizes.items() if size > MAX_FUNCTION_LINES}, LONG_FUNCTIONS, MAX_FUNCTION_LINES)


def test_functions_take_few_parameters() -> None:
    sizes = {name: num_parameters(function) for name, function in functions() if not is_device_code(function)}
    held({n: size for n, size in sizes.items() if size > MAX_PARAMETERS}, MANY_PARAMETERS, MAX_PARAMETERS)


def test_half_of_all_functions_are_tiny() -> None:
    sizes = sorted(num_lines(function) for _, function in functions())
    assert sizes[len(sizes) // 2] <= 10
