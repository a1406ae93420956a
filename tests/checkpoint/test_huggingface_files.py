"""Hugging Face directories: every spelling that exists is read, what is damaged or unknown is refused by name, and what
is written is complete and holds the same bits."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fmeg
from fmeg import tree
from fmeg.checkpoint import huggingface
from fmeg.checkpoint.huggingface import from_hf, to_hf

DATA = Path(__file__).parent.parent / "data" / "huggingface"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


def copy(name: str, target: Path, config: dict[str, Any] | None = None, drop: tuple[str, ...] = ()) -> Path:
    """A stored model in `target`, some options of its config.json changed or dropped."""
    raw = json.loads((DATA / name / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in drop} | (config or {})
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(raw))
    shutil.copyfile(DATA / name / WEIGHTS, target / WEIGHTS)
    return target


def rewrite(directory: Path, change: Any) -> Path:
    tensors = change(load_file(directory / WEIGHTS))
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / WEIGHTS)
    return directory


def assert_equal(got: Any, want: Any) -> None:
    for (path, a), (other, b) in zip(tree.flatten_with_path(got), tree.flatten_with_path(want), strict=True):
        assert path == other
        assert a.dtype == b.dtype
        assert torch.equal(a, b), path


def tiny(**changes: Any) -> fmeg.TransformerConfig:
    fields = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 96}
    fields |= {"normalization": "RMSNorm", "position_embedding_type": "rope", "gated_linear_unit": True}
    fields |= {"activation": "silu", "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return fmeg.TransformerConfig(**fields | {"max_position_embeddings": 64} | changes)


# --- spellings of config.json


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, LLAMA3 | {"rope_type": "llama3"}, YARN | {"type": "yarn"}])
def test_old_and_new_spelling_of_rope_are_one(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    old = {"rope_theta": 5e4, "rope_scaling": scaling, "torch_dtype": "float32"}
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    numbers = {key: value for key, value in (scaling or {}).items() if key not in ("type", "rope_type")}
    new = {"rope_parameters": numbers | {"rope_theta": 5e4, "rope_type": kind}}
    one, params = from_hf(copy("llama", tmp_path / "old", old, drop=("rope_parameters", "dtype", "head_dim")))
    two, again = from_hf(copy("llama", tmp_path / "new", new))
    assert one == two
    assert one.rotary_base == 5e4
    assert type(one.rope_scaling) is type(
        {"default": None, "llama3": fmeg.Llama3RopeScaling(), "yarn": fmeg.YarnRopeScaling()}[kind]
    )
    assert_equal(params, again)


def test_yarn_options(tmp_path: Path) -> None:
    def scaling(**options: Any) -> Any:
        rope = YARN | {"rope_type": "yarn"} | options
        return from_hf(copy("llama", tmp_path, {"rope_parameters": rope | {"rope_theta": 1e4}}))[0].rope_scaling

    yarn = fmeg.YarnRopeScaling(factor=4.0, original_max_position_embeddings=16)
    assert scaling() == scaling(mscale=2.0) == scaling(mscale_all_dim=1.0, beta_fast=None, beta_slow=0) == yarn
    assert scaling(mscale=2.0, mscale_all_dim=1.0).mscale == 2.0
    assert scaling(attention_factor=1.5, truncate=False, beta_fast=16).attention_factor == 1.5
    assert scaling(factor=None).factor == 4.0  # max_position_embeddings / original_max_position_embeddings


def test_absent_or_null_head_dim_is_derived_and_another_one_wins(tmp_path: Path) -> None:
    for raw, drop in (({}, ("head_dim",)), ({"head_dim": None}, ()), ({}, ())):
        assert from_hf(copy("llama", tmp_path, raw, drop))[0].kv_channels is None
    assert from_hf(DATA / "qwen3")[0].head_dim == 16


@pytest.mark.parametrize(
    ("options", "window", "used"),
    [
        ({"use_sliding_window": False, "sliding_window": 8, "layer_types": None}, None, None),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 2},
            (7, 0),
            (0, 0, 1),
        ),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 0}, (7, 0), None),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None}, None, None),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": "sfs"}, (7, 0), (1, 0, 1)),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": "sss"}, (7, 0), None),
    ],
)
def test_windows_of_qwen(tmp_path: Path, options: dict[str, Any], window: Any, used: Any) -> None:
    names = {"s": "sliding_attention", "f": "full_attention"}
    kinds = options["layer_types"] and [names[kind] for kind in options["layer_types"]]
    cfg, _ = from_hf(copy("qwen2", tmp_path, options | {"layer_types": kinds}))
    assert (cfg.window_size, cfg.window_attn_skip_freq) == (window, used)


def test_window_of_mistral(tmp_path: Path) -> None:
    assert from_hf(DATA / "mistral_swa")[0].window_size == (7, 0)
    assert from_hf(copy("mistral_swa", tmp_path, {"sliding_window": None}))[0].window_size is None
    assert from_hf(copy("mistral_swa", tmp_path, drop=("sliding_window",)))[0].window_size == (4095, 0)


def test_gpt2_options(tmp_path: Path) -> None:
    cfg, _ = from_hf(DATA / "gpt2")
    assert (cfg.activation, cfg.hidden_dropout, cfg.attention_dropout, cfg.softmax_scale) == (
        "gelu_tanh",
        0.1,
        0.1,
        None,
    )
    assert cfg.share_embeddings_and_output_weights
    changes = {"activation_function": "relu2", "scale_attn_weights": False, "reorder_and_upcast_attn": True}
    cfg, _ = from_hf(copy("gpt2", tmp_path, changes | {"attn_pdrop": 0.0}))
    assert (cfg.activation, cfg.softmax_scale, cfg.attention_dropout) == ("squared_relu", 1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"model_type": "gemma2"}, "model_type 'gemma2' with architectures .* fmeg reads gpt2"),
        (
            "llama",
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification.* not supported",
        ),
        ("llama", {"hidden_act": "gelu_10"}, "hidden_act is 'gelu_10': fmeg supports gelu, gelu_new"),
        (
            "llama",
            {"attention_bias": True},
            "mlp_bias is False: fmeg supports only the value of attention_bias, here True",
        ),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}: fmeg supports only None"),
        ("llama", {"hidden_size": "x"}, "hidden_size is 'x': must be a positive integer"),
        ("llama", {"hidden_size": None}, "hidden_size is None: must be a positive integer"),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6': must be a number"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1: must be true or false"),
        ("llama", {"num_attention_heads": 5}, "num_attention_heads 5 is not divisible by num_query_groups 2"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: fmeg supports only 1.0"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_type is 'linear': fmeg supports default",
        ),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "rope_type is 'longrope'"),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 2.0}}, "has no low_freq_factor, high_freq_factor"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "rope_parameters is .* one set of rope parameters"),
        ("llama", {"rope_parameters": "x"}, "rope_parameters is 'x'"),
        (
            "qwen2",
            {"layer_types": ["chunked_attention"] * 3},
            "layer_types is .* fmeg supports full_attention and sliding",
        ),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 3},
            "sliding_window is None: fmeg supports a number of tokens",
        ),
        ("qwen3", {"attention_bias": True}, "attention_bias is True: fmeg supports only False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"embd_pdrop": 0.0}, "resid_pdrop 0.1 and embd_pdrop 0.0 differ"),
        ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
    ],
)
def test_options_that_change_the_numbers_are_refused(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        from_hf(copy(name, tmp_path, options))
    assert str(error.value).startswith(f"{tmp_path}/config.json: ")
    assert "\n" not in str(error.value)


# --- tensor files


def test_gpt2_without_prefix_and_with_old_buffers(tmp_path: Path) -> None:
    def old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        for layer in range(3):
            out[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
            out[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4, dtype=torch.float16)
        return out

    assert_equal(from_hf(rewrite(copy("gpt2", tmp_path), old))[1], from_hf(DATA / "gpt2")[1])


def test_llama_without_prefix_and_with_old_buffers(tmp_path: Path) -> None:
    def old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {name.removeprefix("model."): value for name, value in tensors.items()}
        return out | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}

    for name in ("llama", "llama_tied"):
        assert_equal(from_hf(rewrite(copy(name, tmp_path), old))[1], from_hf(DATA / name)[1])


def test_tied_head_may_be_there_if_it_is_equal(tmp_path: Path) -> None:
    def head(add: float) -> Any:
        return lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + add}

    assert_equal(from_hf(rewrite(copy("llama_tied", tmp_path), head(0.0)))[1], from_hf(DATA / "llama_tied")[1])
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight .* untie them"):
        from_hf(rewrite(copy("llama_tied", tmp_path), head(1.0)))


def test_missing_unexpected_and_misshapen_tensors(tmp_path: Path) -> None:
    gone = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"missing {gone}; unexpected none"):
        from_hf(rewrite(copy("llama", tmp_path), lambda t: {n: v for n, v in t.items() if n != gone}))
    with pytest.raises(ValueError, match=r"missing lm_head.weight; unexpected none"):
        from_hf(copy("llama_tied", tmp_path, {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"missing none; unexpected model.layers.0.self_attn.q_proj.bias"):
        from_hf(rewrite(copy("llama", tmp_path), lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    with pytest.raises(ValueError, match=r"down_proj.weight has shape \(32, 48\): the config asks for \(32, 40\)"):
        from_hf(rewrite(copy("llama", tmp_path, {"intermediate_size": 40}), drop_up_and_gate))
    with pytest.raises(ValueError, match=r"embed_tokens.weight has shape \(96, 32\): the config asks for \(90, 32\)"):
        from_hf(copy("llama", tmp_path, {"vocab_size": 90}))
    with pytest.raises(ValueError, match=r"missing .* and 24 more; unexpected none"):
        from_hf(rewrite(copy("llama", tmp_path), lambda t: {}))


def drop_up_and_gate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: v[:40] if "up_proj" in n or "gate_proj" in n else v for n, v in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_is_that_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = rewrite(copy("llama", tmp_path / "in"), lambda t: {name: v.to(dtype) for name, v in t.items()})
    cfg, params = from_hf(directory)
    assert cfg.params_dtype == dtype
    assert {leaf.dtype for leaf in tree.leaves(params)} == {dtype}
    to_hf(tmp_path / "out", cfg, params)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert_files_equal(tmp_path / "out", directory)


def test_mixed_dtypes_are_widened_and_others_refused(tmp_path: Path) -> None:
    def cast(dtype: torch.dtype) -> Any:
        return lambda t: {name: v if "norm" in name else v.to(dtype) for name, v in t.items()}

    cfg, params = from_hf(rewrite(copy("llama", tmp_path), cast(torch.bfloat16)))
    assert cfg.params_dtype == torch.float32
    assert {leaf.dtype for leaf in tree.leaves(params)} == {torch.float32}
    for dtype, name in ((torch.float16, "F16"), (torch.int8, "I8")):
        with pytest.raises(ValueError, match=rf"lm_head.weight is {name}: fmeg supports BF16, F32, F64; convert"):
            from_hf(rewrite(copy("llama", tmp_path), cast(dtype)))


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    directory = copy("llama", tmp_path / "model")
    data = (directory / WEIGHTS).read_bytes()
    for size in (0, 4, 100, len(data) - 1):
        (directory / WEIGHTS).write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"model.safetensors cannot be read") as error:
            from_hf(directory)
        assert "\n" not in str(error.value)
    (directory / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        from_hf(directory)
    for text in ('{"model_type": "lla', "\x80"):
        (directory / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"config.json cannot be read") as error:
            from_hf(directory)
        assert "\n" not in str(error.value)
    (directory / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json holds list: must be a JSON object"):
        from_hf(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        from_hf(directory)
    with pytest.raises(ValueError, match="gpt2-xl is not a directory: fmeg downloads nothing"):
        from_hf("gpt2-xl")
    with pytest.raises(TypeError, match="mesh is 'tp'"):
        from_hf(directory, mesh="tp")  # type: ignore[arg-type]


def test_shards(tmp_path: Path) -> None:
    cfg, params = from_hf(DATA / "qwen3")
    to_hf(tmp_path / "out", cfg, params, max_shard_bytes=40_000)
    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    count = len(files) - 2
    assert count > 2
    shards = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert files == ["config.json", *shards, INDEX]
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    whole = load_file(DATA / "qwen3" / WEIGHTS)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    parts = {}
    for shard in shards:
        part = load_file(tmp_path / "out" / shard)
        assert sum(value.nbytes for value in part.values()) <= 40_000
        assert {name for name, file in index["weight_map"].items() if file == shard} == part.keys()
        parts |= part
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    again, params_again = from_hf(tmp_path / "out")
    assert again == cfg
    assert_equal(params_again, params)


def test_damaged_shards(tmp_path: Path) -> None:
    cfg, params = from_hf(DATA / "llama")
    to_hf(tmp_path / "out", cfg, params, max_shard_bytes=40_000)
    first = min((tmp_path / "out").glob("model-*.safetensors"))
    shutil.copyfile(first, tmp_path / "out" / "copy.safetensors")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    (tmp_path / "out" / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {"x": "copy.safetensors"}}))
    with pytest.raises(ValueError, match=r"holds tensors that another file holds too: lm_head.weight, model"):
        from_hf(tmp_path / "out")
    (tmp_path / "out" / INDEX).write_text(json.dumps(index))
    first.unlink()
    with pytest.raises(ValueError, match=f"{first.name} cannot be read"):
        from_hf(tmp_path / "out")
    (tmp_path / "out" / INDEX).write_text("{}")
    with pytest.raises(ValueError, match=r"index.json has no weight_map"):
        from_hf(tmp_path / "out")


# --- export


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.iterdir()))
def test_import_then_export_is_bit_exact(tmp_path: Path, name: str) -> None:
    cfg, params = from_hf(DATA / name)
    to_hf(tmp_path / "out", cfg, params)
    assert_files_equal(tmp_path / "out", DATA / name)
    again, params_again = from_hf(tmp_path / "out")
    assert again == cfg
    assert_equal(params_again, params)


def assert_files_equal(one: Path, two: Path) -> None:
    a, b = load_file(one / WEIGHTS), load_file(two / WEIGHTS)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_padding_of_the_vocabulary_stays_inside(tmp_path: Path) -> None:
    cfg = tiny(vocab_size=90)
    params = fmeg.init_params(cfg)
    assert params["output"]["weight"].shape == (128, 48)
    to_hf(tmp_path / "out", cfg, params)
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    assert tensors["lm_head.weight"].shape == tensors["model.embed_tokens.weight"].shape == (90, 48)
    _, again = from_hf(tmp_path / "out")
    assert not again["output"]["weight"][90:].any()
    assert_equal(again, params)


def test_explicit_head_dimension_is_exported(tmp_path: Path) -> None:
    cfg = tiny(kv_channels=16)
    to_hf(tmp_path / "out", cfg, fmeg.init_params(cfg))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["head_dim"] == 16
    assert load_file(tmp_path / "out" / WEIGHTS)["model.layers.0.self_attn.q_proj.weight"].shape == (64, 48)
    assert from_hf(tmp_path / "out")[0].kv_channels == 16


def test_a_taken_path_is_refused_and_an_empty_one_used(tmp_path: Path) -> None:
    cfg = tiny()
    params = fmeg.init_params(cfg)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("file", "full"):
        with pytest.raises(ValueError, match=f"{name} exists already: give a path that does not exist"):
            to_hf(tmp_path / name, cfg, params)
    to_hf(tmp_path / "empty", cfg, params)
    to_hf(tmp_path / "new" / "below", cfg, params)
    assert_equal(from_hf(tmp_path / "empty")[1], from_hf(tmp_path / "new" / "below")[1])
    assert (tmp_path / "full" / "notes").read_text() == "mine"
    config, weights = ((tmp_path / "empty" / name).stat().st_mode for name in ("config.json", WEIGHTS))
    assert config == weights


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    cfg = tiny()
    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "save_file", fail)
        with pytest.raises(OSError, match="No space left"):
            to_hf(tmp_path / "out", cfg, fmeg.init_params(cfg))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="parameters do not match the config"):
        to_hf(tmp_path / "out", cfg.replace(num_layers=3), fmeg.init_params(cfg))
    mixed = fmeg.init_params(cfg) | {"final_norm": {"scale": torch.ones(48, dtype=torch.float64)}}
    with pytest.raises(ValueError, match=r"dtype torch.float32, torch.float64: cast all of them to one of float32"):
        to_hf(tmp_path / "out", cfg, mixed)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layernorm_zero_centered_gamma": True}, "llama, needs layernorm_zero_centered_gamma False, which is True"),
        ({"softmax_scale": 0.5}, "llama, needs softmax_scale None or .*, which is 0.5"),
        ({"rotary_percent": 0.5}, r"llama, needs rotary_percent 1.0, which is 0.5"),
        ({"rotary_interleaved": True}, "llama, needs rotary_interleaved False"),
        ({"gated_linear_unit": False}, "llama, needs gated_linear_unit True"),
        ({"normalization": "LayerNorm"}, "llama, needs normalization RMSNorm"),
        ({"position_embedding_type": "none"}, "llama, needs position_embedding_type rope"),
        ({"window_size": (4, 0), "window_attn_skip_freq": (1, 0)}, "needs window_"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, "needs qk_layernorm False, which is True"),
        ({"qk_layernorm": True, "add_bias_linear": True}, "needs qk_layernorm False, which is True"),
    ],
)
def test_what_no_architecture_expresses_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    cfg = tiny(**changes)
    with pytest.raises(ValueError, match="no architecture of gpt2, llama, qwen2, qwen3, mistral.*" + message):
        to_hf(tmp_path / "out", cfg, fmeg.init_params(cfg))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "model_type"),
    [
        ({}, "llama"),
        ({"hidden_size": 50, "kv_channels": 16}, "mistral"),  # transformers' Llama insists on hidden_size % heads == 0
        ({"add_bias_linear": True}, "llama"),
        ({"window_size": (4, 0)}, "mistral"),
        ({"add_qkv_bias": True}, "qwen2"),
        ({"add_qkv_bias": True, "window_size": (4, 0), "window_attn_skip_freq": 2}, "qwen2"),
        ({"qk_layernorm": True}, "qwen3"),
        ({"hidden_dropout": 0.1, "label_smoothing": 0.1, "softmax_scale": 12**-0.5}, "llama"),
    ],
)
def test_the_architecture_follows_from_the_config(tmp_path: Path, changes: dict[str, Any], model_type: str) -> None:
    cfg = tiny(**changes)
    params = fmeg.init_params(cfg)
    to_hf(tmp_path / "out", cfg, params)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == model_type
    assert_equal(from_hf(tmp_path / "out")[1], params)


def test_every_error_is_one_line_that_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "config.json"))) as error:
        from_hf(tmp_path)
    assert "\n" not in str(error.value)
