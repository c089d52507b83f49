"""The kinds of receivers, and one from outside: the package that the page of receivers shows."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import jsonschema
import pytest

from support.records.issues import TOPICS, issue, issue_record
from tocsin.actions.composition import build_actions_service
from tocsin.actions.decision.retry import RetryPolicy
from tocsin.actions.receivers.registry import BUILT_IN, GROUP, ReceiverKinds
from tocsin.actions.receivers.webhook.kind import Webhook
from tocsin.bus.embedded.bus import EmbeddedBus
from tocsin.bus.port import EARLIEST, Partition
from tocsin.console.configuration.check import check_file
from tocsin.console.configuration.editor_schema import editor_schema
from tocsin.console.context import read_context, section_registry
from tocsin.runtime.worker import Worker, WorkerSettings
from tocsin.schemas.configuration.docstrings import field_docstrings
from tocsin.schemas.configuration.file import Config, check_config
from tocsin.schemas.configuration.receivers import UnreadReceiver
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.events import EVENT_TYPES
from tocsin.schemas.signing import SigningKey
from tocsin.schemas.topics import issue_partition
from tocsin.stream_rules.catalogue import built_in

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "receivers.md"
LAB = """version: 1
receivers:
  lab: {type: notebook, path: later/issues.txt}
rules:
  - nonfinite: [lab]
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the package of the docs is installed."""
    shown = dict(re.findall(r"^```(python|toml)\n(.*?)^```$", DOCS.read_text(), re.M | re.S))
    site = tmp_path / "site"
    package, metadata = site / "tocsin_notebook", site / "tocsin_notebook-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text("")
    (package / "receiver.py").write_text(shown["python"])
    points = shown["toml"].replace('project.entry-points."tocsin.receivers"', GROUP)
    (metadata / "entry_points.txt").write_text(points.replace('"', ""))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tocsin-notebook\nVersion: 1\n")
    monkeypatch.syspath_prepend(site)
    return tmp_path


def test_each_kind_is_called_as_its_type_and_shows_its_keys() -> None:
    kinds = ReceiverKinds(installed=list)
    assert kinds.names() == list(BUILT_IN)
    for name, kind in zip(kinds.names(), kinds.built_in(), strict=True):
        assert kind is kinds.get(name)
        model = kinds.model(name)
        assert model is not None
        assert model.model_fields["type"].examples == [name]
        assert set(field_docstrings(model)) >= set(model.model_fields)
        assert (model.__doc__ or "").strip()


def test_a_training_reads_of_receivers_what_all_kinds_have() -> None:
    text = "version: 1\nreceivers: {a: {type: fax, number: 5, send_resolved: false}}"
    config, problems = check_config(text, "f")
    assert config is not None, problems
    assert config.receivers == {"a": UnreadReceiver(type="fax", send_resolved=False)}
    _, problems = check_config("version: 1\nreceivers: {a: {retry: 3}}", "f")
    assert [problem.message for problem in problems] == [
        "the key 'type' is missing",
        "expected a mapping, got a number",
    ]


def test_only_the_kinds_that_a_file_names_are_imported() -> None:
    code = (
        "import sys; from tocsin.console.context import section_registry; "
        "from tocsin.schemas.configuration.file import check_config; "
        "text = 'version: 1\\nreceivers: {a: {type: goalert, url: \"http://x\"}}'; "
        "print(check_config(text, 'f', section_registry())[1], "
        "*(m.split('.')[3] for m in sys.modules if m.endswith('.kind') and m.count('.') == 4))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "goalert"]


def test_what_was_read_without_kinds_is_sent_nowhere() -> None:
    with pytest.raises(TypeError, match="was not read as one"):
        ReceiverKinds().kind_of(UnreadReceiver(type="webhook"))


@pytest.mark.usefixtures("outside")
def test_mistakes_in_a_receiver_from_outside_have_their_places() -> None:
    text = """version: 1
receivers:
  one: {type: notebook, pth: x}
  two: {type: notebok, path: x}
  three:
    type: notebook
    path: 3
"""
    _, problems = check_config(text, "tocsin.yaml", section_registry())
    assert [(one.line, one.column, one.code, one.hint) for one in problems] == [
        (3, 25, "unknown_key", "path"),
        (4, 15, "invalid_value", "notebook"),
        (7, 11, "invalid_value", None),
    ]


def test_check_and_the_schema_show_a_receiver_from_outside(outside: Path) -> None:
    file = outside / "tocsin.yaml"
    file.write_text(LAB)
    checked = check_file(file, {}, outside)
    assert list(checked.problems) == []
    assert checked.effective is not None
    assert checked.effective.receivers == {"lab": "notebook"}
    schema = editor_schema(built_in(), ReceiverKinds().models(), [])
    validator = jsonschema.Draft202012Validator(schema)
    receivers = {"lab": {"type": "notebook", "path": "issues.txt"}}
    validator.validate({"version": 1, "receivers": receivers})
    assert not validator.is_valid({"version": 1, "receivers": {"lab": {"type": "notebook"}}})


async def test_a_receiver_from_outside_is_delivered_to_and_tried_again(outside: Path) -> None:
    (outside / "tocsin.yaml").write_text(LAB)
    context = read_context(outside / "tocsin.yaml", None, environ={})
    async with EmbeddedBus(outside / "bus.db") as bus:
        await bus.init(TOPICS.specs())
        service = build_actions_service(
            TOPICS,
            context.config,
            bus=bus,
            key=SigningKey.generate(),
            secrets={},
            embedded=True,
            config_path=outside / "tocsin.yaml",
            policy=RetryPolicy(first_ms=20, most_ms=40, least_ms=5),
        )
        worker = Worker(
            bus, service, topics=TOPICS, group="a", settings=WorkerSettings(checkpoint_s=0.05)
        )
        task = asyncio.create_task(worker.run())
        producer = await bus.producer()
        await producer.publish([issue_record(issue())])
        await producer.close()
        assert await worker.caught_up(10)
        assert not await service.drain(0.2), "the folder is not there yet"
        (outside / "later").mkdir()
        assert await service.drain(10)
        worker.stop()
        await task
        last = await _last_delivery(bus)
    assert (last.action, last.kind, last.state, last.reason) == (
        "lab",
        "notebook",
        "delivered",
        "written",
    )
    assert last.attempts > 1
    assert {one.result for one in last.last_attempts[:-1]} == {"cannot write: FileNotFoundError"}
    assert "nonfinite" in (outside / "later" / "issues.txt").read_text()


async def _last_delivery(bus: EmbeddedBus) -> Delivery:
    partition = Partition(TOPICS.actions, issue_partition("run-1"))
    reader = await bus.reader({partition: EARLIEST})
    end = (await reader.ends([partition]))[partition]
    last = b""
    while await reader.position(partition) < end:
        for record in await reader.poll(timeout_s=1.0):
            last = record.value or b""
    await reader.close()
    delivery = EVENT_TYPES.decode(last).data
    assert isinstance(delivery, Delivery)
    return delivery


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["nowhere.at_all:Kind"], "cannot be loaded: ModuleNotFoundError"),
        (["json:JSONDecoder"], "expected a class derived from ReceiverKind"),
        (["a:Kind", "b:Kind"], "expected one package to offer it"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_named_where_it_is_used(
    values: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = [EntryPoint("fax", value, GROUP) for value in values]
    monkeypatch.setattr("tocsin.actions.kinds.entry_points", lambda group: offered)
    text = "version: 1\nreceivers:\n  a: {type: fax}\n  b: {type: webhook, url: 'http://x'}\n"
    _, problems = check_config(text, "f", section_registry())
    assert [(one.line, one.column, one.code) for one in problems] == [
        (3, 13, "receiver_not_loaded")
    ]
    assert words in problems[0].message


def test_a_package_does_not_replace_what_tocsin_has() -> None:
    offered = [EntryPoint("webhook", "nowhere.at_all:Kind", GROUP)]
    kinds = ReceiverKinds(installed=lambda: offered)
    assert kinds.names() == list(BUILT_IN)
    assert isinstance(kinds.get("webhook"), Webhook)
    assert Config() == check_config("version: 1", "f", section_registry())[0]
    assert json.dumps(editor_schema(built_in(), kinds.models(), []))


def test_a_sender_has_imported_what_it_needs_before_the_first_delivery() -> None:
    """An import then held up a stop for 0.3 s."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tocsin.actions.receivers.address_guard import AddressGuard\n"
        "from tocsin.actions.receivers.build import Receivers\n"
        "from tocsin.actions.receivers.email.config import EmailReceiver\n"
        "from tocsin.actions.receivers.kind import ReceiverContext\n"
        "from tocsin.actions.receivers.registry import ReceiverKinds\n"
        "from tocsin.actions.receivers.webhook.config import WebhookReceiver\n"
        "guard = AddressGuard(private=True)\n"
        "context = ReceiverContext(secrets={}, guard=guard, folder=Path(), environ={})\n"
        "hook = WebhookReceiver(type='webhook', url='http://127.0.0.1/hook')\n"
        "mail = EmailReceiver(type='email', to=('me@example.com',))\n"
        "Receivers(context, ReceiverKinds()).open({'hook': hook, 'mail': mail})\n"
        "print({'aiohttp', 'aiosmtplib', 'jinja2'} <= sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
