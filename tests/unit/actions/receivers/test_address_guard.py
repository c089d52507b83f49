from __future__ import annotations

import ipaddress
import socket

import pytest

from tocsin.actions.receivers.address_guard import (
    AddressGuard,
    AddressRefused,
    parse_networks,
    watching,
)
from tocsin.schemas.errors import ConfigurationError

NEVER = [
    "169.254.169.254",
    "169.254.1.1",
    "169.254.170.2",
    "fd00:ec2::254",
    "fd20:ce::254",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "fe80::1",
    "fe80::1%eth0",
    "0.0.0.0",
    "::",
    "224.0.0.1",
    "255.255.255.255",
    "ff02::1",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
]
PRIVATE = [
    "127.0.0.1",
    "127.8.9.10",
    "::1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "fd12:3456::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "2002:7f00:1::",
    "::7f00:1",
    "::ffff:0:7f00:1",
    "64:ff9b:1::a00:1",
    "fec0::1",
]
PUBLIC = ["93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:8.8.8.8"]


@pytest.mark.parametrize("address", NEVER)
def test_metadata_and_link_local_are_never_allowed(address: str) -> None:
    everything = [ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")]
    assert AddressGuard(private=True, allow=everything).why_refused(address) is not None
    assert AddressGuard(private=False).why_refused(address) is not None


@pytest.mark.parametrize("address", PRIVATE)
def test_private_and_loopback_are_for_embedded_runs(address: str) -> None:
    assert AddressGuard(private=True).why_refused(address) is None
    assert "--allow-cidr" in (AddressGuard(private=False).why_refused(address) or "")


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    assert AddressGuard(private=False).why_refused(address) is None


def test_allowed_networks_are_allowed_and_no_others() -> None:
    guard = AddressGuard(private=False, allow=parse_networks(["10.1.0.0/16"]))
    assert guard.why_refused("10.1.2.3") is None
    assert guard.why_refused("::ffff:10.1.2.3") is None
    assert guard.why_refused("10.2.0.1") is not None


def test_the_check_is_made_on_what_is_connected_to() -> None:
    guard = AddressGuard(private=False)
    for host in ("localhost", "0x7f.1", "2130706433"):
        for info in socket.getaddrinfo(host, 80, type=socket.SOCK_STREAM):
            with watching() as tried, pytest.raises(AddressRefused):
                guard.socket(info)
            assert tried.why_refused is not None


def test_one_allowed_address_is_enough() -> None:
    guard = AddressGuard(private=False)
    with watching() as tried:
        with pytest.raises(AddressRefused):
            guard.socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80)))
        guard.socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80))).close()
    assert tried.why_refused is None


def test_a_network_that_is_none_is_said() -> None:
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1/8.*expected a network"):
        parse_networks(["10.0.0.1/8"])
