"""Pages of `docs/reference/` that the code knows best.

`python tools/docs/reference_pages.py DOCS` writes them into the folder of the docs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from cli_page import cli_page
from tocsin.runtime.metrics import METRICS
from tocsin.schemas import exit_codes

COMMAND: Final = "python tools/docs/reference_pages.py docs"

SET_BY_YOU: Final[Mapping[str, str]] = {
    "TOCSIN_CONFIG": "The configuration file, or a folder of them. `--config` overrides it; "
    "without both, `tocsin.yaml` in the working folder.",
    "TOCSIN_BUS": "URL of the bus: `embedded:PATH` or `kafka://HOST:PORT[,HOST:PORT…]`. `--bus` "
    "overrides it; it overrides `bus` in the configuration.",
    "TOCSIN_STORE": "Store of runs: a folder, `s3://BUCKET/PREFIX`, or `off`. `--store` overrides "
    "it; it overrides `store` in the configuration.",
    "TOCSIN_LABELS": "Labels of the run: `team=vision,env=prod`. They override those of the "
    "configuration; `--label` overrides them.",
    "TOCSIN_SCHEDULER": "What a scheduler of your own calls the job, for a stop target: "
    "`lab:job=17,start=2`.",
    "TOCSIN_RUN_ID": "Id of the run. `--run-id` overrides it.",
    "TOCSIN_JOB_ID": "Id of the job. Launchers of one job on several nodes need the same one if no "
    "scheduler provides it.",
    "TOCSIN_POD_NAMESPACE": "Namespace of the pod, by the downward API of Kubernetes. Absent: the "
    "one of its service account.",
    "TOCSIN_POD_NAME": "Name of the pod, by the downward API.",
    "TOCSIN_POD_UID": "Uid of the pod, by the downward API. Absent: the one in the mounts that the "
    "kubelet makes.",
    "TOCSIN_JOB_NAME": "Name of the Kubernetes job that the pod belongs to, by the downward API.",
    "TOCSIN_JOB_UID": "Uid of that job, by the downward API.",
    "TOCSIN_STOP": "`off`: this training refuses stops. For `start()`; `tocsin run` has "
    "`--no-stop`.",
    "TOCSIN_STOP_KEYS": "Files or folders of the public keys whose stops are obeyed, separated by "
    "`:`. It overrides `stop.trusted_keys` and the folder of keys.",
    "TOCSIN_SMTP": "Mail server for receivers without `smtp` and for `--notify`: "
    "`smtp://USER:PASSWORD@HOST:PORT` (STARTTLS) or `smtps://…` (TLS).",
    "TOCSIN_NODE_FOLDER": "Folder in which runs on a node find `tocsin sample`. Set the same one "
    "for both if their runtime folders differ.",
    "TOCSIN_LOG": "Log level of `tocsin rules`, `tocsin actions` and `tocsin sample`: `DEBUG`, "
    "`INFO` (default), `WARNING` or `ERROR`.",
}

SET_BY_TOCSIN: Final[Mapping[str, str]] = {
    "TOCSIN_LAUNCHER": "Socket of the launcher. Its presence tells a process that it runs under "
    "`tocsin run`.",
    "TOCSIN_RUNTIME_DIR": "Private folder of the run on this node, for sockets.",
    "TOCSIN_BEFORE_UPDATE": "What a stop before an update does about the checkpoint "
    "(`stop.before_update`); absent: there are none. For the job's processes.",
    "TOCSIN_AFTER_STOP": "Why the run of this job was stopped before, for the job itself.",
    "TOCSIN_STOP_PIN": "`stop.pin`, as `start()` has read it.",
    "TOCSIN_LABELS_JSON": "All labels of the run, as the launcher has read them.",
    "TOCSIN_CAPTURE": "The section `capture` as the launcher has read it.",
    "TOCSIN_BUS_PREFIX": "Prefix of the topic names, as the launcher has read it.",
    "TOCSIN_PYTHONPATH": "Folders of your `PYTHONPATH` that tocsin's own processes do not import "
    "from. Custom rules may.",
    "TOCSIN_DELIVERY_ID": "For the program of a `command` receiver: the same in each attempt.",
    "TOCSIN_ISSUE_ID": "For the program of a `command` receiver: the issue.",
    "TOCSIN_ISSUE_STATE": "For the program of a `command` receiver: `firing`, `ongoing` or "
    "`resolved`.",
    "TOCSIN_DEMO_HOOK_KEY": "Key with which `tocsin demo` signs its webhooks.",
    "TOCSIN_CRASH_AT": "Kills a worker at a named place. For tests.",
}

OTHERS: Final[Mapping[str, str]] = {
    "XDG_CONFIG_HOME": "The keys that sign stops are in its folder `tocsin/keys`. Default: "
    "`~/.config`.",
    "XDG_RUNTIME_DIR": "Sockets and locks are in a private folder below it. Default: `/tmp`.",
    "SLURM_JOB_ID": "Run id `slurm-ID` (also `SLURM_ARRAY_JOB_ID`, `SLURM_ARRAY_TASK_ID`). "
    "`SLURM_RESTART_COUNT` and `SLURM_STEP_ID` separate restarts and steps of a job.",
    "SLURM_JOB_END_TIME": "The time limit of the job, for estimates of what a stop saves.",
    "TORCHELASTIC_RUN_ID": "Run id `torchelastic-ID`, unless torchrun was called without one. "
    "`TORCHELASTIC_RESTART_COUNT` separates restarts.",
    "KUBERNETES_SERVICE_HOST": "Run id `k8s-JOB`, from the name of the pod (`TOCSIN_POD_NAME`, "
    "else `HOSTNAME` unless that is the node's) and `JOB_COMPLETION_INDEX`.",
    "RANK": "With `WORLD_SIZE` and `LOCAL_RANK`, or the same variables of Open MPI and of MPICH "
    "and Intel MPI (`PMI_RANK`), or Slurm's `SLURM_PROCID`, `SLURM_NTASKS` and "
    "`SLURM_LOCALID`: the rank of a process without an initialised `torch.distributed`.",
    "CUDA_VISIBLE_DEVICES": "Which GPUs belong to the job.",
}

CODES: Final[tuple[tuple[str, int | str, str], ...]] = (
    ("`tocsin run`", "the job's own", "The job ended by itself."),
    ("`tocsin run`", exit_codes.STOPPED, "tocsin stopped the job, whatever the job returned."),
    ("`tocsin run`", f"{exit_codes.SIGNALLED} + n", "Signal n ended the job."),
    ("`tocsin run`", exit_codes.NOT_EXECUTABLE, "The job's command is not executable."),
    ("`tocsin run`", exit_codes.NOT_FOUND, "The job's command does not exist."),
    (
        "a Python process that was stopped",
        exit_codes.STOPPED,
        "It left by `tocsin.emitter.StopTraining`, a `SystemExit`. torchrun turns it into 1.",
    ),
    (
        "`tocsin rules`, `tocsin actions`, `tocsin archive`, `tocsin sample`",
        exit_codes.FAILED,
        "No broker answered within 15 s of the start, or the process cannot continue: start it "
        "again.",
    ),
    (
        "`tocsin stop`",
        exit_codes.FAILED,
        "The job refused the stop, or was not observed to exit in time.",
    ),
    (
        "`tocsin drill`",
        exit_codes.FAILED,
        "A receiver did not accept the message in time, or refused it.",
    ),
    ("`tocsin compare`", exit_codes.FAILED, "A condition of `--fail-if` holds."),
    ("`tocsin demo`", exit_codes.FAILED, "A scenario did not end as it should."),
    ("`tocsin watch`", f"{exit_codes.SIGNALLED} + n", "Signal n ended it; 0 after Ctrl-C."),
    ("`tocsin test`", exit_codes.FAILED, "A test failed."),
    ("`tocsin fmt --check`", exit_codes.FAILED, "A file is not formatted."),
    (
        "`tocsin compare`",
        exit_codes.WRONG_USAGE,
        "No condition of `--fail-if` holds, and one cannot be judged.",
    ),
    ("`tocsin check`", exit_codes.WRONG_USAGE, "The configuration has a problem."),
    (
        "all",
        exit_codes.WRONG_USAGE,
        "The command line or the configuration is wrong, or a bus cannot be opened: nothing was "
        "started.",
    ),
    ("all", 0, "Success."),
)

_ENVIRONMENT: Final = """\
# Environment variables

For each setting the flag comes first, then the environment, then the configuration, then the
default. Names of secrets (`{env: NAME}`) are your own choice.

## Set by you

"""

_EXIT_CODES: Final = f"""\
# Exit codes

A program that starts jobs recognises a stop by **{exit_codes.STOPPED}**; the file of
`tocsin run --summary FILE` has the details under `stop`.

| process | code | meaning |
| --- | --- | --- |
"""

_METRICS: Final = """\
# Metrics

`tocsin rules --http HOST:PORT` and `tocsin actions --http HOST:PORT` serve `/metrics` for
Prometheus, `/healthz` (200 while the process answers) and `/readyz` (200 once it owns partitions
and has restored them). They need the extra `kafka`. Times are in seconds.

With `OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318` both send the same metrics by OTLP over
HTTP, as the variables of OpenTelemetry's SDK say (`OTEL_SERVICE_NAME`,
`OTEL_METRIC_EXPORT_INTERVAL`, …). There, counters have no `_total` at their end. This needs the
extra `otel`.

Three metrics are worth an alarm:

- `tocsin_bus_lag_seconds` grows when there are too few workers.
- `tocsin_round_seconds` grows when rules are too slow for their input.
- `tocsin_delivery_seconds` grows when a receiver fails and tocsin retries. For a `stop`, the
  delivery is complete when the run has answered. After a restart, pending deliveries are timed from
  their decision.

| metric | type | labels | meaning |
| --- | --- | --- | --- |
"""


def environment_page() -> str:
    """The text of `docs/reference/environment.md`. Pure."""
    parts = [_ENVIRONMENT, _variables(SET_BY_YOU)]
    parts += ["\n## Set by tocsin\n\nFor the processes that it starts. Do not set them.\n\n"]
    parts += [_variables(SET_BY_TOCSIN)]
    parts += ["\n## Set by others\n\nUsed if they are there.\n\n", _variables(OTHERS)]
    return "".join(parts)


def exit_codes_page() -> str:
    """The text of `docs/reference/exit-codes.md`. Pure."""
    return _EXIT_CODES + "".join(f"| {who} | {code} | {why} |\n" for who, code, why in CODES)


def metrics_page() -> str:
    """The text of `docs/reference/metrics.md`. Pure."""
    rows = (
        f"| `{name}` | {metric.kind} | {', '.join(metric.labels) or '-'} | {metric.help} |\n"
        for name, metric in METRICS.items()
    )
    return _METRICS + "".join(rows)


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "cli.md": cli_page,
    "environment.md": environment_page,
    "exit-codes.md": exit_codes_page,
    "metrics.md": metrics_page,
}
"""Each page below `docs/reference`, and what makes it."""


def write_pages(docs: Path) -> None:
    """Write them into the folder of the docs."""
    folder = docs / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


def _variables(found: Mapping[str, str]) -> str:
    rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in found.items())
    return f"| variable | meaning |\n| --- | --- |\n{rows}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/docs/reference_pages.py DOCS")
    write_pages(Path(sys.argv[1]))
