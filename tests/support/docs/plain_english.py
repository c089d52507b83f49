"""Words that read as translated, and what this field says instead.

Pairs of a regular expression (matched without regard to case) and the better words. Tests of
help texts, messages, rule texts and pages share the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

PATTERNS: Final = (
    (r"\bis (?:also )?(?:said|told)\b", "is printed, reported"),
    (r"\bare (?:said|told)\b", "are printed, reported"),
    (r"\bmade anew\b", "created again, a new one"),
    (r"\bbegins anew\b", "starts again"),
    (r"\bif need be\b", "if necessary"),
    (r"\b(?:run|training|job) has said\b", "has sent, has reported"),
    (r"\bends the story\b", "resolves the issue"),
    (r"\b(?:was|were|be) (?:said|told)\b", "was printed, reported"),
    (r"\bsaid again\b", "repeated"),
    (r"\bsays so\b", "reports it"),
    (r"\bsay only\b", "print only"),
    (r"\btell one\b", "explain one"),
    (r"\bwas asked for\b", "was requested"),
    (r"\bwere asked for\b", "were requested"),
    (r"\bis asked for\b", "is requested"),
    (r"\bnobody (?:answers|answered|was told)\b", "no reply, no receiver was notified"),
    (r"\bnothing was heard\b", "no data"),
    (r"\blooks? whether\b", "check that"),
    (r"\bsee whether\b", "check that"),
    (r"\bis no (?:number|error|python|mistake)\b", "is not a number, an error, Python"),
    (r"\bno number\b", "NaN or infinite, not a number"),
    (r"\bstays none\b", "does not recover"),
    (r"\bis (?-i:none)\b", "is not one"),
    (r"\b(?:that|which) there are\b", "existing, built-in"),
    (r"\b(?:lies|lie) (?:in|among|on|under|beside)\b", "is in, on, below, next to"),
    (r"\bstands? (?:in|on|under|beside|there|still)\b", "is in, does not change"),
    (r"\bholds? (?:until|with it|in each)\b", "is valid until, applies to"),
    (r"\bwhat holds\b", "the settings in effect"),
    (r"\bof its own that\b", "with its own"),
    (r"\bshall\b", "must, is to"),
    (r"\bbe fed\b|\bis fed\b|\bare fed\b", "receives"),
    (r"\bis given something else\b", "receives the wrong input"),
    (r"\bare let pass\b|\bis let pass\b", "ignored"),
    (r"\bedge of (?:its|the|a) loop\b", "between two steps"),
    (r"\bwait so long\b|\bfor so long\b", "seconds to wait"),
    (r"\b(?:is|are) none of\b", "is not one of, has no"),
    (r"\bas (?:it|they) stands?\b", "unchanged"),
    (r"\b(?:is|be) worth nothing\b", "is ignored"),
    (r"\bgraver?\b", "more severe"),
    (r"\bsa(?:id|ys?) hello\b", "registered"),
    (r"\b(?:has|have|had) told of\b", "reported on"),
    (r"\bholds? the (?:value|floors|state)\b", "has, defines"),
    (r"\bwhat it says\b|\bsays that they do\b", "meaning, according to"),
    (r"\bmended\b|\bto mend\b", "fixed, repaired"),
    (r"\bby chance\b", "at random"),
    (r"\ba process of its own\b|\bone of its own\b", "its own process, its own"),
    (r"\bgoes on with it\b", "finishes it"),
    (r"\bhow it went on\b", "history"),
    (r"\bcome back\b.*\bagain\b", "return"),
    (r"\btaken over\b", "converted, applied"),
    (r"\blooks? after\b", "manages, creates"),
    (r"\bmeant from\b", "relative to"),
    (r"\bnext to it, no\b", "nearly zero, NaN"),
    (r"\ball the same\b", "still, anyway"),
    (r"\bwhile it goes on\b", "while active"),
    (r"\bleave .{0,30} away\b", "omit"),
    (r"\bstill to come\b", "not started yet"),
    (r"\bis over again\b", "has ended"),
    (r"\bthe way to it\b", "the network path"),
    (r"\bwatched from outside\b", "monitored from outside"),
    (r"\bare paid for nothing\b|\bis paid for nothing\b", "is wasted"),
    (r"\b(?:a|the) mistake of\b", "an error of"),
    (r"\bgravest\b|\bhow grave\b", "most severe, severity"),
    (r"\b(?:at|the) (?:an|its own|the|next) edge\b|\bnext edge\b", "exit point"),
    (r"\bleft alone (?:for|until)\b|\bleave (?:it|them|a failing receiver) alone\b", "paused"),
    (r"\bof (?:its|their) own\b", "its own, separate"),
    (
        r"\bis no (?:list|mapping|json|process|duration|report|tuple|size|manifest|difference)\b",
        "is not a list",
    ),
    (r"\bgo(?:es)? on (?:from|with)\b|\bgoes on\b", "resume from, continue"),
    (r"\blast heard of\b|\bheard of (?:it|them)\b|\bwas heard\b", "last record, reported"),
    (r"\bthere is not\b", "unknown, missing"),
    (r"\beach with each\b", "every one with every other"),
    (r"\banew\b", "again"),
    (r"\bto be started again\b", "so that its supervisor restarts it"),
    (r"\bmends\b", "fixes"),
    (r"\bcheckpoint to go back to\b|\bto go on from\b", "to resume from"),
    (r"\b(?:it|issue|attempt) is over\b(?! (?:the|a|\d))", "is resolved, has ended"),
    (r"\bruns that are over\b", "ended runs"),
    (r"\b(?:is|are|was|were) looked at\b", "is checked"),
    (r"\bof no use\b|\bdoes so no more\b", "not usable, no longer"),
    (r"\bputs? out\b", "outputs"),
    (r"\bby turns\b", "alternating"),
    (r"\bkept from being\b|\bkeeps? .{0,20}from being\b", "held back"),
    (r"\bbelongs? into\b", "belongs in"),
    (r"\btest of its name\b", "names its test"),
    (r"\brefused for good\b", "refused permanently"),
    (r"\bby the clock of who\b|\bin the words of who\b", "by that person's clock"),
    (r"\bwould do without\b", "set the option"),
    (r"\bgives? them with\b", "grants"),
    (r"\bwhat holds? (?:it|its|their|them)\b", "muted, held back"),
)
"""(regular expression, better words)."""

_COMPILED: Final = tuple((re.compile(pattern, re.IGNORECASE), why) for pattern, why in PATTERNS)
_ANY: Final = re.compile("|".join(f"(?:{pattern})" for pattern, _ in PATTERNS), re.IGNORECASE)


def found_in(text: str) -> Iterator[str]:
    """A line for each place where the text has words of the list."""
    # Help texts and pages are wrapped: a phrase may begin on one line and end on the next.
    joined = " ".join(text.split())
    if _ANY.search(joined) is None:
        return
    for pattern, better in _COMPILED:
        for match in pattern.finditer(joined):
            around = joined[max(0, match.start() - 30) : match.end() + 30]
            yield f"{match[0]!r} in {around!r}: better {better}"
