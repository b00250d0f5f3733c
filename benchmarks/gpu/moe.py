"""Training steps of a mixture of 64 experts on one GPU: tokens/s, MFU in both conventions, memory.

As `mfu.py`, of active parameters: each token counts the FLOPs of the experts that serve it. With routing
`forced` all experts serve as many tokens; with `learned` those that a router chooses which begins with random
weights and learns on one batch. A public yardstick of a plain FSDP2 stack: 28 % for Qwen3-30B-A3B on 8 H100.

Run on a GPU: python benchmarks/gpu/moe.py [--sweeps routing micro_batch ...] [--out FOLDER]
On a CPU, to see that it works: python benchmarks/gpu/moe.py --tiny
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mfu import Script, main

if __name__ == "__main__":
    main(Script("moe_gpu", ("moe-4b",), "tiny-moe", ("routing",), __doc__))
