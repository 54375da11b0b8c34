"""A place where a provider drops bills, on any fsspec URL: what is complete there, and the bytes of it.

How exports are laid out is in tasks/io/layouts.py. Only reads; knows no charge, no lake and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from seedance.store import file_system
from tasks.errors import DeliveryError
from tasks.io.layouts import Candidate, Tagged, deliveries_in


@dataclass
class Source:
    """One place where a provider drops bills.

    Args:
        name: name in the settings.
        url: file or folder, any fsspec URL.
    """

    name: str
    url: str

    def __post_init__(self) -> None:
        self._found: dict[str, Mapping[str, Any]] = {}
        with self._storage(self.url):
            self._fs, self._root = file_system(self.url)
            self._fs.invalidate_cache()

    def discover(self) -> tuple[list[Candidate], list[DeliveryError]]:
        """Complete deliveries, oldest first, and what is wrong with the others.

        Raises:
            DeliveryError: nothing is there, or the storage refused; carries source, path.
        """
        with self._storage(self.url):
            found = self._fs.find(self._root, detail=True) if self._fs.exists(self._root) else {}
            self._found = {path: info or self._fs.info(path) for path, info in found.items()}
        if not found:
            raise self.refuse(
                self.url,
                f"nothing is at {self.url}",
                f"Correct bills.url of source {self.name} in the settings, or wait for the provider's first delivery.",
            )
        files = {self._below(path): path for path in sorted(found)}
        candidates, problems = deliveries_in(self, files, alone=[*files.values()] == [self._root])
        return sorted(candidates, key=lambda c: (c.delivered_at, c.main, c.name)), problems

    def fetch(self, path: str) -> bytes:
        """All bytes of one file.

        Raises:
            DeliveryError: the storage refused, or the file is gone; carries source, path.
        """
        with self._storage(path):
            return bytes(self._fs.cat_file(path))

    def tagged(self, paths: Sequence[str]) -> Tagged:
        """Each path with a tag that changes whenever the file does, None where the storage gives none."""
        return tuple((path, _tag(self._found[path])) for path in paths)

    def size(self, path: str) -> int | None:
        """Bytes of a file as listed; None where the storage does not say."""
        size = self._found[path].get("size")
        return None if size is None else int(size)

    def modified(self, path: str) -> str:
        """Time of modification, UTC text that sorts."""
        with self._storage(path):
            at: datetime = self._fs.modified(path)
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
        return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _below(self, path: str) -> str:
        return path[len(self._root) :].lstrip("/") if path != self._root else path.rsplit("/", 1)[-1]

    def refuse(self, path: str, problem: str, then: str, **facts: Any) -> DeliveryError:
        """The error that refuses what is at a path of the source."""
        return DeliveryError(
            f"bill source {self.name}, {path}: {problem}. The former delivery stands. {then}",
            source=self.name,
            path=path,
            file=path,
            reason=problem,
            **facts,
        )

    @contextmanager
    def _storage(self, path: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self.refuse(
                path,
                f"cannot be read: {type(error).__name__}: {error}",
                f"Check bills.url of source {self.name} in the settings, and the right to list and read it.",
            ) from error


def _tag(info: Mapping[str, Any]) -> str | None:
    """Text that changes whenever a file does: size and the store's tag, or size, times and inode on local disk.

    None where the storage gives none that could be trusted (times in seconds, links whose own time is told).
    """
    etag = info.get("ETag") or info.get("etag") or info.get("md5Hash")
    if etag:
        return f"{info['size']}-{str(etag).strip(chr(34))}"
    if {"mtime", "created", "ino"} <= set(info) and not info.get("islink"):
        return "-".join(str(info[n]) for n in ("size", "mtime", "created", "ino"))
    return None
