"""The synthetic tasks: how instances are drawn, packed into windows, and scored (paper Section 3, App. A).

Each task isolates one skill that language models need, in data that never repeats: what a model gets right it has
learnt to *do*. Instances are generated on line. Two ideas carry every generator, and make them fast:

  pieces  A document is a list of pieces: special tokens and words. A table holds each piece's tokens as one short row,
          padded with zeros (token 0 is never used); a document is then a list of row numbers. Looking all rows of all
          documents up at once and dropping the zeros gives the text, with no loop over documents.
  owner   The nodes of all graphs lie behind one another in flat arrays, and `owner[i]` says whose node i is. Two graphs of
          3 and 4 nodes: owner = 0 0 0 1 1 1 1, and each node's index within its own graph is 0 1 2 0 1 2 3. Sorting by
          owner + a random fraction then shuffles every graph's nodes at once.

Reading order: 1 the shared machinery; 2 Copy; 3 Depo; 4 `make_task` and the presets.
"""

import numpy as np
import torch

# ------------------------------------------------------------------------------------------------------------
# 1. The shared machinery
# ------------------------------------------------------------------------------------------------------------

TRAIN, EVAL = 0, 1  # streams of random numbers that never meet


def ragged(lengths):
    """Things of several owners behind one another: (owner of each thing, its index within the owner)."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return owner, np.arange(len(owner)) - starts[owner]


def shuffle(rng, owner):
    """An order of the things (int array) that permutes each owner's own uniformly; owner must be sorted."""
    return np.argsort(owner + rng.random(len(owner)))


def draw_sizes(rng, count, N):
    """count sizes in 3..N with probability proportional to 1 / (n + sqrt N): small instances teach first."""
    weights = 1 / (np.arange(3, N + 1) + N**0.5)
    return 3 + np.searchsorted(np.cumsum(weights / weights.sum())[:-1], rng.random(count), side="right")


def draw_words(rng, owner, V, word_len):
    """One word for each thing, distinct within an owner: (things, longest) tokens, zeros behind the word.

    A word of length l, uniform in word_len = (shortest, longest), has l - 1 tokens in 1..V and a last one in V+1..2V,
    so that its end is visible. Words come as if drawn one at a time and drawn again when taken already.
    """
    shortest, longest = word_len
    words = np.zeros((len(owner), longest), dtype=np.int64)
    radix = (2 * V + 1) ** np.arange(longest)  # a word's tokens, read as digits, number it
    taken = np.empty(0, dtype=np.int64)
    todo = np.arange(len(owner))
    while len(todo) > 0:
        length = rng.integers(shortest, longest + 1, (len(todo), 1))
        column = np.arange(longest)
        word = rng.integers(1, V + 1, (len(todo), longest)) + V * (column == length - 1)
        word *= column < length
        number, first = np.unique(owner[todo] * radix[-1] * (2 * V + 1) + word @ radix, return_index=True)
        new = ~np.isin(number, taken, assume_unique=True)
        words[todo[first[new]]] = word[first[new]]
        taken = np.concatenate([taken, number[new]])
        todo = np.delete(todo, first[new])
    # Later draws are rarer words; shuffling makes "which word" independent of "which thing".
    return words[shuffle(rng, owner)]


def spell(pieces, order, owner, documents):
    """The text of documents given as lists of pieces.

    pieces     (P, longest) tokens, zeros behind a piece
    order      (S,) the rows of pieces to write, document by document
    owner      (S,) the document of each
    returns    tokens (all documents behind one another), the index in `order` of each token, each document's length
    """
    rows = pieces[order]
    used = rows > 0
    of = np.repeat(np.arange(len(order)), used.sum(1))
    return rows[used], of, np.bincount(owner[of], minlength=documents)


def specials(longest, first, count):
    """`count` pieces of one token each: first, first + 1, .."""
    table = np.zeros((count, longest), dtype=np.int64)
    table[:, 0] = first + np.arange(count)
    return table


class Task:
    """What all tasks share. A subclass gives `name`, `vocab_size`, `evaluate(model, seed, n)`, and `documents(rng, count)`:
    tokens of `count` documents behind one another, whether each is a target, and each document's length.
    `make_task` adds `settings`: the task's name and parameters."""

    def __init__(self, block_size, model, training):
        self.block_size = block_size  # tokens a model sees; a window has one more, the last target
        self.model = model  # the preset's n_layer, n_head, d_model ..
        self.training = training  # the preset's steps, batch_size, lr ..

    def batch(self, seed, step, batch_size):
        """The training windows of one step: tokens int64, loss_mask bool, both (batch_size, block_size + 1).

        loss_mask[:, i] says whether token i is a target. A pure function of its arguments: any number of loader
        workers, a resumed run and every architecture see the same stream.
        """
        return self.pack(np.random.default_rng([seed, TRAIN, step]), batch_size)

    def pack(self, rng, rows):
        """Documents behind one another, cut into windows. Left-aligned: each window starts with a new document, and the
        last one is cut off at the window's end."""
        width = self.block_size + 1
        tokens, mask, lengths = self.documents(rng, 2 * rows)
        while True:
            starts = np.append(0, np.cumsum(lengths))
            cuts, position = [], 0
            while len(cuts) < rows and position + width <= len(tokens):
                cuts.append(position)
                position = starts[np.searchsorted(starts, position + width)]
            if len(cuts) == rows:
                index = np.array(cuts)[:, None] + np.arange(width)
                return tokens[index], mask[index]
            missing = (rows - len(cuts)) * (width / lengths.mean() + 1)
            more = self.documents(rng, int(1.1 * missing) + 8)
            tokens, mask, lengths = (np.concatenate(pair) for pair in zip((tokens, mask, lengths), more))


@torch.no_grad()
def right_tokens(model, tokens, batch_size):
    """Whether the model's likeliest next token is the true one, bool as tokens[:, 1:], in numpy.

    A model that is right about every token of an answer, given the true ones before it, is one that would have
    generated that answer greedily: exact match needs no generation.
    """
    device = next(model.parameters()).device
    right = []
    for piece in torch.from_numpy(tokens).split(batch_size):
        piece = piece.to(device)
        right.append((model(piece[:, :-1])[0].argmax(-1) == piece[:, 1:]).cpu())
    return torch.cat(right).numpy()


def require(ok, field, value, allowed):
    if not ok:
        raise ValueError(f"{field} = {value!r}: {allowed}")


# ------------------------------------------------------------------------------------------------------------
# 2. Copy (paper Fig. 5): can one layer repeat a permutation?
#
#     <bos> 4 3 1 2 <query> 4 3 1 2
#
# To copy, find the last token's first occurrence and take its right neighbour. Attention alone needs two layers: one to
# tell each token who stands left of it, one to look that up. A Canon layer does the first. Loss on the copy only.
# ------------------------------------------------------------------------------------------------------------


class Copy(Task):
    name = "copy"

    def __init__(self, N, **settings):
        super().__init__(**settings)
        require(N >= 2, "N", N, "the number of tokens to copy must be at least 2")
        fits = 2 * N + 1 <= self.block_size
        require(fits, "block_size", self.block_size, f"an instance of N = {N} needs at least {2 * N + 1}")
        self.N = N
        self.bos, self.query = N + 1, N + 2
        self.vocab_size = N + 3

    def documents(self, rng, count):
        tokens = np.empty((count, 2 * self.N + 2), dtype=np.int64)
        tokens[:, 0] = self.bos
        tokens[:, 1 : self.N + 1] = rng.permuted(np.tile(np.arange(1, self.N + 1), (count, 1)), axis=1)
        tokens[:, self.N + 1] = self.query
        tokens[:, self.N + 2 :] = tokens[:, 1 : self.N + 1]
        mask = np.zeros(tokens.shape, dtype=bool)
        mask[:, self.N + 2 :] = True
        return tokens.ravel(), mask.ravel(), np.full(count, tokens.shape[1])

    def evaluate(self, model, seed, n):
        """n sequences: the share that is copied whole, and the share of tokens."""
        tokens = self.documents(np.random.default_rng([seed, EVAL]), n)[0].reshape(n, -1)
        right = right_tokens(model, tokens, self.training["batch_size"])[:, self.N + 1 :]
        return {"sequences": float(right.all(1).mean()), "tokens": float(right.mean())}


# ------------------------------------------------------------------------------------------------------------
# 3. Depo (paper Section 3): reasoning depth
#
#     <bos> c a  b d  d c  a b  <query_2> b <ans> c  <query_1> c <ans> a           the cycle a -> b -> d -> c -> a
#
# The edges of a cycle in random order, then questions "who comes k after q?". The answer must follow within a token or
# two, so all k hops happen inside the network: its depth is what is measured. Words of several tokens (Depo1: 1-2,
# Depo2: 5-7) make "who follows" a matter of putting neighbouring tokens together. Loss on <ans> and the answer only.
# Our choice: a <bos> opens each instance. Keep N > 2K, or the scores measure less than k hops: on a cycle of n nodes, k
# hops forward are n - k hops backward, and attention follows edges backward as easily.
# ------------------------------------------------------------------------------------------------------------


class Depo(Task):
    queries = 10  # questions an instance, or n if that is less

    def __init__(self, name, N, K, V, word_len, **settings):
        super().__init__(**settings)
        word_len = tuple(word_len)
        require(N >= 3, "N", N, "a cycle needs at least 3 nodes")
        require(K >= 1, "K", K, "at least one hop")
        require(V >= 1, "V", V, "at least one token")
        ok = len(word_len) == 2 and 1 <= word_len[0] <= word_len[1]
        require(ok, "word_len", word_len, "a shortest and a longest word, 1 <= shortest <= longest")
        fits = (2 * V + 1) ** word_len[1] < 2**40  # draw_words numbers the words of a batch by 64-bit integers
        require(fits, "word_len", word_len, f"words this long over V = {V} are too many to number")
        words = sum(V**length for length in range(word_len[0], word_len[1] + 1))
        require(N <= words, "N", N, f"V = {V} and word_len = {word_len} make only {words} words")
        longest = 1 + 2 * N * word_len[1] + min(self.queries, N) * (2 + 2 * word_len[1])
        fits = longest <= self.block_size + 1
        require(fits, "block_size", self.block_size, f"the longest instance of N = {N} needs at least {longest - 1}")
        self.name, self.N, self.K, self.V, self.word_len = name, N, K, V, word_len
        self.bos, self.ans, self.query = 2 * V + 1, 2 * V + 2, 2 * V + 2  # <query_k> is query + k
        self.vocab_size = 2 * V + 3 + K
        self.hops = sorted({2**i for i in range(K.bit_length())} | {K})  # the scored k: powers of two and K

    def documents(self, rng, count):
        sizes = draw_sizes(rng, count, self.N)
        k = rng.integers(1, self.K + 1, np.minimum(sizes, self.queries).sum())
        tokens, of, lengths, hop = self.instances(rng, sizes, k)
        return tokens, hop[of] >= 0, lengths

    def instances(self, rng, sizes, k):
        """Instances of the given sizes; k: the hops of all their queries.

        Returns the three results of `spell`, and for each piece written its `hop`: k for an answer that is k hops from
        its question, 0 for <ans>, -1 for what is no target.
        """
        V, count = self.V, len(sizes)
        owner, at = ragged(sizes)  # the nodes of all cycles, in cycle order
        first = (np.cumsum(sizes) - sizes)[owner]
        pieces = np.concatenate([draw_words(rng, owner, V, self.word_len), specials(self.word_len[1], 2 * V + 1, 2 + self.K)])
        bos, ans, query = len(owner), len(owner) + 1, len(owner) + 1  # rows of pieces; <query_k> is query + k

        source = shuffle(rng, owner)  # the edges in random order
        target = first + (at + 1) % sizes[owner]
        asked = shuffle(rng, owner)[at < self.queries]  # distinct nodes to ask about
        asker, which = owner[asked], at[at < self.queries]
        answer = first[asked] + (at[asked] + k) % sizes[asker]

        # Where each piece goes: <bos>, two pieces an edge, four a query.
        queries = np.minimum(sizes, self.queries)
        lengths = 1 + 2 * sizes + 4 * queries
        start = np.cumsum(lengths) - lengths
        order = np.empty(lengths.sum(), dtype=np.int64)
        order[start] = bos
        edge = start[owner] + 1 + 2 * at
        order[edge], order[edge + 1] = source, target[source]
        ask = start[asker] + 1 + 2 * sizes[asker] + 4 * which
        order[ask], order[ask + 1], order[ask + 2], order[ask + 3] = query + k, asked, ans, answer
        hop = np.full(len(order), -1)
        hop[ask + 2], hop[ask + 3] = 0, k
        return *spell(pieces, order, np.repeat(np.arange(count), lengths), count), hop

    def evaluate(self, model, seed, n):
        """n instances of size N: for each scored k, the share of answers with all tokens right."""
        rng = np.random.default_rng([seed, EVAL])
        k = rng.permutation(np.resize(self.hops, n * min(self.N, self.queries)))  # each as often as the others
        flat, of, lengths, hop = self.instances(rng, np.full(n, self.N), k)
        owner, at = ragged(lengths)
        tokens = np.zeros((n, lengths.max()), dtype=np.int64)
        tokens[owner, at] = flat
        right = right_tokens(model, tokens, self.training["batch_size"])
        wrong = ~right[owner, at - 1]  # the token at i is predicted at i - 1; <bos> is never an answer
        mistakes = np.bincount(of, weights=wrong, minlength=len(hop))
        return {f"k={k}": float((mistakes[hop == k] == 0).mean()) for k in self.hops}


# ------------------------------------------------------------------------------------------------------------
# 4. Presets
#
# One word scales task, model and budget together: nano for two CPU cores and minutes, small for one GPU and minutes,
# paper for the paper's own numbers. Where the paper gives several values (N, lr),
# the first or the middle one stands here, and the flags of train.py reach the others.
# ------------------------------------------------------------------------------------------------------------

ADAMW = dict(betas=(0.9, 0.98), eps=1e-6, weight_decay=0.03, warmup=1000, schedule="cosine")
LARGE = dict(n_layer=12, n_head=12, d_model=768)

PRESETS = {
    "copy": {
        "nano": dict(N=64, block_size=129, model=dict(n_layer=1, n_head=2, d_model=16),
                     training=dict(ADAMW, steps=2000, batch_size=32, lr=1e-2, warmup=200)),
        "small": dict(N=500, block_size=1024, model=dict(n_layer=1, n_head=2, d_model=16),
                      training=dict(ADAMW, steps=5000, batch_size=32, lr=5e-3)),
        "paper": dict(N=500, block_size=1024, model=dict(n_layer=1, n_head=2, d_model=16),
                      training=dict(ADAMW, steps=50_000, batch_size=32, lr=5e-3)),
    },
    "depo1": {
        "nano": dict(N=5, K=2, V=50, word_len=(1, 2), block_size=52, model=dict(n_layer=3, n_head=2, d_model=64),
                     training=dict(ADAMW, steps=10_000, batch_size=32, lr=7e-3, warmup=300)),
        "small": dict(N=40, K=8, V=50, word_len=(1, 2), block_size=320, model=dict(n_layer=6, n_head=6, d_model=384),
                      training=dict(ADAMW, steps=20_000, batch_size=128, lr=1e-3)),
        "paper": dict(N=225, K=8, V=50, word_len=(1, 2), block_size=2048, model=LARGE,
                      training=dict(ADAMW, steps=87_500, batch_size=128, lr=1e-3)),
    },
    "depo2": {
        "nano": dict(N=6, K=2, V=3, word_len=(5, 7), block_size=192, model=dict(n_layer=3, n_head=2, d_model=64),
                     training=dict(ADAMW, steps=2400, batch_size=32, lr=5e-3, warmup=100)),
        "small": dict(N=25, K=8, V=3, word_len=(5, 7), block_size=512, model=dict(n_layer=6, n_head=6, d_model=384),
                      training=dict(ADAMW, steps=20_000, batch_size=128, lr=1e-3)),
        "paper": dict(N=75, K=16, V=3, word_len=(5, 7), block_size=2048, model=LARGE,
                      training=dict(ADAMW, steps=100_000, batch_size=128, lr=1e-3)),
    },
}  # fmt: skip

ALIASES = {"depo": "depo1"}


def make_task(name, preset="nano", **overrides):
    """The task of this name ("copy", "depo1" = "depo", "depo2") at a preset's scale ("nano", "small", "paper").

    overrides: the task's own parameters (copy: N, block_size; depo: N, K, V, word_len, block_size).
    Raises ValueError for an unknown name, preset or parameter, and for values that do not fit together.
    """
    name = ALIASES.get(name, name)
    require(name in PRESETS, "task", name, f"allowed: {', '.join([*PRESETS, *ALIASES])}")
    require(preset in PRESETS[name], "preset", preset, f"allowed: {', '.join(PRESETS[name])}")
    settings = dict(PRESETS[name][preset])
    for field, value in overrides.items():
        own = sorted(set(settings) - {"model", "training"})
        require(field in own, field, value, f"{name} has no such parameter; it has {', '.join(own)}")
        settings[field] = value
    settings["training"] = dict(settings["training"])  # the caller's own, to change
    task = Copy(**settings) if name == "copy" else Depo(name, **settings)
    task.settings = {"name": name, **{f: v for f, v in settings.items() if f not in ("model", "training")}}
    return task
