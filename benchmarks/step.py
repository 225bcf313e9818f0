"""What Canon layers cost in a training step:   python benchmarks/step.py

Each row compares a model with the same Transformer without Canon layers. The two train in turn, a
step each; `ratio` divides their median times. On a GPU: Depo's paper model, 12 layers of 768 dims,
on 16 x 2,048 tokens, compiled, in bfloat16; also with the convolution in plain PyTorch, and Hugging
Face's Llama of the same shape. On a CPU: the nano models, compiled and eager.
"""

import itertools

import torch
from common import Benchmark, times_in_turn

import train
from canon_gpt import CANONS, Canon, CanonGPT, Config
from kernels import causal_conv_pytorch
from tasks import make_task


class PyTorchCanon(Canon):
    """Canon that torch.compile may fuse with its neighbours."""

    def forward(self, x, state=None):
        return causal_conv_pytorch(x, self.weight, self.residual)


CANONS["pytorch"] = PyTorchCanon

MODELS = {
    "Canon-ABCD": dict(canon="abcd"),
    "Canon-AC": dict(canon="ac"),
    "Canon-ABCD in PyTorch": dict(canon="abcd", canon_type="pytorch"),
}


def ours(sizes, **options):
    """A model, and its loss as a function of (forward, tokens, targets, mask)."""
    model = CanonGPT(Config(**{**sizes, **options}))

    def loss(forward, tokens, targets, mask):
        return forward(tokens, targets, mask)[1]

    return model, loss


def llama(sizes):
    """Hugging Face's Llama, likewise."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Compiled, its "sdpa" makes a mask, which rules out flash attention; by another name it won't.
    ALL_ATTENTION_FUNCTIONS.register("causal", sdpa_attention_forward)
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["d_model"],
        intermediate_size=8 * round(sizes["d_model"] / 3),
        num_hidden_layers=sizes["n_layer"],
        num_attention_heads=sizes["n_head"],
        max_position_embeddings=sizes["block_size"],
        attn_implementation="causal",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)

    def loss(forward, tokens, targets, mask):
        targets = targets.masked_fill(~mask, -100)
        return forward(input_ids=tokens, labels=targets, shift_labels=targets).loss

    return model, loss


def training_step(model, loss, compiled, batches, device):
    """A function that trains the model by one step."""
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    forward = torch.compile(model, dynamic=False) if compiled else model

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            nats = loss(forward, *next(batches))
        nats.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # compile
    return step


def compare(bench, name, preset, batch_size, compiled, models, rounds):
    """Rows for these models at the size of a task's preset, beside the model without Canon."""
    torch._dynamo.reset()
    recipe = train.make_recipe(train.preset_parts(preset, name), preset, "float32")
    task, device, sizes = make_task(**recipe.task), bench.device, recipe.model
    batches = []
    for number in range(4):
        tokens, mask = (torch.from_numpy(a).to(device) for a in task.batch(0, number, batch_size))
        batches.append((tokens[:, :-1], tokens[:, 1:], mask[:, 1:]))
    batches = itertools.cycle(batches)
    without = training_step(*ours(sizes), compiled, batches, device)
    for what in models:
        with bench.optional(what):
            model, loss = llama(sizes) if what == "Llama" else ours(sizes, **MODELS[what])
            step = training_step(model, loss, compiled, batches, device)
            ms = times_in_turn({"without": without, "with": step}, device, rounds)
            bench.add(
                what=what,
                task=name,
                how="compiled" if compiled else "eager",
                B=batch_size,
                T=task.block_size,
                parameters=sum(p.numel() for p in model.parameters()),
                without_ms=ms["without"],
                ms=ms["with"],
                ratio=ms["with"][1] / ms["without"][1],
                tokens_per_s=batch_size * task.block_size / ms["with"][1] * 1e3,
            )


def main(argv=None):
    bench = Benchmark(__file__, __doc__, argv)
    everything = [*MODELS, "Llama"]
    if bench.toy:
        compare(bench, "copy", "nano", 2, False, everything, rounds=3)
    elif bench.device == "cuda":
        compare(bench, "depo1", "paper", 16, True, everything, rounds=30)
    else:
        for compiled in (True, False):
            for name in ("depo1", "copy"):
                compare(bench, name, "nano", 32, compiled, ["Canon-ABCD"], rounds=60)


if __name__ == "__main__":
    main()
