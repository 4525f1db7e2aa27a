"""Exercises of chapter 8: a model's file, its rotary positions, its decode loop."""

import json
import math
import random
from collections.abc import Iterator

from pagedlab.exercises import Confusion, Exercise

# 8.1 ----------------------------------------------------------------------------------------------


def tensor_span(file, name):
    header_bytes = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + header_bytes])
    first = 8 + header_bytes
    start, end = header[name]["data_offsets"]
    return first + start, first + end


def file_cases(rng: random.Random) -> Iterator[tuple]:
    for num_tensors in (1, 2, 2, 3, 3, 4):
        header, end = {}, 0
        for name in rng.sample("abcdefg", num_tensors):
            shape = [rng.randint(2, 5), rng.randint(2, 5)]
            start, end = end, end + 2 * shape[0] * shape[1]
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        file = len(text).to_bytes(8, "little") + text + bytes(end)
        yield from ((file, name) for name in header)


def counted_from_the_start(file, name):
    first = 8 + int.from_bytes(file[:8], "little")
    return tuple(byte - first for byte in tensor_span(file, name))


def eight_bytes_forgotten(file, name):
    return tuple(byte - 8 for byte in tensor_span(file, name))


def header_forgotten(file, name):
    header_bytes = int.from_bytes(file[:8], "little")
    return tuple(byte - header_bytes for byte in tensor_span(file, name))


def size_for_end(file, name):
    start, end = tensor_span(file, name)
    return start, end - start


def last_byte_for_end(file, name):
    start, end = tensor_span(file, name)
    return start, end - 1


def big_endian(file, name):
    header_bytes = int.from_bytes(file[:8], "big")
    return tensor_span(header_bytes.to_bytes(8, "little") + file[8:], name)


# 8.2 ----------------------------------------------------------------------------------------------


def rotate(x, position, theta):
    half = len(x) // 2
    turned = list(x)
    for i in range(half):
        angle = position * theta ** -(i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        turned[i] = x[i] * cos - x[i + half] * sin
        turned[i + half] = x[i + half] * cos + x[i] * sin
    return turned


def rotary_cases(rng: random.Random) -> Iterator[tuple]:
    for head_dim in (2, 4, 6, 8):
        for position in (0, 1, rng.randrange(2, 40)):
            x = [rng.randint(-9, 9) + 0.5 for _ in range(head_dim)]
            yield x, position, rng.choice([100.0, 10_000.0])


def neighbours_paired(x, position, theta):
    half = len(x) // 2
    halves = rotate(x[0::2] + x[1::2], position, theta)
    return [halves[i // 2 + (i % 2) * half] for i in range(len(x))]


def one_position_too_far(x, position, theta):
    return rotate(x, position + 1, theta)


def turned_backwards(x, position, theta):
    return rotate(x, -position, theta)


def half_the_exponent(x, position, theta):
    return rotate(x, position, math.sqrt(theta))


def all_pairs_at_one_speed(x, position, theta):
    return rotate(x, position, 1.0)


def overwritten_too_early(x, position, theta):
    half, turned = len(x) // 2, rotate(x, position, theta)
    for i in range(half):
        angle = position * theta ** -(i / half)
        turned[i + half] = x[i + half] * math.cos(angle) + turned[i] * math.sin(angle)
    return turned


# 8.3 ----------------------------------------------------------------------------------------------


class Scripted:
    """A stand-in for a model: the next token depends on the last one and on how many there are."""

    def __init__(self, vocabulary: list[int]) -> None:
        self.vocabulary = vocabulary

    def __call__(self, ids: list[int]) -> int:
        return self.vocabulary[(ids[-1] + len(ids)) % len(self.vocabulary)]

    def __repr__(self) -> str:
        return f"lambda ids: {self.vocabulary}[(ids[-1] + len(ids)) % {len(self.vocabulary)}]"


def decode_loop(next_token, prompt, eos_ids, max_new_tokens):
    tokens = []
    while len(tokens) < max_new_tokens:
        tokens.append(next_token(prompt + tokens))
        if tokens[-1] in eos_ids:
            break
    return tokens


def loop_cases(rng: random.Random) -> Iterator[tuple]:
    for max_new_tokens in (0, 1, 1, 2, 3, 3, 5, 5, 8, 8):
        for ends_at_once in (False, True, False):
            vocabulary = rng.sample(range(10, 40), rng.randint(3, 7))
            eos_ids = rng.sample(vocabulary, 2)
            model = Scripted(vocabulary)
            prompt = [eos_ids[0], *(rng.randrange(10, 40) for _ in range(rng.randint(0, 4)))]
            if ends_at_once:
                prompt += next([i] for i in range(10, 99) if model([*prompt, i]) in eos_ids)
            yield model, prompt, eos_ids, max_new_tokens


def one_eos_only(next_token, prompt, eos_ids, max_new_tokens):
    return decode_loop(next_token, prompt, eos_ids[:1], max_new_tokens)


def eos_left_out(next_token, prompt, eos_ids, max_new_tokens):
    tokens = decode_loop(next_token, prompt, eos_ids, max_new_tokens)
    return [token for token in tokens if token not in eos_ids]


def one_token_too_many(next_token, prompt, eos_ids, max_new_tokens):
    return decode_loop(next_token, prompt, eos_ids, max_new_tokens + 1)


def eos_of_the_prompt(next_token, prompt, eos_ids, max_new_tokens):
    over = any(token in eos_ids for token in prompt)
    return decode_loop(next_token, prompt, eos_ids, min(max_new_tokens, 1) if over else 0)


def first_token_unchecked(next_token, prompt, eos_ids, max_new_tokens):
    if max_new_tokens == 0:
        return []
    first = next_token(prompt)
    return [first, *decode_loop(next_token, [*prompt, first], eos_ids, max_new_tokens - 1)]


def prompt_forgotten(next_token, prompt, eos_ids, max_new_tokens):
    start = len(prompt)
    return decode_loop(lambda ids: next_token(ids[start:] or ids), prompt, eos_ids, max_new_tokens)


def last_token_fed(next_token, prompt, eos_ids, max_new_tokens):
    start = len(prompt)
    return decode_loop(
        lambda ids: next_token(ids if len(ids) == start else ids[-1:]),
        prompt,
        eos_ids,
        max_new_tokens,
    )


def last_token_fed_at_once(next_token, prompt, eos_ids, max_new_tokens):
    return decode_loop(lambda ids: next_token(ids[-1:]), prompt, eos_ids, max_new_tokens)


LAST_TOKEN_FED = (
    "next_token has no cache, unlike the page's loop: give it the prompt and the answer so far, "
    "not the last token alone."
)


EXERCISES = (
    Exercise(
        "8.1",
        "where a tensor lies",
        tensor_span,
        file_cases,
        "Eight bytes, then the header, then the tensors: offsets count from the header's end.",
        (
            Confusion(
                "Offsets count from the header's end, not from the file's start.",
                counted_from_the_start,
            ),
            Confusion(
                "The eight bytes before the header lie before the tensors, too.",
                eight_bytes_forgotten,
            ),
            Confusion(
                "The header itself lies before the tensors, all header_bytes of it.",
                header_forgotten,
            ),
            Confusion("data_offsets holds start and end, not start and size.", size_for_end),
            Confusion("end is the first byte after the tensor.", last_byte_for_end),
            Confusion("The length is little-endian: the smallest byte comes first.", big_endian),
        ),
    ),
    Exercise(
        "8.2",
        "turn by position",
        rotate,
        rotary_cases,
        "Lane i and lane i + half turn together by position * theta ** -(i / half).",
        (
            Confusion("Lane i goes with lane i + half, not with its neighbour.", neighbours_paired),
            Confusion(
                "Positions count from 0: the first token is not turned.", one_position_too_far
            ),
            Confusion("The sign of the sine is on the other lane.", turned_backwards),
            Confusion(
                "The exponent runs from 0 to nearly 1: i / half, not i / len(x).",
                half_the_exponent,
            ),
            Confusion("Each pair turns at a speed of its own.", all_pairs_at_one_speed),
            Confusion("The second lane needs the first one's old value.", overwritten_too_early),
        ),
    ),
    Exercise(
        "8.3",
        "your decode loop",
        decode_loop,
        loop_cases,
        "Ask, append, stop after any of the EOS ids or at max_new_tokens.",
        (
            Confusion("A model may have several EOS ids, and any of them ends it.", one_eos_only),
            Confusion("The EOS that ends the answer belongs to it here.", eos_left_out),
            Confusion(
                "That is one token more than max_new_tokens.",
                one_token_too_many,
            ),
            Confusion(
                "An EOS in the prompt, which every chat template has, ends nothing.",
                eos_of_the_prompt,
            ),
            Confusion(
                "The very first token may be an EOS: check it as well.", first_token_unchecked
            ),
            Confusion(LAST_TOKEN_FED, last_token_fed),
            Confusion(LAST_TOKEN_FED, last_token_fed_at_once),
            Confusion("The model needs all tokens so far, the prompt included.", prompt_forgotten),
        ),
    ),
)
