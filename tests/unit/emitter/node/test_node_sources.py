"""The sources of a node's samples, read from made trees of /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tocsin.emitter.node.cpu import MAX_CORES, CpuSamples
from tocsin.emitter.node.disks import DiskSpace, DiskTraffic
from tocsin.emitter.node.infiniband import InfinibandSamples
from tocsin.emitter.node.kernel_log import XidSamples, bus_place
from tocsin.emitter.node.memory import MemorySamples
from tocsin.emitter.node.network import NetworkSamples
from tocsin.emitter.node.pressure import PressureSamples
from tocsin.emitter.node.proc_files import ProcFile


def write(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def stat(*cores: tuple[int, int, int]) -> str:
    """Busy, idle and iowait ticks per core, as /proc/stat has them."""
    total = tuple(map(sum, zip(*cores, strict=True)))
    lines = [("cpu ", total), *((f"cpu{n}", core) for n, core in enumerate(cores))]
    return (
        "".join(f"{name} {b} 0 0 {i} {w} 0 0 0 0 0\n" for name, (b, i, w) in lines) + "intr 5 0\n"
    )


def test_cores_one_by_one(tmp_path: Path) -> None:
    write(tmp_path, "proc/stat", stat((100, 100, 0), (100, 100, 0)))
    write(tmp_path, "proc/loadavg", "1.50 2.00 0.25 1/100 4711\n")
    cpu = CpuSamples(tmp_path)
    assert cpu.read(1.0) == {"load.1m": 1.5, "load.5m": 2.0, "load.15m": 0.25}
    write(tmp_path, "proc/stat", stat((150, 150, 0), (110, 170, 20)))
    found = cpu.read(2.0)
    assert found == pytest.approx(
        {
            "cpu.percent": 30, "cpu.iowait_percent": 10, "cpu.cores": 2,
            "cpu.0.percent": 50, "cpu.1.percent": 10,
            "cpu.busiest_percent": 50, "cpu.p95_percent": 50, "cpu.least_busy_percent": 10,
            "load.1m": 1.5, "load.5m": 2.0, "load.15m": 0.25,
        }
    )  # fmt: skip


def test_many_cores_have_three_columns_instead_of_one_each(tmp_path: Path) -> None:
    cores = 200
    write(tmp_path, "proc/stat", stat(*[(0, 0, 0)] * cores))
    cpu = CpuSamples(tmp_path)
    cpu.read(1.0)
    write(tmp_path, "proc/stat", stat(*[(n, 200 - n, 0) for n in range(cores)]))
    found = cpu.read(2.0)
    assert cores > MAX_CORES
    assert not [name for name in found if name.startswith("cpu.0")]
    assert found["cpu.busiest_percent"] == pytest.approx(99.5)
    assert found["cpu.p95_percent"] == pytest.approx(94.5)
    assert found["cpu.least_busy_percent"] == 0


def test_a_core_that_comes_online_and_idle_time_that_goes_back(tmp_path: Path) -> None:
    write(tmp_path, "proc/stat", stat((0, 100, 0)))
    cpu = CpuSamples(tmp_path)
    cpu.read(1.0)
    write(tmp_path, "proc/stat", stat((50, 90, 0), (7, 0, 0)))
    found = cpu.read(2.0)
    assert found["cpu.0.percent"] == 100
    assert "cpu.1.percent" not in found


def test_memory_and_swap(tmp_path: Path) -> None:
    memory = MemorySamples(tmp_path)
    assert memory.read(1.0) == {}
    write(
        tmp_path,
        "proc/meminfo",
        "MemTotal: 1000 kB\nMemAvailable:  600 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\n",
    )
    assert memory.read(1.0) == {
        "memory.total_bytes": 1000 * 1024,
        "memory.used_bytes": 400 * 1024,
        "swap.used_bytes": 30 * 1024,
        "swap.total_bytes": 50 * 1024,
    }
    assert memory.total == 1000 * 1024


def test_pressure_where_the_kernel_has_it(tmp_path: Path) -> None:
    pressure = PressureSamples(tmp_path)
    assert pressure.read(1.0) == {}
    text = "some avg10=1.25 avg60=0 avg300=0 total=1\nfull avg10=0.50 avg60=0 avg300=0 total=1\n"
    write(tmp_path, "proc/pressure/memory", text)
    assert pressure.read(2.0) == {
        "pressure.memory_some_percent": 1.25,
        "pressure.memory_full_percent": 0.5,
    }


NET = (
    "Inter-|   Receive  |  Transmit\n face |bytes packets errs|bytes\n"
    "    lo: {0} 1 0 0 0 0 0 0 {0} 1 0 0 0 0 0 0\n"
    "  eth0: {1} 1 {2} 3 0 0 0 0 {1} 1 0 0 0 0 0 0\n"
    "docker0: {1} 1 0 0 0 0 0 0 {1} 1 0 0 0 0 0 0\n"
)


@pytest.mark.parametrize(("real", "rate"), [(["eth0"], 500), ([], 1000)])
def test_traffic_of_real_interfaces_is_counted_once(
    tmp_path: Path, real: list[str], rate: float
) -> None:
    for name in ("lo", "eth0", "docker0"):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
    for name in real:
        (tmp_path / "sys/class/net" / name / "device").mkdir()
    network = NetworkSamples(tmp_path)
    write(tmp_path, "proc/net/dev", NET.format(10, 1000, 0))
    assert network.read(10.0) == {}
    write(tmp_path, "proc/net/dev", NET.format(99999, 2000, 4))
    found = network.read(12.0)
    assert found["network.received_bytes_per_s"] == rate
    assert found["network.sent_bytes_per_s"] == rate
    assert found["network.receive_errors_per_s"] == 2
    assert found["network.receive_drops_per_s"] == 0
    write(tmp_path, "proc/net/dev", NET.format(0, 0, 0))
    assert network.read(13.0)["network.sent_bytes_per_s"] == 0


def disk(name: str, read: int, written: int, busy_ms: int) -> str:
    return f" 259 0 {name} 5 0 {read} 0 5 0 {written} 0 0 {busy_ms} 0 0 0 0 0\n"


def test_device_traffic_leaves_out_partitions_and_layers(tmp_path: Path) -> None:
    for name in ("nvme0n1", "sda", "dm-0", "loop0"):
        (tmp_path / "sys/block" / name).mkdir(parents=True)
    for name in ("nvme0n1", "sda"):
        (tmp_path / "sys/block" / name / "device").mkdir()
    traffic = DiskTraffic(tmp_path)
    names = ("nvme0n1", "nvme0n1p1", "sda", "dm-0", "loop0")
    write(tmp_path, "proc/diskstats", "".join(disk(name, 0, 0, 0) for name in names))
    assert traffic.read(1.0) == {}
    write(
        tmp_path,
        "proc/diskstats",
        "".join(disk(name, 2, 20, 2000 if name == "sda" else 500) for name in names),
    )
    assert traffic.read(5.0) == {
        "disk.read_bytes_per_s": 2 * 2 * 512 / 4,
        "disk.write_bytes_per_s": 2 * 20 * 512 / 4,
        "disk.busiest_percent": 50,
    }


def test_space_of_folders_is_named_by_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "data"
    space = DiskSpace(tmp_path, [other, tmp_path, tmp_path / "data/more"])
    found = space.read(1.0)
    assert set(found) == {"disk.free_bytes", "disk.total_bytes"}
    (other / "more").mkdir(parents=True)
    assert set(space.read(2.0)) == set(found)  # one disk, the first folder's

    real = os.stat

    def on_two_disks(path: str | Path, **how: Any) -> os.stat_result:
        found = real(path, **how)
        device = found.st_dev + ("data" in Path(path).parts)
        return os.stat_result([*found[:2], device, *found[3:]])

    monkeypatch.setattr(os, "stat", on_two_disks)
    found = space.read(3.0)
    assert found[f"disk.{other}.total_bytes"] == found["disk.total_bytes"] > 0
    assert len(found) == 4
    assert not DiskSpace(None)


def test_infiniband_ports(tmp_path: Path) -> None:
    assert InfinibandSamples(tmp_path).read(1.0) == {}
    port = "sys/class/infiniband/mlx5_0/ports/1/counters"
    write(tmp_path, f"{port}/port_rcv_data", "100\n")
    write(tmp_path, f"{port}/symbol_error", "3\n")
    ports = InfinibandSamples(tmp_path)
    assert ports.read(1.0) == {"infiniband.mlx5_0.1.symbol_errors": 3}
    write(tmp_path, f"{port}/port_rcv_data", "600\n")
    assert ports.read(3.0) == {
        "infiniband.mlx5_0.1.received_bytes_per_s": 1000,
        "infiniband.mlx5_0.1.symbol_errors": 3,
    }


XID = "4,{n},9,-;NVRM: Xid (PCI:{place}): {xid}, pid=4711, name=python, oops\n"


@pytest.fixture
def kmsg(tmp_path: Path) -> int:
    """The writing end of a pipe that stands for /dev/kmsg."""
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev/kmsg")
    return os.open(tmp_path / "dev/kmsg", os.O_RDWR | os.O_NONBLOCK)


def test_xids_of_the_kernel_log(tmp_path: Path, kmsg: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "lseek", lambda *_: 0)
    places = {bus_place("00000000:17:00.0"): 0, bus_place("00000000:2A:00.0"): 1}
    xids = XidSamples(lambda: places, tmp_path)
    quiet = {"gpu.0.xids": 0, "gpu.0.xid": 0, "gpu.1.xids": 0, "gpu.1.xid": 0}
    assert xids.read(1.0) == quiet
    os.write(kmsg, b"6,1,8,-;eth0: link up\n")
    assert xids.read(2.0) == quiet
    os.write(kmsg, XID.format(n=2, place="0000:17:00", xid=48).encode())
    assert xids.read(3.0) == {**quiet, "gpu.0.xids": 1, "gpu.0.xid": 48}
    os.write(kmsg, XID.format(n=3, place="0000:2a:00", xid=63).encode())
    assert xids.read(3.0)["gpu.1.xid"] == 63
    os.write(kmsg, XID.format(n=4, place="0000:2a:00", xid=79).encode())
    os.write(kmsg, XID.format(n=5, place="0001:99:00", xid=79).encode())
    xids.read(4.0)
    assert xids.read(5.0) == {
        "gpu.0.xids": 1, "gpu.0.xid": 48, "gpu.1.xids": 2, "gpu.1.xid": 79,
        "gpu.unknown.xids": 1, "gpu.unknown.xid": 79,
    }  # fmt: skip
    xids.close()
    assert xids.read(6.0) == {}
    os.close(kmsg)


def test_a_kernel_log_that_may_not_be_read_has_no_columns(tmp_path: Path) -> None:
    assert XidSamples(lambda: {"0000:17:00": 0}, tmp_path).read(1.0) == {}


def test_long_files_are_read_whole(tmp_path: Path) -> None:
    text = "x" * 10_000
    file = ProcFile(write(tmp_path, "long", text), size=4096)
    assert file.read() == text.encode()
    version = Path("/proc/version").read_bytes()
    assert ProcFile("/proc/version", size=16).read() == version
    assert ProcFile(tmp_path / "long").number() is None
    assert ProcFile(tmp_path / "none").read() is None


@pytest.mark.parametrize(("above", "rate"), [("docker0", 500), ("bond0", 1000)])
def test_a_virtual_function_is_counted_by_the_interface_above_it(
    tmp_path: Path, above: str, rate: float
) -> None:
    folder = tmp_path / "sys/class/net"
    for name in ("eth0", "docker0"):
        (folder / name / "device").mkdir(parents=True)
    (folder / above).mkdir(exist_ok=True)
    (folder / "eth0" / "master").symlink_to(folder / above)
    network = NetworkSamples(tmp_path)
    write(tmp_path, "proc/net/dev", NET.format(10, 1000, 0))
    network.read(10.0)
    write(tmp_path, "proc/net/dev", NET.format(10, 2000, 0))
    assert network.read(12.0)["network.received_bytes_per_s"] == rate
