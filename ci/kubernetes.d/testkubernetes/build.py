"""Build the Kubernetes server from Debian's source package, which has all of upstream's, with Debian's Go.

Debian packs kubectl alone. What stands in the way is told where it is done.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

from testcluster.errors import UnfitMachineError

from testkubernetes import debian, parts

_GO = "1.19"
_PACKAGES = (f"golang-{_GO}-go", f"golang-{_GO}-src", "golang-github-modern-go-reflect2-dev")
#: Longest wait for one program's build, in seconds: two minutes on two idle cores.
_LIMIT_S = 7200.0
_GENERATED = "pkg/generated/openapi"
#: Nothing of a cloud's, and no Docker: smaller, and built in half the time.
_TAGS = "providerless dockerless"


def build(making: Path) -> None:
    """Build the four programs into a new folder.

    Raises:
        UnfitMachineError: Something cannot be had, or does not build.
    """
    work = making.with_name(f"{making.name}.work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    debian.unpack(work / "packages", _PACKAGES)
    tree = work / "gopath/src/k8s.io/kubernetes"
    _unpack_source(work, tree)
    _replace_reflect2(tree, work / "packages")
    environment = _environment(work)
    _generate(tree, work, environment)
    making.mkdir()
    for name in parts.SERVER:
        go = [str(work / f"packages/usr/lib/go-{_GO}/bin/go"), "build", "-trimpath", "-tags", _TAGS]
        flags = ["-ldflags", _linker_flags(), "-o", str(making / name), f"./cmd/{name}"]
        parts.run([*go, *flags], limit_s=_LIMIT_S, cwd=tree, environment=environment)
    shutil.rmtree(work)


def _unpack_source(work: Path, tree: Path) -> None:
    fetched = work / "source"
    fetched.mkdir()
    debian.fetch(fetched, ["source", "--download-only", "kubernetes"])
    found = list(fetched.glob(f"kubernetes_*{parts.VERSION}.orig.tar.*"))
    if len(found) != 1:
        names = ", ".join(sorted(entry.name for entry in fetched.iterdir()))
        raise UnfitMachineError(f"Debian's source package is not Kubernetes {parts.VERSION}: {names}")
    tree.mkdir(parents=True)
    with tarfile.open(found[0]) as tar:
        for member in tar:
            _, _, member.name = member.name.partition("/")
            if member.name and ".." not in Path(member.name).parts:
                tar.extract(member, tree)


def _replace_reflect2(tree: Path, packages: Path) -> None:
    """Put Debian's reflect2 1.0.2 in the place of 1.0.1.

    That one calls the iterator of maps as it was before Go 1.18; built with a newer Go, kube-apiserver corrupts its memory with
    the first map that it prints (modern-go/reflect2, issues 24 and 26).
    """
    place = tree / "vendor/github.com/modern-go/reflect2"
    better = packages / "usr/share/gocode/src/github.com/modern-go/reflect2"
    for file in place.glob("*.go"):
        file.unlink()
    for file in better.glob("*.go"):
        if not file.name.endswith("_test.go"):
            shutil.copy(file, place)
    if "it *hiter)" not in (place / "go_above_118.go").read_text(encoding="utf-8"):
        raise UnfitMachineError("Debian's golang-github-modern-go-reflect2-dev is not the repaired version")


def _environment(work: Path) -> dict[str, str]:
    """Return the environment of Go: no modules, which 1.19 refuses for this tree, and no network."""
    root = work / f"packages/usr/lib/go-{_GO}"
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("GO", "CGO"))},
        "PATH": f"{root}/bin:{os.environ.get('PATH', os.defpath)}",
        "HOME": str(work),
        "GOROOT": str(root),
        "GOPATH": str(work / "gopath"),
        "GOCACHE": str(work / "cache"),
        "GO111MODULE": "off",
        "GOPROXY": "off",
        "GOSUMDB": "off",
        "CGO_ENABLED": "0",
    }


def _generate(tree: Path, work: Path, environment: Mapping[str, str]) -> None:
    """Make the only generated file that upstream does not keep: kube-apiserver's OpenAPI definitions.

    Raises:
        UnfitMachineError: What comes out breaks other rules than upstream's own result does.
    """
    if (tree / _GENERATED / "zz_generated.openapi.go").exists():
        return
    generator, violations = work / "openapi-gen", work / "violations.list"
    go = str(Path(environment["GOROOT"]) / "bin/go")
    source = "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"
    parts.run(
        [go, "build", "-o", str(generator), source], limit_s=_LIMIT_S, cwd=tree, environment=environment
    )
    argv = [
        str(generator), "--input-dirs", ",".join(_annotated(tree)), "--output-package", f"k8s.io/kubernetes/{_GENERATED}",
        "--output-file-base", "zz_generated.openapi", "--go-header-file", "hack/boilerplate/boilerplate.generatego.txt",
        "--report-filename", str(violations),
    ]  # fmt: skip
    parts.run(argv, limit_s=_LIMIT_S, cwd=tree, environment=environment)
    if not filecmp.cmp(violations, tree / "api/api-rules/violation_exceptions.list", shallow=False):
        raise UnfitMachineError("openapi-gen made something else than upstream's does")


def _annotated(tree: Path) -> list[str]:
    """Return the packages that ask for definitions: upstream's build finds them in the same way."""
    wanted = re.compile(rb"^// *\+k8s:openapi-gen=", re.MULTILINE)
    not_ours = ("vendor/k8s.io/code-generator/", "vendor/k8s.io/sample-apiserver/")
    found = set()
    for top in ("pkg", "cmd", "plugin", "vendor/k8s.io"):
        for folder, _, names in os.walk(tree / top, followlinks=True):
            place = os.path.relpath(folder, tree)
            if "_examples" in place or f"{place}/".startswith(not_ours):
                continue
            files = (Path(folder) / name for name in names if name.endswith(".go"))
            if any(wanted.search(file.read_bytes()) for file in files):
                found.add(f"k8s.io/kubernetes/{place}")
    return sorted(found)


def _linker_flags() -> str:
    major, minor, _ = parts.VERSION.split(".")
    facts = {
        "gitVersion": f"v{parts.VERSION}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "archive",
    }
    packages = ("component-base/version", "client-go/pkg/version")
    words = [
        f"-X k8s.io/kubernetes/vendor/k8s.io/{package}.{name}={value}"
        for package in packages
        for name, value in facts.items()
    ]
    return " ".join(["-s", "-w", *words])
