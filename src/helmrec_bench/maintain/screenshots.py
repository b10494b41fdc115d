"""Pictures of the dashboard for the docs: a real server under shifting traffic, in a real browser.

`helmrec bench run screenshots [--seconds 100]` needs Chromium and `pip install 'helmrec[web]'`; writes docs/images.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from helmrec.errors import Refused
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.client import Client
from helmrec_bench.measure.requests import Crowd, Visitors

NUM_ROWS = 60_000
PER_CLIENT_S = 0.09
NUM_CANDIDATES = 64


def drive(url: str, seed: int, until_s: float, started_s: float) -> None:
    """Returning users, then a flood of new users, then both."""
    visitors = Visitors(profile("demo", NUM_ROWS), Crowd(48, 100, 400, NUM_CANDIDATES), seed)
    with Client(url) as client:
        while (now_s := time.monotonic()) < until_s:
            part = (now_s - started_s) / (until_s - started_s)
            with suppress(Refused):  # it shows on the page
                client.rank(visitors.next(0.95 if part < 0.45 else 0.3 if part < 0.75 else 0.8))
            time.sleep(max(0.0, PER_CLIENT_S - (time.monotonic() - now_s)))


def shoot(url: str, folder: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, width, height in (("dashboard-desktop", 1280, 800), ("dashboard-phone", 390, 844)):
            page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=1.5)
            page.goto(url)
            page.wait_for_selector("text=✓ ready")
            page.wait_for_timeout(2_500)
            path = folder / f"{name}.png"
            page.screenshot(path=path, full_page=True)
            Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
        browser.close()


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=100)


def main(flags: Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        init_model(Path(folder) / "model", profile("demo", NUM_ROWS), 0)
        settings = [
            "--pool",
            "64MiB",
            "--port",
            "0",
            "--policy",
            "helm",
            "--set",
            "audit_every=20",
            "--set",
            "slo_ms=100",
        ]
        command = [sys.executable, "-m", "helmrec", "serve", str(Path(folder) / "model"), *settings]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
            assert server.stderr is not None
            url = next(found[0] for line in server.stderr if (found := re.findall(r"address=(http://\S+)", line)))
            threading.Thread(target=server.stderr.read, daemon=True).start()
            with Client(url) as client:
                while not client.is_ready():
                    time.sleep(0.1)
            started_s = time.monotonic()
            clients = [
                threading.Thread(target=drive, args=(url, seed, started_s + flags.seconds, started_s))
                for seed in range(4)
            ]
            for each in clients:
                each.start()
            time.sleep(max(0.0, flags.seconds - 20))
            shoot(url, flags.out)
            for each in clients:
                each.join()
            server.terminate()
