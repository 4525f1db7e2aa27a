"""Text to token ids and back: the model's own tokenizer and chat template (chapter 8)."""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers

from pagedlab import checkpoint
from pagedlab.layout import expect


class Tokenizer:
    """A model's tokenizer.json, with its chat template.

    Args:
        folder: holds tokenizer.json; tokenizer_config.json or chat_template.jinja has the template.

    Raises:
        ValueError: tokenizer.json is missing or malformed.
    """

    def __init__(self, folder: Path) -> None:
        path, template_path = folder / "tokenizer.json", folder / "chat_template.jinja"
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ValueError(f"{path}: expected a tokenizer file, got {error}") from error
        config_path = folder / "tokenizer_config.json"
        config = checkpoint.read_json(config_path) if config_path.exists() else {}
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = [entry for entry in template if isinstance(entry, dict)]
            template = {entry.get("name"): entry.get("template") for entry in named}.get("default")
        expect(isinstance(template, str | None), config_path, "chat_template to be text", template)
        if template_path.exists():
            template = template_path.read_text(encoding="utf-8")
        self.chat_template: str = template or ""
        # What a template may name: bos_token and the like. Older files wrap a token in an object.
        self.special_tokens = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token") and token is not None
        }

    @classmethod
    def from_checkpoint(cls, name: str | Path | None = None) -> "Tokenizer":
        """The tokenizer of a folder, a hub id, or with no name the demo model."""
        return cls(checkpoint.locate(name))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it stands; nothing is put around it."""
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except TypeError:  # no string, or half of a surrogate pair
            raise ValueError(f"text: expected Unicode text, got {text!r}") from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no character become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def chat(self, messages: str | list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        Args:
            messages: dicts with "role" and "content"; a plain string is one user message.

        Raises:
            ValueError: the model has no chat template, or its template refuses the messages.
        """
        expect(self.chat_template != "", "model", "a chat template", "none")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        expect(isinstance(messages, list | tuple), "messages", "a text or a list", repr(messages))
        for message in messages:
            texts = isinstance(message, dict)
            texts = texts and all(isinstance(message.get(key), str) for key in ("role", "content"))
            expect(texts, "messages", "texts as role and content", message)
        import jinja2.sandbox

        def refuse(reason: str) -> None:
            raise jinja2.TemplateError(reason)

        # A sandbox, since the template comes with the model; trimmed as its authors expect.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        names = {"raise_exception": refuse, "strftime_now": time.strftime, **self.special_tokens}
        try:
            template = environment.from_string(self.chat_template, names)
            text = template.render(messages=messages, add_generation_prompt=True)
        except Exception as error:  # a template is a program: it may divide by zero, too
            raise ValueError(f"messages: expected what the template takes, got {error}") from error
        return self.encode(text)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Text as the ids come: pieces of whole characters, which join to decode(ids)."""
        detokenizer = Detokenizer(self)
        for token_id in ids:
            if piece := detokenizer.push(token_id):
                yield piece
        if rest := detokenizer.finish():
            yield rest


class Detokenizer:
    """Turns token ids into text as they come; a character waits until its bytes are complete.

    A token is a piece of bytes: one emoji is often two or three tokens, none of which is text.

    >>> demo = Tokenizer.from_checkpoint()
    >>> detokenizer = Detokenizer(demo)
    >>> [detokenizer.push(token_id) for token_id in demo.encode("a🦙!")]
    ['a', '', '', '🦙', '!']
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # Decoded together: num_shown ids whose text is out, for their context, then ids held back.
        self.ids: list[int] = []
        self.num_shown = 0

    def push(self, token_id: int) -> str:
        """The text that this id completes; empty while a character is unfinished."""
        self.ids.append(token_id)
        return self._text(complete_only=True)

    def finish(self) -> str:
        """What was held back; bytes that stayed incomplete become U+FFFD."""
        return self._text(complete_only=False)

    def _text(self, complete_only: bool) -> str:
        context = self.tokenizer.decode(self.ids[: self.num_shown])
        text = self.tokenizer.decode(self.ids)
        if len(text) == len(context) or (complete_only and text.endswith("\ufffd")):
            return ""
        self.ids = self.ids[self.num_shown :]
        self.num_shown = len(self.ids)
        return text[len(context) :]
