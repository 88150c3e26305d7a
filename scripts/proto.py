"""Generate the Python code of the wire's messages. With --check, only report that the checked-in code is stale.

Messages, enums and service descriptors are generated. The typed stubs of the services are written by hand beside them.
constraints.txt pins the compiler, because another version writes other bytes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
# Package -> its .proto, at its import path.
PROTOS = {
    "tft-coord": "tft_coord/wire/coordination.proto",
    "tft-lighthouse": "tft_lighthouse/etcd/etcd.proto",
}


def source_of(package: str) -> Path:
    return ROOT / "packages" / package / "src"


def generate(package: str, destination: Path) -> None:
    """Write the generated files under `destination`, at their import path. Raises SystemExit: the .proto is wrong."""
    arguments = [
        "protoc",
        f"--proto_path={source_of(package)}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={destination}",
        f"--pyi_out={destination}",
        PROTOS[package],
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit(f"{PROTOS[package]} does not compile; the compiler's message is above.")


def stale() -> list[str]:
    """Return the generated files that differ from the .proto's output, by their path under the package's source."""
    found = []
    for package, proto in PROTOS.items():
        generated = [proto.removesuffix(".proto") + ending for ending in ("_pb2.py", "_pb2.pyi")]
        with tempfile.TemporaryDirectory() as folder:
            fresh = Path(folder)
            generate(package, fresh)
            found += [name for name in generated if not same(fresh / name, source_of(package) / name)]
    return found


def same(left: Path, right: Path) -> bool:
    return right.exists() and left.read_bytes() == right.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a generated file is stale")
    if not parser.parse_args().check:
        for package in PROTOS:
            generate(package, source_of(package))
    elif names := stale():
        sys.exit(f"Stale: {', '.join(names)}. Run `make proto` and commit the result.")


if __name__ == "__main__":
    main()
