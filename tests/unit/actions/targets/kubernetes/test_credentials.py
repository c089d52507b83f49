"""How an API server is reached: a service account, and kubeconfig files."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.servers.certificates import authority
from tocsin.actions.targets.kubernetes.credentials import Cluster, from_kubeconfig, in_cluster
from tocsin.schemas.errors import ConfigurationError

IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
PLANTED = "a-token-that-nobody-may-see"


def kubeconfig(
    folder: Path, user: dict[str, Any], cluster: dict[str, Any] | None = None, **more: Any
) -> Path:
    path = folder / "config"
    raw = {
        "clusters": [
            {"name": "lab", "cluster": {"server": "https://10.0.0.7:6443/", **(cluster or {})}}
        ],
        "users": [{"name": "stopper", "user": user}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "stopper"}}],
        "current-context": "lab",
    }
    path.write_text(yaml.safe_dump(raw | more))
    return path


def account(folder: Path) -> Path:
    (folder / "token").write_text(f"{PLANTED}\n")
    (folder / "ca.crt").write_text("")
    return folder


def test_a_pod_has_the_address_and_its_account(tmp_path: Path) -> None:
    found = in_cluster(IN_A_POD, account(tmp_path))
    assert (found.server, found.bearer()) == ("https://10.96.0.1:443", PLANTED)
    assert found.authority == tmp_path / "ca.crt"


def test_an_address_of_ipv6_is_written_in_brackets(tmp_path: Path) -> None:
    environ = IN_A_POD | {"KUBERNETES_SERVICE_HOST": "fd00::1"}
    assert in_cluster(environ, account(tmp_path)).server == "https://[fd00::1]:443"


def test_a_token_is_read_anew_each_time(tmp_path: Path) -> None:
    found = in_cluster(IN_A_POD, account(tmp_path))
    assert found.bearer() == PLANTED
    (tmp_path / "token").write_text("the-next-one")
    assert found.bearer() == "the-next-one"
    (tmp_path / "token").write_text("")
    with pytest.raises(ValueError, match="expected a token"):
        found.bearer()
    (tmp_path / "token").unlink()
    with pytest.raises(FileNotFoundError):
        found.bearer()


def test_outside_of_a_pod_a_kubeconfig_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="name a kubeconfig"):
        in_cluster({}, tmp_path)
    with pytest.raises(ConfigurationError, match="automountServiceAccountToken"):
        in_cluster(IN_A_POD, tmp_path)


def test_a_kubeconfig_with_a_token(tmp_path: Path) -> None:
    path = kubeconfig(
        tmp_path,
        {"token": PLANTED},
        {"certificate-authority": "ca.pem", "tls-server-name": "kubernetes"},
    )
    found = from_kubeconfig(path)
    assert found == Cluster(
        server="https://10.0.0.7:6443",
        authority=tmp_path / "ca.pem",
        token=PLANTED,
        server_name="kubernetes",
    )
    assert PLANTED not in repr(found)


def test_the_file_of_a_token_counts_more_than_the_token(tmp_path: Path) -> None:
    (tmp_path / "fresh").write_text("fresh-token")
    found = from_kubeconfig(kubeconfig(tmp_path, {"token": PLANTED, "tokenFile": "fresh"}))
    assert found.bearer() == "fresh-token"


def test_another_context(tmp_path: Path) -> None:
    path = kubeconfig(
        tmp_path,
        {"token": PLANTED},
        contexts=[
            {"name": "lab", "context": {"cluster": "nowhere", "user": "nobody"}},
            {"name": "training", "context": {"cluster": "lab", "user": "stopper"}},
        ],
    )
    assert from_kubeconfig(path, "training").server == "https://10.0.0.7:6443"
    with pytest.raises(ConfigurationError, match=r"clusters has no 'nowhere' \(it has: lab\)"):
        from_kubeconfig(path)
    with pytest.raises(ConfigurationError, match="contexts has no 'x'"):
        from_kubeconfig(path, "x")


@pytest.mark.parametrize("embedded", [True, False])
def test_a_client_certificate(tmp_path: Path, embedded: bool) -> None:
    made = authority(tmp_path / "tls", "127.0.0.1")
    pem = (tmp_path / "tls" / "server.pem").read_bytes()
    if embedded:
        data = base64.b64encode(pem).decode()
        user = {"client-certificate-data": data, "client-key-data": data}
        ca = {"certificate-authority-data": base64.b64encode(made.ca.read_bytes()).decode()}
    else:
        user = {"client-certificate": "tls/server.pem", "client-key": "tls/server.pem"}
        ca = {"certificate-authority": str(made.ca)}
    found = from_kubeconfig(kubeconfig(tmp_path, user, ca))
    assert found.bearer() is None
    context = found.tls()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert [one["issuer"] for one in context.get_ca_certs()] == [((("commonName", "tests"),),)]


@pytest.mark.parametrize(
    ("user", "says"),
    [
        ({"exec": {"command": "aws"}}, "a user that runs a program to log in (exec)"),
        ({"auth-provider": {"name": "gcp"}}, "(auth-provider)"),
        ({"username": "ana", "password": PLANTED}, "logs in with a password"),
        ({"token": PLANTED, "as": "admin"}, "acts as somebody else (as)"),
        ({}, "the user has no way to log in"),
        ({"client-certificate": "c.pem"}, "client-certificate and client-key together"),
        ({"client-key-data": "not base64!", "client-certificate-data": ""}, "PEM text in base64"),
        ({"token": 7}, "token: expected text"),
    ],
)
def test_a_user_that_cannot_be_is_refused(tmp_path: Path, user: dict[str, Any], says: str) -> None:
    path = kubeconfig(tmp_path, user)
    with pytest.raises(ConfigurationError) as caught:
        from_kubeconfig(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert PLANTED not in str(caught.value)


def test_whoever_has_no_way_to_log_in_hears_of_one_that_does_not_expire(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"kubernetes\.io/service-account-token") as caught:
        from_kubeconfig(kubeconfig(tmp_path, {"exec": {"command": "aws"}}))
    assert "`kubectl create token` expires after an hour" in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ({"server": "http://10.0.0.7:8080"}, "expected a URL with https://"),
        ({"server": "https://ana:secret@10.0.0.7"}, "expected a URL with https://"),
        ({"insecure-skip-tls-verify": True}, "insecure-skip-tls-verify is not supported"),
        ({"proxy-url": "http://proxy:3128"}, "proxy-url is not supported"),
    ],
)
def test_a_server_that_cannot_be_trusted_is_refused(
    tmp_path: Path, cluster: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        from_kubeconfig(kubeconfig(tmp_path, {"token": PLANTED}, cluster))


@pytest.mark.parametrize("text", ["", "[", "just text", "a: &b [*b]\n", "- 1\n"])
def test_a_file_that_is_no_kubeconfig(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(ConfigurationError):
        from_kubeconfig(tmp_path / "config")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected a kubeconfig"):
        from_kubeconfig(tmp_path / "config")
