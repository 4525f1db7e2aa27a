"""The decoder against transformers, and its promises about blocks, batches and bad input."""

import dataclasses
import math
from itertools import product

import pytest
import torch
import transformers

from pagedlab import BlockTable, Llama, LlamaConfig, PagedKVCache, paged_attention, reference

TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.3}
SMALL = LlamaConfig(
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=101,
    max_seq_len=64,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(model: Llama, num_slots: int = 2, max_seq_len: int = 64, block_size: int = 4):
    """A cache with NaN everywhere, and a table whose every entry is assigned, blocks shuffled."""
    max_blocks, num_layers = -(-max_seq_len // block_size), model.config.num_layers
    table = BlockTable(num_slots, num_layers, max_blocks)
    num_blocks = num_slots * num_layers * max_blocks + 5
    cache = PagedKVCache(model.kv_layout(block_size), num_blocks)
    cache.buffer.fill_(float("nan"))
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    for slot, logical_block in product(range(num_slots), range(max_blocks)):
        table.assign_layers(slot, logical_block, [blocks.pop() for _ in range(num_layers)])
    return cache, table


def random_ids(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()


def transformers_model(folder, num_q_heads, num_kv_heads, head_dim, tied, rope):
    """A random transformers Llama, saved into folder; its sizes differ pairwise."""
    torch.manual_seed(num_q_heads * head_dim)
    config = transformers.LlamaConfig(
        hidden_size=168,
        intermediate_size=136,
        num_hidden_layers=2,
        num_attention_heads=num_q_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=211,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters={"rope_theta": 5000.0, **(rope or {"rope_type": "default"})},
        initializer_range=0.1,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


HEADS = {"mha": (4, 4), "mqa": (4, 1), "gqa3": (6, 2), "gqa4": (8, 2), "gqa7": (14, 2)}
CASES = [
    pytest.param(
        *heads, head_dim, i % 2 == 0, LLAMA3_ROPE if i % 3 == 0 else None, id=f"{name}-{head_dim}"
    )
    for i, ((name, heads), head_dim) in enumerate(product(HEADS.items(), (16, 64, 80, 128)))
]


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim", "tied", "rope"), CASES)
def test_prefill_and_20_decode_steps_equal_transformers(
    tmp_path, num_q_heads, num_kv_heads, head_dim, tied, rope
):
    theirs = transformers_model(tmp_path, num_q_heads, num_kv_heads, head_dim, tied, rope)
    ours = Llama.from_checkpoint(tmp_path, device="cpu", dtype=torch.float32)
    cache, table = paged(ours)
    # Two sequences in slots 1 and 0: the batch index and the slot differ throughout.
    prompts, slots = (37, 18), int32(1, 0)
    ids = [random_ids(211, length + 20, seed=length) for length in prompts]
    with torch.no_grad():
        expected = [theirs(torch.tensor([row])).logits[0] for row in ids]
    for row, length in enumerate(prompts):
        logits = ours.prefill(ids[row][:length], cache, table, int(slots[row]))
        torch.testing.assert_close(logits, expected[row][length - 1], atol=1e-4, rtol=0)
    for step in range(20):
        lengths = int32(*(length + step + 1 for length in prompts))
        tokens = [row[length + step] for row, length in zip(ids, prompts, strict=True)]
        logits = ours.decode(tokens, cache, table, lengths, slots)
        for row, length in enumerate(prompts):
            torch.testing.assert_close(logits[row], expected[row][length + step], atol=1e-4, rtol=0)


def test_llama3_scaling_changes_the_logits(tmp_path):
    transformers_model(tmp_path / "plain", 4, 2, 64, False, None)
    transformers_model(tmp_path / "scaled", 4, 2, 64, False, LLAMA3_ROPE)
    plain, scaled = (Llama.from_checkpoint(tmp_path / name) for name in ("plain", "scaled"))
    assert torch.equal(plain.layers[0].qkv.to_dense(), scaled.layers[0].qkv.to_dense())
    ids = random_ids(211, 40, seed=0)
    a, b = (model.prefill(ids, *paged(model), slot=0) for model in (plain, scaled))
    assert (a - b).abs().max() > 1e-2


@pytest.mark.parametrize("cuts", [(0, 1), (0, 16), (0, 5, 6, 30), tuple(range(37))])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(cuts):
    model = Llama.random(SMALL)
    ids = random_ids(SMALL.vocab_size, 37, seed=2)
    whole = model.prefill(ids, *paged(model), slot=1)
    cache, table = paged(model)
    for start, end in zip(cuts, (*cuts[1:], len(ids)), strict=True):
        logits = model.prefill(ids[start:end], cache, table, 1, start=start)
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=0)


def test_a_decode_step_gives_the_logits_of_a_longer_prompt():
    model = Llama.random(SMALL)
    ids = random_ids(SMALL.vocab_size, 33, seed=3)
    whole = model.prefill(ids, *paged(model), slot=0)
    cache, table = paged(model)
    model.prefill(ids[:-1], cache, table, 0)
    logits = model.decode(ids[-1:], cache, table, int32(33), int32(0))
    torch.testing.assert_close(logits[0], whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("section", ["k_view", "v_view"])
@pytest.mark.parametrize("layer", range(SMALL.num_layers))
def test_a_nan_in_one_live_block_changes_the_answer(section, layer):
    model = Llama.random(SMALL)
    cache, table = paged(model)
    model.prefill(random_ids(SMALL.vocab_size, 10, seed=4), cache, table, 0)
    getattr(cache, section)()[table.lookup(0, layer, 1), 2, 1, 3] = float("nan")
    assert model.decode([7], cache, table, int32(11), int32(0)).isnan().any()


def test_a_nan_beyond_the_length_or_in_another_slot_changes_nothing():
    model = Llama.random(SMALL)
    cache, table = paged(model)  # full of NaN
    model.prefill(random_ids(SMALL.vocab_size, 10, seed=4), cache, table, 0)
    assert model.decode([7], cache, table, int32(11), int32(0)).isfinite().all()


def test_a_row_does_not_depend_on_its_batch():
    model = Llama.random(SMALL)
    cache, table = paged(model, num_slots=3)
    lengths = (9, 16, 30)
    for slot, length in enumerate(lengths):
        model.prefill(random_ids(SMALL.vocab_size, length, seed=slot), cache, table, slot)
    alone = [
        model.decode([slot], cache, table, int32(length + 1), int32(slot))[0]
        for slot, length in enumerate(lengths)
    ]
    together = model.decode([2, 0, 1], cache, table, int32(31, 10, 17), int32(2, 0, 1))
    torch.testing.assert_close(together, torch.stack([alone[2], alone[0], alone[1]]))


def test_a_readers_attention_is_called_once_a_layer_with_the_plain_arguments():
    model = Llama.random(SMALL)
    cache, table = paged(model)
    model.prefill([1, 2, 3], cache, table, 1)
    batch = cache, table, int32(4), int32(1)
    layers = []

    def readers(q, cache, table, seq_lens, active_slots, layer):
        layers.append(layer)
        return reference.gathered_attention(q, cache, table, seq_lens, active_slots, layer)

    logits = model.decode([4], *batch, attention=readers)
    assert layers == [0, 1, 2]
    torch.testing.assert_close(logits, model.decode([4], *batch), atol=1e-5, rtol=0)
    in_place = model.decode(
        [4], *batch, attention=lambda q, *rest: paged_attention(q, *rest, out=q)
    )
    torch.testing.assert_close(in_place, logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_dtype_computes_the_same_model(dtype):
    full, model = Llama.random(SMALL), Llama.random(SMALL, dtype=dtype)
    assert model.kv_layout(8).dtype is model.dtype is dtype
    ids = random_ids(SMALL.vocab_size, 20, seed=5)
    logits = []
    for each in (full, model):
        cache, table = paged(each)
        prefill = each.prefill(ids, cache, table, 0)
        decode = each.decode([5], cache, table, int32(21), int32(0))[0]
        assert prefill.dtype is decode.dtype is torch.float32
        logits.append(torch.stack((prefill, decode)))
    torch.testing.assert_close(*logits, atol=TOLERANCE[dtype], rtol=0)


def test_an_empty_batch_gives_no_logits():
    model = Llama.random(SMALL)
    logits = model.decode([], *paged(model), int32(), int32())
    assert logits.shape == (0, SMALL.vocab_size)


def test_the_seed_alone_decides_random_weights():
    first, second, other = (Llama.random(SMALL, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.head.to_dense(), second.head.to_dense())
    assert not torch.equal(first.head.to_dense(), other.head.to_dense())


@pytest.mark.parametrize(
    ("ids", "start", "message"),
    [
        ([], 0, "ids: expected 1 to 64 tokens at position 0, got 0"),
        ([1] * 65, 0, "ids: expected 1 to 64 tokens at position 0, got 65"),
        ([1] * 5, 60, "ids: expected 1 to 4 tokens at position 60, got 5"),
        ([4, 101], 0, "ids: expected token ids from 0 to 100, got 4 to 101"),
        ([-1], 0, "ids: expected token ids from 0 to 100, got -1 to -1"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_and_writes_nothing(ids, start, message):
    model = Llama.random(SMALL)
    cache, table = paged(model)
    with pytest.raises(ValueError, match="ids") as error:
        model.prefill(ids, cache, table, 0, start=start)
    assert str(error.value) == message
    assert cache.buffer.isnan().all()


def test_a_prompt_without_its_blocks_is_refused_and_writes_nothing():
    model = Llama.random(SMALL)
    cache, table = paged(model)
    table.release_slot(0)
    with pytest.raises(ValueError, match="-1"):
        model.prefill([1, 2, 3], cache, table, 0)
    assert cache.buffer.isnan().all()


def test_a_token_id_outside_the_vocabulary_is_refused_in_decode():
    model = Llama.random(SMALL)
    with pytest.raises(ValueError, match="ids: expected token ids from 0 to 100, got 101 to 101"):
        model.decode([101], *paged(model), int32(1), int32(0))


def test_the_demo_model_answers():
    from pagedlab import Tokenizer

    model, tokenizer = (
        Llama.from_checkpoint(dtype=torch.float32, device="cpu"),
        Tokenizer.from_checkpoint(),
    )
    ids = tokenizer.chat("What is the capital of Japan?")
    cache, table = paged(model, num_slots=1, block_size=16)
    logits, answer = model.prefill(ids, cache, table, 0), []
    while len(answer) < 9 and logits.argmax() not in model.config.eos_token_ids:
        answer.append(int(logits.argmax()))
        length = int32(len(ids) + len(answer))
        logits = model.decode(answer[-1:], cache, table, length, int32(0))[0]
    assert tokenizer.decode(answer) == "The capital of Japan is Tokyo."


def test_prompts_side_by_side_get_the_logits_they_get_alone():
    model = Llama.random(SMALL, seed=3)
    lengths, slots = (9, 1, 17, 15, 31, 12), [2, 0, 5, 1, 4, 3]  # 9, 15, 12 and 17, 31 are alike
    prompts = [random_ids(SMALL.vocab_size, length, seed=length) for length in lengths]
    together, table = paged(model, num_slots=6)
    alone, _ = paged(model, num_slots=6)
    logits = model.prefill_batch(prompts, together, table, slots)
    assert logits.shape == (6, SMALL.vocab_size)
    for row, (ids, slot) in enumerate(zip(prompts, slots, strict=True)):
        torch.testing.assert_close(logits[row], model.prefill(ids, alone, table, slot))
    torch.testing.assert_close(together.buffer, alone.buffer, equal_nan=True)


@pytest.mark.parametrize("broken", range(3))
def test_a_prompt_that_is_nan_spoils_no_neighbour(broken):
    model = Llama.random(SMALL, seed=3)
    model.embedding[SMALL.vocab_size - 1] = math.nan
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6]]  # one group
    prompts[broken][-1] = SMALL.vocab_size - 1
    logits = model.prefill_batch(prompts, *paged(model, num_slots=3), [0, 1, 2])
    assert logits.isnan().any(1).tolist() == [row == broken for row in range(3)]


@pytest.mark.parametrize("chunk_size", [1, 15, 16, 17, 40, 2048])
def test_prompts_cut_into_chunks_get_the_logits_of_the_whole(chunk_size):
    """Of prompts side by side; a chunk may hold the end of one and the beginning of the next."""
    model = Llama.random(SMALL, seed=3)
    lengths, slots = (33, 1, 16, 15, 30, 10), [2, 0, 3, 1, 5, 4]
    prompts = [random_ids(SMALL.vocab_size, length, seed=length) for length in lengths]
    whole, table = paged(model, num_slots=6)
    chunked, _ = paged(model, num_slots=6)
    rows = zip(prompts, slots, strict=True)
    expected = [model.prefill(ids, whole, table, slot) for ids, slot in rows]
    logits = model.prefill_batch(prompts, chunked, table, slots, chunk_size=chunk_size)
    torch.testing.assert_close(logits, torch.stack(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(chunked.buffer, whole.buffer, atol=1e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize("length", [2047, 2048, 2049])
def test_no_more_than_2048_tokens_go_through_the_model_at_a_time(monkeypatch, length):
    model = Llama.random(dataclasses.replace(SMALL, num_layers=1, max_seq_len=2100))
    sizes, decoder = [], model._decoder
    monkeypatch.setattr(model, "_decoder", lambda *a: (sizes.append(len(a[0])), decoder(*a))[1])
    heads = []
    monkeypatch.setattr(
        model, "_logits", lambda x: (heads.append(len(x)), Llama._logits(model, x))[1]
    )
    ids = random_ids(SMALL.vocab_size, length, seed=0)
    sizes_wanted = [min(length, 2048)] + [1] * (length > 2048)
    cache, table = paged(model, 1, 2100)
    logits = model.prefill(ids, cache, table, 0)
    assert sizes == sizes_wanted
    assert sum(heads) == 1, "only the last token has logits"
    cache, table = paged(model, 1, 2100)
    whole = model.prefill_batch([ids], cache, table, [0], chunk_size=4096)[0]
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=0)


def test_a_chunk_has_a_token_at_least():
    model = Llama.random(SMALL)
    with pytest.raises(ValueError, match="chunk_size: expected chunk_size >= 1, got 0"):
        model.prefill_batch([[1]], *paged(model), [0], chunk_size=0)
