"""The demo model's tokenizer, its chat template, and text that appears in whole characters."""

import json
import shutil

import pytest
import transformers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pagedlab import Tokenizer, checkpoint
from pagedlab.tokenizer import Detokenizer

VOCAB_SIZE = 49152
# Bytes with no token of their own: some control characters, and starts of unassigned planes.
ABSENT_BYTES = {*b"\x04\x06\x13\x14\x16\x1d\xf1\xf2"}
HARD_TEXT = (
    "The 2nd of 1,234 foxes doesn't jump over 12.5% of the  lazy dogs.\n\n"
    "日本語 👩‍👩‍👧 🇫🇷 e\u0301 नमस्ते\tdef f(x):\n    return x**2  \n<|im_end|> x² ½"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint()


def changed_copy(folder, **changes):
    """A folder with the demo model's tokenizer, fields of tokenizer_config.json replaced."""
    source = checkpoint.locate()
    shutil.copy(source / "tokenizer.json", folder)
    config = json.loads((source / "tokenizer_config.json").read_text()) | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_token_ids_are_the_models_own(tokenizer):
    # The first ids are those that transformers' own reading of the GGUF gives, too.
    assert tokenizer.encode("In 1987, 42 foxes didn't sleep.") == [
        *(788, 216, 33, 41, 40, 39, 28, 216, 36, 34),  # digits stand one by one
        *(28510, 3683, 982, 2801, 30),
    ]
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.encode("") == []


def test_transformers_reads_the_converted_tokenizer_the_same_way(tokenizer):
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint.locate())
    assert tokenizer.encode(HARD_TEXT) == theirs.encode(HARD_TEXT)
    messages = [
        {"role": "user", "content": "Hi <|im_start|> 🙂"},
        {"role": "assistant", "content": "Hello!\n"},
        {"role": "user", "content": "  Bye?"},
    ]
    for conversation in (messages, messages[:1], [{"role": "system", "content": "Be brief."}]):
        assert tokenizer.chat(conversation) == theirs.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False
        )


def test_a_question_becomes_a_conversation(tokenizer):
    ids = tokenizer.chat("What is the capital of Japan?")
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (len(ids), ids[:3], ids[-3:]) == (37, [1, 9690, 198], [520, 9531, 198])
    assert ids == tokenizer.chat([{"role": "user", "content": "What is the capital of Japan?"}])


@settings(max_examples=200)
@given(text=st.text())
@example(text=HARD_TEXT.replace("<|im_end|>", ""))
def test_decoding_gives_the_text_back(tokenizer, text):
    assume(not ABSENT_BYTES & set(text.encode()) and "<" not in text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_left_out_of_text_unless_asked_for(tokenizer):
    ids = [*tokenizer.encode("Tokyo."), 2]
    assert tokenizer.decode(ids) == "Tokyo."
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Tokyo.<|im_end|>"


@pytest.mark.parametrize("text", ["a🦙b", "日本語", "e\u0301", "👩‍👩‍👧!", "नमस्ते", HARD_TEXT])
def test_a_stream_never_shows_half_a_character(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = list(tokenizer.stream(ids))
    assert "".join(pieces) == text.replace("<|im_end|>", "")
    assert all(piece and "\ufffd" not in piece for piece in pieces)


def test_a_character_appears_with_its_last_token(tokenizer):
    ids, detokenizer = tokenizer.encode("a🦙b"), Detokenizer(tokenizer)
    assert [detokenizer.push(token_id) for token_id in ids] == ["a", "", "", "🦙", "b"]
    assert detokenizer.finish() == ""


def test_bytes_that_stay_incomplete_are_shown_at_the_end(tokenizer):
    ids = tokenizer.encode("ok 🦙")[:-1]
    assert list(tokenizer.stream(ids)) == ["ok", " \ufffd"]
    assert tokenizer.decode(ids) == "ok \ufffd"


any_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
# Ids 17 to 251 stand for single bytes: most of their sequences are no text at all.
bytewise_ids = st.lists(st.integers(0, 251), max_size=40)


@settings(max_examples=300)
@given(ids=any_ids | bytewise_ids)
def test_the_pieces_of_a_stream_are_the_whole_text(tokenizer, ids):
    assert "".join(tokenizer.stream(ids)) == tokenizer.decode(ids)


def test_a_template_may_come_in_any_of_its_three_places(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}\n{{ m['content'] }}{% endfor %}"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": template}]
    bos = {"content": "<|im_start|>", "lstrip": False}
    first = Tokenizer(changed_copy(tmp_path, chat_template=template, bos_token=bos))
    second = Tokenizer(changed_copy(tmp_path, chat_template=named, bos_token=bos))
    (tmp_path / "chat_template.jinja").write_text(template)
    third = Tokenizer(changed_copy(tmp_path, chat_template="no", bos_token="<|im_start|>"))
    for tokenizer in (first, second, third):
        assert tokenizer.decode(tokenizer.chat("Hi"), skip_special_tokens=False) == "<|im_start|>Hi"


def test_a_template_can_do_no_harm(tmp_path):
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="messages: expected what the template takes, got"):
        Tokenizer(changed_copy(tmp_path, chat_template=template)).chat("Hi")


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, "Hi", "model: expected a chat template, got none"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "Hi",
            "messages: expected what the template takes, got roles must alternate",
        ),
        (
            "x",
            [{"role": "user"}],
            "messages: expected texts as role and content, got {'role': 'user'}",
        ),
        ("x", None, "messages: expected a text or a list, got None"),
        ("x", ["Hi"], "messages: expected texts as role and content, got Hi"),
        (
            "{{ 1 // 0 }}",
            "Hi",
            "messages: expected what the template takes, got integer division or modulo by zero",
        ),
    ],
)
def test_a_chat_that_the_model_cannot_have_is_refused(tmp_path, template, messages, message):
    tokenizer = Tokenizer(changed_copy(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match="expected") as error:
        tokenizer.chat(messages)
    assert str(error.value) == message


@pytest.mark.parametrize("text", [5, None, b"Hi", "\udcff"])
def test_what_is_no_text_is_refused(tmp_path, text):
    tokenizer = Tokenizer(changed_copy(tmp_path))
    with pytest.raises(ValueError, match="text: expected Unicode text, got") as error:
        tokenizer.encode(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("template", [5, {"default": "x"}, [{"name": "default", "template": 5}]])
def test_a_template_that_is_no_text_is_named(tmp_path, template):
    with pytest.raises(ValueError, match=r"config\.json: expected chat_template to be text, got"):
        Tokenizer(changed_copy(tmp_path, chat_template=template))


@pytest.mark.parametrize("content", [None, "", '{"version": "1.0"', "[]"])
def test_a_missing_or_broken_tokenizer_file_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"tokenizer\.json: expected a tokenizer file, got"
    ) as error:
        Tokenizer(tmp_path)
    assert "\n" not in str(error.value)
