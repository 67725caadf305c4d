"""Tokenises documents that come in pieces, to the tokens of the whole document: in little memory, and in threads.

What a tokenizer makes of a place depends on what is around it: words, merges, the space that some put before a text. So
pieces overlap, and are joined where both have had the same tokens for a while. Ids are those of the whole text, but
where a Unigram model that cuts no words has two ways of equal probability, of which the library takes one by rounding.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from training.data.library_tokenizer import LibraryTokenizer
from training.data.tokenizer import Tokenizer
from training.errors import UserError

# Documents are tokenised in groups of this many characters: enough to keep a tokenizer's threads busy, and few enough
# to keep its intermediate objects (about 100 bytes a token) small.
CHARACTERS_PER_CALL = 1 << 20
# Characters that a piece has of each of its neighbours.
MARGIN = 1 << 11
# Pieces are joined in the middle of so many tokens that both have.
COMMON = 32
# Of so many kinds: in what repeats, tokens may depend on where it began.
DISTINCT = 8
# Pieces that have none are tokenised as one, up to so many characters; then those of fewer kinds have to do.
LONGEST = 1 << 20


@dataclass(frozen=True)
class Window:
    """A piece with its margins, which begins at the character `start` of its document."""

    text: str
    start: int
    document_begins: bool
    document_ends: bool


@dataclass(frozen=True)
class Part:
    """The tokens of a window: ids uint32 [n], and where each begins and ends in its document, int64 [n, 2]."""

    window: Window
    ids: np.ndarray
    places: np.ndarray


def encoded(pieces: Iterable[tuple[str, bool]], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, bool]]:
    """Yields (tokens, document_ends) of pieces (text, document_ends): together those of each document's whole text.

    Raises UserError for a document that cannot be cut: of LONGEST characters all tokens depend on where they began.
    """
    looks_around = isinstance(tokenizer, LibraryTokenizer)
    last: Part | None = None
    # The tokens of `last` that were given out.
    done = 0
    for group in _grouped(windows(pieces, MARGIN if looks_around else 0)):
        texts = [window.text for window in group]
        if not looks_around or all(window.document_begins and window.document_ends for window in group):
            yield from zip(tokenizer.encode_batch(texts), (window.document_ends for window in group), strict=True)
            continue
        for window, (ids, spans) in zip(group, tokenizer.encode_spans(texts), strict=True):
            part = Part(window, ids, spans + window.start)
            if window.document_begins:
                done = 0
            else:
                seam = _seam(last, part, done, DISTINCT)
                if seam is None and len(last.window.text) + len(window.text) > LONGEST:
                    seam = _seam(last, part, done, 1)
                if seam is None:
                    part = _as_one(last, part, tokenizer, done)
                else:
                    yield last.ids[done : seam[0]], False
                    done = seam[1]
            last = part
            if window.document_ends:
                yield part.ids[done:], True
    if last is not None and not last.window.document_ends:
        yield last.ids[done:], False


def windows(pieces: Iterable[tuple[str, bool]], margin: int) -> Iterator[Window]:
    """Yields each piece with up to `margin` characters of its neighbours in the same document."""
    # `start` is that of `held`, a piece whose window waits for the next one.
    before, start, held = "", 0, None
    for text, ends in pieces:
        if held is not None:
            yield Window(before + held + text[:margin], start - len(before), start == 0, False)
            start += len(held)
            before = (before + held)[-margin:] if margin else ""
        held = text
        if ends:
            yield Window(before + held, start - len(before), start == 0, True)
            before, start, held = "", 0, None
    if held is not None:
        yield Window(before + held, start - len(before), start == 0, False)


def _seam(first: Part, second: Part, done: int, distinct: int) -> tuple[int, int] | None:
    """Returns how many tokens of the first part count, `done` or more, and from which on those of the second do.

    Around the place both have COMMON tokens of `distinct` kinds. None: there is no such place.
    """
    begin = int(np.searchsorted(first.places[:, 0], second.window.start))
    stop = int(np.searchsorted(second.places[:, 0], first.window.start + len(first.window.text)))
    of_second = {token: number for number, token in enumerate(_tokens(second, slice(stop)))}
    found, run, last, ids = [], 0, -1, first.ids.tolist()
    for number, token in enumerate(_tokens(first, slice(begin, None)), begin):
        place = of_second.get(token, -1)
        run = run + 1 if place == last + 1 and run else int(place >= 0)
        last = place
        here = number + 1 - COMMON // 2
        if run >= COMMON and here >= done and len({*ids[number + 1 - COMMON : number + 1]}) >= distinct:
            found.append((here, place + 1 - COMMON // 2))
    return found[len(found) // 2] if found else None


def _tokens(part: Part, which: slice) -> Iterator[tuple[int, ...]]:
    return zip(part.ids[which].tolist(), *part.places[which].T.tolist(), strict=True)


def _as_one(first: Part, second: Part, tokenizer: LibraryTokenizer, done: int) -> Part:
    """Returns the tokens of both windows; the first `done` are those of `first`. Raises UserError as `encoded`."""
    here, there = first.window, second.window
    text = here.text + there.text[here.start + len(here.text) - there.start :]
    ((ids, spans),) = tokenizer.encode_spans([text])
    if len(text) > LONGEST or not np.array_equal(ids[:done], first.ids[:done]):
        raise UserError(
            f"dataset: a document has {len(text)} characters that cannot be tokenised in pieces, because all their"
            f" tokens depend on those before: shorten it where it repeats {text[-40:]!r}"
        )
    return Part(replace(here, text=text, document_ends=there.document_ends), ids, spans + here.start)


def _grouped(pieces: Iterable[Window]) -> Iterator[list[Window]]:
    """Yields lists of consecutive windows with CHARACTERS_PER_CALL characters each."""
    group: list[Window] = []
    num_characters = 0
    for window in pieces:
        group.append(window)
        num_characters += len(window.text)
        if num_characters >= CHARACTERS_PER_CALL:
            yield group
            group, num_characters = [], 0
    if group:
        yield group
