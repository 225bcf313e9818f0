"""See a trained model answer:   python sample.py out/RUN

Shows fresh instances of the run's task with the model's answers, right or wrong:

    <bos> 3 1 , 2 4 , 4 3 , 1 2 , <query_2> 2 [<ans> 3 ✓] <query_1> 3 [<ans> 4 ✗ <ans> 1]

A cross stands between what the model said and what is right. With --prompt the model goes on after
a text of your own, in the task's words:

    python sample.py out/RUN --prompt "<bos> 3 1 , 1 2 , 2 3 , <query_1> 3 <ans>"
"""

import argparse
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch

from runs import RunError, load_model, register
from tasks import SAMPLES, device_of, wrapped


def answered(task, model, seed, temperature=0.0):
    """One instance of the task in words, with the model's answers in it.

    task, model   as `runs.load_model` returns them
    temperature   0 takes the likeliest tokens, 1 samples
    """
    rng = np.random.default_rng([seed, SAMPLES])  # other numbers than training's and evaluation's
    (document,) = task.documents(rng, 1)
    generator = torch.Generator(device_of(model)).manual_seed(seed)
    text = ""
    shown = 0  # how many of the document's tokens are in the text
    for start, end in task.answer_spans(document):
        asked = document.tokens[:start]  # with right answers to earlier questions
        expected = document.tokens[start:end]
        length = end - start
        if task.stop is not None:  # the answer ends at `stop`, or where the window is full
            length = room_after(task, asked)
        answer = go_on(model, asked, length, task.stop, temperature, generator)
        text += task.decode(document.tokens[shown:start]) + task.space
        verdict = task.is_right(document, (start, end), answer)
        if verdict is None:  # there is no right or wrong
            text += f"[{task.decode(answer)}]"
        elif verdict:
            text += f"[{task.decode(answer)} ✓]"
        else:
            text += f"[{task.decode(answer)} ✗ {task.decode(expected)}]"
        text += task.space
        shown = end
    return text + task.decode(document.tokens[shown:])


def continued(task, model, prompt, length, temperature, seed):
    """The prompt in words, and what the model writes after it. ValueError for what does not fit."""
    tokens = task.encode(prompt)
    room = room_after(task, tokens)
    if not tokens or room < 1:
        raise ValueError(f"--prompt: {len(tokens)} tokens, allowed: 1 to {task.block_size}")
    if length is None:
        length = min(100, room)
    if not 1 <= length <= room:
        raise ValueError(f"--length {length}: allowed: 1 to {room}")
    generator = torch.Generator(device_of(model)).manual_seed(seed)
    answer = go_on(model, tokens, length, task.stop, temperature, generator)
    return f"{task.decode(tokens)}{task.space}[{task.decode(answer)}]"


def room_after(task, tokens):
    """How many more tokens fit: one more than it reads, as a model never reads its last one."""
    return task.block_size + 1 - len(tokens)


def go_on(model, tokens, length, stop, temperature, generator):
    """What the model writes after these tokens: a list of tokens, up to and including `stop`."""
    prompt = torch.tensor([tokens], device=device_of(model))
    whole = model.generate(prompt, length, temperature, stop, generator)
    return whole[0, len(tokens) :].tolist()


def coloured(text):
    """For a terminal: right answers in green, wrong ones in red."""
    # In the patterns, [^][]* is anything but brackets. In what replaces them, \\1 is the answer,
    # \033[32m begins green, \033[31m begins red, and \033[0m ends the colour.
    text = re.sub(r"(\[[^][]*✓\])", "\033[32m\\1\033[0m", text)
    return re.sub(r"(\[[^][]*✗[^][]*\])", "\033[31m\\1\033[0m", text)


# ---- The command line ------------------------------------------------------


def fail(message):
    print(f"sample.py: {message}", file=sys.stderr)
    sys.exit(2)


def read_command_line(argv):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail  # one line, without argparse's usage
    parser.add_argument("run", type=Path, help="a run's folder, such as out/copy_nano_rope_abcd_s0")
    parser.add_argument("--count", type=int, help="how many instances (default: 3)")
    parser.add_argument("--prompt", help="a text of your own, in the task's words")
    parser.add_argument(
        "--length",
        type=int,
        help="at most this many tokens after --prompt (default: 100, or what fits)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0: the likeliest tokens (default); 1: sample",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--program",
        type=Path,
        help="a file that registers a task, mixer, Canon layer or positions of your own",
    )
    args = parser.parse_args(argv)
    if args.count is not None and args.prompt is not None:
        fail("--count: means nothing beside --prompt")
    if args.count is None:
        args.count = 3
    if not 1 <= args.count <= 10_000:
        fail(f"--count {args.count}: allowed: 1 to 10,000")
    if args.temperature != 0 and not 0.01 <= args.temperature <= 100:
        fail(f"--temperature {args.temperature}: allowed: 0, and 0.01 to 100")
    if not 0 <= args.seed < 2**32:
        fail(f"--seed {args.seed}: allowed: 0 to {2**32 - 1:,}")
    if args.length is not None and args.prompt is None:
        fail("--length: means nothing without --prompt")
    if args.program is not None and not args.program.is_file():
        fail(f"--program {args.program}: no such file")
    return args


def main(argv=None):
    args = read_command_line(argv)
    if args.program is not None:
        register(args.program)
    # Users who want no colours set NO_COLOR, in any program (no-color.org).
    in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    try:
        task, model = load_model(args.run)
        if args.prompt is not None:
            text = continued(task, model, args.prompt, args.length, args.temperature, args.seed)
            print(wrapped(text))
            return
        for number in range(args.count):
            text = wrapped(answered(task, model, args.seed + number, args.temperature))
            print(coloured(text) if in_colour else text, end="\n\n")
    except (RunError, ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
