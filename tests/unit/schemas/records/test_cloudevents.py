"""Our events are CloudEvents 1.0 to the CNCF's own library, not only to us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cloudevents.core.bindings.common import get_event_factory_for_version
from cloudevents.core.formats.json import JSONFormat

from tocsin.schemas.records.events import EVENT_TYPES

GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.mark.parametrize("event_type", EVENT_TYPES.names())
def test_the_library_reads_each_golden_event(event_type: str) -> None:
    value = (GOLDEN / f"{event_type}-v1.json").read_bytes()

    event = JSONFormat().read(get_event_factory_for_version("1.0"), value)

    ours = EVENT_TYPES.decode(value)
    assert event.get_specversion() == "1.0"
    assert (event.get_id(), event.get_source()) == (ours.id, ours.source)
    assert (event.get_type(), event.get_time()) == (event_type, ours.time)
    # Fields that came later have their defaults.
    assert type(ours.data).model_validate_json(json.dumps(event.get_data())) == ours.data
    assert set(event.get_attributes()) <= {
        "specversion",
        "id",
        "source",
        "type",
        "time",
        "subject",
        "datacontenttype",
    }, "our fields stand only inside data"


def test_a_type_that_nothing_imported_makes_use_of_is_read() -> None:
    code = (
        "from tocsin.schemas.records.events import EVENT_TYPES\n"
        "print(EVENT_TYPES.model('tocsin.run.loss_inputs').__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "LossInputsSeen\n"
