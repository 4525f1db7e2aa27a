"""Compile a kernel for a GPU that is not there, to read what the compiler made of it."""

import re
from typing import Any, NamedTuple

import torch

from pagedlab import portable


class Compiled(NamedTuple):
    """A kernel compiled for one target.

    ptx and sass are NVIDIA's virtual and real assembly, amdgcn is AMD's; what the target does not
    have is "". shared_bytes: shared memory (LDS on AMD) of one program.
    """

    target: str
    shared_bytes: int
    num_warps: int
    ptx: str = ""
    sass: str = ""
    amdgcn: str = ""

    def lines(self, pattern: str) -> list[str]:
        """The instructions of the real assembly (SASS, amdgcn) that match a regular expression."""
        text = self.sass or self.amdgcn
        return [line.strip() for line in text.splitlines() if re.search(pattern, line)]


def compile_for(
    kernel: Any, target: str | list[str], *args: Any, **kwargs: Any
) -> Compiled | list[Compiled]:
    """Compile `kernel` with no GPU, as `kernel[grid](*args, **kwargs)` on `target` would.

    It happens in a process of its own, so it works where kernels are interpreted, too. Of a tensor
    only the dtype counts (its address is taken as a multiple of 16), so it may be on any device.

    Args:
        kernel: a function under @triton.jit, from a file or a notebook cell.
        target: "sm_75" to "sm_120" (NVIDIA), "gfx942" and its like (AMD). A list is compiled in one
            process, into a list.
        args, kwargs: the kernel's arguments and launch options such as num_warps.

    >>> import torch
    >>> from pagedlab import KVLayout
    >>> from pagedlab.portable import capture_launch
    >>> from pagedlab.kernels.write_kv import write_kv
    >>> layout = KVLayout(block_size=4, num_kv_heads=1, head_dim=16, dtype=torch.bfloat16)
    >>> k = table = cache = torch.empty(1, 1, 1, dtype=torch.bfloat16)
    >>> kernel, _, args, kwargs = capture_launch(write_kv, k, k, cache, table, 0, layout)
    >>> compiled = compile_for(kernel, "sm_75", *args, **kwargs)
    >>> ".target sm_75" in compiled.ptx, compiled.shared_bytes
    (True, 0)

    Raises:
        ValueError: unknown target, not a Triton kernel, arguments that do not fit, or a kernel that
            does not compile.
    """
    from triton.runtime.jit import MockTensor

    targets = [target] if isinstance(target, str) else target
    for name in targets:
        if not re.fullmatch(r"sm_\d+|gfx\w+", name):
            raise ValueError(f"target: expected a name like sm_90 or gfx942, got {name}")
    inner, bound, options = portable.bind(kernel, args, kwargs)
    named = {
        name: MockTensor(value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in bound.items()
    }
    compiled = portable.run_in_process(_compile, inner, targets, named, options, interpret=False)
    return compiled[0] if isinstance(target, str) else compiled


def _compile(kernel: Any, targets: list[str], arguments: dict, options: dict) -> list[Compiled]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    compiled = []
    for name in targets:
        cuda = name.startswith("sm_")
        arch = int(name[3:]) if cuda else name
        target = GPUTarget("cuda" if cuda else "hip", arch, 32 if cuda else 64)
        backend = make_backend(target)
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, special, rest = bind(**arguments, **options)
        chosen, signature, constexprs, attrs = kernel._pack_args(
            backend, {**options}, bound, special, rest
        )
        try:
            source = ASTSource(kernel, signature, constexprs, attrs)
            result = triton.compile(source, target=target, options=vars(chosen))
        except (triton.CompilationError, RuntimeError) as problem:
            reason = str(problem.__cause__ or problem).strip().splitlines()[-1]
            raise ValueError(f"{kernel.fn.__name__} for {name}: {reason}") from None
        asm = {kind: result.asm[kind] for kind in (("ptx", "sass") if cuda else ("amdgcn",))}
        shared, num_warps = result.metadata.shared, result.metadata.num_warps
        compiled.append(Compiled(name, shared, num_warps, **asm))
    return compiled
