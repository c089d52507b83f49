"""`deploy/` for a fleet: three brokers, monitoring, the Helm chart.

`promtool` and `helm` are those that `tools/setup-peers` installs.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.docs import command_lines
from support.servers.chart import CHART, EVERYTHING, RELEASE, manifests, template, tool
from tocsin.runtime.metrics import METRICS
from tocsin.schemas.configuration.file import check_config
from tocsin.schemas.key_folder import keys_folder, own_key

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
MONITORING = DEPLOY / "monitoring"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "tocsin.json"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def run(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- monitoring

_METRIC = re.compile(r"\b(tocsin_[a-z_]+?)(_bucket|_sum|_count)?\b(?![a-z_])")


def queries() -> Iterator[tuple[str, str]]:
    for group in read(MONITORING / "alerts.yml")["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def test_each_query_asks_for_metrics_that_there_are_by_labels_that_they_have() -> None:
    asked = set()
    for where, query in queries():
        for name, part in _METRIC.findall(query):
            assert name in METRICS, f"{where}: {name}"
            assert (METRICS[name].kind == "histogram") == bool(part), f"{where}: {name}{part}"
            asked.add(name)
            for label in re.findall(r"by \(([^)]*)\)", query):
                known = {*METRICS[name].labels, "le", "instance", "job", "prefix"}
                assert {one.strip() for one in label.split(",")} <= known, f"{where}: {label}"
    assert len(asked) >= 15


def test_prometheus_accepts_configuration_and_alerts_and_they_fire() -> None:
    promtool = tool("promtool")
    run(promtool, "check", "config", MONITORING / "prometheus.yml")
    run(promtool, "test", "rules", MONITORING / "alerts_test.yml")


def test_each_alert_is_seen_to_fire_and_seen_not_to() -> None:
    cases = [
        (case["alertname"], bool(case.get("exp_alerts")))
        for group in read(MONITORING / "alerts_test.yml")["tests"]
        for case in group["alert_rule_test"]
    ]
    alerts = [
        rule["alert"]
        for group in read(MONITORING / "alerts.yml")["groups"]
        for rule in group["rules"]
    ]
    assert set(cases) == {(alert, fires) for alert in alerts for fires in (True, False)}


def test_each_alert_says_what_is_wrong_in_one_line() -> None:
    for group in read(MONITORING / "alerts.yml")["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert 20 < len(rule["annotations"]["summary"]) < 160


# -- compose, one file over the other


def test_monitoring_mounts_what_is_there_and_scrapes_the_services() -> None:
    services = read(DEPLOY / "compose.monitoring.yaml")["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).exists(), source
    (job,) = read(MONITORING / "prometheus.yml")["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    workers = read(DEPLOY / "compose.yaml")["services"]
    served = [n for n, s in workers.items() if f"0.0.0.0:{found['port']}" in s.get("command", ())]
    assert found["names"] == served


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("prometheus", {"/prometheus"}),
        # Its database and plugins; downloads of plugins. It logs to the console.
        ("grafana", {"/var/lib/grafana", "/tmp"}),
    ],
)
def test_a_service_of_monitoring_is_confined(name: str, written: set[str]) -> None:
    made = read(DEPLOY / "compose.monitoring.yaml")
    service = made["services"][name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    volumes = [volume.split(":") for volume in service["volumes"]]
    kept = {target for source, target, *_ in volumes if source in made["volumes"]}
    assert kept | set(service.get("tmpfs", ())) == written
    assert all(mode == ["ro"] for source, _, *mode in volumes if source not in made["volumes"])


def three_brokers() -> dict[str, dict[str, Any]]:
    """The services that are brokers, of one file over the other, by name."""
    one = read(DEPLOY / "compose.yaml")["services"]["kafka"]
    services = read(DEPLOY / "compose.brokers.yaml")["services"]
    brokers = {name: s for name, s in services.items() if name.startswith("kafka")}
    environment = one["environment"] | brokers["kafka"]["environment"]
    brokers["kafka"] = one | brokers["kafka"] | {"environment": environment}
    return brokers


def listeners(text: str) -> dict[str, tuple[str, int]]:
    """Host and port of each: `INSIDE://kafka:19092,OUTSIDE://:9092`."""
    found = {}
    for one in text.split(","):
        name, _, address = one.partition("://")
        host, _, port = address.rpartition(":")
        found[name] = (host, int(port))
    return found


def test_each_of_three_brokers_listens_at_ports_of_its_own_that_all_others_know() -> None:
    brokers = three_brokers()
    voters, inside, published = set(), set(), []
    for name, service in brokers.items():
        environment = service["environment"]
        listening = listeners(environment["KAFKA_LISTENERS"])
        ports = [port for _, port in listening.values()]
        assert len(set(ports)) == len(ports) == 3, f"{name}: two listeners of one port"
        protocols = environment["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")
        assert {one.partition(":")[0] for one in protocols} == listening.keys()
        assert environment["KAFKA_INTER_BROKER_LISTENER_NAME"] == "INSIDE"

        advertised = listeners(environment["KAFKA_ADVERTISED_LISTENERS"])
        assert advertised["INSIDE"] == (name, listening["INSIDE"][1])
        assert advertised["OUTSIDE"] == (
            "${TOCSIN_KAFKA_HOST:-localhost}",
            listening["OUTSIDE"][1],
        )
        # A port that is another one outside would not be the one that is advertised.
        (port,) = service["ports"]
        outside = listening["OUTSIDE"][1]
        assert port == f"${{TOCSIN_KAFKA_BIND:-127.0.0.1}}:{outside}:{outside}"
        published.append(outside)
        check = service["healthcheck"]["test"]
        assert check[check.index("--bootstrap-server") + 1] == f"localhost:{listening['INSIDE'][1]}"
        inside.add(f"{name}:{listening['INSIDE'][1]}")
        voters.add(f"{environment['KAFKA_NODE_ID']}@{name}:{listening['CONTROLLER'][1]}")
    assert len(set(published)) == 3, "they are published at one address"
    for service in brokers.values():
        quorum = service["environment"]["KAFKA_CONTROLLER_QUORUM_VOTERS"].split(",")
        assert sorted(quorum) == sorted(voters)
    workers = read(DEPLOY / "config" / "tocsin.yaml")
    url = workers["bus"] if isinstance(workers["bus"], str) else workers["bus"]["url"]
    assert set(url.removeprefix("kafka://").split(",")) <= inside
    together = read(DEPLOY / "compose.brokers.yaml")["services"]
    for name in ("rules", "actions", "archive", "page", "topics"):
        (setting,) = together[name]["environment"]
        key, _, url = setting.partition("=")
        assert key == "TOCSIN_BUS"
        assert set(url.removeprefix("kafka://").split(",")) == inside, name


def test_three_brokers_are_one_cluster_whose_records_survive_one_of_them() -> None:
    one = read(DEPLOY / "compose.yaml")["services"]["kafka"]["environment"]
    services = read(DEPLOY / "compose.brokers.yaml")["services"]
    brokers = {name: service["environment"] for name, service in three_brokers().items()}
    assert len(brokers) == 3
    for same in (
        "KAFKA_CONTROLLER_QUORUM_VOTERS", "CLUSTER_ID", "KAFKA_MIN_INSYNC_REPLICAS",
        "KAFKA_AUTO_CREATE_TOPICS_ENABLE", "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR",
    ):  # fmt: skip
        assert len({environment[same] for environment in brokers.values()}) == 1, same
    assert one.keys() <= brokers["kafka"].keys()
    command = services["topics"]["command"]
    assert command[command.index("--replication") + 1] == "3"
    command_lines.parse_exactly(command)


def test_all_three_files_together_are_one_set_of_services() -> None:
    files = [read(DEPLOY / f"compose{part}.yaml") for part in ("", ".brokers", ".monitoring")]
    services: dict[str, dict[str, Any]] = {}
    for file in files:
        for name, service in file["services"].items():
            services.setdefault(name, {}).update(service)
    published: dict[str, str] = {}
    for name, service in services.items():
        assert "image" in service or "build" in service, name
        assert service.get("depends_on", {}).keys() <= services.keys(), name
        for port in service.get("ports", ()):
            outside = port.rsplit(":", 2)[1]
            assert published.setdefault(outside, name) == name, f"{outside}: two services"
    named = {
        volume.partition(":")[0]
        for file in files
        for service in file["services"].values()
        for volume in service.get("volumes", ())
        if not volume.startswith(".")
    }
    defined = {name for file in files for name in file.get("volumes") or ()}
    assert named == defined
    assert {"kafka", "kafka-2", "kafka-3", "rules", "actions", "archive", "page"} < services.keys()
    assert {"prometheus", "grafana"} < services.keys()
    assert services["rules"]["deploy"]["replicas"] == 2


# -- the Helm chart


@pytest.fixture(scope="module")
def rendered() -> list[dict[str, Any]]:
    run(tool("helm"), "lint", "--strict", CHART)
    return manifests(*EVERYTHING)


def makers(rendered: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What makes pods, by name."""
    return {
        one["metadata"]["name"].removeprefix(f"{RELEASE}-"): one
        for one in rendered
        if "template" in one.get("spec", {})
    }


def pods(rendered: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The specifications of its pods, by the names of what makes them."""
    return {name: one["spec"]["template"]["spec"] for name, one in makers(rendered).items()}


def test_the_chart_runs_commands_of_tocsin_confined(rendered: list[dict[str, Any]]) -> None:
    assert pods(rendered).keys() == {"topics-1", "rules", "actions", "archive", "page"}
    for pod in pods(rendered).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"] is True
        assert confined["capabilities"] == {"drop": ["ALL"]}
        command_lines.parse_exactly(
            [word.replace("$(POD_NAME)", "watch-rules-0") for word in container["args"]]
        )
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_chart_s_configuration_is_valid(rendered: list[dict[str, Any]]) -> None:
    (config,) = [one for one in rendered if one["kind"] == "ConfigMap"]
    made, problems = check_config(config["data"]["tocsin.yaml"], "tocsin.yaml")
    assert made is not None, problems
    assert made.bus.url.startswith("kafka://")


def test_a_service_finds_the_pods_of_its_name_at_their_port(rendered: list[dict[str, Any]]) -> None:
    services = [one for one in rendered if one["kind"] == "Service"]
    names = [one["metadata"]["name"].removeprefix(f"{RELEASE}-") for one in services]
    assert sorted(names) == ["page", "rules"]
    for name, service in zip(names, services, strict=True):
        spec = makers(rendered)[name]["spec"]["template"]
        assert service["spec"]["selector"].items() <= spec["metadata"]["labels"].items()
        (port,), (container,) = service["spec"]["ports"], spec["spec"]["containers"]
        (opened,) = container["ports"]
        assert port.get("targetPort", port["port"]) in (opened["name"], opened["containerPort"])
        listening = container["args"][container["args"].index("--http") + 1]
        assert listening == f"0.0.0.0:{opened['containerPort']}"


def test_what_has_metrics_is_annotated_for_prometheus(rendered: list[dict[str, Any]]) -> None:
    scraped = set()
    for name, one in makers(rendered).items():
        annotations = one["spec"]["template"]["metadata"].get("annotations", {})
        if annotations.get("prometheus.io/scrape") == "true":
            assert annotations["prometheus.io/port"] == "9464"
            scraped.add(name)
    assert scraped == {"rules", "actions", "archive"}


def keys_of(pod: dict[str, Any]) -> dict[str, dict[str, str]]:
    """What its folder of keys has: by secret, the key in it by the name of the file."""
    (volume,) = [one for one in pod["volumes"] if one["name"] == "key"]
    if "secret" in volume:
        sources = [{"name": volume["secret"]["secretName"], "items": volume["secret"]["items"]}]
    else:
        sources = [one["secret"] for one in volume["projected"]["sources"]]
    return {one["name"]: {item["path"]: item["key"] for item in one["items"]} for one in sources}


def test_action_workers_trust_the_key_of_the_page_and_do_not_have_it(
    rendered: list[dict[str, Any]],
) -> None:
    assert keys_of(pods(rendered)["actions"])["page-key"] == {"page.pub": "actions.pub"}

    alone = pods(manifests("actions.keySecret=stop-key", "page.keySecret=page-key"))["actions"]
    assert keys_of(alone).keys() == {"stop-key"}, "there is no page"


def test_the_key_of_a_secret_is_where_the_worker_reads_it(
    rendered: list[dict[str, Any]], tmp_path: Path
) -> None:
    own_key(tmp_path)
    for name in ("actions", "page"):
        pod = pods(rendered)[name]
        paths = set(keys_of(pod)[f"{'stop' if name == 'actions' else name}-key"])
        assert paths == {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
        (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "key"]
        home = re.search(r"XDG_CONFIG_HOME=(\S+)", (DEPLOY / "Containerfile").read_text())
        assert home is not None
        assert mount["mountPath"] == str(keys_folder({"XDG_CONFIG_HOME": home[1]}))


def test_only_action_workers_with_a_service_account_get_its_token() -> None:
    (account,) = (
        one["metadata"]["name"]
        for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "job.yaml").read_text())
        if one["kind"] == "ServiceAccount"
    )
    made = pods(manifests(*EVERYTHING, f"actions.serviceAccount={account}"))

    tokens = {name: pod["automountServiceAccountToken"] for name, pod in made.items()}
    assert tokens == {name: name == "actions" for name in made}
    assert {name: pod.get("serviceAccountName") for name, pod in made.items()} == {
        name: account if name == "actions" else None for name in made
    }


def test_archive_and_page_are_off_unless_they_are_asked_for() -> None:
    made = manifests()

    assert pods(made).keys() == {"topics-1", "rules", "actions"}
    assert "PersistentVolumeClaim" not in {one["kind"] for one in made}


def test_a_folder_is_a_volume_that_the_page_cannot_change(rendered: list[dict[str, Any]]) -> None:
    (claim,) = [one for one in rendered if one["kind"] == "PersistentVolumeClaim"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    for name, read_only in (("archive", False), ("page", True)):
        pod = pods(rendered)[name]
        (volume,) = [one for one in pod["volumes"] if one["name"] == "store"]
        used = volume["persistentVolumeClaim"]["claimName"]
        assert used == claim["metadata"]["name"]
        (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "store"]
        assert mount.get("readOnly", False) is read_only
        # A volume for one node: both are there.
        (term,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        labels = makers(rendered)[name]["spec"]["template"]["metadata"]["labels"]
        assert term["labelSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("store", ["config.store=s3://b/p", "config.store.url=s3://b/p"])
def test_a_bucket_needs_no_volume_but_what_opens_it(store: str) -> None:
    made = manifests(*EVERYTHING, store, "store.environment=aws", "store.serviceAccount=writer")

    assert "PersistentVolumeClaim" not in {one["kind"] for one in made}
    for name in ("archive", "page"):
        pod = pods(made)[name]
        assert "store" not in {volume["name"] for volume in pod["volumes"]}
        assert "affinity" not in pod
        assert pod["serviceAccountName"] == "writer"
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "aws"}}]
    (config,) = [one for one in made if one["kind"] == "ConfigMap"]
    written, problems = check_config(config["data"]["tocsin.yaml"], "tocsin.yaml")
    assert written is not None, problems
    assert written.store.url == "s3://b/p"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (("actions.replicas=2",), "actions.keySecret is needed"),
        (("page.enabled=true",), "page.tokenSecret is needed"),
        (
            ("page.enabled=true", "page.tokenSecret=t", "page.keySecret=k"),
            "actions.keySecret is needed with page.keySecret",
        ),
        (("archive.enabled=true", "config.store=null"), "config.store is needed"),
        (("archive.enabled=true", "config.store=off"), "config.store is needed"),
    ],
)
def test_the_chart_refuses_what_would_not_work(values: tuple[str, ...], why: str) -> None:
    done = template(*values)

    assert done.returncode != 0
    assert why in done.stderr
