"""How to reach and log in to an API server: the service account of the pod, or a kubeconfig."""

from __future__ import annotations

import base64
import binascii
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import yaml

from tocsin.schemas.errors import ConfigurationError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the token of its service account, and the authority of the API server."""

_LARGEST: Final = 1024 * 1024
"""Bytes of a file that are read."""

_NOT_SUPPORTED: Final = {
    "exec": "runs a program to log in",
    "auth-provider": "uses a log-in of one cloud",
    "username": "logs in with a password, which API servers refuse since 1.19",
    "as": "acts as somebody else",
    "as-uid": "acts as somebody else",
    "as-groups": "acts as somebody else",
}
_INSTEAD: Final = (
    "use a client certificate, or the token of a secret of the type "
    "kubernetes.io/service-account-token (one of `kubectl create token` expires after an hour)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """An API server, and who we are to it.

    Attributes:
        server: its URL, without a slash at the end.
        authority: PEM text or file of the authority that vouches for it; None: the system's.
        token: the token that logs in, or the file of one that changes.
        certificate: PEM text or file of a client certificate.
        key: PEM text or file of its private key.
        server_name: the name that its certificate must bear; None: the one of the URL.
    """

    server: str
    authority: str | Path | None = None
    token: str | Path | None = field(default=None, repr=False)
    certificate: str | Path | None = None
    key: str | Path | None = field(default=None, repr=False)
    server_name: str | None = None

    def bearer(self) -> str | None:
        """The token as it is now. Reads its file: a service account's is replaced each hour.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no token.
        """
        if self.token is None:
            return None
        text = self.token if isinstance(self.token, str) else _read(self.token).decode()
        text = text.strip()
        if not text.isascii() or not text.isprintable() or not text or " " in text:
            raise ValueError("expected a token: one word")
        return text

    def tls(self) -> ssl.SSLContext:
        """Whom to trust and what to show. Reads files.

        Raises:
            OSError: a file cannot be read, or holds no certificate or key.
        """
        context = ssl.create_default_context(
            cafile=str(self.authority) if isinstance(self.authority, Path) else None,
            cadata=self.authority if isinstance(self.authority, str) else None,
        )
        if self.certificate is not None and self.key is not None:
            # OpenSSL reads a certificate's key from a file only.
            with tempfile.TemporaryDirectory(prefix="tocsin-kube-") as folder:
                certificate = _file(self.certificate, Path(folder, "certificate"))
                key = _file(self.key, Path(folder, "key"))
                # Without a password OpenSSL would ask for one on the terminal.
                context.load_cert_chain(certificate, key, password=lambda: b"")
        return context


def in_cluster(environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Cluster:
    """The cluster of this pod, as its service account.

    Raises:
        ConfigurationError: this is no pod, or it has no service account.
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise ConfigurationError(
            "not in a pod of Kubernetes (KUBERNETES_SERVICE_HOST is not set): name a kubeconfig"
        )
    if not (folder / "token").is_file():
        raise ConfigurationError(
            f"{folder / 'token'} does not exist: expected the token of the pod's service account "
            "(automountServiceAccountToken)"
        )
    shown = f"[{host}]" if ":" in host else host
    return Cluster(
        server=f"https://{shown}:{port}", authority=folder / "ca.crt", token=folder / "token"
    )


def from_kubeconfig(path: Path, context: str | None = None) -> Cluster:
    """The cluster and user of a context of a kubeconfig file.

    Raises:
        ConfigurationError: the file cannot be used. The message names the file and the key, and
            shows no value of a credential.
    """
    try:
        # A mapping of our own administrator, of at most 1 MiB; as kubectl reads it.
        raw = yaml.safe_load(_read(path))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; expected a kubeconfig") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigurationError(f"{path}: expected a kubeconfig: YAML of at most 1 MiB") from None
    file = _Kubeconfig(path, raw if isinstance(raw, dict) else {})
    name = context if context is not None else file.text(file.raw, "current-context")
    if not name:
        raise ConfigurationError(f"{path}: no current-context: name one with 'context'")
    chosen = file.named("contexts", name, "context")
    cluster = file.named("clusters", file.text(chosen, "cluster") or "", "cluster")
    user = file.named("users", file.text(chosen, "user") or "", "user")
    return file.cluster(cluster, user)


@dataclass(frozen=True, slots=True)
class _Kubeconfig:
    """A kubeconfig file, as YAML has it. All methods raise ConfigurationError."""

    path: Path
    raw: Mapping[str, object]

    def named(self, section: str, name: str, key: str) -> Mapping[str, object]:
        """What a list of the file holds under a name."""
        listed = self.raw.get(section)
        entries = [
            each for each in (listed if isinstance(listed, list) else ()) if isinstance(each, dict)
        ]
        for entry in entries:
            if entry.get("name") == name:
                value = entry.get(key)
                return value if isinstance(value, dict) else {}
        known = ", ".join(sorted(str(entry.get("name")) for entry in entries)) or "none"
        raise ConfigurationError(f"{self.path}: {section} has no {name!r} (it has: {known})")

    def text(self, section: Mapping[str, object], key: str) -> str | None:
        """A text, if it is there."""
        value = section.get(key)
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise ConfigurationError(f"{self.path}: {key}: expected text")
        return value

    def given(self, section: Mapping[str, object], key: str) -> str | Path | None:
        """What `KEY-data` holds in base64, or else the file that `KEY` names."""
        data = self.text(section, f"{key}-data")
        if data is not None:
            try:
                return base64.b64decode(data, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                raise ConfigurationError(
                    f"{self.path}: {key}-data: expected PEM text in base64"
                ) from None
        name = self.text(section, key)
        return None if name is None else self.path.parent / name

    def cluster(self, cluster: Mapping[str, object], user: Mapping[str, object]) -> Cluster:
        """Both together, if nothing in them would have to be left out."""
        server = self.text(cluster, "server") or ""
        parts = urlsplit(server)
        if parts.scheme != "https" or not parts.hostname or parts.username or parts.query:
            raise ConfigurationError(
                f"{self.path}: server: expected a URL with https://, for the token must not be read"
            )
        if cluster.get("insecure-skip-tls-verify"):
            raise ConfigurationError(
                f"{self.path}: insecure-skip-tls-verify is not supported: anybody could take the "
                "token; use certificate-authority"
            )
        if cluster.get("proxy-url"):
            raise ConfigurationError(f"{self.path}: proxy-url is not supported")
        for way, does in _NOT_SUPPORTED.items():
            if user.get(way):
                raise ConfigurationError(
                    f"{self.path}: a user that {does} ({way}) is not supported: {_INSTEAD}"
                )
        token_file = self.text(user, "tokenFile")
        token = self.text(user, "token")
        certificate = self.given(user, "client-certificate")
        key = self.given(user, "client-key")
        if (certificate is None) != (key is None):
            raise ConfigurationError(
                f"{self.path}: expected client-certificate and client-key together"
            )
        if token is None and token_file is None and certificate is None:
            raise ConfigurationError(f"{self.path}: the user has no way to log in: {_INSTEAD}")
        return Cluster(
            server=server.rstrip("/"),
            authority=self.given(cluster, "certificate-authority"),
            # As in kubectl: the file is the newer one.
            token=self.path.parent / token_file if token_file is not None else token,
            certificate=certificate,
            key=key,
            server_name=self.text(cluster, "tls-server-name"),
        )


def _file(text: str | Path, path: Path) -> Path:
    """A file with a text: the one that was named, or `path`."""
    if isinstance(text, Path):
        return text
    path.touch(0o600)
    path.write_text(text)
    return path


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"expected at most {_LARGEST:,} bytes")
    return data
