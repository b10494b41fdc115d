"""Checks the checksums of a model's large files beside serving, without filling the page cache."""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from helmrec.errors import ModelError
from helmrec.model.folder import VERIFY_BYTES, FileRecord, read_manifest

log = logging.getLogger("helmrec.engine")
_CHUNK_BYTES = 8 << 20
_BYTES_PER_S = 256 << 20  # of the disk, which rows may come from
_LOG_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class FileCheckStats:
    """How far the check of a model's files is."""

    done_bytes: int
    total_bytes: int
    is_corrupt: bool


class FileCheck:
    """Checks the files of a model folder over 256 MiB in a thread of its own."""

    def __init__(self, folder: Path, on_corrupt: Callable[[ModelError], None], larger_than: int = VERIFY_BYTES) -> None:
        """`on_corrupt` is called in the thread, at most once."""
        files = read_manifest(folder).files
        self._files = {folder / name: record for name, record in files.items() if record.bytes > larger_than}
        self._on_corrupt = on_corrupt
        self._is_over = threading.Event()
        self._total = sum(record.bytes for record in self._files.values())
        self._done = 0
        self._is_corrupt = False
        self._thread = threading.Thread(target=self._check_all, name="helmrec-file-check", daemon=True)
        if self._files:
            self._thread.start()

    def stats(self) -> FileCheckStats:
        return FileCheckStats(self._done, self._total, self._is_corrupt)

    def close(self) -> None:
        """End the check, finished or not."""
        self._is_over.set()
        if self._files:
            self._thread.join()

    def join(self) -> None:
        """Wait until all files are checked."""
        if self._files:
            self._thread.join()

    def _check_all(self) -> None:
        try:
            for path, record in self._files.items():
                self._check(path, record)
        except (ModelError, OSError) as error:
            self._is_corrupt = True
            problem = error if isinstance(error, ModelError) else ModelError(f"{error.filename}: {error.strerror}")
            log.error("%s", problem)
            self._on_corrupt(problem)
            return
        if not self._is_over.is_set():
            log.info("the checksums of %d files over 256 MiB are right", len(self._files))

    def _check(self, path: Path, record: FileRecord) -> None:
        digest, began_s, done = hashlib.blake2b(digest_size=16), time.monotonic(), 0
        logged_s = began_s
        with path.open("rb") as file:
            while not self._is_over.is_set() and (chunk := file.read(_CHUNK_BYTES)):
                digest.update(chunk)
                os.posix_fadvise(file.fileno(), done, len(chunk), os.POSIX_FADV_DONTNEED)
                done += len(chunk)
                self._done += len(chunk)
                now_s = time.monotonic()
                if now_s - logged_s >= _LOG_EVERY_S:
                    logged_s = now_s
                    log.info("checking the model's files: %.0f%%", 100 * self._done / self._total)
                self._is_over.wait(max(0.0, began_s + done / _BYTES_PER_S - now_s))
        if not self._is_over.is_set() and digest.hexdigest() != record.blake2b:
            raise ModelError(f"{path} is corrupt: checksum {record.blake2b} expected, got {digest.hexdigest()}")
