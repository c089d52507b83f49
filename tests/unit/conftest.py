"""A bucket for all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.servers.s3 import KEYS, s3_server


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """Of an S3 on loopback that has the bucket `runs`; its keys are in the environment."""
    with pytest.MonkeyPatch.context() as patch, s3_server() as url:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        yield url
