"""A certificate authority of the tests' own, and certificates for names on this machine."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM
_DAYS = timedelta(days=2)


@dataclass(frozen=True)
class Authority:
    """`ca` is the PEM file to trust; `context` is for a server with the names.

    PEM files with a key and its certificate: `server` has the names, `client` is somebody called
    `client`.
    """

    ca: Path
    server: Path
    client: Path
    context: ssl.SSLContext


def authority(folder: Path, *names: str) -> Authority:
    """Make an authority, a server's certificate for `names` (hosts, addresses), and a client's."""
    start = datetime.now(UTC) - timedelta(hours=1)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    issuer = _named("tests")
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        _certificate(issuer, "tests", ca_key, start)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(identifier, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.pem").write_bytes(ca.public_bytes(_PEM))
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    for file, name, others in (("server", names[0], names), ("client", "client", ())):
        key = ec.generate_private_key(ec.SECP256R1())
        unsigned = _certificate(issuer, name, key, start).add_extension(by, critical=False)
        if others:
            alternatives = x509.SubjectAlternativeName([_name(other) for other in others])
            unsigned = unsigned.add_extension(alternatives, critical=False)
        (folder / f"{file}.pem").write_bytes(
            key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            + unsigned.sign(ca_key, hashes.SHA256()).public_bytes(_PEM)
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return Authority(folder / "ca.pem", folder / "server.pem", folder / "client.pem", context)


def _certificate(
    issuer: x509.Name, name: str, key: ec.EllipticCurvePrivateKey, start: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(_named(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + _DAYS)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
