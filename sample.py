"""See a trained model answer:   python sample.py out/RUN

Shows instances of the run's task with the model's answers, right or wrong:

    <bos> c a , b d , d c , a b , <query_2> b [<ans> c ✓] <query_1> d [<ans> a ✗ <ans> c]

In brackets is the model's answer: ✓ if it is right, or else ✗ and the right one. With --prompt
the model continues your own text, in the task's words:

    python sample.py out/RUN --prompt "<bos> c a , b d , d c , a b , <query_2> b"

`load_model` is for notebooks: it returns the task and the model of a run. If the run uses your own
layer or task, import the file that defines it first:

    python -c "import examples.relatives, sample; sample.main(['out/RUN'])"
"""

from pathlib import Path

import torch

from canon_gpt import CanonGPT, Refused, require
from tasks import device_of, make_parser, wrapped
from train import load_checkpoint, read_config, task_and_config

MOST_NEW_TOKENS = 160


def load_model(folder):
    """(task, model) of a run, the model on the CPU, with the weights of its last checkpoint.

    Raises Refused if there is no run in this folder, if its task or mixer is unknown, or if its
    checkpoint is missing or damaged.
    """
    task, config = task_and_config(read_config(folder))
    model = CanonGPT(config)
    load_checkpoint(folder, model=model)
    return task, model.eval()


def complete_prompt(task, model, prompt, temperature, seed):
    """The prompt in words, and what the model writes after it."""
    tokens = task.encode(prompt)
    room = task.block_size + 1 - len(tokens)  # the model never reads the last token that it writes
    allowed = f"allowed: 1 to {task.block_size} tokens"
    require(tokens and room > 0, "tokens of the prompt", len(tokens), allowed)
    generator = torch.Generator(device_of(model)).manual_seed(seed)
    answer = task.generate_answer(
        model, tokens, min(MOST_NEW_TOKENS, room), temperature, generator
    )
    return f"{task.decode(tokens)}{task.space}[{task.decode(answer)}]"


def main(argv=None):
    parser = make_parser(__file__, __doc__)
    parser.add_argument("run", type=Path, help="a run's folder, such as out/copy_nano_rope_abcd_s0")
    parser.add_argument("--count", type=int, default=3, help="how many instances (3)")
    parser.add_argument("--prompt", help="your own text, in the task's words")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest (0)")
    parser.add_argument("--seed", type=int, default=0, help="of instances and drawn tokens (0)")
    args = parser.parse_args(argv)
    try:
        require(args.count > 0, "count", args.count, "allowed: 1 or more")
        require(0 <= args.seed < 2**32, "seed", args.seed, "allowed: 0 to 2^32 - 1")
        task, model = load_model(args.run)
        if args.prompt is not None:
            print(wrapped(complete_prompt(task, model, args.prompt, args.temperature, args.seed)))
            return
        for number in range(args.count):
            print(wrapped(task.show(model, args.seed + number, args.temperature)) + "\n")
    except Refused as error:
        parser.error(error)


if __name__ == "__main__":
    main()
