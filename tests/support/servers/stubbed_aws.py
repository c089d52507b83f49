"""Clients of AWS whose answers are given: botocore's Stubber refuses all that was not expected."""

from __future__ import annotations

from functools import cache
from typing import Any

import boto3
from botocore.stub import Stubber

from tocsin.actions.receivers.aws import Service

SECRET = "planted-SECRET-aws"


@cache
def stubbed_session() -> Any:
    """One for all such clients: to read what a service can do takes a tenth of a second, and each
    session does it anew."""
    return boto3.session.Session(aws_access_key_id="x", aws_secret_access_key=SECRET)


class StubbedAws:
    """Makes the client of one service. `regions` are those that one was asked for."""

    def __init__(self, service: Service) -> None:
        self.client = stubbed_session().client(service, region_name="eu-central-1")
        self.stubber = Stubber(self.client)
        self.stubber.activate()
        self.regions: list[str | None] = []

    def __call__(self, service: Service, region: str | None) -> Any:
        assert service == self.client.meta.service_model.service_name
        self.regions.append(region)
        return self.client

    def answer(self, operation: str, asked: dict[str, Any], **answer: Any) -> None:
        """Expect that call next, and answer it."""
        meta = {"ResponseMetadata": {"HTTPStatusCode": 200}}
        self.stubber.add_response(operation, {**answer, **meta}, asked)

    def refuse(self, operation: str, asked: dict[str, Any], code: str, status: int) -> None:
        """Expect that call next, and refuse it."""
        self.stubber.add_client_error(
            operation, code, f"{SECRET} of account 123", status, expected_params=asked
        )

    def done(self) -> None:
        """All that was expected has come."""
        self.stubber.assert_no_pending_responses()
