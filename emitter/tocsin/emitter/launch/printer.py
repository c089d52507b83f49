"""What a launcher prints for the person at the terminal: which news get a line, and when."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Final

from tocsin.emitter.launch import messages
from tocsin.emitter.launch.options import LaunchOptions
from tocsin.schemas.records.configurations import ConfigurationRefused
from tocsin.schemas.records.deliveries import Delivery
from tocsin.schemas.records.issues import Issue, IssueFiring
from tocsin.schemas.records.run_view import RunView

_CLEAR: Final = "\r\x1b[K"


class Printer:
    """Lines on stderr, or to whom the options name.

    Attributes:
        unjudged: whether the last line about that said that nobody judges the run.
    """

    def __init__(self, options: LaunchOptions, *, now_s: float) -> None:
        self.unjudged = False
        self._options = options
        self._judged_s = now_s
        self._reported_off: set[str] = set()

    def line(self, text: str) -> None:
        """One line; never raises for a terminal that is gone."""
        if self._options.print_line is not None:
            self._options.print_line(text)
            return
        with contextlib.suppress(OSError):
            # The job may have left a progress bar on this line, which it draws again.
            clear = _CLEAR if sys.stderr and sys.stderr.isatty() else ""
            print(f"{clear}{messages.PREFIX}{text}", file=sys.stderr, flush=True)

    def note(self, text: str | None, *, wrong: bool = False) -> None:
        """The same, unless `--quiet`, which lets lines through about what is `wrong`."""
        if text is not None and (wrong or not self._options.quiet):
            self.line(text)

    def news(
        self,
        news: Issue | Delivery | RunView | ConfigurationRefused,
        cause: Issue | None,
        *,
        now_s: float,
    ) -> None:
        """What rules and actions have to say of the run; `cause` is of an issue that follows."""
        match news:
            case ConfigurationRefused():
                self.note(messages.refused_line(news), wrong=True)
            case RunView():
                self._judged_s = now_s
                if news.capture is not None:
                    for line in messages.switched_off_lines(news.capture, self._reported_off):
                        self.note(line, wrong=True)
            case Delivery():
                wrong = news.kind == "stop" or news.state in ("rejected", "expired")
                self.note(messages.delivery_line(news), wrong=wrong)
            case IssueFiring() if news.state != "ongoing" or news.turned_critical:
                self.note(messages.issue_line(news, cause), wrong=news.severity != "info")

    def judging(self, bus_url: str, log: Path | None, *, now_s: float) -> None:
        """Say once that nobody judges the run, and once that somebody does again.

        `log` is that of the helper, if there is one; times are of a monotonic clock, in seconds.
        """
        silent_s = now_s - self._judged_s
        if (silent_s > self._options.judged_within_s) == self.unjudged:
            return
        self.unjudged = not self.unjudged
        if self.unjudged:
            self.line(messages.unjudged_line(bus_url, silent_s, log))
        else:
            self.line("this run's rules are reporting again")
