"""The paper's released models, of 1 to 8 billion parameters: load one, and let it write.

    pip install huggingface_hub tokenizers
    hf download facebook/PhysicsLM4.2__LlamaCanon-1B-Nemo-2T-lr0.003 --local-dir llama
    python examples/released.py llama --prompt "Galileo Galilei climbed the Leaning Tower of Pisa"

The author has released sixteen Llamas, half of them with Canon layers
(github.com/zhuzeyuan/PhysicsLM4). `load(folder)` returns one as a CanonGPT. Section 1 is what they
compute differently from our Transformer, section 2 reads the files, section 3 is the command.
"""

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where canon_gpt.py is
from canon_gpt import BLOCK_BUDGET, MIXERS, POSITIONS, Attention, Canon, CanonGPT, Config
from canon_gpt import Positions, Refused, RMSNorm, canon_at, require
from canon_gpt import rotary_angles, rotate
from tasks import make_parser

# ---- 1. His Llama ----------------------------------------------------------
#
# There are H heads of queries, and G of keys and values, each K wide. In the 8B models, H is 32 and
# G is 8, so four heads share their keys and values ("grouped queries"). In the others, G is H.


@dataclasses.dataclass
class LlamaConfig(Config):
    mixer: str = "llama"
    pos: str = "llama"
    n_kv_head: int = 12  # G
    qk_norm: bool = False
    rope_dim: int = 64  # how many channels of a head are turned, the first ones
    rope_theta: int = 10000
    mlp_width: int = 2048
    eos_token_id: int | list | None = None  # ends a text


class LlamaNorm(RMSNorm):
    eps = 1e-5  # ours is 1e-6


class PointB(nn.Module):
    """All that he has between projections and heads: QK-norm, then Canon-B, then a copy of keys and
    values for each head. In `Attention` it takes the place of Canon-B."""

    def __init__(self, config):
        super().__init__()
        H, G = config.n_head, config.n_kv_head
        K = config.d_model // H
        self.widths = [H * K, G * K, G * K]
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        if config.qk_norm:  # over all heads together, as in OLMo 2; Qwen3 norms each head alone
            self.q_norm, self.k_norm = LlamaNorm(H * K), LlamaNorm(G * K)
        self.canon = canon_at("b", sum(self.widths), config)
        # Which of the H + 2G heads in x have q of heads 0, 1, .. H - 1, then k, then v.
        k = [H + h * G // H for h in range(H)]
        v = [G + head for head in k]
        self.order = list(range(H)) + k + v
        self.head_width = K

    def forward(self, x, state=None):  # (B, T, (H + 2G) K) -> (B, T, 3HK)
        q, k, v = x.split(self.widths, dim=-1)
        x = torch.cat([self.q_norm(q), self.k_norm(k), v], dim=-1)
        x = self.canon(x, state).unflatten(-1, (-1, self.head_width))
        return x[:, :, self.order].flatten(2)


class LlamaAttention(Attention):
    def __init__(self, config):
        super().__init__(config)
        self.canon_b = PointB(config)
        self.qkv = nn.Linear(config.d_model, sum(self.canon_b.widths), bias=False)
        # The MLP gets the rest of the budget: here what its three matrices need.
        self.budget = BLOCK_BUDGET - 3 * config.mlp_width / config.d_model


class LlamaRotary(Positions):
    def __init__(self, config):
        super().__init__(config)
        self.n_turned = config.rope_dim
        self.theta = config.rope_theta

    def turn(self, x, start):
        # He turns channels 0 and 1 together, 2 and 3, and so on. `rotate` turns pairs that are
        # n_turned / 2 apart, so put the even channels before the odd ones. This leaves q.k as it
        # is, because the order is the same in q and k.
        turned, rest = x[..., : self.n_turned], x[..., self.n_turned :]
        x = torch.cat([turned[..., 0::2], turned[..., 1::2], rest], dim=-1)
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        angles = rotary_angles(positions, self.n_turned, self.theta)
        return rotate(x, angles.cos(), angles.sin())


MIXERS["llama"] = LlamaAttention
POSITIONS["llama"] = LlamaRotary

# ---- 2. The files ----------------------------------------------------------
#
# A release is what Lingua, his training code, saves: params.json and consolidated.pth. His code for
# Hugging Face's library saves config.json and safetensors, with other names.

# Our names of weights, Lingua's, and Hugging Face's. Where ours has several rows, our matrix is his
# matrices one below the other. All but the first three rows are in each block.
NAMES = """
embed                 tok_embeddings       embed_tokens
norm                  norm                 norm
head                  output               lm_head
norm1                 attention_norm       input_layernorm
canon_a               canonA               canonA
mixer.qkv             attention.wq         self_attn.q_proj
mixer.qkv             attention.wk         self_attn.k_proj
mixer.qkv             attention.wv         self_attn.v_proj
mixer.canon_b.q_norm  attention.q_norm     self_attn.q_norm
mixer.canon_b.k_norm  attention.k_norm     self_attn.k_norm
mixer.canon_b.canon   attention.canonB     self_attn.canonB
mixer.out             attention.wo         self_attn.o_proj
norm2                 ffn_norm             post_attention_layernorm
canon_c               canonC               canonC
mlp.up                feed_forward.w1      mlp.gate_proj
mlp.up                feed_forward.w3      mlp.up_proj
mlp.canon_d           feed_forward.canonD  mlp.canonD
mlp.down              feed_forward.w2      mlp.down_proj
"""
ROWS = [line.split() for line in NAMES.strip().splitlines()]

SETTINGS = {  # Hugging Face's names, and Lingua's
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "seq_len",
    "rms_norm_eps": "norm_eps",
}
FIXED = {  # the same in all sixteen models; other values are refused
    "norm_eps": 1e-5,
    "canon_kernel": 4,
    "canon_residual": True,
    "rope_version": "lingua",
    "model_type": "LlamaCanon",
    "model_name": None,  # set in his linear models
    "hidden_act": "silu",
}
# What else a model may say: what is read, and what does not change what given weights compute. Any
# other setting must be off, None or False.
KNOWN = """
seq_len n_layers n_heads n_kv_heads canon_set qk_norm rope_dim rope_theta eos_token_id

dim vocab_size hidden_dim hidden_size intermediate_size head_dim multiple_of ffn_dim_multiplier
partial_rotary_factor max_seqlen init_base_std init_std_factor initializer_range seed attn_impl
z_loss attention_dropout pretraining_tp use_cache dtype torch_dtype bos_token_id pad_token_id
architectures auto_map transformers_version
""".split()


def load(folder, dtype=torch.bfloat16, device="cpu"):
    """The model in this folder. Raises Refused if it is none of the released ones, or damaged.

    Loading takes no more memory than the weights, in dtype, and the largest matrix.
    """
    folder = Path(folder)
    read = read_lingua if (folder / "default").is_dir() else read_hugging_face
    settings, weights = read(folder)
    check_settings(settings)
    return make_model(settings, weights, dtype, device)


def read_file(file, read):
    """What `read` makes of the file. Raises Refused if it is missing or damaged."""
    try:
        return read(file)
    except Exception as error:  # a damaged file fails in many ways
        fault = f"missing, damaged, or a git-lfs pointer in its place ({type(error).__name__})"
        raise Refused(f"{file} is {fault}; download it again") from None


def read_json(file):
    return dict(json.loads(file.read_text()))


def read_lingua(folder):
    """His settings, and his weights by name, each of which is read from the disk when used."""

    def read_params(file):
        params = read_json(file)
        return params["model"] | {"seq_len": params["data"]["seq_len"]}

    def read_weights(file):
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)["model"]

    settings = read_file(folder / "default" / "params.json", read_params)
    config = folder / "config.json"
    if config.exists():
        settings["eos_token_id"] = read_file(config, read_json).get("eos_token_id")
    return settings, read_file(folder / "default" / "consolidated.pth", read_weights)


def read_hugging_face(folder):
    """The same. Where an index names the files, no other file is read."""
    from safetensors.torch import load_file

    config = read_file(folder / "config.json", read_json)
    for name in ("rope_version", "rms_norm_eps"):  # his defaults are not those of his models
        require(name in config, name, None, "config.json must say it")
    files = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = read_file(index, lambda file: read_json(file)["weight_map"])
        files = sorted(set(places.values()))
    weights = {}
    for file in files:
        part = read_file(folder / file, load_file)
        twice = sorted(weights.keys() & part.keys())
        require(not twice, "weights", twice[:1], "in two files")
        weights |= part
    return in_lingua(config, weights)


def in_lingua(config, weights):
    """Settings and weights in Lingua's names."""
    settings = {SETTINGS.get(name, name): value for name, value in config.items()}
    renamed = {}
    for name, weight in weights.items():
        for _, lingua, hugging_face in ROWS:
            name = name.replace(hugging_face, lingua)
        renamed[name.removeprefix("model.")] = weight
    return settings, renamed


def check_settings(settings):
    """Refuse settings that are missing, and those that would make it another model."""
    for name, only in FIXED.items():
        value = settings.get(name, only)
        require(value == only, name, value, f"allowed: {only}")
    for name in ("n_layers", "n_heads", "seq_len", "rope_theta"):
        value = settings.get(name)
        require(isinstance(value, (int, float)) and value > 0, name, value, "allowed: a number")
    for name, value in settings.items():
        known = name in FIXED or name in KNOWN
        require(known or value in (None, False), name, value, "his sixteen models don't have it")


def make_model(settings, weights, dtype, device):
    """A CanonGPT with these settings and weights. It takes the weights out of their dict."""
    for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        require(name in weights, "weights", name, "not in the file")
    vocab_size, D = weights["tok_embeddings.weight"].shape
    H = settings["n_heads"]
    head_dim = settings.get("head_dim") or D // H
    require(head_dim * H == D, "head_dim", head_dim, f"with {H} heads allowed: {D // H}")
    config = LlamaConfig(
        vocab_size=vocab_size,
        block_size=settings["seq_len"],
        n_layer=settings["n_layers"],
        n_head=H,
        d_model=D,
        canon="".join(re.findall("[A-D]", settings.get("canon_set", ""))),  # "abcd" has no layers
        n_kv_head=settings.get("n_kv_heads") or H,
        qk_norm=settings.get("qk_norm", False),
        rope_dim=settings.get("rope_dim") or D // H,
        rope_theta=int(settings["rope_theta"]),
        mlp_width=len(weights["layers.0.feed_forward.w1.weight"]),
        eos_token_id=settings.get("eos_token_id"),
    )
    with torch.device("meta"):  # shapes only
        model = CanonGPT(config)
        model.norm = LlamaNorm(D)
        for block in model.blocks:
            block.norm1, block.norm2 = LlamaNorm(D), LlamaNorm(D)
    ours = {name: convert(name, weights, dtype, device) for name in model.state_dict()}
    require(not weights, "weights", list(weights)[:1], "not in such a Llama")
    for name, weight in model.state_dict().items():
        allowed = f"the settings say {tuple(weight.shape)}"
        require(ours[name].shape == weight.shape, name, tuple(ours[name].shape), allowed)
    model.load_state_dict(ours, assign=True)
    return model.eval()


def convert(name, weights, dtype, device):
    """Our weight of this name."""
    block, name = re.fullmatch(r"(blocks\.\d+\.)?(.*)\.weight", name).groups(default="")
    parts = []
    for row in ROWS:
        if row[0] == name:
            his = f"{block.replace('blocks', 'layers')}{row[1]}.weight"
            require(his in weights, "weights", his, "not in the file")
            parts.append(weights.pop(his).to(device, dtype))
    weight = torch.cat(parts) if len(parts) > 1 else parts[0]  # cat would copy
    if weight.dim() == 3:  # Conv1d's (width, 1, kernel), the weight of the oldest token first
        weight = weight[:, 0].t().flip(0).contiguous()  # findings/fused_strides.sh says why
    return weight


# ---- 3. The command --------------------------------------------------------


def main(argv=None):
    parser = make_parser(__file__, __doc__)
    parser.add_argument("folder", type=Path, help="a downloaded model")
    parser.add_argument("--prompt", help="a text, or numbers of tokens if there is no tokenizer")
    parser.add_argument("--length", type=int, default=50, help="how many tokens to write (50)")
    args = parser.parse_args(argv)
    try:
        model = load(args.folder, device="cuda" if torch.cuda.is_available() else "cpu")
        total = model.parameter_counts()["total"]
        canon = sum(m.weight.numel() for m in model.modules() if isinstance(m, Canon))
        print(f"{total:,} weights, {canon:,} of them in Canon layers")
        print(model.config)
        if args.prompt is not None:
            print(continuation(model, args.folder / "tokenizer.json", args.prompt, args.length))
    except (Refused, ModuleNotFoundError) as error:
        parser.error(str(error))


def continuation(model, file, prompt, length):
    """The prompt, and the likeliest tokens after it, up to the model's end of a text. Without the
    tokenizer's file, a text is the numbers of its tokens."""
    require(length >= 1, "length", length, "allowed: 1 or more")
    if file.exists():
        from tokenizers import Tokenizer

        tokenizer = read_file(file, lambda file: Tokenizer.from_file(str(file)))
        tokens = tokenizer.encode(prompt).ids
    else:
        allowed = f"allowed: numbers of tokens, because there is no {file}"
        require(re.fullmatch(r"[\d\s]+", prompt), "prompt", prompt, allowed)
        tokens = [int(number) for number in prompt.split()]
    size = model.config.vocab_size
    allowed = f"allowed: one token or more, below {size}"
    require(tokens and max(tokens) < size, "prompt", tokens, allowed)
    ends = model.config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    prompt = torch.tensor([tokens], device=model.embed.weight.device)
    written = model.generate(prompt, length, temperature=0, stop=ends[0])[0, len(tokens) :]
    tokens += itertools.takewhile(lambda token: token not in ends, written.tolist())
    return tokenizer.decode(tokens) if file.exists() else " ".join(map(str, tokens))


if __name__ == "__main__":
    main()
