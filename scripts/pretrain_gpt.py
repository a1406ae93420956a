"""Train a GPT on a text file, evaluate it on the text's end, save it and show what it writes. See --help."""

from fmeg.training.cli import main
from fmeg.training.run import RunConfig, run


def pretrain(cfg: RunConfig) -> None:
    report = run(cfg)
    if report is None:  # another rank of torchrun's reports
        return
    print(f"training loss {report.loss:.3f} nats per token, {report.skipped} updates skipped")
    print(
        f"held-out bits per byte {report.held_out_bits_per_byte:.3f}   "
        f"(every token at its own frequency: {report.unigram_bits_per_byte:.3f})"
    )
    print(f"sample:\n{report.sample}")
    if cfg.save is not None:
        print(f"written to {cfg.save}: checkpoint, tokenizer.json, metrics.jsonl, loss.png")


if __name__ == "__main__":
    main(pretrain)
