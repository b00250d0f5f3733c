"""The section `[compile]`, and the limit of how often blocks are compiled. Imports no torch."""

from __future__ import annotations

from forge_config import ALL_KEYS, Config

from forge_parallel.error import ParallelError

COMPILATIONS_OF_A_KIND = 12
"""So often at most is a block of one kind compiled: for training and evaluation, masks, numbers of rows and
tokens, of which the compiler soon takes any. Counted by `tests/contracts/test_recompilation.py`."""

MOST_COMPILATIONS = 256
"""Of all kinds of blocks together; torch compiles no function more often (2.11 to 2.15)."""


class CompileConfig(Config):
    """torch.compile, block by block.

    Attributes:
        enabled: compile the blocks.
        backend: the backend of torch.compile.
        fullgraph: a block that is not one graph is an error; otherwise it is split into several graphs.
        cache: a folder that keeps compiled code over restarts, separately for each rank and layout. Its files
            are executed, so nobody else may write there. Absent: torch uses a folder of the machine.
    """

    free_keys = (ALL_KEYS,)
    path_keys = ("cache",)

    enabled: bool = False
    backend: str = "inductor"
    fullgraph: bool = True
    cache: str | None = None

    def require_kinds(self, kinds: int) -> None:
        """Check that a model with this number of kinds of blocks stays below the limit of recompilations.

        Raises:
            ParallelError: torch would give up in the middle of the run.
        """
        most = MOST_COMPILATIONS // COMPILATIONS_OF_A_KIND
        if self.enabled and kinds > most:
            raise ParallelError(
                f"compile.enabled = true and the model has {kinds} kinds of blocks, each compiled up to "
                f"{COMPILATIONS_OF_A_KIND} times (training, evaluation, masks, lengths), and torch compiles "
                f"{MOST_COMPILATIONS} times at most; expected at most {most} kinds: make more layers "
                "alike, or compile nothing"
            )
