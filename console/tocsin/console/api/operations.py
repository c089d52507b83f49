"""The operations of the API: paths, parameters, answers, and what answers them.

The routes and the OpenAPI description are both made of this table, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from pydantic import ValidationError

from tocsin.console.api import answers, documents, numbers, readings, requests
from tocsin.console.api.answers import Facts
from tocsin.console.api.described import Answer
from tocsin.console.api.problems import wrong_parameters
from tocsin.console.api.requests import Parameters, Request
from tocsin.console.api.source import DataSource

ROOT: Final = "/api/v1"

P = TypeVar("P", bound=Parameters)


@dataclass(frozen=True, slots=True)
class Operation(Generic[P]):
    """One operation. `name` is unique; `path` begins behind `/api/v1`."""

    name: str
    path: str
    summary: str
    parameters: type[P]
    answer: Answer
    handler: Callable[[Request[P]], Awaitable[Facts]]

    @property
    def about(self) -> str:
        """The parameter in its path; empty: there is none."""
        return next((name for name in PATH_PARAMETERS if f"{{{name}}}" in self.path), "")

    def request(
        self, source: DataSource, given: Mapping[str, object], now_ms: int, about: str = ""
    ) -> Request[P]:
        """What it is asked. Raises ProblemError: a parameter is wrong, or there is none such."""
        try:
            asked = self.parameters.model_validate(given)
        except ValidationError as error:
            raise wrong_parameters(error) from None
        return Request(source, asked, now_ms, about)


PATH_PARAMETERS: Final[Mapping[str, str]] = {
    "run_id": "id of the run, or the beginning of it where that is unambiguous",
    "issue_id": "id of the issue, or at least its first four characters",
}


async def _catalogue(request: Request[requests.Nothing]) -> Facts:
    # The catalogue is imported by who asks for it: it takes half a second.
    from tocsin.console.catalog.table import list_facts
    from tocsin.stream_rules.catalogue import built_in

    return list_facts(built_in())


# Each takes parameters of its own: what they have in common is `Operation.request`.
OPERATIONS: Final[tuple[Operation[Any], ...]] = (
    Operation(
        "list_runs",
        "/runs",
        "Runs, the last started first",
        requests.ListRuns,
        documents.Runs,
        answers.list_runs,
    ),
    Operation(
        "get_run",
        "/runs/{run_id}",
        "One run",
        requests.Nothing,
        documents.OneRun,
        answers.get_run,
    ),
    Operation(
        "get_rules_of_run",
        "/runs/{run_id}/rules",
        "How the rules of a run stand",
        requests.Nothing,
        documents.RunRules,
        answers.get_rules,
    ),
    Operation(
        "get_goodput",
        "/runs/{run_id}/goodput",
        "Where the time of a run went",
        requests.Nothing,
        documents.RunGoodput,
        answers.get_goodput,
    ),
    Operation(
        "get_captured",
        "/runs/{run_id}/captured",
        "Names of what was captured of a run",
        requests.OfTraining,
        numbers.Captured,
        readings.get_captured,
    ),
    Operation(
        "find_tensors",
        "/runs/{run_id}/tensors",
        "Names of tensors",
        requests.FindTensors,
        numbers.Tensors,
        readings.find_tensors,
    ),
    Operation(
        "read_series",
        "/runs/{run_id}/series",
        "One number over the steps: a scalar, or a statistic of a tensor",
        requests.ReadSeries,
        numbers.RunSeries,
        readings.read_series,
    ),
    Operation(
        "read_matrix",
        "/runs/{run_id}/matrix",
        "One statistic of the tensors of a collection over the steps",
        requests.ReadMatrix,
        numbers.RunMatrix,
        readings.read_matrix,
    ),
    Operation(
        "read_system",
        "/runs/{run_id}/system",
        "Samples of a node",
        requests.ReadSystem,
        numbers.RunSystem,
        readings.read_system,
    ),
    Operation(
        "list_issues",
        "/issues",
        "Issues, the last that occurred first",
        requests.ListIssues,
        documents.Issues,
        answers.list_issues,
    ),
    Operation(
        "get_issue",
        "/issues/{issue_id}",
        "The story of an issue",
        requests.Nothing,
        documents.Story,
        answers.get_issue,
    ),
    Operation(
        "list_deliveries",
        "/deliveries",
        "Notices and stops, the last decided first",
        requests.ListDeliveries,
        documents.Deliveries,
        answers.list_deliveries,
    ),
    Operation(
        "list_stops",
        "/stops",
        "Stops of runs, the last requested first",
        requests.ListStops,
        documents.Stops,
        answers.list_stops,
    ),
    Operation(
        "get_stops_report",
        "/stops/report",
        "What stops did, rule by rule",
        requests.SinceAlone,
        documents.StopsReport,
        answers.get_stops_report,
    ),
    Operation(
        "list_suspended_receivers",
        "/receivers/suspended",
        "Failing receivers to which deliveries are paused",
        requests.Nothing,
        documents.SuspendedReceivers,
        answers.list_suspended_receivers,
    ),
    Operation(
        "list_refused_configurations",
        "/configurations/refused",
        "Configurations that workers refuse",
        requests.Nothing,
        documents.RefusedConfigurations,
        answers.list_refused_configurations,
    ),
    Operation(
        "list_rules",
        "/rules",
        "The built-in rules",
        requests.Nothing,
        documents.Catalogue,
        _catalogue,
    ),
)
"""All of them."""
