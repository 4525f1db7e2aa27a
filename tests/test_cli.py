"""python -m pagedlab: what it prints, where, and how it fails."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from pagedlab import LLAMA_3_2_1B, checkpoint
from pagedlab.__main__ import main

torch.set_num_threads(1)
JAPAN = "What is the capital of Japan?"
ELEMENT = ["--physical-block", "3", "--token", "5", "--kv-head", "2", "--lane", "7"]


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pagedlab", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A folder with a random two-layer model, under the demo model's tokenizer."""
    folder, demo = tmp_path_factory.mktemp("tiny"), checkpoint.locate()
    for path in demo.iterdir():
        if path.name.startswith("tokenizer") or path.suffix == ".jinja":
            shutil.copy(path, folder)
    vocab_size = checkpoint.read_config(demo).vocab_size
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab_size,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (vocab_size, 32), "model.norm": (32,)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {layer + "input_layernorm": (32,), layer + "post_attention_layernorm": (32,)}
        shapes |= {layer + f"self_attn.{name}_proj": (64, 32) for name in "q"}
        shapes |= {layer + f"self_attn.{name}_proj": (32, 32) for name in "kv"}
        shapes |= {layer + "self_attn.o_proj": (32, 64), layer + "mlp.down_proj": (32, 48)}
        shapes |= {layer + f"mlp.{name}_proj": (48, 32) for name in ("gate", "up")}
    generator = torch.Generator().manual_seed(5)
    weights = {f"{n}.weight": torch.randn(s, generator=generator) for n, s in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return str(folder)


# decode


def test_one_prompt_prints_the_answer_and_nothing_else():
    result = run("decode", JAPAN)
    assert result.stdout == "The capital of Japan is Tokyo.\n"
    assert result.stderr == ""
    assert result.returncode == 0


def test_several_prompts_are_labelled_in_their_order(tiny_model, capsys):
    prompts = ["one", "two", "three"]
    options = ["--model", tiny_model, "--max-new-tokens", "5", "--slots", "2"]
    assert main(["decode", *prompts, *options]) == 0
    labelled = capsys.readouterr().out
    alone = []
    for prompt in prompts:
        assert main(["decode", prompt, *options]) == 0
        alone.append(capsys.readouterr().out)
    assert labelled == "".join(f"[{i}] {text}" for i, text in enumerate(alone))


def test_an_answer_that_was_cut_is_noted_on_stderr(tiny_model, capsys):
    main(["decode", "one", "--model", tiny_model, "--max-new-tokens", "3"])
    assert capsys.readouterr().err == "pagedlab: request 0 ended by length\n"


def test_decode_as_json(tiny_model, capsys):
    options = ["--model", tiny_model, "--max-new-tokens", "4", "--json", "--cache-mib", "1"]
    assert main(["decode", "one", "two", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [answer["prompt"] for answer in result["requests"]] == ["one", "two"]
    assert all(len(answer["tokens"]) == 4 for answer in result["requests"])
    assert (result["device"], result["dtype"], result["model"]) == ("cpu", "float32", tiny_model)
    assert result["num_blocks"] == 2**20 // (2 * 16 * 2 * 16 * 4)
    assert "events" not in result


def test_show_blocks_tells_who_owned_what(tiny_model, capsys):
    options = ["--model", tiny_model, "--max-new-tokens", "4", "--cache-mib", "1"]
    assert main(["decode", "one", "--show-blocks", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "256 blocks of 16 tokens; layer 0 of 2:" in lines
    assert any(line.endswith("allocate  logical 0 = physical 255") for line in lines)
    assert any(line.endswith("release   logical 0 = physical 255") for line in lines)
    assert lines[-1] == "256 of 256 blocks are free"
    assert main(["decode", "one", "--show-blocks", "--json", *options]) == 0
    events = json.loads(capsys.readouterr().out)["events"]
    assert {event["event"] for event in events} == {"BlockEvent", "SlotEvent", "TokenEvent"}


def test_the_triton_backend_says_the_same_in_the_interpreter(tiny_model):
    pytest.importorskip("triton")
    options = ["--model", tiny_model, "--max-new-tokens", "3", "--json"]
    results = {b: run("decode", "one", *options, "--backend", b) for b in ("torch", "triton")}
    answers = {b: json.loads(result.stdout)["requests"] for b, result in results.items()}
    assert answers["torch"] == answers["triton"]
    assert "interpreter" in results["triton"].stderr
    assert "interpreter" not in results["torch"].stderr


# address


def test_address_of_an_element_and_back(capsys):
    assert main(["address", *ELEMENT]) == 0
    assert capsys.readouterr().out == "K 103694\nV 120078\n"
    assert main(["address", *ELEMENT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"K": 103694, "V": 120078}
    assert main(["address", "--byte", "120079", "--json"]) == 0
    owner = json.loads(capsys.readouterr().out)
    assert owner == LLAMA_3_2_1B.locate(120079)._asdict()
    assert (owner["section"], owner["lane"], owner["byte_in_element"]) == ("V", 7, 1)


def test_address_in_another_layout(capsys):
    layout = ["--block-size", "4", "--num-kv-heads", "3", "--head-dim", "16", "--dtype", "float32"]
    place = ["--physical-block", "2", "--token", "1", "--kv-head", "2", "--lane", "5"]
    assert main(["address", *place, *layout]) == 0
    k = 4 * (2 * 2 * 4 * 48 + 48 + 2 * 16 + 5)
    assert capsys.readouterr().out == f"K {k}\nV {k + 4 * 4 * 48}\n"


# doctor


def test_doctor_names_versions_and_what_runs_where(capsys):
    assert main(["doctor"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["torch"] == torch.__version__
    assert {"triton", "GPU", "model", "attention", "kernels", "demo"} <= set(lines)
    assert main(["doctor", "--json"]) == 0
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)}
    if not torch.cuda.is_available():
        assert findings["model"]["found"] == "runs on cpu in float32"
        assert findings["attention"]["found"] == "backend auto is torch"


def report(capsys) -> dict[str, str]:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    return {f["name"]: f"{f['found']}; {f['advice']}" for f in findings}


def pretend(monkeypatch, *, gpu: tuple | None, interpret: bool, **versions: str) -> None:
    """Let the doctor see another machine: a GPU's name and capability, package versions."""
    device = torch.device("cuda" if gpu else "cpu")
    monkeypatch.setattr(checkpoint, "pick_device", lambda: device)
    monkeypatch.setattr(checkpoint, "pick_dtype", lambda _: torch.float16)
    if gpu:
        name, major, minor = gpu
        properties = SimpleNamespace(name=name, major=major, minor=minor, total_memory=15 * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpret)))
    monkeypatch.setattr("pagedlab.__main__.installed", lambda name: versions.get(name, ""))


def test_doctor_on_a_t4(monkeypatch, capsys):
    pretend(monkeypatch, gpu=("Tesla T4", 7, 5), interpret=False, triton="3.6.0")
    found = report(capsys)
    assert found["GPU"].startswith("Tesla T4, sm_75, 15 GiB")
    assert found["model"] == "runs on cuda in float16; "
    assert found["attention"] == "backend auto is triton; "
    assert found["kernels"].startswith("compiled for sm_75; ")
    assert "--backend torch" in found["kernels"]
    assert found["ipywidgets"] == "not installed; for widgets: pip install ipywidgets"


def test_doctor_finds_a_gpu_kept_from_the_kernels(monkeypatch, capsys):
    pretend(monkeypatch, gpu=("NVIDIA H200", 9, 0), interpret=True, triton="3.6.0")
    assert "unset TRITON_INTERPRET" in report(capsys)["kernels"]


def test_doctor_without_triton(monkeypatch, capsys):
    pretend(monkeypatch, gpu=None, interpret=True)
    found = report(capsys)
    assert found["kernels"].startswith("do not run without triton")
    assert found["attention"] == "backend auto is torch; "


@pytest.mark.parametrize(("numpy", "broken"), [("2.4.6", True), ("2.1.3", False)])
def test_doctor_knows_the_interpreter_that_numpy_breaks(monkeypatch, capsys, numpy, broken):
    pretend(monkeypatch, gpu=None, interpret=True, triton="3.6.0", numpy=numpy)
    assert ("pip install 'numpy<2.4'" in report(capsys)["kernels"]) == broken


def test_doctor_on_a_cpu_with_compiled_kernels(monkeypatch, capsys):
    pretend(monkeypatch, gpu=None, interpret=False, triton="3.7.1")
    assert "set TRITON_INTERPRET=1" in report(capsys)["kernels"]


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: decode | address | doctor"),
        ("decode", "required: PROMPT"),
        ("decode x --slots 0", "--slots: expected an integer >= 1, got '0'"),
        ("decode x --max-new-tokens many", "expected an integer >= 1, got 'many'"),
        ("decode x --backend cuda", "invalid choice: 'cuda'"),
        ("decode x --model /no/such/folder", "got /no/such/folder"),
        ("decode x --cache-mib 1", "request: expected at most 42 blocks, got "),
        ("address", "expected --physical-block, --token, --kv-head and --lane, or --byte alone"),
        ("address --lane 3", "got --lane"),
        ("address --lane 3 --byte 9", "got --lane --byte"),
        ("address --byte -1", "byte: expected byte >= 0, got -1"),
        ("address --byte x", "invalid int value: 'x'"),
        ("address --byte 0 --block-size 3", "block_size: expected a power of two"),
        (" ".join(["address", *ELEMENT[:-1], "64"]), "lane: expected 0 <= lane < 64, got 64"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_status_2(arguments, message, capsys):
    try:
        status = main(arguments.split())
    except SystemExit as stop:
        status = stop.code
    output = capsys.readouterr()
    assert status == 2
    assert output.out == ""
    assert output.err.startswith("pagedlab")
    assert output.err.count("\n") == 1
    assert message in output.err


def test_an_error_in_a_process_of_its_own_shows_no_traceback():
    result = run("decode", "x", "--model", "/no/such/folder")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_traceback():
    command = [sys.executable, "-m", "pagedlab", "address", *ELEMENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
