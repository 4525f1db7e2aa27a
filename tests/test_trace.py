"""The debugger: what it records is what the kernel did, whatever kernel, wherever it runs."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import time

import kernels_to_step as kernels
import numpy as np
import pytest
import torch

import pagedlab
from pagedlab import KVLayout
from pagedlab.kernels.by_token import by_token
from pagedlab.trace import Trace, step, step_launch
from pagedlab.trace_recorder import Pointer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5 if DEVICE == "cuda" else 0  # the same interpreter gives the same bits
SHARED = torch.ones(8)
LAYOUT = KVLayout(block_size=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)


def attention_batch(seed: int, length: int = 9) -> tuple:
    """(q, cache, table, seq_lens, active_slots, layer, layout, out, scale): one row in slot 1."""
    torch.manual_seed(seed)
    cache = torch.randn(7 * LAYOUT.block_bytes // 4)
    table = torch.full((2, 3, 5), -1, dtype=torch.int32)
    num_blocks = -(-length // 4)
    table[1, 2, :num_blocks] = torch.randperm(7)[:num_blocks].int()
    q = torch.randn(1, 4, 64)
    lengths, slots = torch.tensor([length]).int(), torch.tensor([1]).int()
    tensors = (t.to(DEVICE) for t in (q, cache, table, lengths, slots))
    return *tensors, 2, LAYOUT, torch.zeros_like(q, device=DEVICE), 0.125


def keys_and_values(batch: tuple, kv_head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the row's tokens, by indexing a [block, K|V, token, kv_head, lane] view."""
    cache, table, length = batch[1].cpu().view(7, 2, 4, 2, 64), batch[2], int(batch[3])
    where = [(int(table[1, 2, token // 4]), token % 4) for token in range(length)]
    k, v = (torch.stack([cache[b, part, t, kv_head] for b, t in where]) for part in (0, 1))
    return k, v


def test_every_score_and_running_value_is_recorded():
    batch = attention_batch(seed=1)
    trace = step_launch(by_token, *batch, program=(0, 3))
    k, v = keys_and_values(batch, kv_head=1)
    scores = (k @ batch[0][0, 3].cpu() * 0.125).numpy()
    assert trace.error is None
    assert not trace.truncated
    np.testing.assert_allclose(trace.values("score"), scores, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        trace.values("new_max"), np.maximum.accumulate(scores), rtol=1e-5, atol=1e-6
    )
    out = torch.softmax(torch.from_numpy(scores), 0) @ v
    np.testing.assert_allclose(trace.outputs["out_ptr"][0, 3], out.numpy(), atol=1e-5)


def test_every_level_of_the_reduction_tree_is_recorded():
    batch = attention_batch(seed=2, length=3)
    trace = step_launch(by_token, *batch, program=(0, 1))
    k, _ = keys_and_values(batch, kv_head=0)
    partials = [p for p in trace.values("partial") if p.ndim]
    assert len(partials) == 3 * 6
    for token in range(3):
        lanes = (batch[0][0, 1].cpu() * k[token]).numpy()
        for level, partial in enumerate(partials[6 * token : 6 * token + 6]):
            # lanes 32 >> level apart have been added, within each half of 32
            expected = lanes.reshape(2, 2**level, 32 >> level).sum(1)
            assert partial.dtype == np.float32
            np.testing.assert_allclose(partial.reshape(expected.shape), expected, atol=1e-5)


def test_traced_and_untraced_outputs_are_the_same():
    batch = attention_batch(seed=3)
    by_token(*batch)
    untraced = batch[7].cpu().numpy().copy()
    batch[7].zero_()
    for q_head in range(4):
        trace = step_launch(by_token, *batch, program=(0, q_head))
        traced = trace.outputs["out_ptr"][0, q_head]
        np.testing.assert_allclose(traced, untraced[0, q_head], rtol=TOLERANCE, atol=TOLERANCE)
    assert not batch[7].any(), "step changed the caller's tensors"


def test_loads_and_stores_name_their_argument_and_elements():
    x = torch.arange(10.0).reshape(2, 5)
    trace = step(kernels.scale_rows, 2, x, torch.zeros(12), 5, WIDTH=4, program=1)
    loads = [access for s in trace.steps for access in s.accesses if access.kind == "load"]
    assert [access.argument for access in loads] == ["x_ptr", "x_ptr"]
    assert loads[1].offsets.tolist() == [9, 10, 11, 12]
    assert loads[1].mask.tolist() == [True, False, False, False]
    assert loads[1].values.tolist() == [9.0, 0.0, 0.0, 0.0]
    stores = [access for s in trace.steps for access in s.accesses if access.kind == "store"]
    assert stores[-1].argument == "out_ptr"
    assert stores[-1].offsets.tolist() == [11]
    assert trace.outputs["out_ptr"][5:].tolist() == [2.5, 3.0, 3.5, 4.0, 4.5, 0.0, 17.5]
    assert trace.values("total") == [0.0, 13.0, 17.5]


def test_a_masked_load_without_other_gives_what_nobody_can_take_for_an_answer():
    x, n = torch.arange(4.0), torch.arange(4, dtype=torch.int32)
    trace = step(kernels.no_other, 1, x, n, torch.zeros(4), 3, WIDTH=4)
    (number,), (index,) = trace.values("number"), trace.values("index")
    np.testing.assert_array_equal(number, [0, 1, 2, np.nan])
    assert index.tolist() == [0, 1, 2, -(2**31)]
    (load, _, store) = (access for s in trace.steps for access in s.accesses)
    np.testing.assert_array_equal(load.values, number)
    assert store.mask.tolist() == [True, True, True, False]
    assert trace.outputs["out_ptr"].tolist() == [0, 2, 4, 0], "the interpreter's zeros were used"


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
def test_a_block_pointer_is_named_and_what_it_reads_is_recorded():
    x = torch.tensor([1.0, 2.0, 3.0])
    trace = step(kernels.by_block_pointer, 1, x, torch.zeros(4), 3, WIDTH=4)
    assert trace.error is None
    assert trace.values("block") == ["BlockPointerHandle"]
    assert trace.outputs["out_ptr"].tolist() == [2.0, 4.0, 6.0, 0.0]
    (load,) = (a for s in trace.steps for a in s.accesses if a.kind == "load")
    assert (load.argument, load.mask.tolist()) == ("x_ptr", [True, True, True, False])


def test_a_statement_on_several_lines_is_one_step():
    trace = step(kernels.scale_rows, 1, torch.ones(8), torch.zeros(9), 8, WIDTH=4)
    loads = trace.at("tl.load(")
    assert [s.assigned for s in loads] == [["x"], ["x"]]
    assert {s.last_line - s.line for s in loads} == {4}
    assert [s.variables["start"] for s in trace.at("for start")] == [0, 4, 4]
    assert trace.values("start") == [0, 4], "leaving the loop assigns nothing"


def test_arguments_that_share_memory_still_share_it():
    x = torch.arange(4.0)
    trace = step(kernels.add_one_in_place, 1, x, x, N=4)
    assert trace.outputs["out_ptr"].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    kinds = [(access.kind, access.argument) for s in trace.steps for access in s.accesses]
    assert kinds == [("load", "x_ptr"), ("store", "out_ptr")] * 2


def test_a_pointer_is_shown_as_argument_and_offset():
    table = torch.arange(12).reshape(3, 4)
    trace = step(kernels.read_at, 1, table[1:], torch.zeros(1, dtype=torch.int64), -2)
    (pointer,) = trace.values("pointers")
    assert isinstance(pointer, Pointer)
    assert (pointer.argument, int(pointer.offsets)) == ("x_ptr", -2)
    assert trace.values("x") == [2]


@pytest.mark.parametrize("offset", [-1, 8, 2**31])
def test_an_access_outside_its_argument_is_an_error_with_its_line(offset):
    trace = step(kernels.read_at, 1, torch.zeros(8), torch.zeros(1), offset)
    line = trace.steps[-1].line
    assert trace.error == f"line {line}: load x_ptr[{offset}], outside its 0 to 7"
    assert "tl.load(pointers)" in trace.source.lines[line - trace.source.first_line]


def test_atomics_are_recorded():
    trace = step(kernels.count_up, 3, torch.tensor([7]), torch.zeros(1).long(), program=2)
    (access,) = trace.at("atomic_add")[0].accesses
    assert (access.kind, access.argument, access.values.tolist()) == ("atomic", "counter_ptr", [7])
    assert trace.outputs["counter_ptr"].tolist() == [12]


def test_nan_and_infinity_are_data_and_survive_json():
    trace = step(kernels.not_a_number, 1, torch.tensor([1000.0]), torch.zeros(1))
    text = trace.to_json()
    assert "NaN" not in text
    assert "Infinity" not in text
    again = Trace.from_json(text)
    for one in (trace, again):
        assert one.values("low") == [-np.inf]
        assert np.isnan(one.values("y")[0])
        assert one.values("z") == [np.inf]
    assert again.to_json() == text


def test_json_keeps_the_whole_trace():
    trace = step_launch(by_token, *attention_batch(seed=4), program=(0, 2))
    again = Trace.from_json(trace.to_json())
    assert again.source == trace.source
    assert len(again.steps) == len(trace.steps)
    for one, other in zip(trace.steps, again.steps, strict=True):
        assert one[:3] == other[:3]
        assert one.variables.keys() == other.variables.keys()
        for name, value in one.variables.items():
            if isinstance(value, Pointer):
                np.testing.assert_array_equal(value.offsets, other.variables[name].offsets)
            else:
                np.testing.assert_array_equal(value, other.variables[name])
        for mine, theirs in zip(one.accesses, other.accesses, strict=True):
            assert mine[:2] == theirs[:2]
            np.testing.assert_array_equal(mine.values, theirs.values)


def test_bfloat16_tensors_are_stepped_as_float32_and_said_so():
    x = torch.tensor([1.5, 2.5, 3.5, 4.5], dtype=torch.bfloat16)
    trace = step(kernels.add_one_in_place, 1, x, x, N=4)
    assert trace.as_float32 == ["x_ptr", "out_ptr"]
    assert trace.outputs["out_ptr"].tolist() == [3.5, 4.5, 5.5, 6.5]
    assert x.dtype == torch.bfloat16


def test_bfloat16_inside_a_kernel_is_refused():
    trace = step(kernels.to_bfloat16, 1, torch.ones(1), torch.zeros(1))
    assert trace.error.endswith("y is bf16, which the interpreter gets wrong: use float32")


def test_an_autotuned_kernel_is_stepped_with_the_sizes_it_is_given():
    trace = step(kernels.tuned, 1, torch.arange(16.0), torch.zeros(1), N=8)
    assert trace.values("total") == [28.0]
    with pytest.raises(ValueError, match=r"^tuned: missing a required argument: 'N'$"):
        step(kernels.tuned, 1, torch.arange(16.0), torch.zeros(1))


def test_max_steps_stops_a_kernel_that_never_ends():
    trace = step(kernels.forever, 1, torch.zeros(1), max_steps=100)
    assert trace.truncated
    assert trace.error is None
    assert len(trace.steps) == 100


def test_the_tracer_that_was_set_before_is_set_again():
    def tracer(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        step(kernels.tree, 1, torch.ones(8), torch.zeros(1))
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


def test_an_inserted_line_moves_the_recorded_lines(tmp_path):
    text = textwrap.dedent("""
        import triton
        import triton.language as tl

        @triton.jit
        def double(x_ptr, out_ptr):
            x = tl.load(x_ptr)
            tl.store(out_ptr, x * 2)
    """)

    def lines(name: str, text: str) -> list[int]:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        trace = step(module.double, 1, torch.ones(1), torch.zeros(1))
        assert trace.source.file == f"{name}.py"
        assert trace.source.first_line == 5
        return [s.line for s in trace.steps]

    assert lines("before", text) == [7, 8]
    inserted = text.replace("    tl.store", "    y = x + 1\n    tl.store")
    assert lines("after", inserted) == [7, 8, 9]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: step(len, 1), "kernel: expected a function under @triton.jit, got len"),
        (lambda: step(kernels.tree, 1), "tree: missing a required argument: 'x_ptr'"),
        (
            lambda: step(kernels.tree, (2, 1), 0, 0, program=(0, 1)),
            "program: expected one inside the grid (2, 1, 1), got (0, 1, 0)",
        ),
        (
            lambda: step(kernels.tree, 1, torch.ones(8), torch.zeros(1), WIDTH=4),
            "tree: got an unexpected keyword argument 'WIDTH'",
        ),
        (
            lambda: step_launch(torch.add, torch.ones(1), torch.ones(1)),
            "launcher: expected a kernel launch, add made none",
        ),
        (
            lambda: step(kernels.tree, 1, SHARED, SHARED.view(torch.int32)),
            "out_ptr: expected torch.float32 like an argument it overlaps, got torch.int32",
        ),
    ],
)
def test_what_cannot_be_stepped_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


CELL = """
import torch, triton, triton.language as tl
from pagedlab import step
from pagedlab.trace_recorder import Pointer
import kernels_to_step

SCALE: tl.constexpr = 3
x = object()  # a global of the notebook that the kernel does not use

@triton.jit
def thrice(value):
    return value * SCALE

@triton.jit
def mine(x_ptr, out_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    x = tl.load(x_ptr + lane)
    y = thrice(x)
    total = tl.sum(y, 0)
    tl.store(out_ptr, total)

trace = step(mine, (1,), torch.arange(4.0), torch.zeros(1), N=4, num_warps=1)
x = torch.arange(10.0)
row = step(kernels_to_step.scale_rows, 2, x, torch.zeros(12), 5, WIDTH=4, program=1)
print(trace.source.file, trace.values("total"), [s.line for s in trace.steps], trace.outputs)
print(row.values("total"), row.error, type(mine).__name__)
"""


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_a_notebook_cell_is_stepped_in_both_of_tritons_modes(tmp_path, interpret):
    script = tmp_path / "notebook.py"
    script.write_text(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        f"InteractiveShell.instance().run_cell({CELL!r}).raise_error()\n"
    )
    here = os.path.dirname(__file__)
    env = os.environ | {
        "TRITON_INTERPRET": interpret,
        "PYTHONPATH": os.pathsep.join([here, os.path.dirname(here)]),
        "IPYTHONDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()[-2:]
    assert first.startswith("notebook cell [np.float32(18.0)] [15, 16, 17, 18, 19]"), first
    assert ("JITFunction" if interpret == "0" else "InterpretedFunction") in second
    assert "17.5" in second
    assert "None" in second


@pytest.mark.serial
def test_tracing_overhead_is_reported(capsys):
    batch = attention_batch(seed=5, length=20)
    step_launch(by_token, *batch, program=(0, 1))
    start = time.perf_counter()
    by_token(*batch)
    untraced = (time.perf_counter() - start) / 4
    start = time.perf_counter()
    trace = step_launch(by_token, *batch, program=(0, 1))
    traced = time.perf_counter() - start
    with capsys.disabled():
        print(
            f"\nby_token, 20 tokens, one program: {1e3 * untraced:.0f} ms interpreted, "
            f"{1e3 * traced:.0f} ms stepped ({len(trace.steps)} steps)"
        )
    assert traced < 40 * untraced


def test_step_is_public():
    assert pagedlab.step is step
    assert pagedlab.Trace is Trace


def test_an_interpreter_that_numpy_breaks_is_named_with_the_cure(monkeypatch):
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr("numpy.__version__", "2.5.0")
    with pytest.warns(UserWarning, match=r"^the interpreter of triton 3\.6\.0 needs numpy < 2\.4"):
        from pagedlab import triton

    @triton.jit
    def breaks(x_ptr):
        range(None)

    with pytest.raises(RuntimeError, match=r"got 2\.5\.0: pip install 'numpy<2\.4'$"):
        step(breaks, (1,), torch.zeros(1))
