"""Cases of the search of the whole engine, drawn from a seed and a mix of features. Pure.

Each feature has a random stream of its own, so a new one leaves the other draws of a seed as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

from vllm_repro_explore.case import Case, Request, Setup, least_blocks, least_length, longest_of

_OFFLOADING, _SIMPLE = "OffloadingConnector", "SimpleCPUOffloadConnector"
_MULTI, _NIXL = "MultiConnector", "NixlConnector"
_STORE, _LATE_STORE = "StoreConnector", "LateStoreConnector"
_COMMON = {"asynchronous": 0.6, "abort": 0.4, "priority": 0.3, "share": 0.7, "pressure": 0.3}
_RESETS = {"reset": 0.5, "reset-running": 0.6}
_CROWD = {**_COMMON, "asynchronous": 0.8, "abort": 0.2, "crowd": 1}
_IMAGES = {"images": 1, "image cache": 0.6}
_LONG = {"long": 1, "waves": 0.7}
_EAGLE = {**_COMMON, "draft": 1, "eagle": 1, "eos": 0.3, "chat": 0.3}
_ANY = (
    *("eos", "turn-eos", "least", "cut", "salt", "lora", "threshold", "grammar", "eagle", "stream"),
    *("mamba", _OFFLOADING, _SIMPLE, _MULTI, "chunks", "waves", "reset", "reset-running", "sleep"),
    *("images", "image cache", "same text", "v2", "stats", "switch"),
)
_MORE = (
    *("eos", "least", "cut", "salt", "threshold", "grammar", "stream", "chat", "draft", "stats"),
    *("reset", "reset-running", "pause", "images", "image cache", "waves", "events"),
)
_CHAT = {**_COMMON, "chat": 1, "switch": 0.5, "eos": 0.3, "stats": 0.5}
MIXES: dict[str, dict[str, float]] = {
    "plain": {**_COMMON, "eos": 0.3, "salt": 0.2, "lora": 0.2, "threshold": 0.2},
    "urgent": {**_COMMON, "abort": 0.1, "priority": 1, "urgent": 1},
    "urgent-spec": {**_COMMON, "abort": 0.1, "priority": 1, "urgent": 1, "draft": 1},
    "spec": {**_COMMON, "draft": 1, "eos": 0.3, "grammar": 0.3},
    "grammar": {**_COMMON, "grammar": 1, "faulty": 0.5, "draft": 0.3},
    "async": {**_COMMON, "asynchronous": 1, "draft": 0.4, "eos": 0.3, "grammar": 0.3},
    "off": {**_COMMON, "abort": 0.6, _OFFLOADING: 1},
    "off-crowd": {**_CROWD, _OFFLOADING: 1},
    "off-busy": {**_CROWD, "crowd": 0, "busy": 1, _OFFLOADING: 1},
    "off-long": {**_COMMON, _OFFLOADING: 1, **_LONG},
    "sco": {**_COMMON, _SIMPLE: 1},
    "sco-crowd": {**_CROWD, _SIMPLE: 1},
    "sco-busy": {**_CROWD, "crowd": 0, "busy": 1, _SIMPLE: 1},
    "sco-long": {**_COMMON, _SIMPLE: 1, **_LONG},
    "stream": {**_COMMON, "stream": 1, "draft": 0.3, "turn-eos": 0.3},
    "mamba": {**_COMMON, "mamba": 1, "draft": 0.3, "eos": 0.3},
    "mamba-off": {**_COMMON, "mamba": 1, _OFFLOADING: 1, "draft": 0.2},
    "mamba-sco": {**_COMMON, "mamba": 1, _SIMPLE: 1},
    "mamba-nixl": {**_COMMON, "mamba": 1, _NIXL: 1},
    "multi": {**_COMMON, "abort": 0.6, _MULTI: 1},
    "nixl": {**_COMMON, "abort": 0.6, _NIXL: 1, "draft": 0.2},
    "fetch": {**_COMMON, "abort": 0.6, "fetch": 1, "draft": 0.2},
    "fetch-off": {**_COMMON, "abort": 0.6, "fetch": 1, _MULTI: 1},
    "store": {**_COMMON, "store": 1, "fetch": 1, "v2": 0.5, "draft": 0.2},
    "store-late": {**_COMMON, "abort": 0.6, "store": 1, "late": 1, "fetch": 1, "v2": 0.2},
    "mooncake": {**_COMMON, "abort": 0.6, "mooncake": 1, _NIXL: 1},
    "mooncake-fetch": {**_COMMON, "abort": 0.6, "mooncake": 1, "fetch": 1},
    "mamba-ops": {**_COMMON, "mamba": 1, **_RESETS, "pause": 0.3, "stream": 0.3, "draft": 0.3},
    "ops": {**_COMMON, **_RESETS, "eos": 0.3, "draft": 0.2},
    "ops-off": {**_COMMON, **_RESETS, _OFFLOADING: 1},
    "reset-off": {**_CHAT, "reset-connector": 1, "waves": 0.7, _OFFLOADING: 1},
    "reset-sco": {**_CHAT, "reset-connector": 1, "waves": 0.7, _SIMPLE: 1},
    "reset-multi": {**_CHAT, "reset-connector": 1, "waves": 0.7, _MULTI: 1},
    "pause": {**_COMMON, "pause": 1, "eos": 0.3, "draft": 0.2, "stream": 0.2},
    "pause-off": {**_COMMON, "pause": 1, _OFFLOADING: 1},
    "pause-grammar": {**_COMMON, "asynchronous": 1, "pause": 1, "grammar": 1, "draft": 1},
    "sleep": {
        **_COMMON,
        "pause": 1,
        "sleep": 1,
        "eos": 0.3,
        "stream": 0.2,
        **_IMAGES,
        "images": 0.3,
    },
    "sleep-off": {**_COMMON, "pause": 1, "sleep": 1, _OFFLOADING: 1},
    "images": {**_COMMON, **_IMAGES, "stream": 0.1, "eos": 0.2},
    "images-off": {**_COMMON, **_IMAGES, _OFFLOADING: 1},
    "images-same": {**_COMMON, **_IMAGES, "same text": 1, "share": 1, "eos": 0.2},
    "ends": {
        **_COMMON,
        "switch": 0.5,
        "cut": 0.7,
        "eos": 0.5,
        "least": 0.7,
        "draft": 0.3,
        "stats": 0.5,
        "repeats": 0.3,
    },
    "chat": {**_CHAT, "draft": 0.2, "salt": 0.1},
    "chat-off": {**_CHAT, _OFFLOADING: 1},
    "eagle": {**_EAGLE, "grammar": 0.2},
    "mamba-eagle": {**_EAGLE, "mamba": 1},
    "eagle-off": {**_EAGLE, _OFFLOADING: 1},
    "events": {**_CHAT, "events": 1, "salt": 0.2, "lora": 0.2, "images": 0.2, **_RESETS},
    "mamba-events": {**_CHAT, "events": 1, "mamba": 1, "draft": 0.2},
    "chunks": {**_CHAT, "chunks": 1, _OFFLOADING: 1, "share": 1, "waves": 0.5, "reset": 0.6},
    "v2": {
        **_COMMON,
        "v2": 1,
        "draft": 0.3,
        "eos": 0.3,
        "stream": 0.2,
        "reset-running": 0.2,
        "images": 0.2,
    },
    "v2-mamba": {**_COMMON, "v2": 1, "mamba": 1, "draft": 0.5, "eos": 0.3, "reset-running": 0.2},
    "v2-off": {**_COMMON, "v2": 1, _OFFLOADING: 1, "abort": 0.6},
    "v2-sco": {**_COMMON, "v2": 1, _SIMPLE: 1},
    "swarm": {
        **_COMMON,
        **dict.fromkeys(_ANY, 0.2),
        "draft": 0.5,
        "chat": 0.5,
        "pause": 0.1,
        "long": 0.05,
    },
}
"""For each mix, the probability with which a case has a feature.

pressure: long answers in a pool for one of them, and slow stores. reset-connector: a reset of
running requests and of the connector's cache. long: prompts of up to 64 blocks.
waves: some requests come once the engine is idle. sleep: half of the pauses put the engine to
sleep. v2: the scheduler's half for the second model runner. image cache: images go through the
cache of `--mm-processor-cache-gb`. store: the prompts of `fetch` come in the step that needs them;
late: they come before it, and the blocks of finished requests are saved. mooncake:
MooncakeConnector instead of NixlConnector. crowd: most requests come in one step, to a pool for one
of them; layers of two kinds. busy: up to thirty requests, many of them short, in a pool for one or
two of the longest; layers of two kinds. urgent: short requests come while the longest one, which
matters least, is in its prefill. same text: equal prompts have other images of the same sizes. cut:
answers may end at the model's length. repeats: answers that repeat themselves, and end by that.
least: `min_tokens`. switch: prompts that go on with the blocks of another. chat: requests that
continue an earlier prompt with its answer. chunks: offloaded chunks of several blocks.
"""

_LAYERS: tuple[tuple[str, ...], ...] = (
    ("full",),
    ("full",),
    ("full", "sliding"),
    ("sliding", "full"),
    ("sliding", "full", "sliding"),
)
_MAMBA_LAYERS = (
    ("mamba", "full"),
    ("full", "mamba"),
    ("mamba", "mamba", "full"),
    ("mamba", "full", "mamba", "mamba"),
)
_GRAMMARS = ("json", "regex", "choice", "ebnf", "object")
_LONGEST_CHAT = 20
"""Blocks of a prompt from which on a chat does not grow."""
_PAUSES = ("abort", "wait", "keep")
_SIZES = 4
"""Sizes of images in a case. Images whose numbers differ by a multiple of it are equally large."""
_FAULTY = ("two-roots", "no-rule", "empty-or-any")


class _Seed:
    """Random generators of a seed, one for each feature, and the features that its case has.

    mix, more: as of `draw`.
    """

    def __init__(self, seed: int, mix: str, more: float) -> None:
        self._seed, self._chances = seed, dict.fromkeys(_MORE, more) | MIXES[mix]

    def stream(self, feature: str) -> Random:
        """Return a new random generator for one feature; its numbers are the same each time."""
        return Random(f"engine/{self._seed}/{feature}")

    def has(self, feature: str) -> bool:
        """Return True if this seed's case has a feature, drawn by the mix's probability for it."""
        return self.stream(f"has {feature}").random() < self._chances.get(feature, 0)


def draw(seed: int, mix: str, more: float = 0.0) -> Case:
    """Draw the random case of a seed; it is the same for every release.

    mix: a key of `MIXES`, which has the probability of each feature. more: the probability of each
    feature of `_MORE` that the mix does not have.
    """
    drawn = _Seed(seed, mix, more)
    server = drawn.stream("server")
    block = server.choice((16, 16, 32))
    seqs = server.choice((1, 2, 3, 4, 8))
    draft = drawn.stream("draft").choice((1, 2, 3)) if drawn.has("draft") else 0
    chunk = block * server.choice((1, 2, 4, 8, 16)) + server.choice(
        (0, 0, 0, 1, block // 2, block - 1)
    )
    # the model runner does not take both
    adapters = drawn.has("lora") and not drawn.has("images")
    loras = drawn.stream("lora").choice((1, 2)) if adapters else 0
    asks = _asks(drawn, block, bool(loras))
    if drawn.has("chat"):
        asks = _chats(drawn.stream("chat"), asks, block)
    longest = longest_of(asks, block)
    largest = max(_image_sizes(drawn, block)) if drawn.has("images") else 0
    transfer = drawn.stream("transfer")
    layers = server.choice(_LAYERS)
    setup = Setup(
        layers=drawn.stream("mamba").choice(_MAMBA_LAYERS) if drawn.has("mamba") else layers,
        window=server.choice((block // 2, block, 2 * block, 4 * block, 40)),
        block=block,
        chunk=max(chunk, seqs * (draft + 1)),
        seqs=seqs,
        max_len=longest + server.choice((1, 1, 8, 2 * block)),
        caching=server.random() < 0.93,
        # it fails blocks of one group
        hybrid=(server.random() < 0.9 or drawn.has("mamba")) and not drawn.has("store"),
        connector=_connector(drawn),
        lazy=transfer.random() < 0.2,
        store_polls=transfer.choice((0, 1, 1, 2, 5)),
        load_polls=transfer.choice((0, 0, 1, 4)),
        asynchronous=drawn.has("asynchronous"),
        draft=draft,
        runner=2 if drawn.has("v2") else 1,
        priority=drawn.has("priority"),
        loras=loras,
        threshold=drawn.stream("threshold").choice((block, 3 * block))
        if drawn.has("threshold")
        else 0,
        grammar_looks=drawn.stream("grammar").choice((0, 1, 3)),
        load_failures=(
            drawn.stream("load failures").choice(("fail", "recompute"))
            if drawn.has("fetch")
            else ""
        ),
        largest_image=largest,
        # vLLM refuses it with Mamba layers
        whole_images=0 < largest <= chunk
        and not drawn.has("mamba")
        and drawn.stream("whole images").random() < 0.3,
        image_cache=(
            drawn.stream("image cache").choice((1, 4, 64)) * block
            if largest and drawn.has("image cache")
            else 0
        ),
        ops=_operations(drawn, max(ask.after for ask in asks)),
        chunk_blocks=(
            drawn.stream("chunks").choice((2, 3, 4))
            if drawn.has("chunks") and _connector(drawn) == _OFFLOADING
            else 1
        ),
        eagle=drawn.has("eagle") and draft > 0,
        stats=drawn.has("stats"),
        events=drawn.has("events"),
    )
    if drawn.has("cut") and not (setup.draft and setup.asynchronous):
        setup = _cut(drawn.stream("cut"), setup, asks)
    shape = next((name for name in _SHAPES if drawn.has(name)), "")
    if shape:
        setup, asks = _SHAPES[shape](drawn.stream(shape), setup, asks)
        asks = tuple(map(fitting, asks))
    least = least_blocks(setup) + draft
    pool = drawn.stream("pool")
    blocks = least + int(least * pool.choice((0.0, 0.05, 0.2, 0.5, 2.0)) * pool.random())
    if shape == "busy":
        blocks = int(least * pool.choice((1.25, 1.5, 2)))
    elif shape:
        blocks = least + pool.choice((0, 1, 3))
    cpu_blocks = max(4, int(blocks * transfer.choice((0.25, 0.5, 1, 4, 4)))) * setup.chunk_blocks
    waves = _waves(drawn, asks) if drawn.has("waves") else (asks,)
    return Case(replace(setup, blocks=blocks, cpu_blocks=cpu_blocks), waves, seed)


def fitting(ask: Request) -> Request:
    """Return the request without images and shared tokens that do not fit into its prompt."""
    images = tuple(image for image in ask.images if image[0] + image[1] <= ask.prompt)
    return replace(ask, shared=min(ask.shared, ask.prompt), images=images)


def _connector(drawn: _Seed) -> str:
    """Return the name of the KV connector that the case has; empty without one."""
    if drawn.has("store"):
        return _LATE_STORE if drawn.has("late") else _STORE
    connector = next(
        (name for name in (_OFFLOADING, _SIMPLE, _NIXL, _MULTI) if drawn.has(name)), ""
    )
    if not connector and drawn.has("fetch"):
        connector = _NIXL
    return "MooncakeConnector" if connector == _NIXL and drawn.has("mooncake") else connector


def _cut(rng: Random, setup: Setup, asks: Sequence[Request]) -> Setup:
    """Return the setup with `cut` set, and a `max_len` that may end answers of `asks` early."""
    cut = replace(setup, cut=True)
    least = least_length(cut, asks)
    return replace(cut, max_len=min(setup.max_len, least + rng.choice((0, 0, 1, 3, setup.block))))


def _chats(rng: Random, asks: Sequence[Request], block: int) -> tuple[Request, ...]:
    """Return the requests; the prompts of some begin with an earlier prompt and its answer."""
    chats: list[Request] = []
    for ask in asks:
        before = rng.choice(chats) if chats and rng.random() < 0.7 else None
        if before is not None and not before.segments and not ask.segments:
            whole = before.prompt + before.answer
            more = rng.choice((1, rng.randint(1, block), rng.randint(1, 2 * block), -1, -block))
            ask = replace(
                ask,
                prompt=max(before.prompt, min(whole, _LONGEST_CHAT * block) + more),
                shared=0,
                follows=before.number,
                salt=before.salt,
                lora=before.lora,
                images=before.images,
            )
        chats.append(ask)
    return tuple(chats)


_Shaped = tuple[Setup, tuple[Request, ...]]


def _under_pressure(rng: Random, setup: Setup, asks: tuple[Request, ...]) -> _Shaped:
    """Return (setup, requests): answers of one to three blocks, `seqs` of 2 to 4, slow KV stores.

    The requests also arrive sooner. Streaming sessions stay as they are.
    """
    seqs, block = rng.choice((2, 3, 4)), setup.block
    longer = tuple(
        (
            ask
            if ask.segments
            else replace(
                ask,
                answer=min(rng.choice((1, 2, 3)) * block, setup.max_len - ask.prompt),
                after=ask.after // 3,
            )
        )
        for ask in asks
    )
    chunk = max(setup.chunk, seqs * (setup.draft + 1))
    return replace(setup, seqs=seqs, chunk=chunk, store_polls=rng.choice((1, 2, 5, 9))), longer


def _crowded(rng: Random, setup: Setup, asks: tuple[Request, ...]) -> _Shaped:
    """Return (setup, requests): most requests arrive at once; full and sliding-window layers.

    The answers get new lengths.
    """
    block = setup.block
    crowd = tuple(
        replace(
            ask,
            answer=rng.choice((1, block, 2 * block, rng.randint(1, 6 * block))),
            after=0 if rng.random() < 0.8 else rng.randint(0, 20),
        )
        for ask in asks
    )
    return _with_two_kinds(rng, setup, crowd, (1, 2, 4, 8)), crowd


def _with_two_kinds(
    rng: Random, setup: Setup, asks: Sequence[Request], chunks: Sequence[int]
) -> Setup:
    """Return the setup with full and sliding-window layers, and mostly with slow KV stores.

    `seqs` becomes 8, and `max_len` fits the longest of `asks`. chunks: values to choose `chunk`
    from, in blocks.
    """
    block = setup.block
    return replace(
        setup,
        layers=rng.choice(_LAYERS[2:]),
        window=block * rng.choice((1, 2, 4)),
        chunk=block * rng.choice(chunks),
        seqs=8,
        max_len=longest_of(asks, block) + rng.choice((0, 1, 8)),
        hybrid=True,
        store_polls=rng.choice((1, 2, 5, 9)),
    )


def _busy(rng: Random, setup: Setup, asks: tuple[Request, ...]) -> _Shaped:
    """Return (setup, requests): 16 or 30 requests; full and sliding-window layers.

    About 20, 50 or 80 % of the answers have one to three tokens. What is not drawn anew, such as
    `abort`, comes from `asks`, in turn.
    """
    block, spread = setup.block, rng.choice((0, 20, 60))
    short, longest = rng.choice((0.2, 0.5, 0.8)), rng.choice((3, 6)) * setup.block
    many = []
    for number in range(rng.choice((16, 30))):
        prompt = rng.randint(1, rng.choice((3, 6)) * block)
        many.append(
            replace(
                asks[number % len(asks)],
                number=number,
                family=rng.randrange(2),
                prompt=prompt,
                shared=prompt if rng.random() < 0.7 else rng.randint(0, prompt),
                answer=rng.randint(1, 3) if rng.random() < short else rng.randint(1, longest),
                after=rng.randint(0, spread),
            )
        )
    return _with_two_kinds(rng, setup, many, (1, 2, 4)), tuple(many)


def _urgent(rng: Random, setup: Setup, asks: tuple[Request, ...]) -> _Shaped:
    """Return (setup, requests): short requests arrive while the longest one is in its prefill.

    The longest has the lowest priority.
    """
    block = setup.block
    long = max(asks, key=lambda ask: ask.prompt)
    threshold = rng.choice((2, 3, 4)) * block
    urgent = tuple(
        replace(
            ask,
            prompt=prompt,
            shared=min(ask.shared, prompt),
            answer=rng.randint(1, block),
            after=rng.randint(1, long.prompt // threshold + 1),
        )
        for ask in asks
        if ask is not long
        for prompt in (rng.randint(1, 2 * block),)
    )
    late = (replace(long, after=0, priority=4), *urgent[: rng.choice((2, 3, 4))])
    longest = max(longest_of(late, block), threshold) + rng.choice((0, 1, 8))
    return (
        replace(setup, threshold=threshold, chunk=2 * threshold + 4, seqs=5, max_len=longest),
        late,
    )


_SHAPES: dict[str, Callable[[Random, Setup, tuple[Request, ...]], _Shaped]] = {
    "crowd": _crowded,
    "busy": _busy,
    "urgent": _urgent,
    "pressure": _under_pressure,
}


def _asks(drawn: _Seed, block: int, loras: bool) -> tuple[Request, ...]:
    """Draw one to twelve requests.

    For all requests together, each property has a random generator of its own. loras: requests may
    have a LoRA adapter.
    """
    lengths, shared, stream, remote, fetch = map(
        drawn.stream, ("lengths", "share", "stream", "remote", "fetch")
    )
    count = lengths.choice((3, 4, 5, 6, 8) if drawn.has("crowd") else (1, 2, 3, 4, 6, 8, 12))
    spread = lengths.choice((0, 1, 3, 8, 20, 60))
    usual = [
        lengths.randint(1, lengths.choice((2, 4, 8, 14)) * block)
        for _ in range(lengths.choice((1, 2, 3)))
    ]
    if drawn.has("long"):
        long = drawn.stream("long")
        usual = [long.randint(1, long.choice((8, 16, 32, 64)) * block) for _ in usual]
    answers = [
        lengths.choice((1, 2, 5, block, 2 * block, 4 * block))
        for _ in range(lengths.choice((1, 2)))
    ]
    starts = list(accumulate((lengths.randint(0, spread) for _ in range(count - 1)), initial=0))
    abort, salt, lora, eos, priority = map(
        drawn.stream, ("abort", "salt", "lora ids", "eos", "priority")
    )
    grammars = _grammars(drawn, count)
    asks = []
    for number in range(count):
        prompt = max(
            1,
            lengths.choice(usual)
            + lengths.choice((0, 0, 0, -1, 1, lengths.randint(-block, block))),
        )
        family, part = (
            shared.randrange(2),
            shared.choice((0, prompt, prompt, prompt // 2, shared.randint(0, prompt))),
        )
        ask = Request(
            prompt=prompt,
            answer=lengths.choice(answers),
            shared=part if drawn.has("share") else 0,
            after=starts[number],
            abort=abort.choice((-1, -1, 0, 1, 2, 3, 5, 9, 20)) if drawn.has("abort") else -1,
            number=number,
            family=family,
            mid=abort.random() < 0.5,
            priority=priority.randrange(4) if drawn.has("priority") else 0,
            lora=lora.randrange(4) if loras else 0,
            salt=salt.randrange(3) if drawn.has("salt") else 0,
            grammar=grammars[number],
            eos=eos.choice((0, 4, 12)) if drawn.has("eos") else 0,
            stops=drawn.has("eos") and eos.random() < 0.2,
        )
        if drawn.has("repeats") and not ask.grammar:
            ask = replace(ask, eos=drawn.stream(f"repeats {number}").choice((0, -1, -2, -3)))
        if drawn.has("least") and ask.eos and not (ask.stops or ask.grammar or drawn.has("draft")):
            ask = replace(ask, least=drawn.stream(f"least {number}").randint(1, ask.answer))
        if drawn.has("switch"):
            # a request of each family, then some that go over from one to the other
            over = block if number > 1 and drawn.stream(f"switch {number}").random() < 0.5 else 0
            ask = replace(ask, shared=prompt, family=number if number < 2 else family, switch=over)
        if drawn.has(_NIXL) and remote.random() < 0.8:
            ask = replace(ask, remote=True, answer=1)
        if drawn.has("fetch") and fetch.random() < 0.8:
            ask = replace(ask, fetch=True, fails=fetch.random() < 0.3)
        if drawn.has("images"):
            refused = drawn.has("image cache") and drawn.stream(f"refused {number}").random() < 0.1
            images = _images(drawn, family, prompt, block)
            if drawn.has("same text"):
                images = other_images(drawn.stream(f"same text {number}"), images)
            ask = replace(ask, images=images, refused=refused)
        parts = tuple(sorted(stream.randint(1, 30) for _ in range(stream.randint(1, 3))))
        if drawn.has("stream") and stream.random() < 0.5 and not ask.grammar:
            ends = drawn.stream("turn-eos").choice((4, 12)) if drawn.has("turn-eos") else 0
            ask = replace(
                ask, segments=parts, shared=0, lora=0, salt=0, eos=ends, stops=False, least=0
            )
        asks.append(ask)
    return tuple(asks)


def _image_sizes(drawn: _Seed, block: int) -> list[int]:
    """Return the sizes in tokens of the images that the prompts of a case may hold.

    Image number n has the size at index n modulo `_SIZES`.
    """
    rng = drawn.stream("image sizes")
    return [
        rng.choice((1, block // 2, block, block + 1, 2 * block, 4 * block)) for _ in range(_SIZES)
    ]


def _images(drawn: _Seed, family: int, prompt: int, block: int) -> tuple[tuple[int, int, int], ...]:
    """Return (offset, tokens, image number) of each image in a prompt of `prompt` tokens.

    Prompts of one family get the same images at the same offsets, as far as they fit.
    """
    rng, sizes = drawn.stream(f"images of family {family}"), _image_sizes(drawn, block)
    images, at = [], 0
    for _ in range(rng.randint(1, 5)):
        number = rng.randrange(len(sizes))
        at += rng.choice((0, 1, block // 2, block))
        if at + sizes[number] > prompt:
            break
        images.append((at, sizes[number], number))
        at += sizes[number]
    return tuple(images)


def other_images(
    rng: Random, images: tuple[tuple[int, int, int], ...]
) -> tuple[tuple[int, int, int], ...]:
    """Return the images in the same places; some are replaced by another image of the same size."""
    return tuple(
        (offset, tokens, number + _SIZES * rng.choice((0, 0, 1, 2)))
        for offset, tokens, number in images
    )


def _waves(drawn: _Seed, asks: tuple[Request, ...]) -> tuple[tuple[Request, ...], ...]:
    """Split requests into up to four waves, each of which comes when the engine is idle.

    `after` then counts from the first request of the wave.
    """
    rng = drawn.stream("waves")
    cuts = sorted({0, *(rng.randrange(len(asks)) for _ in range(3))})
    parts = [asks[first:last] for first, last in zip(cuts, [*cuts[1:], len(asks)], strict=True)]
    return tuple(
        tuple(replace(ask, after=ask.after - part[0].after) for ask in part) for part in parts
    )


def _grammars(drawn: _Seed, count: int) -> list[str]:
    """Return the name of each request's grammar, empty without one; some may be faulty."""
    kinds, faulty = drawn.stream("grammars"), drawn.stream("faulty")
    grammars = [
        kinds.choice(_GRAMMARS) if kinds.random() < 0.6 and drawn.has("grammar") else ""
        for _ in range(count)
    ]
    if not drawn.has("faulty"):
        return grammars
    unchecked = drawn.stream("unchecked")
    faults = [
        faulty.choice(_FAULTY) if grammar and faulty.random() < 0.3 else "" for grammar in grammars
    ]
    return [
        "unchecked" if fault and unchecked.random() < 0.3 else fault or grammar
        for fault, grammar in zip(faults, grammars, strict=True)
    ]


def _operations(drawn: _Seed, last: int) -> tuple[tuple[int, str], ...]:
    """Return (step, operation) of each cache reset and pause, as in `Setup.ops`.

    last: step of the last arrival.
    """
    operations = []
    for what in ("reset", "reset-running", "reset-connector"):
        rng = drawn.stream(what)
        operations += [
            (rng.randint(0, last + 30), what) for _ in range(rng.randint(1, 3)) if drawn.has(what)
        ]
    rng = drawn.stream("pause")
    for _ in range(rng.randint(1, 2) if drawn.has("pause") else 0):
        then = rng.choice(("", "-sleep" if drawn.has("sleep") else "-clear"))
        operations.append(
            (
                rng.randint(0, last + 20),
                f"pause-{rng.choice(_PAUSES)}{then}-{rng.choice((1, 3, 10, 40))}",
            )
        )
    return tuple(sorted(operations))
