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

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

from helmrec.errors import Refused
from helmrec.model.config import ModelConfig
from helmrec.model.profiles import profile
from helmrec.model.weights import init_model
from helmrec.serve.client import Client
from helmrec.types import RankRequest

NUM_ROWS = 60_000
PER_CLIENT_S = 0.09
NUM_CANDIDATES = 64


class Traffic:
    """Users with growing histories over Zipf-popular items. Same seed, same requests."""

    def __init__(self, config: ModelConfig, seed: int, num_hot: int = 48) -> None:
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._num_items = config.features[0].num_rows
        self._hot = [self._history(int(self._rng.integers(100, 400))) for _ in range(num_hot)]
        self._next_stranger = num_hot

    def next_request(self, hot_share: float) -> RankRequest:
        rng = self._rng
        if rng.random() < hot_share:
            user_id = int(rng.integers(len(self._hot)))
            self._hot[user_id] = history = self._append(self._hot[user_id])
        else:
            user_id, history = self._next_stranger, self._history(int(rng.integers(50, 200)))
            self._next_stranger += 1
        items, actions, timestamps = history
        candidates = self._items(NUM_CANDIDATES)
        return RankRequest(
            user_id=user_id,
            items=items,
            actions=actions,
            timestamps=timestamps,
            candidates=candidates,
            features={"category": items % 500},
            candidate_features={"category": candidates % 500},
            context={"country": user_id % 200, "hour": int(rng.integers(24))},
        )

    def _history(self, length: int) -> np.ndarray:  # (3, events): items, actions, timestamps
        return np.stack([self._items(length), self._rng.integers(0, 8, length), self._times(0, length)])

    def _append(self, history: np.ndarray) -> np.ndarray:
        num = int(self._rng.integers(1, 4))
        new = [self._items(num), self._rng.integers(0, 8, num), self._times(history[2, -1], num)]
        return np.concatenate([history, np.stack(new)], axis=1)

    def _times(self, start: int, num: int) -> np.ndarray:
        return start + np.cumsum(self._rng.integers(1, 3_600, num))

    def _items(self, num: int) -> np.ndarray:
        return (self._rng.zipf(1.2, num) - 1) % self._num_items


def drive(url: str, seed: int, until_s: float, started_s: float) -> None:
    """Returning users, then a flood of strangers, then both."""
    traffic = Traffic(profile("demo", NUM_ROWS), seed)
    with Client(url) as client:
        while (now_s := time.monotonic()) < until_s:
            part = (now_s - started_s) / (until_s - started_s)
            with suppress(Refused):  # it shows on the page
                client.rank(traffic.next_request(0.95 if part < 0.45 else 0.3 if part < 0.75 else 0.8))
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
