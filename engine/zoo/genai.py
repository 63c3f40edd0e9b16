"""genai_config.json: the exporter's own description of a decoder."""

from __future__ import annotations

from engine.zoo.hybrid_geometry import HybridGeometry
from engine.zoo.tokenizer_json import json_bytes
from engine.zoo.writer import MODEL_FILE, DecoderGeometry

CONFIG_FILE = "genai_config.json"


def genai_config(
    geometry: DecoderGeometry | HybridGeometry, *, bos: int, eos: int, pad: int, context: int, family: str = "llama"
) -> bytes:
    """genai_config.json as the exporter writes it: for a card where activations are float16, else for the CPU."""
    hybrid = isinstance(geometry, HybridGeometry)
    card = isinstance(geometry, HybridGeometry) or geometry.half
    carried = ("conv", "recurrent") if hybrid else ()
    return json_bytes(
        {
            "model": {
                "bos_token_id": bos,
                "context_length": context,
                "decoder": {
                    "session_options": {
                        "log_id": "onnxruntime-genai",
                        "provider_options": [{"cuda": {"enable_cuda_graph": "0"}}] if card else [],
                    },
                    "filename": MODEL_FILE,
                    "head_size": geometry.head_size,
                    "hidden_size": geometry.hidden,
                    "inputs": {
                        "input_ids": "input_ids",
                        "attention_mask": "attention_mask",
                        **({"position_ids": "position_ids"} if hybrid else {}),
                        "past_key_names": "past_key_values.%d.key",
                        "past_value_names": "past_key_values.%d.value",
                        **{f"past_{state}_names": f"past.%d.{state}" for state in carried},
                    },
                    "outputs": {
                        "logits": "logits",
                        "present_key_names": "present.%d.key",
                        "present_value_names": "present.%d.value",
                        **{f"present_{state}_names": f"present.%d.{state}" for state in carried},
                    },
                    "num_attention_heads": geometry.heads,
                    "num_hidden_layers": geometry.layers,
                    "num_key_value_heads": geometry.kv_heads,
                },
                "eos_token_id": eos,
                "pad_token_id": pad,
                "type": family,
                "vocab_size": geometry.vocabulary,
            },
            "search": {
                "diversity_penalty": 0.0,
                "do_sample": False,
                "early_stopping": True,
                "length_penalty": 1.0,
                "max_length": context,
                "min_length": 0,
                "no_repeat_ngram_size": 0,
                "num_beams": 1,
                "num_return_sequences": 1,
                "past_present_share_buffer": True,
                "repetition_penalty": 1.0,
                "temperature": 1.0,
                "top_k": 50,
                "top_p": 1.0,
            },
        }
    )
