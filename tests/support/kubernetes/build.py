"""The programs of a Kubernetes, built once from their Go modules into the cache.

`python -m support.kubernetes.build` (with `tests` on the path) does it ahead of the tests: it takes
some minutes of two cores, 1 GB of modules and 3 GB of build cache, both of which may go afterwards.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

KUBERNETES: Final = "v1.36.3"
ETCD: Final = "v3.6.8"
JOBSET: Final = "v0.8.2"
TRAINER: Final = "v2.0.0"
TRAINING_OPERATOR: Final = "v1.8.1"

CRDS: Final[Mapping[str, tuple[str, str]]] = {
    "jobsets": (
        f"sigs.k8s.io/jobset@{JOBSET}",
        "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml",
    ),
    "trainjobs": (
        f"github.com/kubeflow/trainer/v2@{TRAINER}",
        "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml",
    ),
    "trainingruntimes": (
        f"github.com/kubeflow/trainer/v2@{TRAINER}",
        "manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml",
    ),
    "clustertrainingruntimes": (
        f"github.com/kubeflow/trainer/v2@{TRAINER}",
        "manifests/base/crds/trainer.kubeflow.org_clustertrainingruntimes.yaml",
    ),
    "pytorchjobs": (
        f"github.com/kubeflow/training-operator@{TRAINING_OPERATOR}",
        "manifests/base/crds/kubeflow.org_pytorchjobs.yaml",
    ),
}
"""The kinds that they add, and where their modules describe them."""

_BUILD_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Programs:
    """Where the programs are, or will be."""

    folder: Path

    @property
    def apiserver(self) -> Path:
        return self.folder / f"kube-apiserver-{KUBERNETES}"

    @property
    def manager(self) -> Path:
        return self.folder / f"kube-controller-manager-{KUBERNETES}"

    @property
    def etcd(self) -> Path:
        return self.folder / f"etcd-{ETCD}"

    @property
    def trainer(self) -> Path:
        """The controllers of JobSets and TrainJobs."""
        return self.folder / f"trainer-{_digest('trainer', JOBSET, TRAINER)}"

    @property
    def pytorch(self) -> Path:
        """The controller of PyTorchJobs."""
        return self.folder / f"pytorch-{_digest('pytorch', TRAINING_OPERATOR)}"

    def crd(self, plural: str) -> Path:
        """The description of a kind."""
        module, _ = CRDS[plural]
        return self.folder / f"{plural}-{module.rpartition('@')[2]}.yaml"

    def complete(self) -> bool:
        """Whether all of them are there."""
        needed = (self.apiserver, self.manager, self.etcd, self.trainer, self.pytorch)
        return all(path.exists() for path in (*needed, *map(self.crd, CRDS)))


def cached() -> Programs:
    """Where the programs of this recipe are kept."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Programs(base / "tocsin" / "kubernetes")


def unavailable() -> str | None:
    """Why there is no Kubernetes here, or None. Builds nothing."""
    if cached().complete():
        return None
    return "Kubernetes is not built: make peers does it, or python -m support.kubernetes.build"


def programs() -> Programs:
    """The programs and the descriptions of the kinds; builds what is missing.

    Raises RuntimeError: something cannot be built.
    """
    found = cached()
    found.folder.mkdir(parents=True, exist_ok=True)
    with (found.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for plural, (module, path) in CRDS.items():
            if not found.crd(plural).exists():
                shutil.copyfile(_downloaded(module, "Dir") / path, found.crd(plural))
        if not (found.apiserver.exists() and found.manager.exists()):
            _kubernetes(found)
        if not found.etcd.exists():
            _etcd(found)
        if not found.trainer.exists():
            _operator(
                found.trainer,
                f"github.com/kubeflow/trainer/v2 {TRAINER}",
                f"sigs.k8s.io/jobset {JOBSET}",
            )
        if not found.pytorch.exists():
            _operator(found.pytorch, f"github.com/kubeflow/training-operator {TRAINING_OPERATOR}")
    return found


def _kubernetes(found: Programs) -> None:
    go_mod = _downloaded(f"k8s.io/kubernetes@{KUBERNETES}", "GoMod").read_text()
    version = f"-X k8s.io/component-base/version.gitVersion={KUBERNETES}"
    with _module(found.folder, pinned(go_mod)) as work:
        for program, name in (
            (found.apiserver, "kube-apiserver"),
            (found.manager, "kube-controller-manager"),
        ):
            _build(work, program, f"k8s.io/kubernetes/cmd/{name}", f"-s -w {version}")


def pinned(go_mod: str) -> str:
    """A go.mod from which the programs of k8s.io/kubernetes can be built, from its own.

    Its staging modules are replaced there by folders that are not part of the published module, and
    Go ignores the replacements of a dependency: so they are pinned to their published versions, and
    all others to those that this release was made with.
    """
    staging = "v0." + KUBERNETES.split(".", 1)[1]
    lines = ["module peers", "", _found(r"^go \S+$", go_mod)]
    lines += [f"require k8s.io/kubernetes {KUBERNETES}"]
    for name, version in re.findall(r"^\t(\S+) (v\S+)", go_mod, re.MULTILINE):
        if version != "v0.0.0":
            lines.append(f"require {name} {version}")
    for name in re.findall(r"^\t(\S+) => \./staging/", go_mod, re.MULTILINE):
        lines.append(f"replace {name} => {name} {staging}")
    return "\n".join(lines) + "\n"


def _etcd(found: Programs) -> None:
    module = "go.etcd.io/etcd/server/v3"
    with _module(found.folder, f"module peers\n\ngo 1.24\n\nrequire {module} {ETCD}\n") as work:
        _build(work, found.etcd, module)


def _operator(program: Path, *required: str) -> None:
    """The program of `controllers`, with these modules."""
    lines = ["module peers", "", "go 1.24", *(f"require {one}" for one in required)]
    with _module(program.parent, "\n".join(lines) + "\n") as work:
        shutil.copyfile(_source(program.name.partition("-")[0]), work / "main.go")
        _build(work, program, ".")


def _source(name: str) -> Path:
    return Path(__file__).parent / "controllers" / name / "main.go"


def _digest(name: str, *versions: str) -> str:
    text = "\0".join((_source(name).read_text(), *versions))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextmanager
def _module(folder: Path, go_mod: str) -> Iterator[Path]:
    """A folder with this go.mod."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as name:
        (Path(name) / "go.mod").write_text(go_mod)
        yield Path(name)


def _build(work: Path, program: Path, package: str, ldflags: str = "-s -w") -> None:
    part = work / "part"
    _go(["build", "-ldflags", ldflags, "-o", str(part), package], work)
    part.rename(program)


def _downloaded(module: str, what: str) -> Path:
    """Where Go keeps a module: its folder (`Dir`) or its requirements (`GoMod`)."""
    answer = json.loads(_go(["mod", "download", "-json", module], Path.home()))
    return Path(answer[what])


def _go(arguments: Sequence[str], folder: Path) -> str:
    flags = {"GOFLAGS": "-mod=mod -buildvcs=false", "CGO_ENABLED": "0", "GOWORK": "off"}
    if arguments[0] == "mod":
        del flags["GOFLAGS"]
    done = subprocess.run(
        ["go", *arguments],
        cwd=folder,
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=_BUILD_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"go {' '.join(arguments)}: {done.stderr[-3000:]}")
    return done.stdout


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    assert match is not None, pattern
    return match[0]


def main() -> None:
    """Build what is missing, if there is Go; else tell why not, and let the tests be skipped."""
    if shutil.which("go") is None:
        sys.stdout.write("Kubernetes is not built: go is not installed\n")
        return
    sys.stdout.write(f"Kubernetes: {programs().folder}\n")


if __name__ == "__main__":
    main()
