"""Byte-level BPE tokenizer in the format of `tokenizer.json`; the same on every machine.

Like a real tokenizer it encodes any text, joins common pieces of English and code into one token,
and can split a character into several tokens. Pairs of ASCII characters fill the vocabulary, so
that almost every random token id is a piece of text.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
PAD = "<pad>"
SPECIAL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN, PAD)
IMAGE = "<image>"
"""Stands for an image in the prompt of a model that reads images."""
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens that vLLM's reasoning and tool-call parsers require.

Unlike special tokens they appear in decoded text.
"""

Merge = tuple[str, str]

# The merges of BPE training on a page of English and Python, in order of rank. "Ġ" is a space, "Ċ"
# a line break.
_LEARNT = """
Ġ|t Ġ|Ġ h|e Ġt|he Ġ|a i|n r|e s|t e|n e|r i|t Ġ|s ĠĠ|ĠĠ a|t Ġ|o u|e Ġ|w Ġa|n Ġ|f Ġ|l Ġt|h i|s m|p
o|n Ġ|" Ġ|b ĠĠ|Ġ a|n a|r o|r Ġ|is Ġan|d Ġo|f e|l in|e l|o p|r q|ue Ġ|m Ġ|n Ġ|st Ġt|o Ġth|at "|: e|p
e|s k|en o|mp Ċ|ĠĠĠĠ Ġ|c Ġ|in b|er e|f omp|t pr|ompt que|st t|o u|s ĊĠĠĠĠ|ĠĠĠ Ġ|it Ġa|re Ġst|ep "|,
a|x c|k e|a e|v el|f en|t i|v in|g ken|s l|lo m|ber o|d re|a t|e to|kens Ġ|d Ġ|prompt Ġl|ine Ġn|o
(|" (|) T|he a|l at|u atu|re d|s e|c er|ature ev|en g|u he|llo it|h lo|ck m|e mp|erature on|e on|t
s|s s|w t|he us|er v|e Ċ|ĠĠĠ Ġ|= Ġ|A Ġ|J Ġ|g Ġ|h Ġ|re Ġb|lock Ġb|u Ġf|i Ġf|or Ġs|elf )|: R|e
Re|quest _|_ a|i a|in a|y ai|d an|t ar|gu ar|t ar|y argu|m argum|ent c|h d|g dg|e dge|t e|e
e|mperature ef|t h|at i|st ist|ant iv|es l|it l|y m|ax n|e o|me o|re o|u od|el on|g p|lit que|ue
r|it r|o r|st r|u re|e rea|d s|plit ss|istant sw|er te|d the|r us|e w|s {|" Ġ|I Ġ|O Ġ|Request Ġ|The
Ġ|W Ġ|en Ġ|hello Ġ|k Ġ|queue ĠJ|u Ġa|l Ġa|ssistant Ġa|t Ġan|swer Ġblock|s Ġbu|dget Ġc|an Ġfi|rst
Ġit|s Ġl|eft Ġm|ax Ġo|n Ġs|aid Ġstep|s Ġt|emperature Ġt|r Ġt|w Ġth|an Ġthe|m Ġthe|y Ġto|ken Ġw|ith
Ġw|rit "|) "|} "}|] "}]|, #|") ("|#") ()|): ()|. ()|: )|) )|. ))|, -|> 0|0 1|00 1|6 :|", D|ec Dec|e
Dece|mber F|e Fe|b Feb|ru Febru|ary M|ar M|ay Mar|ch N|o No|ve Nove|mber P|l Pl|ea Plea|s Pleas|e
S|ep Sep|te Septe|mber [|{" __|( a|ck a|g a|it a|k a|me a|ss a|st a|use a|ve ag|es ait|ing ak|es
al|k al|l al|ue alue|s an|u anu|ary art|sw artsw|ith at|er ay|s b|ef b|od b|ou bef|ore bod|y bou|t
c|l c|ont c|to cl|ass cont|ent cto|ber d|ef e|ar e|i e|x e|y ea|ch ea|st ec|ause ec|od ecod|ing
ee|ds ee|k ei|g eig|h eigh|t el|ve er|y es|s ess|ages ev|ery even|ing ex|t ey|s g|ain g|ine gu|st
h|or h|s he|n he|re hor|t i|f i|l i|on i|p i|x in|it in|t in|ue in|y iv|e iv|en l|d l|e l|ine llo|ws
m|all
"""


def special_id(token: str) -> int:
    """Return the id of one of `SPECIAL_TOKENS`."""
    return SPECIAL_TOKENS.index(token)


def added_tokens(*, image: bool = False) -> tuple[str, ...]:
    """Return the special tokens and markers, which stand for no bytes, in the order of their ids.

    image: include the token `IMAGE`.
    """
    return (*SPECIAL_TOKENS, *MARKERS, *((IMAGE,) if image else ()))


def tokenizer_json(vocab: int, *, image: bool = False) -> dict[str, Any]:
    """Return the content of `tokenizer.json` with at most `vocab` tokens.

    vocab: at least `SMALLEST_VOCABULARY`. image: include the token `IMAGE`.
    """
    added = added_tokens(image=image)
    tokens = [*added, *byte_alphabet()]
    merges = list(_merges()[: vocab - len(tokens)])
    tokens += ["".join(merge) for merge in merges]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in SPECIAL_TOKENS or token == IMAGE,
            }
            for number, token in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


@cache
def byte_alphabet() -> tuple[str, ...]:
    """Return the character for each of the 256 bytes in a byte-level vocabulary.

    Printable bytes map to themselves. The others, including the space, map to characters from
    U+0100 on, so that no token contains a space or a control character.
    """
    prints = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    moved = iter(range(256, 512))
    return tuple(chr(byte) if byte in prints else chr(next(moved)) for byte in range(256))


@cache
def _merges() -> tuple[Merge, ...]:
    """Return every merge of the BPE tokenizer in order of rank; no two make the same token."""
    learnt: list[Merge] = [
        (left, right) for left, _, right in (pair.partition("|") for pair in _LEARNT.split())
    ]
    alphabet = byte_alphabet()
    ascii_characters = [alphabet[byte] for byte in range(ord(" "), ord("~") + 1)]
    known = {left + right for left, right in learnt}
    pairs = [
        (left, right)
        for left, right in product(ascii_characters, repeat=2)
        if left + right not in known
    ]
    return (*learnt, *pairs)
