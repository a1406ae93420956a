"""The command line of a training run: generated from the config dataclasses, with Megatron-LM's spellings accepted."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fmeg.config import DTYPES, ROPE_SCALINGS, RopeScaling
from fmeg.training.presets import PRESETS
from fmeg.training.run import RunConfig

# Megatron-LM's flags that have another name here, and what they stand for. A flag with a value keeps its value last.
MEGATRON_FLAGS: dict[str, list[str]] = {
    "--swiglu": ["--gated-linear-unit", "--activation", "silu"],
    "--squared-relu": ["--activation", "squared_relu"],
    "--openai-gelu": ["--activation", "gelu_tanh"],
    "--disable-bias-linear": ["--no-add-bias-linear"],
    "--untie-embeddings-and-output-weights": ["--no-share-embeddings-and-output-weights"],
    "--apply-layernorm-1p": ["--layernorm-zero-centered-gamma"],
    "--recompute-activations": ["--recompute-granularity", "selective"],
    "--group-query-attention": [],
    "--norm-epsilon": ["--layernorm-epsilon"],
    "--use-rotary-position-embeddings": ["--position-embedding-type", "rope"],
    "--no-position-embedding": [],  # rope and "none" have no table anyway
}


def parse_args(argv: Sequence[str]) -> RunConfig:
    """A RunConfig from flags: `--config` names the preset that they change. Exits with a message for bad flags.

    >>> parse_args(["--config", "tiny", "--num-layers", "3", "--swiglu"]).model.num_layers
    3
    """
    import tyro

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", choices=sorted(PRESETS), default="quickstart")
    chosen, rest = first.parse_known_args(_expand_megatron_flags(argv))
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_dtype_rule)
    registry.primitive_rule(_rope_scaling_rule)
    presets = "\n".join(f"  {name}: {(make.__doc__ or '').splitlines()[0]}" for name, make in sorted(PRESETS.items()))
    return tyro.cli(
        RunConfig,
        args=rest,
        default=PRESETS[chosen.config](),
        registry=registry,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
        description=(
            "Train a GPT on a text file. Start from a preset with --config NAME (default quickstart) and change single "
            f"fields by flags; the defaults shown are those of the preset.\n\nPresets:\n{presets}"
        ),
    )


def main(run: Callable[[RunConfig], Any]) -> None:
    """Parse the command line and run; an error that a user can mend is one line and exit status 2."""
    try:
        run(parse_args(sys.argv[1:]))
        if dist.is_initialized():
            dist.destroy_process_group()
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the last checkpoint, if there is one, can be resumed with --load", file=sys.stderr)
        sys.exit(130)


def _expand_megatron_flags(argv: Sequence[str]) -> list[str]:
    """Flags in Megatron's spelling replaced by fmeg's; `--use-rope-scaling [--rope-scaling-factor F]` becomes one flag."""
    out: list[str] = []
    for word in argv:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        out += [*MEGATRON_FLAGS[flag], *([value] if equals else [])] if flag in MEGATRON_FLAGS else [word]
    if "--use-rope-scaling" in out:
        out.remove("--use-rope-scaling")
        scaling = "llama3"
        if "--rope-scaling-factor" in out:
            i = out.index("--rope-scaling-factor")
            scaling += f":factor={out[i + 1]}" if i + 1 < len(out) else ""
            del out[i : i + 2]
        out += ["--rope-scaling", scaling]
    return out


def parse_rope_scaling(text: str) -> RopeScaling | None:
    """`none`, or a kind with its fields.

    >>> parse_rope_scaling("llama3:factor=32,low_freq_factor=1").factor
    32.0
    """
    kind, _, fields = text.partition(":")
    if kind.lower() == "none":
        return None
    if kind not in ROPE_SCALINGS:
        raise ValueError(f"rope scaling is {kind!r}: must be none, {' or '.join(ROPE_SCALINGS)}, then :name=value,...")
    cls = ROPE_SCALINGS[kind]
    types: dict[str, Any] = {f.name: float if f.default is None else type(f.default) for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for item in filter(None, fields.split(",")):
        name, _, value = item.partition("=")
        if name not in types:
            raise ValueError(f"rope scaling {kind} has no field {name!r}: its fields are {', '.join(types)}")
        values[name] = value.lower() == "true" if types[name] is bool else types[name](value)
    return cls(**values)


def _format_rope_scaling(scaling: Any) -> list[str]:
    if scaling is None:
        return ["none"]
    kind = next(kind for kind, cls in ROPE_SCALINGS.items() if isinstance(scaling, cls))
    fields = ",".join(f"{f.name}={getattr(scaling, f.name)}" for f in dataclasses.fields(scaling))
    return [f"{kind}:{fields}"]


def _rope_scaling_rule(info: Any) -> Any:
    import tyro

    if info.type != RopeScaling | None:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="none|llama3[:NAME=VALUE,...]|yarn[:NAME=VALUE,...]",
        instance_from_str=lambda words: parse_rope_scaling(words[0]),
        is_instance=lambda value: value is None or isinstance(value, tuple(ROPE_SCALINGS.values())),
        str_from_instance=_format_rope_scaling,
    )


def _dtype_rule(info: Any) -> Any:
    import tyro

    if info.type is not torch.dtype:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join(DTYPES),
        instance_from_str=lambda words: DTYPES[words[0]],
        is_instance=lambda value: isinstance(value, torch.dtype),
        str_from_instance=lambda value: [str(value).removeprefix("torch.")],
        choices=tuple(DTYPES),
    )
