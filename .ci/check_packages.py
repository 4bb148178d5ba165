"""What a wheel and an sdist must contain: `check_packages.py FOLDER`. Links do not survive packaging by themselves."""

import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

WANTED = (
    "dpurt/__init__.py",
    "dpurt/py.typed",
    "dpurt/cli.py",
    "dpurt/agents/__init__.py",
    "dpurt/agents/gateway.py",
    "dpurt/bench/__init__.py",
    "dpurt/bench/result.py",
    "dpurt/topology/laptop.toml",
)


def main(folder: Path) -> int:
    [wheel] = folder.glob("*.whl")
    [sdist] = folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = archive.namelist()
    with tarfile.open(sdist) as archive:
        in_sdist = ["/".join(PurePosixPath(name).parts[1:]) for name in archive.getnames()]
    tops = {name.split("/", 1)[0] for name in in_wheel}
    faults = [
        f"top-level {top} in the wheel" for top in sorted(tops) if top != "dpurt" and ".dist-info" not in top
    ]
    faults += [f"{name} is not in {wheel.name}" for name in WANTED if name not in in_wheel]
    faults += [f"{name} is not in {sdist.name}" for name in (*WANTED, "LICENSE") if name not in in_sdist]
    print(
        "\n".join(faults)
        or f"{wheel.name}: {len(in_wheel)} files; {sdist.name}: {len(in_sdist)} files: as they should be"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
