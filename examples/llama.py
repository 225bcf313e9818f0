"""Canon layers in Hugging Face's Llama:

    pip install transformers
    python examples/llama.py

This puts Canon layers into a small new Llama, and checks them. For your own model, copy the
functions that you need.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Canon(torch.nn.Module):
    def __init__(self, width, kernel=4):
        super().__init__()
        bound = kernel**-0.5  # as in Conv1d; GPT's normal(0, 0.02) would add next to nothing
        self.weight = torch.nn.Parameter(torch.empty(kernel, width).uniform_(-bound, bound))

    def forward(self, x):  # (B, T, width) -> same
        n, T = len(self.weight) - 1, x.shape[1]
        padded = torch.nn.functional.pad(x, (0, 0, n, 0))  # n rows of zeros before the first token
        y = x
        for i, w in enumerate(self.weight):
            y = y + w * padded[:, n - i : n - i + T]  # w_i * h_{t-i}
        return y.to(x.dtype)  # under autocast x may be bfloat16, and the weights float32


def with_canon(module, width):
    """The module, and a Canon layer on its output, on the same device and in the same dtype."""
    return torch.nn.Sequential(module, Canon(width).to(module.weight))


def add_canon(model, points="abcd"):
    """Put Canon layers into a new LlamaForCausalLM, before it is trained from scratch.

    points  some of "abcd"; start with "ac", which changes nothing inside attention and MLP
    """
    width = model.config.hidden_size
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if "a" in points:
            layer.input_layernorm = with_canon(layer.input_layernorm, width)
        # Channels do not mix, so a layer on q, k and v together is the same as one on each.
        if "b" in points:
            for name in ("q_proj", "k_proj", "v_proj"):
                linear = getattr(attention, name)
                setattr(attention, name, with_canon(linear, linear.out_features))
        if "c" in points:
            layer.post_attention_layernorm = with_canon(layer.post_attention_layernorm, width)
        if "d" in points:
            for name in ("gate_proj", "up_proj"):
                linear = getattr(mlp, name)
                setattr(mlp, name, with_canon(linear, linear.out_features))
        attention.register_forward_pre_hook(refuse_cache, with_kwargs=True)
    model.config.use_cache = False
    model.generation_config.use_cache = False


def refuse_cache(attention, args, kwargs):
    """With a cache, a block sees one token at a time, but a Canon layer also needs the three before
    it. Without this hook generation would be wrong, without any warning."""
    for name in ("cache", "past_key_values"):  # in transformers 5.24 and in 4.57
        if kwargs.get(name) is not None:
            raise ValueError("these Canon layers cannot work with a cache: use_cache must be False")


def weight_groups(model, weight_decay):
    """The optimizer's groups. Matrices decay; Canon's weights, norms and biases don't."""
    canon = {m.weight for m in model.modules() if isinstance(m, Canon)}
    learning = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in learning if p.dim() < 2 or p in canon], "weight_decay": 0.0},
        {
            "params": [p for p in learning if p.dim() >= 2 and p not in canon],
            "weight_decay": weight_decay,
        },
    ]


@torch.no_grad()
def reach(model, position, length=16):
    """Where logits change with the token at `position` in the first of three sequences. All these
    places must be in the first sequence, and none before `position`.

    Returns a list of (sequence, position). Call it in eval() mode.
    """
    tokens = torch.randint(model.config.vocab_size, (3, length), device=model.device)
    changed = tokens.clone()
    changed[0, position] = (changed[0, position] + 1) % model.config.vocab_size
    difference = (model(tokens).logits - model(changed).logits).abs().amax(-1)  # (3, length)
    return [tuple(place) for place in (difference > 1e-4).nonzero().tolist()]


# ---- Try it on a small Llama -----------------------------------------------


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=168,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    add_canon(model)
    changed = reach(model, position=8)
    assert changed == [(0, position) for position in range(8, 16)], changed
    count = sum(isinstance(module, Canon) for module in model.modules())
    print(f"{count} Canon layers; a token changes no other sequence, and nothing before it")


if __name__ == "__main__":
    main()
