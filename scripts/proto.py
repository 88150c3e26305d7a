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
SOURCE_ROOT = ROOT / "packages" / "tft-coord" / "src"
PROTO = "tft_coord/wire/coordination.proto"
GENERATED = ("tft_coord/wire/coordination_pb2.py", "tft_coord/wire/coordination_pb2.pyi")


def generate(destination: Path) -> None:
    """Write the generated files under `destination`, at their import path. Raises SystemExit: the .proto is wrong."""
    arguments = [
        "protoc",
        f"--proto_path={SOURCE_ROOT}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={destination}",
        f"--pyi_out={destination}",
        PROTO,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit(f"{PROTO} does not compile; the compiler's message is above.")


def stale() -> list[str]:
    """Return the generated files that differ from the .proto's output, by their path under the package's source."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        return [name for name in GENERATED if not same(fresh / name, SOURCE_ROOT / name)]


def same(left: Path, right: Path) -> bool:
    return right.exists() and left.read_bytes() == right.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a generated file is stale")
    if not parser.parse_args().check:
        generate(SOURCE_ROOT)
    elif names := stale():
        sys.exit(f"Stale: {', '.join(names)}. Run `make proto` and commit the result.")


if __name__ == "__main__":
    main()
