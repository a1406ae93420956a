"""Text as data: every token is seen, batches are functions of the step, evaluation counts each label once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fmeg import random
from fmeg.data.text import (
    TextData,
    encode_text,
    evaluation_batches,
    make_batches,
    read_text,
    split_text,
    train_tokenizer,
    unigram_bits_per_byte,
)


def test_labels_are_the_next_tokens_and_an_epoch_has_no_repeats() -> None:
    tokens = torch.arange(1000, dtype=torch.int32)
    batches = make_batches(tokens, batch_size=3, seq_length=16, key=random.key(0))
    num_samples = (1000 - 1) // 16 - 1
    starts = []
    for step in range(num_samples // 3):
        batch = batches(step)
        assert torch.equal(batch["labels"], batch["tokens"] + 1)
        starts += batch["tokens"][:, 0].tolist()
    assert len(set(starts)) == len(starts)
    assert len({start % 16 for start in starts}) == 1
    assert starts != sorted(starts)


def test_batches_depend_on_the_step_and_the_key_alone() -> None:
    tokens = torch.arange(500, dtype=torch.int32)

    def tokens_of(seed: int, steps: list[int]) -> list[torch.Tensor]:
        batches = make_batches(tokens, batch_size=4, seq_length=8, key=random.key(seed))
        return [batches(step)["tokens"] for step in steps]

    a, b = tokens_of(0, [0, 7, 40]), tokens_of(0, [40, 7, 0])
    assert all(torch.equal(x, y) for x, y in zip(a, reversed(b), strict=True))
    assert not torch.equal(a[0], tokens_of(1, [0])[0])


def test_a_batch_size_does_not_change_the_order_of_samples() -> None:
    tokens = torch.arange(500, dtype=torch.int32)
    one, four = (make_batches(tokens, batch_size=size, seq_length=8, key=random.key(0)) for size in (1, 4))
    assert torch.equal(torch.cat([one(i)["tokens"] for i in range(8)]), torch.cat([four(i)["tokens"] for i in range(2)]))


@pytest.mark.parametrize("length", [18, 33, 100])
def test_every_text_of_at_least_one_sample_gives_batches(length: int) -> None:
    batches = make_batches(torch.arange(length), batch_size=2, seq_length=16, key=random.key(0))
    for step in range(20):
        assert torch.equal(batches(step)["labels"], batches(step)["tokens"] + 1)


@pytest.mark.parametrize("length", [9, 33, 64, 65, 100])
def test_evaluation_has_each_label_once(length: int) -> None:
    tokens = torch.arange(length)
    batches = evaluation_batches(tokens, batch_size=2, seq_length=8)
    kept = [batch[name][batch["loss_mask"] > 0] for batch in batches for name in ("tokens", "labels")]
    assert torch.equal(torch.cat(kept[::2]), tokens[:-1])
    assert torch.equal(torch.cat(kept[1::2]), tokens[1:])


def test_split_and_tokens_cover_the_text() -> None:
    text = "".join(f"{i} line of words\n" for i in range(400))
    train, held_out = split_text(text)
    assert train + held_out == text
    assert train.endswith("\n")
    assert len(held_out) == pytest.approx(0.05 * len(text), rel=0.1)
    tokenizer = train_tokenizer(train, 300)
    data = encode_text(text, tokenizer, seq_length=8)
    assert tokenizer.decode(data.train.tolist()) == train
    assert tokenizer.decode(data.held_out.tolist()) == held_out
    assert tokenizer.decode(tokenizer.encode("ünïcödé \t\n 日本").ids) == "ünïcödé \t\n 日本"


def test_unigram_of_a_known_distribution() -> None:
    """Tokens 0 and 1, equally often, 4 bytes each: about a quarter of a bit per byte."""
    tokens = torch.tensor([0, 1] * 5000, dtype=torch.int32)
    data = TextData(tokens, tokens[:100], 40_000, 400)
    assert unigram_bits_per_byte(data, 2) == pytest.approx(math.log2(2) / 4, rel=1e-3)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the text file"):
        read_text(tmp_path / "missing")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot read the text file"):
        read_text(binary)
    with pytest.raises(ValueError, match="vocab_size is 100: a byte-level tokenizer needs at least 256"):
        train_tokenizer("text", 100)
    text = "a b c\n" * 100
    with pytest.raises(ValueError, match=r"the held-out part of the text has \d+ tokens, too few"):
        encode_text(text, train_tokenizer(text, 256), seq_length=64)
