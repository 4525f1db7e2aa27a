"""Kernels compiled for GPUs that are not here, and what the compiler made of the reduction."""

import functools
import re

import kernels_to_step
import pytest
import torch

from pagedlab import KVLayout, compile_for
from pagedlab.kernels.by_block import by_block
from pagedlab.kernels.by_token import by_token
from pagedlab.kernels.write_kv import write_kv
from pagedlab.portable import capture_launch

NVIDIA = ["sm_75", "sm_80", "sm_89", "sm_90"]


def launch(name: str, dtype: torch.dtype, head_dim: int = 64) -> tuple:
    """(kernel, args, kwargs) of a launch at the sizes of Llama 3.2 1B, on tensors without data."""
    layout = KVLayout(block_size=16, num_kv_heads=8, head_dim=head_dim, dtype=dtype)
    empty = functools.partial(torch.empty, device="meta")
    cache = empty(layout.block_bytes // dtype.itemsize, dtype=dtype)
    table = empty(2, 16, 128, dtype=torch.int32)
    rows = empty(2, dtype=torch.int32)
    if name == "write_kv":
        k = empty(2, 8, head_dim, dtype=dtype)
        launched = capture_launch(
            write_kv, k, k, cache, table, 3, layout, seq_lens=rows, active_slots=rows
        )
    else:
        q = empty(2, 32, head_dim, dtype=dtype)
        launcher = {"by_token": by_token, "by_block": by_block}[name]
        launched = capture_launch(launcher, q, cache, table, rows, rows, 3, layout, q, 0.125)
    kernel, _, args, kwargs = launched
    return kernel, args, kwargs


@functools.cache
def compiled_by_token() -> dict:
    kernel, args, kwargs = launch("by_token", torch.float32)
    return {one.target: one for one in compile_for(kernel, NVIDIA, *args, **kwargs)}


@pytest.mark.parametrize("target", NVIDIA)
def test_the_tree_is_five_shuffles_and_one_step_between_two_warps(target):
    compiled = compiled_by_token()[target]
    assert compiled.num_warps == 2
    assert compiled.shared_bytes == 8, "two partial sums of 4 bytes"
    in_ptx = re.findall(r"shfl\.sync\.bfly\.b32\s+%\w+, %\w+, (\d+),", compiled.ptx)
    assert in_ptx == ["16", "8", "4", "2", "1", "1"]
    in_sass = [
        int(re.search(r"0x[0-9a-f]+", line)[0], 16) for line in compiled.lines(r"SHFL\.BFLY")
    ]
    assert in_sass == [16, 8, 4, 2, 1, 1]
    order = re.findall(r"SHFL|BAR", "\n".join(compiled.lines("SHFL|BAR")))
    assert order[order.index("SHFL") :][:7] == ["SHFL"] * 5 + ["BAR", "SHFL"]


def test_amd_does_all_six_steps_inside_one_wavefront():
    kernel, args, kwargs = launch("by_token", torch.float32)
    compiled = compile_for(kernel, "gfx942", *args, **kwargs | {"num_warps": 1})
    assert compiled.shared_bytes == 0
    assert not compiled.lines(r"^\s*s_barrier")
    assert not compiled.ptx
    assert len(compiled.lines(r"ds_bpermute_b32|v_permlane32_swap")) == 1, "lanes 32 apart"
    assert len(compiled.lines(r"ds_swizzle_b32.*SWAP,16")) == 1
    for distance in (r"row_sh[lr]:8", r"row_sh[lr]:4", r"quad_perm:\[2,3", r"quad_perm:\[1,0"):
        assert compiled.lines(distance)


@pytest.mark.parametrize("name", ["write_kv", "by_token", "by_block"])
@pytest.mark.parametrize(
    ("dtype", "targets"),
    [
        (torch.float32, NVIDIA),
        (torch.float16, ["sm_75", "sm_90"]),
        (torch.bfloat16, ["sm_80", "sm_90"]),  # a T4 has no bfloat16
    ],
)
def test_each_kernel_compiles(name, dtype, targets):
    kernel, args, kwargs = launch(name, dtype)
    for target, compiled in zip(
        targets, compile_for(kernel, targets, *args, **kwargs), strict=True
    ):
        assert compiled.target == target
        assert f".target {target}" in compiled.ptx
        assert "EXIT" in compiled.sass
        assert compiled.shared_bytes <= 64 * 1024, "what a T4 has"


def test_integers_are_specialised_as_a_launch_does():
    x = torch.empty(8, device="meta")
    general, one = (compile_for(kernels_to_step.read_at, "sm_80", x, x, n) for n in (3, 1))
    assert len(re.findall(r"\.param \.u32", general.ptx)) == 1
    assert len(re.findall(r"\.param \.u32", one.ptx)) == 0, "1 became a constant"


@pytest.mark.parametrize(
    ("target", "width", "message"),
    [
        ("volta", 4, r"^target: expected a name like sm_90 or gfx942, got volta$"),
        ("sm_80", 6, r"^scale_rows for sm_80: .*power of 2.*$"),
        ("sm_80", None, r"^scale_rows: missing a required argument: 'WIDTH'$"),
    ],
)
def test_what_does_not_compile_is_refused_in_one_line(target, width, message):
    x = torch.empty(8, device="meta")
    sizes = {} if width is None else {"WIDTH": width}
    with pytest.raises(ValueError, match=message):
        compile_for(kernels_to_step.scale_rows, target, x, x, 8, **sizes)
