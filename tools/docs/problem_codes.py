"""The codes of `tocsin check`: words for programs, which stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PROBLEM_CODES: Final[Mapping[str, str]] = {
    "alias": "An alias (`*name`), which YAML knows and this file does not.",
    "anchor": "An anchor (`&name`), likewise.",
    "digest_not_shown": "A receiver of this kind takes issues alone, and no digest.",
    "directives": "More lines begin with `%` than a file needs.",
    "documents": "More than one document in the file.",
    "duplicate_action": "An action is twice in one list.",
    "duplicate_key": "A key is twice in one mapping.",
    "duplicate_name": "Two routes, or two inhibitions, have one name.",
    "duplicate_recipient": "An address or phone number is twice in one list.",
    "duplicate_rule": "A rule, or a name of an instance, is listed twice.",
    "empty_policy": "An entry of the policy names no target.",
    "encoding": "The file is not UTF-8 text.",
    "header": "An HTTP header that cannot be sent, or that tocsin sets itself.",
    "invalid_value": "A value of the wrong kind, or out of its bounds.",
    "key": "A key that is not text.",
    "line_too_long": "A line has more than 10,000 characters.",
    "merge_key": "A merge key (`<<`), which this file does not know.",
    "missing_key": "A key that is needed is not there.",
    "name": "A name with characters that it may not have.",
    "no_routes": "An action list says `by_route`, and there are no routes.",
    "no_trusted_key": "There is no public key at this path; where the file is to be used here.",
    "number": "A number that does not fit into 64 bits.",
    "receiver_not_loaded": "A package offers this kind of receiver, and cannot be loaded.",
    "repeat_before_message": "Notices are repeated before the message that they repeat.",
    "rule_not_loaded": "A rule of your own is not there, cannot be imported, or is no rule.",
    "secret_missing": "A secret is not on this machine; where the file is to be used here.",
    "syntax": "Not YAML.",
    "tag": "A tag (`!name`), which this file does not know.",
    "target_not_loaded": "A package offers this kind of stop target, and cannot be loaded.",
    "template": "A template of a receiver cannot be used; the message has its place in it.",
    "too_deep": "Nested too deeply.",
    "too_large": "The file is too large.",
    "too_many_nodes": "Too many values.",
    "too_many_problems": "So many problems that reading ended.",
    "unknown_collection": "A collection that there is not.",
    "unknown_key": "A key or section that there is not.",
    "unknown_preset": "A preset that the rule does not have.",
    "unknown_receiver": "An action or a route names a receiver that there is not.",
    "unknown_rule": "A rule that there is not.",
    "unknown_run": "A test of `tocsin test` is about a run that is not listed under `runs`.",
    "unknown_secret": "A secret that the section `secrets` does not name.",
    "unknown_target": "The policy names a target that the section `targets` does not have.",
    "unknown_time_window": "A time window that the section `time_windows` does not name.",
    "unknown_time_zone": "A time zone that this machine does not know.",
    "unreachable_route": "A route after one that matches all its issues.",
    "version": "A version of the file that this release does not read.",
}
"""With any of them the file cannot be used."""

WARNING_CODES: Final[Mapping[str, str]] = {
    "grace_of_backend": "A backend gives that grace only to jobs that were submitted with it.",
    "grace_of_target": "A stop gives its job more time than a backend that may have to end it.",
    "no_rules": "No rule is on.",
    "question_not_shown": "The receiver that is to ask people for approval shows no question.",
    "stop_without_input": "A rule with a stop action reads only what is not captured.",
    "unused_receiver": "No rule or route names this receiver.",
    "unused_target": "No entry of the policy names this target.",
}
"""The file works with them, though hardly as meant."""
