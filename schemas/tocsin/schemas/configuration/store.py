"""The section `store`: where the Parquet files of runs are, and how much of them is kept."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from tocsin.schemas.configuration.capture import CaptureConfig
from tocsin.schemas.configuration.sections import Section
from tocsin.schemas.configuration.values import BUCKETS, Duration, FolderOrBucket, Size, between
from tocsin.schemas.configuration.yaml_document import Plain

# The bus keeps telemetry for a day; what is not in a file by then is lost.
SHORTEST: Final = timedelta(seconds=1)
LONGEST: Final = timedelta(hours=6)

Kept = Annotated[int, Field(ge=1, le=10_000_000)]


def _endpoint(value: str) -> str:
    if not value.startswith(("http://", "https://")) or "@" in value or " " in value:
        raise ValueError("expected a URL like https://minio.example.com:9000, without a password")
    return value


class KeepConfig(Section):
    """How much the store may hold. Beyond that, the oldest ended runs are deleted."""

    runs: Kept | None = Field(default=None, examples=[500])
    """The largest number of runs. Absent: no limit."""
    bytes: Size | None = Field(default=None, examples=["50GB"])
    """At most so much. Runs that are live may exceed it. Absent: any size. Unit: a size."""
    age: Duration | None = Field(default=None, examples=["90d"])
    """Runs that ended longer ago are deleted. Absent: any age. Unit: a duration."""


class StoreConfig(Section):
    """The store: Parquet files of past and present runs. `store: off` and `store: URL` are short
    for one key of it."""

    enabled: bool = Field(default=True, examples=[False])
    """Whether the helper of `tocsin run` archives runs on an embedded bus. `store: off` means
    `{enabled: false}`."""
    url: FolderOrBucket | None = Field(
        default=None, examples=["s3://ml-runs/tocsin", "/data/tocsin-store"]
    )
    """A folder, or `s3://BUCKET/PREFIX` (also `gs://` and `az://`); credentials come from the
    environment. Absent: the folder `store` beside the file of an embedded bus, `.tocsin/store`."""
    endpoint: Annotated[str, AfterValidator(_endpoint)] | None = Field(
        default=None, examples=["https://minio.example.com:9000"]
    )
    """URL of a service that is compatible with S3. Absent: AWS, or `AWS_ENDPOINT_URL`."""
    region: str | None = Field(default=None, max_length=64, examples=["eu-central-1"])
    """Region of the bucket. Absent: that of the environment."""
    every: Annotated[Duration, AfterValidator(between(SHORTEST, LONGEST))] = Field(
        default=timedelta(minutes=5), examples=["5m"], validate_default=True
    )
    """How long numbers of a live run wait for their file, 1s to 6h. Until then they are on the bus,
    where `open_run` and the page read them. Unit: a duration."""
    keep: KeepConfig | None = Field(default=None, examples=[{"runs": 500, "bytes": "50GB"}])
    """How much is kept. Absent: 10 GB of the store beside an embedded bus; all of any other
    store."""


def capture_json(capture: CaptureConfig, store: StoreConfig, folder: Path) -> str:
    """The section `capture` as a training gets it: with the place of tensors that are saved in
    full, if the configuration names it. Paths start at `folder`."""
    raw = json.loads(capture.model_dump_json(exclude_defaults=True))
    url = capture.full_tensors.url or store.url
    if url is not None and any(
        not isinstance(c, str) and c.save for c in capture.collections.values()
    ):
        full = raw.setdefault("full_tensors", {})
        full["url"] = url if url.startswith(BUCKETS) else str(folder / Path(url).expanduser())
        if capture.full_tensors.url is None:
            options = {"endpoint": store.endpoint, "region": store.region}
            full |= {key: value for key, value in options.items() if value is not None}
    return json.dumps(raw)


def store_section(raw: Plain) -> Plain:
    """What the section means in its long form: `off` and a URL are short ones."""
    if raw == "off":
        return {"enabled": False}
    return {"url": raw} if isinstance(raw, str) else raw
