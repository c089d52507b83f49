"""What aiokafka logs in threads that run a bus."""

from __future__ import annotations

import logging
import pkgutil
import threading

import aiokafka
import pytest

from tocsin.bus.kafka.clients import own_threads


def test_every_module_is_silent_in_our_threads_and_heard_in_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A module that nothing has imported yet makes its logger by its name, once it is.
    names = {"aiokafka"}
    names |= {module.name for module in pkgutil.walk_packages(aiokafka.__path__, "aiokafka.")}
    assert {"aiokafka.conn", "aiokafka.helpers"} <= names
    # These are compiled, and log nothing.
    names = {name for name in names if "._crecords." not in name}

    def log() -> None:
        own_threads.add_current()
        for name in names:
            logging.getLogger(name).error("in our thread")

    ours = threading.Thread(target=log)
    ours.start()
    ours.join()
    assert caplog.records == []
    # Not on this thread, which may have run a bus in an earlier test.
    theirs = threading.Thread(target=logging.getLogger("aiokafka.helpers").error, args=("a word",))
    theirs.start()
    theirs.join()
    assert [record.name for record in caplog.records] == ["aiokafka.helpers"]
