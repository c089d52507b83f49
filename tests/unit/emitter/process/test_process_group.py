"""What is known of processes that are not ours."""

from __future__ import annotations

import os
import signal
import subprocess

from support.waiting import wait_until
from tocsin.emitter.process.process_group import is_pending


def test_a_suspension_that_a_stopped_process_has_not_acted_on_is_pending() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert not is_pending(process.pid, signal.SIGTSTP)
        os.kill(process.pid, signal.SIGTSTP)
        assert is_pending(process.pid, signal.SIGTSTP)
        os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: not is_pending(process.pid, signal.SIGTSTP), what="it is discarded")
    finally:
        process.kill()
        process.wait()
    assert not is_pending(process.pid, signal.SIGTSTP), "it is gone"
