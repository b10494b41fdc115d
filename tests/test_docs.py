"""README and docs: links lead somewhere, samples run as printed, and the generated reference is complete."""

import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from docs.reference import GROUPS, routes_table, settings_table, unit

import helmrec
import helmrec.model
from helmrec.serve.settings import Given, resolve

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "examples" / "README.md", *DOCS.rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"(?:<!-- (not run: [^\n]+|slow) -->\n)?^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub and the site make them, and targets of the site's own."""
    text = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    named = re.findall(r"^\((.+)\)=$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles} | set(named)


def broken_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One thing: two!\n```\n# no heading\n```\n(target)=\n")
    page = tmp_path / "a.md"
    page.write_text("[](b.md#one-thing-two) [](b.md#target) [](b.md#no-heading) [](c.md) [](#here) [](https://x.org)\n")
    assert list(broken_links(page)) == ["b.md#no-heading", "c.md", "#here"]


def test_every_page_is_reached_from_the_front_page() -> None:
    listed = set(re.findall(r"^(?:[\w -]+<)?([\w/-]+)>?$", (DOCS / "index.md").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert {page for page in pages if not page.startswith("decisions/0")} - listed == {"index"}


class Block(NamedTuple):
    """A sample of a page. `mark` is what the comment before it says."""

    mark: str
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall((ROOT / page).read_text())]


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def run_shell(text: str) -> str:
    """Run a block as a user would paste it, on a free port; return what it prints."""
    script = f"set -e\n{text.replace('8000', str(free_port()))}\nwait\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_python(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    exec(compile(text, "sample", "exec"), {})
    return capsys.readouterr().out


def test_the_samples_of_readme_and_quickstart_run_as_printed_in_an_empty_folder(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve, python = [block.text for block in blocks("README.md") if not block.mark]
    same, longer, ranked = [block.text for block in blocks("docs/quickstart.md") if not block.mark]
    api, update = blocks("docs/python-api.md")
    assert len(re.findall(r"^\S+", serve, re.MULTILINE)) == 4  # every command begins a line
    assert same == serve
    assert '"scores":[[' in run_shell(serve)
    assert run_python(python, capsys).splitlines()[-1] == "4"
    assert run_python(longer, capsys).splitlines()[-1] == "0 4"
    assert run_python(api.text, capsys) == "(2, 2)\n"
    assert run_python(update.text, capsys) == "True 2\n"
    run_shell(ranked)
    lines = (empty_folder / "scores.jsonl").read_text().splitlines()
    assert ['"scores"' in line for line in lines] == [True, True]


def test_the_samples_of_the_page_on_own_models_run_as_printed_one_after_the_other(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "own-model.md").read_text()
    printed = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    python = "".join(block.text for block in blocks("docs/own-model.md") if block.language == "python")
    check, serve = [block.text for block in blocks("docs/own-model.md") if block.language == "sh"]
    assert run_python(python, capsys).endswith(printed[0])
    assert run_shell(check).splitlines()[:2] == printed[1].splitlines()[:2]
    answers = run_shell(serve)
    assert re.findall(r'"reused_tokens":(\d+)', answers) == ["0", "4"]
    assert float(answers.rpartition("helmrec_pool_reused_tokens_total ")[2]) >= 4


def test_the_samples_of_the_page_on_imports_run_as_printed_one_after_the_other(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "import-hstu.md").read_text()
    (printed,) = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    samples = blocks("docs/import-hstu.md")
    first, last = [block.text for block in samples if block.language == "python"]
    names, convert, serve = [block.text for block in samples if block.language == "sh"]
    run_python(first, capsys)
    assert run_shell(names).startswith(printed)
    assert "largest difference" in run_shell(convert)
    run_python(first + last, capsys)
    assert re.findall(r'"reused_tokens":(\d+)', run_shell(serve)) == ["0", "4"]


def test_the_sample_of_an_own_log_runs_and_prints_the_report_of_the_page(empty_folder: Path) -> None:
    (sample,) = blocks("docs/workloads.md")
    (report,) = re.findall(r"^```text\n(.*?)^```$", (DOCS / "workloads.md").read_text(), re.DOTALL | re.MULTILINE)
    printed = [line.split() for line in run_shell(sample.text).splitlines()]
    expected = [line.split() for line in report.splitlines()]
    assert [line for line in printed if line in expected] == expected
    assert (empty_folder / "own.safetensors").is_file()


def test_the_page_from_a_csv_leads_to_the_ranked_list_it_shows(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = blocks("docs/from-csv.md")
    run_python("".join(block.text for block in page if block.language == "python"), capsys)
    (serve,) = [block.text for block in page if block.language == "sh"]
    (first,) = re.findall(r"^```text\n(.*)\n```$", (DOCS / "from-csv.md").read_text(), re.MULTILINE)
    ranked = run_shell(serve).splitlines()[-3:]
    assert ranked[0].split()[0] == first


@pytest.mark.slow
def test_the_slow_samples_of_the_quickstart_run_as_printed(empty_folder: Path) -> None:
    (simulated,) = [block for block in blocks("docs/quickstart.md") if block.mark == "slow"]
    assert "helm" in run_shell(simulated.text)


def test_samples_that_are_not_run_name_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    skipped = [block for page in ("README.md", "docs/quickstart.md") for block in blocks(page) if block.mark]
    targets = [name for block in skipped for name in re.findall(r"^make ([\w-]+)", block.text, re.MULTILINE)]
    assert targets == ["demo", "test", "docs"]
    assert all(f"\n{name}: " in makefile for name in targets)


def test_every_setting_has_a_type_and_a_meaning() -> None:
    assert not [
        (group, field)
        for group, kind in GROUPS.items()
        for field, info in kind.model_fields.items()
        if not info.description
    ]
    page = (DOCS / "configuration.md").read_text()
    assert re.findall(r"^```{settings} (\w+)$", page, re.MULTILINE) == list(GROUPS)


def test_the_reference_shows_name_type_default_unit_and_meaning() -> None:
    lines = settings_table("EngineConfig").splitlines()
    assert "| [`alpha`]{#engineconfig-alpha} | number, ≥ 0, ≤ 1 | 0.4 |  | embedding share" in "\n".join(lines)
    (moved,) = [line for line in lines if "`move_bytes_per_step`" in line]
    assert "| size, > 0 | 16 MiB | bytes per step |" in moved
    assert "`history_secret`" in settings_table("HistoryConfig")
    assert "its defaults, `sketch_bits` 32768" in settings_table("ClusterConfig")
    assert "| `POST /v1/admin/rows` | Replace rows of a table (admin token) |" in routes_table()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("slo_ms", "ms"), ("tick_s", "s"), ("max_events_per_user", "events per user"), ("risk", ""), ("alpha", "")],
)
def test_the_unit_of_a_setting_is_that_of_its_name(name: str, expected: str) -> None:
    assert unit(name) == expected


def test_the_python_page_has_every_export() -> None:
    shown = re.findall(r"^\.\. auto\w+:: (\w+)", (DOCS / "python-api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted([*helmrec.__all__, *helmrec.model.__all__])


def test_the_files_for_one_node_agree_with_the_server() -> None:
    yaml = pytest.importorskip("yaml", reason="helmrec[cluster] is not installed")
    parts = list(yaml.safe_load_all((ROOT / "examples" / "node" / "kubernetes.yaml").read_text()))
    pod = parts[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (text,) = parts[1]["data"].values()
    given = {name: Given(value, "the file") for name, value in tomllib.loads(text).items()}
    settings = resolve(given, {}, None)
    routes = routes_table()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f"`GET {container[probe]['httpGet']['path']}`" in routes
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > waits + settings.serve.drain_s
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/models", "/data", "/etc/helmrec"} <= mounted
    assert str(settings.serve.history_path).startswith("/data/")
