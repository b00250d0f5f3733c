"""What importing costs other programs: no heavy module."""

import subprocess
import sys


def test_import_brings_no_torch_and_no_numpy():
    code = "import forge_config, forge_config.cli, sys; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
