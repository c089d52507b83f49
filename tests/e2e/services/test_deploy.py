"""`deploy/` holds together: what it runs, copies, mounts and names is there.

A container engine is not needed: the files are read as the engine reads them, and the commands in
them are run here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.docs import command_lines
from support.processes.forking import Forked
from support.processes.site import Site, end
from support.servers.kafka_broker import free_ports
from support.waiting import wait_until
from tocsin.console.context import section_registry
from tocsin.schemas.configuration.file import Config, check_config
from tocsin.schemas.key_folder import keys_folder

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
WORKER_UNITS = [unit for unit in UNITS if unit.name != "tocsin-page.service"]
"""The page waits for Kafka, and shows that it does."""
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = {name: service for name, service in SERVICES.items() if name != "kafka"}
"""All that run tocsin; `page` alone is reached from outside."""
LONG_RUNNING = ("rules", "actions", "archive", "page")
EXTRAS = {"rules": "kafka", "actions": "actions", "archive": "store", "serve": "page"}
"""What each command needs beside the package."""
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# What the Compose Specification knows of a service, as far as it is used or likely to be.
SERVICE_KEYS = {
    "build", "cap_drop", "command", "depends_on", "deploy", "entrypoint", "environment",
    "healthcheck", "image", "ports", "read_only", "restart", "secrets", "security_opt",
    "stop_grace_period", "tmpfs", "user", "volumes",
}  # fmt: skip
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


def subcommand(words: list[str]) -> list[str]:
    """The leading words: before the first option."""
    end = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    return words[:end]


# -- compose.yaml


def test_the_composition_has_its_shape() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} == {
        "name",
        "services",
        "volumes",
        "secrets",
    }
    assert set(SERVICES) == {"kafka", "topics", *LONG_RUNNING}
    for name, service in SERVICES.items():
        assert set(service) <= SERVICE_KEYS, name
        assert service["restart"] in ("unless-stopped", "on-failure:5")
    assert SERVICES["rules"]["deploy"] == {"replicas": 2}


def test_what_services_wait_for_can_come() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] in CONDITIONS
            if how["condition"] == "service_healthy":
                assert SERVICES[other]["healthcheck"]["test"][0] == "CMD"
            if how["condition"] == "service_completed_successfully":
                assert SERVICES[other]["restart"].startswith("on-failure"), "it must be let end"
            assert other != name
    assert set(WORKERS["topics"]["depends_on"]) == {"kafka"}
    assert all(set(WORKERS[name]["depends_on"]) == {"topics"} for name in LONG_RUNNING)


def test_what_services_mount_is_declared_and_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_dir()
            else:
                assert source in COMPOSE["volumes"]
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])
    for secret in COMPOSE["secrets"].values():
        assert (DEPLOY / secret["file"]).parent.is_dir()
        ignored = subprocess.run(
            ["git", "check-ignore", "--quiet", str(DEPLOY / secret["file"])], cwd=ROOT
        )
        assert ignored.returncode == 0, "a secret's file could be committed"


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_a_worker_s_command_is_one_of_tocsin(name: str) -> None:
    command_lines.parse_exactly(WORKERS[name]["command"])


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_a_worker_is_confined(name: str) -> None:
    worker = WORKERS[name]

    assert worker["read_only"] is True
    assert worker["cap_drop"] == ["ALL"]
    assert worker["security_opt"] == ["no-new-privileges:true"]
    assert ("ports" in worker) == (name == "page")


def test_the_page_is_this_machine_s_and_asks_for_a_token() -> None:
    page = WORKERS["page"]
    (port,) = page["ports"]
    command = page["command"]
    token = Path(command[command.index("--token-file") + 1])

    address = command[command.index("--http") + 1]
    assert port == f"${{TOCSIN_PAGE_BIND:-127.0.0.1}}:{address.split(':')[1]}:8470"
    assert token.parent == Path("/run/secrets")
    assert token.name in page["secrets"]
    # It reads runs; it changes none.
    assert "store:/store:ro" in page["volumes"]


def test_the_action_worker_trusts_the_key_of_the_page_and_cannot_change_it() -> None:
    def mounts(worker: str) -> dict[str, list[str]]:
        """Where it has each volume, and how."""
        return {(parts := mount.split(":"))[0]: parts[1:] for mount in WORKERS[worker]["volumes"]}

    (own,), (page, mode) = mounts("actions")["actions"], mounts("actions")["page"]
    assert mounts("page")["page"] == [own]
    assert f"XDG_CONFIG_HOME={own} " in " ".join(of("ENV"))
    trusted = WORKERS["actions"]["environment"]["TOCSIN_STOP_KEYS"].split(":")
    assert trusted == [str(keys_folder({"XDG_CONFIG_HOME": one})) for one in (own, page)]
    assert mode == "ro"
    # Whoever is first at a new volume gives it its owner.
    assert re.search(rf"install -d -o tocsin -g tocsin -m 0700 .*{page}\b", " ".join(of("RUN")))


def test_the_archive_writes_where_the_page_reads_and_the_image_lets_it() -> None:
    url = config_of(WORKERS["archive"]).store.url

    assert url == config_of(WORKERS["page"]).store.url
    assert f"store:{url}" in WORKERS["archive"]["volumes"]
    assert f"-o tocsin -g tocsin -m 0700 {url}" in " ".join(of("RUN"))


def config_of(worker: dict[str, Any]) -> Config:
    """The configuration that its command names, seen through its volumes."""
    words = worker["command"]
    path = Path(words[words.index("--config") + 1])
    mounts = {volume.split(":")[1]: volume.split(":")[0] for volume in worker["volumes"]}
    text = (DEPLOY / mounts[str(path.parent)] / path.name).read_text()
    config, problems = check_config(text, path.name, section_registry())
    assert problems == []
    assert config is not None
    return config


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_a_worker_s_configuration_is_valid_and_its_secrets_are_mounted(name: str) -> None:
    config = config_of(WORKERS[name])

    mounted = {Path("/run/secrets") / secret for secret in WORKERS[name]["secrets"]}
    assert {source.file for source in config.secrets.values()} <= mounted


def test_the_workers_use_the_broker_s_inner_listener() -> None:
    kafka = SERVICES["kafka"]["environment"]
    listeners = dict(item.split("://") for item in kafka["KAFKA_ADVERTISED_LISTENERS"].split(","))

    assert config_of(WORKERS["rules"]).bus.url == f"kafka://{listeners['INSIDE']}"
    assert kafka["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert all(isinstance(value, str) for value in kafka.values()), "quote numbers and booleans"
    names = {item.split(":")[0] for item in kafka["KAFKA_LISTENERS"].split(",")}
    protocols = kafka["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")
    assert {item.split(":")[0] for item in protocols} == names == {*listeners, "CONTROLLER"}


def test_the_published_port_is_this_machine_s_unless_told_otherwise() -> None:
    (port,) = SERVICES["kafka"]["ports"]

    assert port == "${TOCSIN_KAFKA_BIND:-127.0.0.1}:9092:9092"


def test_variables_are_kept_where_each_command_finds_them() -> None:
    ignored = subprocess.run(["git", "check-ignore", "--quiet", str(DEPLOY / ".env")], cwd=ROOT)
    assert ignored.returncode == 0, "it has keys of the bucket"
    for page in sorted((ROOT / "docs").rglob("*.md")):
        single = re.findall(r"\b[A-Z_]+=\S+ +(?:docker|podman)[ -]compose .*", page.read_text())
        assert single == [], f"{page}: the next command does not have them"


# -- Containerfile


def instructions() -> Iterator[tuple[str, str]]:
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            yield name, " ".join(rest.split())


INSTRUCTIONS = list(instructions())


def of(name: str) -> list[str]:
    return [rest for what, rest in INSTRUCTIONS if what == name]


def copied() -> list[str]:
    """What is copied from the repository."""
    return [
        source
        for rest in of("COPY")
        if "--from" not in rest
        for source in rest.split()[:-1]
    ]  # fmt: skip


def test_the_image_is_built_in_two_stages_from_a_plain_base_image() -> None:
    bases = [rest.split()[0] for rest in of("FROM")]

    assert len(bases) == 2
    for image in [*bases, SERVICES["kafka"]["image"]]:
        first = image.split("/")[0] if "/" in image else ""
        assert not re.search(r"[.:]", first), f"{image} names a registry"
        assert re.search(r":\d+\.\d+", image), f"{image} may change its version"
    python = re.search(r"python:(\d+\.\d+)", bases[0])
    assert python is not None
    assert PYPROJECT["project"]["requires-python"] == f">={python[1]}"
    assert {"AS build"} == {rest.split(" ", 1)[1] for rest in of("FROM") if " " in rest}


def test_all_that_is_copied_is_there_and_all_that_is_needed_is_copied() -> None:
    sources = copied()

    assert [source for source in sources if not (ROOT / source).exists()] == []
    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {package.split("/")[0] for package in packages}
    needed |= {"pyproject.toml", PYPROJECT["project"]["readme"], "constraints.txt"}
    needed |= set(PYPROJECT["project"]["license-files"])
    assert needed == set(sources)


def test_only_what_is_copied_goes_to_the_engine() -> None:
    lines = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}

    assert "*" in lines
    assert kept == set(copied())


def test_pip_installs_extras_that_there_are_within_the_constraints() -> None:
    (install,) = (words for rest in of("RUN") if "pip" in (words := shlex.split(rest))[0])

    assert install[install.index("--constraint") + 1] == "constraints.txt"
    extras = re.fullmatch(r"\.\[(.*)\]", install[-1])
    assert extras is not None
    chosen = set(extras[1].split(","))
    assert chosen <= set(PYPROJECT["project"]["optional-dependencies"])
    assert {EXTRAS[WORKERS[name]["command"][0]] for name in LONG_RUNNING} <= chosen
    assert "index-url" not in " ".join(install)


def test_the_image_runs_tocsin_without_root() -> None:
    assert json.loads(of("ENTRYPOINT")[-1]) == ["tocsin"]
    (user,) = of("USER")
    assert all(int(part) >= 1000 for part in user.split(":"))
    assert f"--uid {user.split(':')[0]}" in " ".join(of("RUN"))
    names = [name for name, _ in INSTRUCTIONS]
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))


# -- units


def unit_lines(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def unit_command(unit: Path) -> list[str]:
    (command,) = unit_lines(unit)["ExecStart"]
    return shlex.split(
        command.replace("%i", "1")
        .replace("%H", "node-1")
        .replace("${CREDENTIALS_DIRECTORY}", "/run/credentials")
        .replace("${TOCSIN_PAGE_NAME}", "localhost")
    )


def installed(folder: Path) -> list[Path]:
    """The units as on a host where tocsin is installed: ours, instead of /opt/tocsin."""
    tocsin = folder / "tocsin"
    tocsin.write_text(f'#!/bin/sh\nexec {sys.executable} -m tocsin.console "$@"\n')
    tocsin.chmod(0o755)
    units = []
    for unit in UNITS:
        path = folder / unit.name.replace("@.", "@1.")
        path.write_text(unit.read_text().replace("/opt/tocsin/bin/tocsin", str(tocsin)))
        units.append(path)
    return units


def systemd_analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments], capture_output=True, text=True, timeout=60
    )


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    done = systemd_analyze("verify", "--man=no", *map(str, installed(tmp_path)))

    said = [line for line in done.stderr.splitlines() if "tocsin" in line]
    assert (done.returncode, said) == (0, []), done.stderr


def test_the_units_are_little_exposed(tmp_path: Path) -> None:
    for unit in installed(tmp_path):
        # In tenths: 10 is fully exposed, below 2 is what systemd calls OK.
        done = systemd_analyze("security", "--offline=true", "--threshold=20", str(unit))
        if "unrecognized option" in done.stderr:
            pytest.skip("this systemd-analyze cannot look at a unit that is not loaded")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_service_and_gives_it_time_to_end(unit: Path) -> None:
    program, *words = unit_command(unit)
    lines = unit_lines(unit)

    assert program == "/opt/tocsin/bin/tocsin"
    command_lines.parse_exactly(words)
    assert lines["RestartPreventExitStatus"] == ["2"]
    assert int(lines["TimeoutStopSec"][0]) >= (5 if words[0] == "serve" else 2 * 15)
    assert words[words.index("--http") + 1].startswith("127.0.0.1:")
    user = (DEPLOY / "systemd" / "tocsin.sysusers").read_text().splitlines()[-1].split()[1]
    assert lines["User"] == [user]


def test_each_unit_listens_at_a_port_of_its_own() -> None:
    ports = [words[words.index("--http") + 1] for words in map(unit_command, UNITS)]

    assert len(set(ports)) == len(UNITS) == 4


def test_only_the_action_worker_sees_its_key() -> None:
    for unit in UNITS:
        lines = unit_lines(unit)
        owner = "StateDirectory" in lines and lines["StateDirectory"] == ["tocsin"]
        assert owner == (unit.name == "tocsin-actions.service")
        if unit.name in ("tocsin-archive.service", "tocsin-page.service"):
            assert lines["InaccessiblePaths"] == ["-/var/lib/tocsin/tocsin"]


def test_the_unit_of_the_action_worker_trusts_its_own_key_and_the_page_s() -> None:
    def variables(unit: str) -> dict[str, str]:
        lines = unit_lines(DEPLOY / "systemd" / unit)["Environment"]
        return dict(word.split("=", 1) for line in lines for word in line.split())

    actions, page = variables("tocsin-actions.service"), variables("tocsin-page.service")
    trusted = [str(keys_folder(one)) for one in (actions, page)]
    assert actions["TOCSIN_STOP_KEYS"].split(":") == trusted


def test_units_start_again_when_kafka_is_late_and_not_when_their_configuration_is_wrong(
    embedded_site: Site, tmp_path: Path
) -> None:
    def ends(unit: Path, name: str, bus: str, said: str) -> tuple[int, bool]:
        config = tmp_path / f"{unit.name}-{name}.yaml"
        config.write_text(f"version: 1\nbus: {bus}\nstore: {tmp_path}/store\n")
        words = unit_command(unit)[1:]
        words[words.index("--config") + 1] = str(config)
        done = embedded_site.tocsin(*words[: words.index("--http")])
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        final = unit_lines(unit)["RestartPreventExitStatus"]
        return done.returncode, str(done.returncode) in final

    for unit in WORKER_UNITS:
        assert ends(unit, "wrong", "kafka:/127.0.0.1:1", "embedded:PATH") == (2, True)
    # Each waits for its broker for a quarter of a minute.
    with ThreadPoolExecutor(len(WORKER_UNITS)) as pool:
        late = pool.map(
            lambda unit: ends(unit, "late", "kafka://127.0.0.1:1", "no broker answers"),
            WORKER_UNITS,
        )
        assert set(late) == {(1, False)}


# -- what is run


def commands() -> list[list[str]]:
    """The distinct subcommands that are started anywhere in deploy/."""
    lines = [worker["command"] for worker in WORKERS.values()]
    lines += [unit_command(unit)[1:] for unit in UNITS]
    return [list(words) for words in sorted({tuple(subcommand(line)) for line in lines})]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_each_command_explains_itself(words: list[str], embedded_site: Site) -> None:
    done = embedded_site.tocsin(*words, "--help")

    assert done.returncode == 0, done.stderr
    assert f"tocsin {' '.join(words)}" in done.stdout


def at(words: list[str], site: Site, port: int) -> list[str]:
    """A worker's command with this site's configuration, port and token."""
    words = list(words)
    words[words.index("--config") + 1] = str(site.config)
    if "--http" in words:
        words[words.index("--http") + 1] = f"127.0.0.1:{port}"
    if "--token-file" in words:
        token = site.folder / "page-token"
        token.write_text("a-token-of-more-than-twenty-characters")
        token.chmod(0o600)
        words[words.index("--token-file") + 1] = str(token)
    if "--host-name" in words:
        words[words.index("--host-name") + 1] = "tocsin.example.com"
    return words


def start(name: str, site: Site, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tocsin.console"]
    with (site.folder / f"deploy-{name}.log").open("w") as log:
        return Forked(
            [*command, *at(WORKERS[name]["command"], site, port)],
            cwd=site.folder,
            env={**os.environ, **site.environ, "TOCSIN_STORE": str(site.folder / "store")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
        )


def healthy(name: str, port: int) -> bool:
    """What the engine would find."""
    _, _, *check = WORKERS[name]["healthcheck"]["test"]
    check[-1] = re.sub(r"(?<=127\.0\.0\.1:)\d+", str(port), check[-1])
    return subprocess.run([sys.executable, *check], capture_output=True).returncode == 0


@pytest.mark.kafka
def test_the_services_start_in_their_order_and_become_healthy(bare_kafka_site: Site) -> None:
    topics = bare_kafka_site.tocsin(*at(WORKERS["topics"]["command"], bare_kafka_site, 0))
    assert topics.returncode == 0, topics.stderr
    ports = dict(zip(LONG_RUNNING, free_ports(4), strict=True))
    assert not healthy("rules", ports["rules"])
    started = []
    try:
        for name, port in ports.items():
            started.append(start(name, bare_kafka_site, port))
        for name, port in ports.items():
            wait_until(partial(healthy, name, port), timeout_s=60, what=f"{name} is healthy")
    finally:
        codes = [end(process, 30) for process in started]
    assert codes == [0, 0, 0, 0]


# -- the pages about it


PAGES = {name: (ROOT / "docs" / "how-to" / name).read_text() for name in ("kafka.md", "systemd.md")}
"""`test_docs.py` leaves their commands other than `tocsin` to this file."""


def shown_commands() -> list[str]:
    text = "".join(PAGES.values())
    blocks = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [re.split(r"\s# |\s{2,}#", line.removeprefix("$ "))[0].strip() for line in lines]


def test_each_tocsin_command_of_the_pages_is_one() -> None:
    found = 0
    for line in shown_commands():
        words = shlex.split(line)
        if Path(words[0]).name == "tocsin":
            command_lines.parse_exactly(words[1:])
            found += 1
    assert found >= 6


def test_each_file_that_a_page_names_is_there() -> None:
    readme = (DEPLOY / "README.md").read_text()
    for text in (readme, *PAGES.values()):
        for path in re.findall(r"(?<![\w/.])deploy/[\w./@-]+", text):
            assert (ROOT / path).exists(), path


def test_each_service_and_unit_that_the_pages_name_is_there() -> None:
    units = {unit.name.removesuffix(".service").removesuffix("@") for unit in UNITS}
    for line in shown_commands():
        words = shlex.split(line)
        if words[:3] == ["docker", "compose", "restart"]:
            assert set(words[3:]) <= set(SERVICES)
        if words[:2] == ["systemctl", "enable"]:
            assert {word.split("@")[0] for word in words[3:]} == units
