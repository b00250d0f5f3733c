"""Run each package's tests with that package, its dependencies and pytest installed, nothing else.

Those on several ranks run with all other tests: what they import is the same.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ["--with", "pytest", "--with", "pytest-timeout", "--with", "pytest-xdist"]


def main() -> int:
    """Test every package named on the command line, or all of them."""
    folders = sorted(ROOT.glob("packages/*"))
    chosen = [folder for folder in folders if not sys.argv[1:] or folder.name in sys.argv[1:]]
    failed = []
    for folder in chosen:
        name = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]
        print(f"-- {name}", flush=True)
        command = ["uv", "run", "--isolated", "--no-default-groups", "--package", name, *PYTEST]
        command += [
            "pytest",
            "-q",
            "-n",
            "2",
            "-m",
            "not dist",
            "-c",
            str(ROOT / "pyproject.toml"),
            str(folder / "tests"),
        ]
        if subprocess.run(command, cwd=folder).returncode:
            failed.append(name)
    print(f"packages that failed alone: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
