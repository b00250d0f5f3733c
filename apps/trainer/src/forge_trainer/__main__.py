"""`python -m forge_trainer` is the command `forge`, for torchrun."""

import sys

from forge_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
