"""Every command of the pages is run, as printed, in a folder that has the files the page names.

A block of commands is fenced as `bash` and run here, or as `sh` on a page with a test of its own, which compares what
is printed. A comment before it says when: `slow` (by make test-slow), `card` (on a GPU), or `not run: WHY`. All others
are run by make test. Options of every `helmrec` command are checked, in whatever block or sentence it stands.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from tests.cli.test_help import commands
from tests.test_docs import PAGES, ROOT
from tests.test_examples import write_log

OWN_TESTS = {  # pages whose `sh` blocks have tests that compare what is printed
    "README.md": "test_docs",
    "docs/quickstart.md": "test_docs",
    "docs/own-model.md": "test_docs",
    "docs/from-csv.md": "test_docs",
    "docs/import-hstu.md": "test_docs",
    "docs/workloads.md": "test_docs",
    "docs/serving.md": "serve/test_docs",
}
BLOCK = re.compile(r"(?:^<!-- ([^\n]+) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:\w+=\S+ )*(helmrec|helm|pip|make|python|curl|docker|kubectl|ray|serve) \S", re.MULTILINE)
SERVES = re.compile(r"(?:\w+=\S+ )*helmrec serve ")
INLINE = re.compile(r"`(helmrec [a-z][^`\n]*)`")
NEEDS_SERVER = re.compile(r"http://127\.0\.0\.1:8000")
SMALLER = {"--quick": "--smoke", "/quick/": "/smoke/"}  # the evaluation takes a quarter of an hour at its usual size
TIMEOUT_S = 600
CLICKS = "user,item,action,time\n" + "".join(f"u{i % 7},i{i % 11},view,{1000 + 3 * i}\n" for i in range(300))
SCENARIO = """\
name = "short"
profile = "wide"
warm_up_s = 2
row_sample = 0.001
[engine]
pool_bytes = "2GB"
max_batch_requests = 8
[family]
name = "burst"
shape = { rate = 50, duration_s = 6, burst_s = 2, axis = "all", num_items = 100000, hot_users = 50 }
"""


class Block(NamedTuple):
    """Commands of a page. `mark` is what the comment before them says."""

    mark: str
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Its commands; lines that end in a backslash and what is between END and END belong together."""
        found: list[str] = []
        for line in self.text.splitlines():
            is_open = found and (found[-1].endswith("\\") or found[-1].count("'END'") > found[-1].count("\nEND"))
            if is_open:
                found[-1] += f"\n{line}"
            else:
                found.append(line)
        return [line for line in found if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def has(page: Path, mark: str) -> bool:
    return any(block.language == "bash" and block.mark == mark for block in blocks(page))


def test_every_block_of_commands_says_how_it_is_run() -> None:
    wrong = []
    for page in PAGES:
        for block in blocks(page):
            if block.language == "bash" or (block.language == "sh" and named(page) in OWN_TESTS):
                is_right = block.mark in {"", "slow", "card"} or block.mark.startswith("not run: ")
            else:
                is_right = not COMMAND.search(block.text)
            if not is_right:
                wrong.append(f"{named(page)}: ```{block.language}, {block.mark!r}: {block.text[:60]!r}")
    assert wrong == [], "fence commands as bash, and say in a comment before them if they are slow, card or not run"


def test_tests_that_stand_for_commands_not_run_exist() -> None:
    marks = [block.mark for page in PAGES for block in blocks(page) if block.mark.startswith("not run: ")]
    assert len(marks) > 5
    for path in re.findall(r"tests/[\w/.]+", " ".join(marks)):
        assert (ROOT / path).exists(), path


def invocations() -> Iterator[tuple[str, list[str]]]:
    """Every `helmrec` command of the pages, in blocks and in sentences, as words."""
    for page in PAGES:
        text = page.read_text()
        in_blocks = [line for block in blocks(page) if block.language in {"sh", "bash"} for line in block.lines]
        for line in in_blocks + ([] if page.name in {"CHANGELOG.md", "log.md"} else INLINE.findall(text)):
            with contextlib.suppress(ValueError):  # a quote that does not end: half a sentence
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"\w+=.*", words[0]):
                    words.pop(0)
                if words[:1] == ["helmrec"] and "decisions/" not in named(page):
                    yield f"{named(page)}: {line}", words[1:]


def test_every_command_and_option_that_is_printed_exists() -> None:
    known = {name: {opt for option in command.params for opt in option.opts} for name, command in commands()}
    wrong = []
    for where, words in invocations():
        name = next((" ".join(words[:n]) for n in (3, 2, 1) if " ".join(words[:n]) in known), None)
        group = any(each.startswith(f"{words[0]} ") for each in known) if words else False
        if name is None:
            if words and not words[0].startswith("-") and not group:
                wrong.append(where)
            continue
        given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        own = words[:2] == ["bench", "run"]  # measurements have options of their own
        if not own and given - known[name] - {"--help"}:
            wrong.append(f"{where}: {given - known[name]}")
    assert wrong == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "demo"
    init_model(folder, profile("demo", 20_000), 0)
    return folder


@pytest.fixture
def workshop(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty folder with the files that pages name."""
    for name in ("MODEL", "model"):
        (tmp_path / name).symlink_to(model)
    for name in ("examples", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    scenarios = ROOT / "src" / "helmrec_bench" / "scenarios"
    shutil.copytree(scenarios, tmp_path / "my-scenarios", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (tmp_path / "scenario.toml").write_text(SCENARIO)
    (tmp_path / "clicks.csv").write_text(CLICKS)
    write_log(tmp_path / "ratings.dat")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


class Terminal:
    """Runs the commands of a page one after the other. A server runs until the next one is started."""

    def __init__(self) -> None:
        self._ports = {"8000": str(free_port()), "8001": str(free_port())}
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, line: str) -> None:
        if NEEDS_SERVER.search(line) and self._server is None:
            self._serve("helmrec serve MODEL --pool 16MiB")
        if SERVES.match(line):
            self._serve(line)
            return
        done = subprocess.run(
            ["bash", "-ec", self._here(line)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    def _here(self, line: str) -> str:
        for printed, port in self._ports.items():
            line = re.sub(rf"\b{printed}\b", port, line)
        return line

    def _serve(self, line: str) -> None:
        self.end()
        environment = {**os.environ, "HELMREC_PORT": self._ports["8000"]}
        command = ["bash", "-c", self._here(line).partition("  #")[0]]
        self._server = subprocess.Popen(command, env=environment, start_new_session=True)
        end_s = time.monotonic() + 180
        while not self._is_ready():
            assert self._server.poll() is None, f"{line}: ended"
            assert time.monotonic() < end_s, f"{line}: is not ready"
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ports['8000']}/readyz", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def end(self) -> None:
        """End the server as a supervisor would; it must end with status 0."""
        if self._server is None:
            return
        server, self._server = self._server, None
        os.killpg(server.pid, signal.SIGTERM)
        assert server.wait(60) == 0


def run_page(page: Path, marks: set[str], smaller: dict[str, str]) -> None:
    tables = [block.text for block in blocks(page) if block.language == "toml"]
    if tables and named(page) in {"docs/simulator.md", "docs/workloads.md"}:  # the file that a command reads
        name = "scenario.toml" if named(page) == "docs/simulator.md" else "workload.toml"
        Path(name).write_text(tables[0])
    terminal = Terminal()
    try:
        for block in blocks(page):
            if block.language == "bash" and block.mark in marks:
                for line in block.lines:
                    for usual, small in smaller.items():
                        line = line.replace(usual, small)  # noqa: PLW2901
                    terminal.run(line)
    finally:
        terminal.end()


def ids(page: Any) -> str:
    return named(page)


@pytest.mark.parametrize("page", [page for page in PAGES if has(page, "")], ids=ids)
def test_commands_run_as_printed(page: Path, workshop: Path) -> None:
    run_page(page, {""}, {})


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if has(page, "slow")], ids=ids)
def test_slow_commands_run_as_printed(page: Path, workshop: Path) -> None:
    run_page(page, {"", "slow"}, SMALLER)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [page for page in PAGES if has(page, "card")], ids=ids)
def test_commands_for_a_card_run_as_printed(page: Path, workshop: Path) -> None:
    run_page(page, {"card"}, {"/data/": f"{workshop}/", "0.0.0.0": "127.0.0.1"})
