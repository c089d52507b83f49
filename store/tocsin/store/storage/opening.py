"""From a URL or a path to a storage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tocsin.schemas.configuration.values import BUCKETS
from tocsin.schemas.errors import require_extra
from tocsin.store.errors import UnusableStore
from tocsin.store.storage.local import LocalStorage
from tocsin.store.storage.port import Storage


def open_storage(url: str | Path, options: Mapping[str, str] | None = None) -> Storage:
    """The storage of a folder, or of `s3://BUCKET/PREFIX` (also `gs://`, `az://`). Opens nothing.

    Raises:
        UnusableStore: it is neither. MissingExtra: a bucket without the extra `store`.
    """
    if isinstance(url, Path):
        return LocalStorage(url)
    if url.startswith(BUCKETS):
        require_extra("store", f"the store {url}", "obstore")
        from tocsin.store.storage.objects import ObjectStorage

        return ObjectStorage(url.rstrip("/"), options)
    if "://" in url or not url:
        raise UnusableStore(
            f"store {url!r}: expected a folder, or s3://BUCKET/PREFIX (also gs:// and az://)"
        )
    return LocalStorage(Path(url).expanduser())
