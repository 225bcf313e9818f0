"""How fast training data are made:   OMP_NUM_THREADS=1 python results/generators.py

For each task at the paper's scale, tokens a second of one process: of `task.batch`, and of a generator as one would first write it, with
Python's lists and `random`, a token at a time. The two are timed in turn, several times; the table has medians. Also: how long the
chart of one long Lano sentence takes, which both of Lano's scores need.
"""

import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from tasks import GRAMMARS, Grammar, make_task  # noqa: E402


def size(N):
    return random.choices(range(3, N + 1), [1 / (n + N**0.5) for n in range(3, N + 1)])[0]


def words(n, V, word_len):
    found = []
    while len(found) < n:
        length = random.randint(*word_len)
        word = [random.randint(1, V) for _ in range(length - 1)] + [random.randint(V + 1, 2 * V)]
        if word not in found:
            found.append(word)
    return found


def depo(task):
    n = size(task.N)
    name = words(n, task.V, task.word_len)
    edges = [(i, (i + 1) % n) for i in range(n)]
    random.shuffle(edges)
    text, mask = [task.bos], [False]
    for a, b in edges:
        text += name[a] + name[b]
    mask += [False] * (len(text) - 1)
    for q in random.sample(range(n), min(10, n)):
        k = random.randint(1, task.K)
        answer = name[(q + k) % n]
        text += [task.query + k, *name[q], task.ans, *answer]
        mask += [False] * (1 + len(name[q])) + [True] * (1 + len(answer))
    return text, mask


def brevo(task):
    n = size(task.N)
    name = words(n, task.V, task.word_len) if task.word_len[1] > 1 else [[x] for x in random.sample(range(1, task.N + 1), n)]
    leaves = random.randint(1, (n - 1) // 4 + 1)
    parents, children, edges = [[] for _ in range(n)], [0] * n, []
    for node in range(leaves, n):
        free = [a for a in range(node) if children[a] < 4]
        parents[node] = random.sample(free, min(random.randint(1, 4), len(free)))
        for a in parents[node]:
            children[a] += 1
            edges.append((a, node))
    random.shuffle(edges)
    q = n - 1 - random.randrange(0, (n - leaves + 3) // 4)
    need, todo = {q}, [q]
    while todo:
        for a in parents[todo.pop()]:
            if a not in need:
                need.add(a)
                todo.append(a)
    answer = []
    while len(answer) < len(need):
        answer.append(random.choice([a for a in need if a not in answer and all(b in answer for b in parents[a])]))
    text = [task.bos]
    for a, b in edges:
        text += name[a] + name[b]
    text += [task.query, *name[q]]
    prompt = len(text)
    text.append(task.ans)
    for a in answer:
        text += name[a]
    text.append(task.eos)
    return text, [False] * prompt + [True] * (len(text) - prompt)


def mano(task):
    def expression(l):
        if l == 0:
            x = random.randrange(23)
            return [1 + x], x
        op, left = random.randrange(3), random.randint(0, l - 1)
        (first, a), (second, b) = expression(left), expression(l - 1 - left)
        return [task.operator + op, *first, *second], (a + b, a - b, a * b)[op] % 23

    l = random.randint(1, task.L)
    text, value = expression(l)
    text = [task.bos, task.len + l, *text, task.ans, 1 + value]
    return text, [True] * len(text)


def lano(task):
    def grow(symbol):
        return [symbol] if symbol <= 3 else [token for part in random.choice(task.grammar.rules[symbol]) for token in grow(part)]

    text = [task.bos, *grow(task.grammar.root)]
    return text, [True] * len(text)


def windows(task, instance, rows):
    tokens, masks = [], []
    for _ in range(rows):
        text, mask = [], []
        while len(text) < task.block_size + 1:
            more = instance(task)
            text += more[0]
            mask += more[1]
        tokens.append(text[: task.block_size + 1])
        masks.append(mask[: task.block_size + 1])
    return np.array(tokens), np.array(masks)


def main():
    print(f"numpy {np.__version__}, torch {torch.__version__}, {torch.get_num_threads()} thread(s); million tokens/s, median of 5")
    print(f"{'task':8} {'N or L':>6} {'simple':>8} {'ours':>8} {'ratio':>7}")
    simple = {"depo1": depo, "depo2": depo, "brevo1": brevo, "brevo2": brevo, "mano": mano, "lano": lano}
    for name, options in (("depo1", {}), ("depo2", {}), ("brevo1", {}), ("brevo2", {}), ("mano", {}), ("lano", dict(cfg="cfg3k", block_size=1536))):
        task, rates = make_task(name, "paper", **options), ([], [])
        rows = task.training["batch_size"]
        for turn in range(6):
            for make, rate, count in ((lambda: windows(task, simple[name], 8), rates[0], 8), (lambda: task.batch(0, turn, rows), rates[1], rows)):
                start = time.perf_counter()
                make()
                rate.append(count * (task.block_size + 1) / (time.perf_counter() - start) / 1e6)
        slow, fast = (statistics.median(rate[1:]) for rate in rates)  # the first turn warms up
        print(f"{name:8} {getattr(task, 'N', getattr(task, 'L', '')):>6} {slow:8.2f} {fast:8.2f} {fast / slow:6.1f}x", flush=True)

    grammar, rng = Grammar(GRAMMARS["cfg3k"]), np.random.default_rng(0)
    text, lengths = grammar.sample(rng, 2000)
    ends = np.cumsum(lengths)
    which = int(np.abs(lengths - 645).argmin())
    sentence = torch.from_numpy(text[ends[which] - lengths[which] : ends[which]])[None]
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        chart = grammar.chart(sentence)
        seconds.append(time.perf_counter() - start)
    assert chart[0, -1, 0] > 0
    print(f"chart of one cfg3k sentence of {lengths[which]} tokens: {statistics.median(seconds[1:]):.2f} s")


if __name__ == "__main__":
    main()
