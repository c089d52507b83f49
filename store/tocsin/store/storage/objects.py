"""A bucket, by obstore: S3 and what speaks like it, and also Google's and Azure's."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotSupportedError,
    PreconditionError,
)
from obstore.store import from_url

from tocsin.store.errors import StoreUnavailable, UnusableStore
from tocsin.store.storage.port import Content, Overtaken

TIMEOUT: Final = "30s"
RETRIES: Final = 2
"""What waits for longer belongs to the archive, which goes on reading meanwhile."""


class ObjectStorage:
    """Files in a bucket. They are fetched whole into a folder of this process, each once.

    Args:
        url: `s3://BUCKET/PREFIX`, `gs://…`, `az://…`. Credentials come from the environment, as
            usual for that service.
        options: of obstore, over the environment: `endpoint`, `region`, …

    Raises:
        UnusableStore: the URL or the options are wrong.
    """

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self._url = url
        given = dict(options or {})
        plain = given.get("endpoint", os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://")
        try:
            self._store = from_url(  # type: ignore[call-overload]
                url,
                client_options={"allow_http": plain, "timeout": TIMEOUT},
                retry_config={"max_retries": RETRIES},
                **given,
            )
        except (BaseError, ValueError) as error:
            raise UnusableStore(f"store {url!r}: {_first_line(error)}") from error
        self._conditional = True
        self._folder: Path | None = None

    @property
    def url(self) -> str:
        """Where it is, for people, without secrets."""
        return self._url

    def read(self, path: str) -> Content | None:
        """A small file; None if it is not there."""
        with self._errors():
            try:
                found = obstore.get(self._store, path)
                data = bytes(found.bytes())
            except FileNotFoundError:
                return None
            return Content(data, found.meta["e_tag"] or "")

    def replace(self, path: str, data: bytes, *, expected: str | None) -> str:
        """Write a small file whole, or not at all; its new version."""
        with self._errors():
            if self._conditional:
                try:
                    mode = "create" if expected is None else {"e_tag": expected}
                    put = obstore.put(self._store, path, data, mode=mode)  # type: ignore[arg-type]
                    return put["e_tag"] or ""
                except (AlreadyExistsError, PreconditionError) as error:
                    # obstore sends again what was not answered, and finds its own write then.
                    found = self.read(path)
                    if found is not None and found.data == data:
                        return found.version
                    raise Overtaken(f"{self._url}/{path} was written by somebody else") from error
                except (NotSupportedError, NotImplementedError):
                    # Some older services cannot compare. Then the consumer group alone keeps two
                    # writers apart.
                    self._conditional = False
            return obstore.put(self._store, path, data)["e_tag"] or ""

    def scratch(self) -> Path:
        """A folder of this machine for files that `move_in` takes."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="tocsin-store-"))
        return self._folder

    def move_in(self, path: str, made: Path) -> None:
        """Take a file of `scratch`, which is there whole and survives a crash when this returns."""
        try:
            with self._errors():
                obstore.put(self._store, path, made)
        finally:
            made.unlink(missing_ok=True)

    def local(self, path: str) -> Path:
        """The path of a file on this machine, fetched if need be; it is never changed."""
        place = self._copy_of(path)
        if place.exists():
            return place
        with self._errors():
            found = obstore.get(self._store, path)
            descriptor, name = tempfile.mkstemp(dir=self.scratch())
            with open(descriptor, "wb") as file:
                for chunk in found.stream():
                    file.write(chunk)
            os.replace(name, place)
        return place

    def folders(self, path: str = "") -> Sequence[str]:
        """The names of what has files below it in a folder; empty if there is none."""
        with self._errors():
            found = obstore.list_with_delimiter(self._store, path or None)
            return sorted(one.rpartition("/")[2] for one in found["common_prefixes"])

    def files(self, path: str) -> Sequence[str]:
        """The paths of all files below a folder."""
        with self._errors():
            return sorted(
                meta["path"] for chunk in obstore.list(self._store, path) for meta in chunk
            )

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; those that are not there are deleted already."""
        listed = list(paths)
        # A worker merges for weeks: what it fetched for that is not to fill the disk here.
        for path in listed:
            self._copy_of(path).unlink(missing_ok=True)
        if listed:
            with self._errors(), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, listed)

    def discard(self, path: str, *, expected: str) -> None:
        """Delete a small file if it is of that version still, and leave another one alone. A bucket
        does not delete on a condition: it is asked just before."""
        found = self.read(path)
        if found is not None and found.version == expected:
            self.delete([path])

    def tidy(self, now_s: float) -> None:
        """Delete what processes that have crashed left in `scratch`. `scratch` is this process's
        own."""

    def _copy_of(self, path: str) -> Path:
        return self.scratch() / hashlib.sha256(path.encode()).hexdigest()

    def close(self) -> None:
        """Delete what was fetched."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __del__(self) -> None:
        self.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except GenericError as error:
            raise StoreUnavailable(
                f"the store {self._url} does not answer: {_first_line(error)}"
            ) from error
        except BaseError as error:
            raise UnusableStore(f"store {self._url}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
