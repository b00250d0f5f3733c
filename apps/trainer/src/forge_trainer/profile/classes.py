"""Classifies operations by their names in the profiler. Imports no torch."""

from __future__ import annotations

import re

MATMUL, ATTENTION, COMMUNICATION = "matmul", "attention", "communication"
OPTIMIZER, MEMORY, OTHER, IDLE = "optimizer", "memory", "other", "idle"

CLASSES = (MATMUL, ATTENTION, COMMUNICATION, OPTIMIZER, MEMORY, OTHER, IDLE)
"""Every moment of a step belongs to exactly one class, to communication only if nothing overlaps it."""

OPTIMIZER_MARK = "Optimizer.step#"
"""The beginning of the name of an optimizer step in a profile of torch."""

_KERNELS = {
    COMMUNICATION: r"nccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast_kernel",
    ATTENTION: r"flash|fmha|sdpa|attention|compute_dot_do_o|flex_",
    MATMUL: r"gemm|nvjet|cutlass|xmma|cublas|wgmma|_mm_|_mm$|triton_tem_fused_(\w*_)?(mm|bmm|addmm)"
    r"|GroupProblem|splitKreduce|gemv|dot_kernel|scaled_mm",
    OPTIMIZER: r"Fused(Adam|SGD|Optimizer)|FusedOptimizer",
    MEMORY: r"^Mem(cpy|set)|copy|CatArray|chunk_cat|split_with_sizes|FillFunctor|fill_kernel|memcpy",
}
"""Patterns of GPU kernels, searched anywhere in the name, in this order."""

_OPERATORS = {
    COMMUNICATION: r"^(c10d|_c10d_functional|_dtensor|symm_mem)::|^(gloo|nccl|mpi|ucc):",
    OPTIMIZER: r"^aten::_fused_(adam|adamw|adagrad|sgd)_$",
    ATTENTION: r"attention|flex_|ScaledDotProduct|FlashAttn",
    MATMUL: r"^aten::_?(mm|bmm|addmm_?|baddbmm_?|matmul|linear|dot|mv|addmv_?|addr_?|scaled_mm|grouped_mm"
    r"|int_mm|scaled_grouped_mm|einsum|convolution|conv\w*|mkldnn_\w+|thnn_conv\w*|convolution_\w+|slow_conv\w*)$"
    r"|^mkl::|^onednn::|^(extern_kernels|torch_ipex)",
    MEMORY: r"^aten::_?(copy_|clone|contiguous|cat|stack|to|to_copy|fill_|zero_|zeros\w*|ones\w*|full\w*"
    r"|empty\w*|resize_\w*|pin_memory|split_with_sizes_copy|foreach_copy_|foreach_zero_|new_\w+|chunk_cat|detach"
    r"|local_scalar_dense|item|repeat|set_\w*)$|^fsdp::|^inductor::_alloc",
}
"""Patterns of CPU operators, searched in the same way."""

_FUSED = re.compile(r"^triton_(poi|red|per)_")
"""Element-wise operations and reductions fused by the compiler; the name lists all their operations."""

_COMPILED = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _KERNELS.items()}
_COMPILED_OPERATORS = {kind: re.compile(pattern) for kind, pattern in _OPERATORS.items()}


def class_of_kernel(name: str, in_optimizer: bool = False) -> str:
    """Return the class of a GPU kernel.

    Args:
        name: name of the kernel, copy or fill.
        in_optimizer: whether the step of an optimizer started it.
    """
    if in_optimizer:
        return COMMUNICATION if _COMPILED[COMMUNICATION].search(name) else OPTIMIZER
    if _FUSED.match(name):
        return OTHER
    return next((kind for kind, pattern in _COMPILED.items() if pattern.search(name)), OTHER)


def class_of_operator(path: tuple[str, ...]) -> str:
    """Return the class of a CPU operator.

    Args:
        path: names of the calling operators, the outermost first, and of the operator itself.
    """
    kinds = [_class_of_name(name) for name in path]
    if COMMUNICATION in kinds:
        return COMMUNICATION
    if any(name.startswith(OPTIMIZER_MARK) for name in path):
        return OPTIMIZER
    if ATTENTION in kinds:
        return ATTENTION
    return next((kind for kind in reversed(kinds) if kind != OTHER), OTHER)


def _class_of_name(name: str) -> str:
    return next((kind for kind, pattern in _COMPILED_OPERATORS.items() if pattern.search(name)), OTHER)


def short(name: str) -> str:
    """Return the name of a kernel without types and arguments, with the functor that it applies, if any."""
    bare = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    head, _, rest = bare.partition("<")
    if inner := re.search(
        r"\b(\w*(?:Functor|_kernel_cuda|_kernel_impl|FusedOptimizer\w*|FusedAdam\w*))\b", rest
    ):
        return f"{head.partition('(')[0]}<{inner.group(1)}>"
    return head.partition("(")[0].strip() or name[:80]
