"""A tokenizer as a GGUF file describes it; both ways.

llama.cpp has two kinds: byte pairs merged by rank (``gpt2``), and pieces of SentencePiece merged by
score (``llama``). The package ``tokenizers`` has both as BPE; pieces have a byte for what is not in
the vocabulary, and ``▁`` for spaces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tunesmith.errors import ModelError
from tunesmith.models.gguf.splitting import ALIASES, SPLITTINGS, Splitting, steps_of
from tunesmith.plan.facts.gguf import Header, Value
from tunesmith.plan.facts.layers import Written
from tunesmith.records.plain import JsonObject

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
SPACE = "▁"
_BYTES = frozenset(f"<0x{number:02X}>" for number in range(256))
_NO_PIECE = -1000.0
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ENDS = ("eos", "eot", "eom")
"""What llama.cpp calls the tokens that end a completion."""
_KEY = "tokenizer.ggml."


# From a tokenizer to a file


def tokenizer_values(
    tokenizer: PreTrainedTokenizerBase, rows: int, ends: Sequence[int]
) -> dict[str, Value]:
    """What a file says of a tokenizer.

    Args:
        rows: those of the embedding.
        ends: tokens that end a completion.

    Raises:
        ModelError: llama.cpp would tokenise texts in another way.
    """
    core: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    described: JsonObject = json.loads(core.to_str()) if core is not None else {}
    model: JsonObject = described.get("model") or {}
    if model.get("type") != "BPE":
        raise _refused(f"of type {model.get('type')}", "BPE")
    if not model["merges"]:
        raise _refused("without merges", "BPE with merges")
    said = _pieces(described) if model.get("byte_fallback") else _byte_pairs(described)
    tokens = _by_id(tokenizer, rows)
    added = {token["id"]: token for token in described["added_tokens"]}
    kinds = [_kind_of(tokens.get(row), added.get(row), model) for row in range(rows)]
    texts = [tokens.get(row, f"[PAD{row}]") for row in range(rows)]
    if model.get("byte_fallback"):
        pairs = zip(texts, kinds, strict=True)
        texts = [t.replace(SPACE, " ") if kind == USER_DEFINED else t for t, kind in pairs]
        ranks = _scores(model, {token["content"] for token in added.values()})
        said["scores"] = [ranks.get(tokens.get(row, ""), _NO_PIECE) for row in range(rows)]
    said |= {"tokens": [*texts], "token_type": [*kinds], **_special(tokenizer, ends)}
    values = {_KEY + name: value for name, value in said.items()}
    return values | _templates(tokenizer)


def _refused(what: str, valid: str) -> ModelError:
    return ModelError(f"a tokenizer {what} cannot be written as GGUF; valid: {valid}")


def _by_id(tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[int, str]:
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(tokens) >= rows:
        raise ModelError(
            f"the tokenizer has the token {max(tokens)}, and the embedding has {rows} rows: they "
            "are not of one model"
        )
    return tokens


def _kind_of(token: str | None, added: Written | None, model: Written) -> int:
    if token is None:
        return UNUSED
    if model.get("byte_fallback") and token == model.get("unk_token"):
        return UNKNOWN
    if added is not None:
        return CONTROL if added["special"] else USER_DEFINED
    return BYTE if model.get("byte_fallback") and token in _BYTES else NORMAL


def _byte_pairs(described: Written) -> dict[str, Value]:
    model = described["model"]
    normalizer: JsonObject = described.get("normalizer") or {}
    if normalizer.get("type") not in (None, "NFC"):  # llama.cpp leaves texts as they are
        raise _refused(f"with the normalizer {normalizer['type']}", "none, NFC")
    steps = steps_of(described.get("pre_tokenizer"))
    ignores = bool(model.get("ignore_merges"))
    for name, splitting in SPLITTINGS.items():
        if steps == splitting.steps and ignores == splitting.ignore_merges:
            return {
                "model": "gpt2",
                "pre": name,
                "merges": [_joined(merge) for merge in model["merges"]],
            }
    raise _refused(
        f"that splits texts by {json.dumps(described.get('pre_tokenizer'))} with ignore_merges = "
        f"{ignores}",
        f"the splitting of {', '.join(SPLITTINGS)}",
    )


def _joined(merge: str | Sequence[str]) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)


def _pieces(described: Written) -> dict[str, Value]:
    steps = [*_flat(described.get("normalizer"), "normalizers")]
    steps += _flat(described.get("pre_tokenizer"), "pretokenizers")
    prefix = False
    for step in steps:
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                prefix = True
            case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}:
                prefix = scheme != "never"
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case {"type": "Split", "pattern": {"String": " "}}:  # spaces are ▁ by then
                pass
            case _:
                raise _refused(f"of pieces with the step {json.dumps(step)}", "▁ for spaces")
    return {"model": "llama", "pre": "default", "add_space_prefix": prefix}


def _flat(described: Written | None, inner: str) -> Iterator[Written]:
    if described and described["type"] == "Sequence":
        yield from described[inner]
    elif described:
        yield described


def _scores(model: Written, added: set[str]) -> dict[str, float]:
    """llama.cpp merges the two neighbours that make the piece with the highest score: the negative
    rank at which a merge first makes it."""
    scores: dict[str, float] = {}
    pairs = {tuple(_joined(merge).split(" ")) for merge in model["merges"]}
    for rank, merge in enumerate(model["merges"]):
        scores.setdefault(_joined(merge).replace(" ", ""), -float(rank))
    vocabulary = {piece for piece in model["vocab"] if piece not in added} - _BYTES
    missing = next((pair for pair in _halves(vocabulary) if pair not in pairs), None)
    if missing:
        raise _refused(
            f"of pieces that merges not {missing[0]!r} and {missing[1]!r}, though both and their "
            "sum are pieces,",
            "all such merges, as SentencePiece has them",
        )
    return scores


def _halves(vocabulary: Iterable[str]) -> Iterator[tuple[str, str]]:
    pieces = frozenset(vocabulary)
    for piece in pieces:
        for place in range(1, len(piece)):
            if piece[:place] in pieces and piece[place:] in pieces:
                yield piece[:place], piece[place:]


def _special(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> dict[str, Value]:
    """The tokens with a role, and which of them are added to a text."""
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in _NAMED}
    all_ends = dict.fromkeys(number for number in (ids["eos"], *ends) if number is not None)
    if len(all_ends) > len(_ENDS):
        raise _refused(f"with {len(all_ends)} tokens that end a completion", f"{len(_ENDS)}")
    values: dict[str, Value] = {
        f"{_NAMED[name]}_token_id": number for name, number in ids.items() if number is not None
    }
    values |= {f"{_ENDS[place]}_token_id": number for place, number in enumerate(all_ends)}
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    bos = whole[:1] == [ids["bos"]] != bare[:1]
    eos = whole[-1:] == [ids["eos"]] != bare[-1:]
    if whole != [*[ids["bos"]] * bos, *bare, *[ids["eos"]] * eos]:
        raise _refused(f"that adds {whole} to a text of {bare}", "BOS before and EOS after it")
    return values | {"add_bos_token": bos, "add_eos_token": eos}


def _templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, Value]:
    template: str | dict[str, str] | None = tokenizer.chat_template
    if not isinstance(template, dict):
        return {"tokenizer.chat_template": template} if template else {}
    named = {f"tokenizer.chat_template.{name}": text for name, text in template.items()}
    default = template.get("default")
    return {**named, **({"tokenizer.chat_template": default} if default else {})}


# From a file to a tokenizer


def tokenizer_of(header: Header) -> PreTrainedTokenizerFast:
    """The tokenizer that a file describes.

    Raises:
        ModelError: it describes none, or one of another kind.
    """
    kind = header.values.get(f"{_KEY}model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{header.path}: tokenizer.ggml.model is {kind!r}; read from GGUF are gpt2 and llama"
        )
    core = _core_of_pieces(header) if kind == "llama" else _core_of_byte_pairs(header)
    tokens = header.texts(f"{_KEY}tokens")
    for number, type_ in enumerate(header.numbers(f"{_KEY}token_type")):
        if type_ in (CONTROL, USER_DEFINED):
            core.add_tokens(
                [AddedToken(tokens[number], special=type_ == CONTROL, normalized=False)]
            )
    numbered = {name: header.numbers(f"{_KEY}{said}_token_id") for name, said in _NAMED.items()}
    known = {name: ids[0] for name, ids in numbered.items() if ids and ids[0] < len(tokens)}
    named = {name: tokens[number] for name, number in known.items() if tokens[number]}
    _add_template(core, header, named, kind)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        **{f"{name}_token": token for name, token in named.items()},
        clean_up_tokenization_spaces=False,
    )
    template = header.values.get("tokenizer.chat_template")
    made.chat_template = str(template) if template else None
    return made


def ends_in(header: Header) -> list[int]:
    """The tokens that end a completion."""
    return [number for name in _ENDS for number in header.numbers(f"{_KEY}{name}_token_id")]


def _vocabulary(header: Header) -> dict[str, int]:
    """All tokens but those that only fill up the embedding."""
    kinds = header.numbers(f"{_KEY}token_type")
    tokens = enumerate(header.texts(f"{_KEY}tokens"))
    return {token: n for n, token in tokens if not kinds or kinds[n] != UNUSED}


def _core_of_byte_pairs(header: Header) -> Tokenizer:
    name = str(header.values.get(f"{_KEY}pre"))
    splitting = _splitting(header)
    if splitting is None:
        raise ModelError(
            f"{header.path}: tokenizer.ggml.pre '{name}' is not read from GGUF; valid: "
            f"{', '.join([*SPLITTINGS, *ALIASES])}"
        )
    split = (merge.split(" ") for merge in header.texts(f"{_KEY}merges"))
    merges = [(merge[0], merge[1]) for merge in split]
    ignores = splitting.ignore_merges
    core = Tokenizer(models.BPE(_vocabulary(header), merges, ignore_merges=ignores))
    steps = [_made(kind, setting) for kind, setting in splitting.steps]
    core.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    core.decoder = decoders.ByteLevel()
    return core


def _splitting(header: Header) -> Splitting | None:
    name = str(header.values.get(f"{_KEY}pre"))
    return SPLITTINGS.get(ALIASES.get(name, name))


def _made(kind: str, setting: str) -> pre_tokenizers.PreTokenizer:
    match kind:
        case "Split":
            return pre_tokenizers.Split(Regex(setting), "isolated")
        case "Digits":
            return pre_tokenizers.Digits(individual_digits=True)
        case _:
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(setting))


def _core_of_pieces(header: Header) -> Tokenizer:
    vocabulary = _vocabulary(header)
    kinds = header.numbers(f"{_KEY}token_type")
    tokens = header.texts(f"{_KEY}tokens")
    scores = header.values.get(f"{_KEY}scores")
    if not isinstance(scores, list):
        raise ModelError(f"{header.path}: tokenizer.ggml.scores are missing")
    pieces = {token for token, number in vocabulary.items() if kinds[number] == NORMAL}

    def order(pair: tuple[str, str]) -> tuple[float, int, int]:
        one, other = pair
        return -float(str(scores[vocabulary[one + other]])), vocabulary[one], vocabulary[other]

    merges = sorted(_halves(pieces), key=order)
    unknown = next((tokens[place] for place, kind in enumerate(kinds) if kind == UNKNOWN), None)
    core = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token=unknown, byte_fallback=True, fuse_unk=True
        )
    )
    prefix = bool(header.values.get(f"{_KEY}add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    core.normalizer = spaces
    if prefix:
        core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return core


def _add_template(core: Tokenizer, header: Header, named: Mapping[str, str], kind: str) -> None:
    """Make the tokenizer add BOS and EOS as llama.cpp does."""
    splitting = _splitting(header) if kind == "gpt2" else None
    usual = kind == "llama" or (splitting is not None and splitting.adds_bos)
    bos = header.values.get(f"{_KEY}add_bos_token", usual) and named.get("bos")
    eos = header.values.get(f"{_KEY}add_eos_token", False) and named.get("eos")
    if not (bos or eos):
        return
    before = [str(bos)] if bos else []
    after = [str(eos)] if eos else []
    special = [(token, core.token_to_id(token)) for token in dict.fromkeys([*before, *after])]
    core.post_processor = TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=special,
    )
