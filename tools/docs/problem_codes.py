"""The codes of `tocsin check`: words for programs, which stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PROBLEM_CODES: Final[Mapping[str, str]] = {
    "alias": "An alias (`*name`), which tocsin does not support.",
    "anchor": "An anchor (`&name`), which tocsin does not support.",
    "digest_not_shown": "A receiver of this kind cannot show a digest.",
    "directives": "Too many `%` directive lines.",
    "documents": "More than one document in the file.",
    "duplicate_action": "An action is listed twice.",
    "duplicate_key": "A key occurs twice in a mapping.",
    "duplicate_name": "Two routes or two inhibitions have the same name.",
    "duplicate_recipient": "An address or phone number is listed twice.",
    "duplicate_rule": "A rule or an instance name is listed twice.",
    "empty_policy": "An entry of the policy names no target.",
    "encoding": "The file is not UTF-8 text.",
    "header": "An HTTP header that cannot be sent, or that tocsin sets itself.",
    "invalid_value": "A value of the wrong type or out of range.",
    "key": "A key that is not text.",
    "line_too_long": "A line has more than 10,000 characters.",
    "merge_key": "A merge key (`<<`), which tocsin does not support.",
    "missing_key": "A required key is missing.",
    "name": "A name with characters that are not allowed.",
    "no_routes": "An action list contains `by_route`, but there are no routes.",
    "no_trusted_key": "There is no public key at this path. Checked only where the file is used.",
    "number": "A number that does not fit into 64 bits.",
    "receiver_not_loaded": "The package that provides this kind of receiver cannot be loaded.",
    "repeat_before_message": "The repeat interval is not longer than `group_wait`.",
    "rule_not_loaded": "A custom rule was not found, cannot be imported, or is not a rule.",
    "secret_missing": "A secret is missing on this machine. Checked only where the file is used.",
    "syntax": "Not YAML.",
    "tag": "A tag (`!name`), which tocsin does not support.",
    "target_not_loaded": "The package that provides this kind of stop target cannot be loaded.",
    "template": "A receiver's template is not valid; the message names the position.",
    "too_deep": "Nested too deeply.",
    "too_large": "The file is too large.",
    "too_many_nodes": "Too many values.",
    "too_many_problems": "Too many problems; the rest of the file was not checked.",
    "unknown_collection": "Unknown collection.",
    "unknown_key": "Unknown key or section.",
    "unknown_preset": "Unknown preset of this rule.",
    "unknown_receiver": "An action or route names an unknown receiver.",
    "unknown_rule": "Unknown rule.",
    "unknown_run": "A test of `tocsin test` names a run that is not listed under `runs`.",
    "unknown_secret": "A secret that the section `secrets` does not define.",
    "unknown_target": "The policy names a target that the section `targets` does not define.",
    "unknown_time_window": "A time window that the section `time_windows` does not define.",
    "unknown_time_zone": "A time zone that is unknown on this machine.",
    "unreachable_route": "No issue reaches this route: an earlier one matches all of them.",
    "version": "A file version that this release cannot read.",
}
"""A file with any of these problems cannot be used."""

WARNING_CODES: Final[Mapping[str, str]] = {
    "grace_of_backend": "The backend gives this grace only to jobs that were submitted with it.",
    "grace_of_target": "The stop's grace is longer than that of a backend that may end the job.",
    "no_rules": "No rule is enabled.",
    "question_not_shown": "The receiver for approvals cannot show an approval request.",
    "stop_without_input": "A rule with a stop action reads only data that is not captured.",
    "unused_receiver": "No rule or route names this receiver.",
    "unused_target": "No entry of the policy names this target.",
}
"""The file can be used, but probably does not do what you want."""
