"""How to prove oneself to a Kafka broker: SASL and TLS options."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tocsin.bus.port import UnusableBus

SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
Protocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]


@dataclass(frozen=True, slots=True)
class KafkaSecurity:
    """SASL and TLS for a Kafka bus. With nothing set, the connection is plain text.

    `mechanism` needs `username` and `password`, which never shows in a repr. `tls` encrypts and
    checks the broker's name and certificate, against `ca_file` if there is one, else against the
    system's; `cert_file` and `key_file` are this client's own certificate.
    """

    mechanism: SaslMechanism | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if self.mechanism is not None and (self.username is None or self.password is None):
            raise UnusableBus(f"SASL {self.mechanism} needs a username and a password")
        if self.mechanism is None and (self.username is not None or self.password is not None):
            raise UnusableBus(
                "a SASL username or password needs a mechanism, such as SCRAM-SHA-256"
            )
        if not self.tls and (self.ca_file or self.cert_file or self.key_file):
            raise UnusableBus("TLS files are given but tls is off: set tls: true")
        if self.key_file is not None and self.cert_file is None:
            raise UnusableBus("a TLS key_file needs its cert_file")

    @property
    def protocol(self) -> Protocol:
        """Kafka's word for the combination."""
        if self.mechanism is None:
            return "SSL" if self.tls else "PLAINTEXT"
        return "SASL_SSL" if self.tls else "SASL_PLAINTEXT"

    def ssl_context(self) -> ssl.SSLContext | None:
        """What the client checks the broker with; None without TLS. Reads the files.

        Raises:
            UnusableBus: a file is missing or is not PEM.
        """
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            files = [str(file) for file in (self.ca_file, self.cert_file, self.key_file) if file]
            raise UnusableBus(f"cannot use the TLS files {', '.join(files)}: {error}") from error
        return context
