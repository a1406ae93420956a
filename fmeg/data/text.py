"""A text file as training data: byte-level BPE tokens, a held-out end, and samples by step number."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmeg import random

HELD_OUT = 0.05
"""Share of the text, its end, that is never trained on."""


@dataclass(frozen=True)
class TextData:
    """Tokens of the training part and of the held-out part (int32), and how many bytes each had."""

    train: Tensor
    held_out: Tensor
    train_bytes: int
    held_out_bytes: int


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; ValueError if it cannot be read or is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the text file {path}: {error}; give the path of a UTF-8 text file") from error
    if not text.strip():
        raise ValueError(f"the text file {path} is empty: give the path of a UTF-8 text file")
    return text


def train_tokenizer(text: str, vocab_size: int) -> Any:
    """A byte-level BPE tokenizer (Sennrich et al. 2016) of at most `vocab_size` entries, learned from `text`.

    >>> tokenizer = train_tokenizer("the cat and the hat and the bat " * 9, 260)
    >>> tokenizer.decode(tokenizer.encode("the cat sat").ids)
    'the cat sat'
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 256:
        raise ValueError(f"vocab_size is {vocab_size}: a byte-level tokenizer needs at least 256, one for each byte")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def split_text(text: str) -> tuple[str, str]:
    """The training part and the held-out end, cut at the end of a line where there is one.

    >>> [len(part) for part in split_text(chr(10).join(["a line"] * 100))]
    [658, 41]
    """
    most = int(len(text) * (1 - HELD_OUT))
    cut = text.rfind("\n", 0, most) + 1 or most
    return text[:cut], text[cut:]


def encode_text(text: str, tokenizer: Any, seq_length: int) -> TextData:
    """Tokens of both parts of `text`. ValueError if a part is shorter than one sample."""
    parts = split_text(text)
    train, held_out = (torch.tensor(tokenizer.encode(part).ids, dtype=torch.int32) for part in parts)
    for name, tokens in (("training", train), ("held-out", held_out)):
        if len(tokens) <= seq_length:
            raise ValueError(
                f"the {name} part of the text has {len(tokens)} tokens, too few for one sample of seq_length {seq_length} "
                "and the token after it: give a longer text or a smaller seq_length"
            )
    return TextData(train, held_out, *(len(part.encode()) for part in parts))


def make_batches(tokens: Tensor, *, batch_size: int, seq_length: int, key: Tensor) -> Callable[[int], dict[str, Tensor]]:
    """`batches(step)`: the batch of a step, a function of its number alone, so that a resumed run goes on where it was.

    The text is cut into samples of `seq_length` tokens; each epoch visits every sample once, in an order drawn from
    `key`, and cuts them elsewhere, by a drawn shift. Result: tokens and labels [B, T], int64.
    """
    # One token less for the label of the last position, and one sample less as room for the shift.
    num_samples = max((len(tokens) - 1) // seq_length - 1, 1)
    room = min(seq_length, len(tokens) - num_samples * seq_length)

    @functools.lru_cache(maxsize=2)
    def epoch_starts(epoch: int) -> Tensor:
        order_key, shift_key = random.split(random.fold_in(key, epoch)).unbind(0)
        shift = int(random.uniform(shift_key, (1,)).item() * room)
        return random.bits(order_key, (num_samples,)).argsort() * seq_length + shift

    def batches(step: int) -> dict[str, Tensor]:
        places = [divmod(i, num_samples) for i in range(step * batch_size, (step + 1) * batch_size)]
        starts = [int(epoch_starts(epoch)[i]) for epoch, i in places]
        rows = torch.stack([tokens[start : start + seq_length + 1] for start in starts]).long()
        return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    return batches


def evaluation_batches(tokens: Tensor, *, batch_size: int, seq_length: int) -> list[dict[str, Tensor]]:
    """All tokens but the first as labels, each once: batches of equal shape, the end filled up and masked."""
    num_rows = math.ceil((len(tokens) - 1) / seq_length)
    num_batches = math.ceil(num_rows / batch_size)
    total = num_batches * batch_size * seq_length
    padded = torch.zeros(total + 1, dtype=torch.int64)
    padded[: len(tokens)] = tokens
    mask = (torch.arange(total) < len(tokens) - 1).float()
    parts = {"tokens": padded[:-1], "labels": padded[1:], "loss_mask": mask}
    cut = {name: part.view(num_batches, batch_size, seq_length) for name, part in parts.items()}
    return [{name: part[i] for name, part in cut.items()} for i in range(num_batches)]


def unigram_bits_per_byte(data: TextData, vocab_size: int) -> float:
    """Bits per byte of the held-out text if every token had its (add-one) frequency in the training text."""
    counts = torch.bincount(data.train, minlength=vocab_size).double() + 1
    log_probs = (counts / counts.sum()).log()
    nats = -log_probs[data.held_out.long()].sum().item()
    return nats / math.log(2) / data.held_out_bytes
