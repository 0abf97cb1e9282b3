"""An encoder that has shown that it agrees with the library as it is installed."""

import logging

import tokenizers

from rose.serving.gateway.unigram.encoder import UnigramEncoder, load_library
from rose.serving.gateway.unigram.facts import Unsupported, read_facts

log = logging.getLogger(__name__)

# One text for each thing that a version of the library might come to do otherwise.
PROBES = (
    *("", " ", "  two  spaces ", "\u2581", "a\u2581b \u2581\u2581c", "more words, 12.5% of them"),
    *(
        "Straße naïve œuvre",
        "привет, мир",
        "你好\uff0c世界。",
        "こんにちは\uff76\uff9e\uff77\uff9e",
    ),
    *("안녕 \u1112\u1161\u11ab", "नमस्ते क\u093c", "กรุงเทพฯ น้ำ", "السَّلَامُ \u0675\u064e", "שָׁלוֹם"),
    *("tiê\u0301ng Vie\u0323\u0302t", "e\u0301 a\u0302\u0301 A\u030a\u0327 o\u0308\u0304"),
    *("\u0301 mark", "\n\u0301 \u0301\u0327\u0300", "q\u0345\u0334", "\u00a0\u0301 \u3000wide"),
    *("\uff26\uff35\uff2c\uff2c \uff5e ﬁ ½ ² ① ㍿ \ufdfa", "\u2126 \u212b \u0344 \u0958 \u1fc1"),
    *("🙂👩\u200d👩\u200d👧 🇪🇺 1\ufe0f\u20e3 ❤\ufe0f", "\u00a9\u200d \u2122\ufe0f \u00a0nbsp"),
    *("nul\0 \x01 \x7f \x8f \x9f \x85 tab\t", "line\r\nend\r \v\f", "\u200b \ufeff \ufffd \u00ad"),
    *(
        "\U000e0041 \ue000 \uffff \U0010ffff \u0378",
        "\U00020000 \U0001d524 \u0f77 \u0f73",
        "x" * 99,
    ),
)


def fast_encoder(backend: tokenizers.Tokenizer) -> UnigramEncoder | None:
    """Return an encoder with the ids of a tokenizer; None if the library has to serve.

    The tokenizer may not be changed afterwards; it neither truncates nor pads.
    """
    try:
        facts = read_facts(backend)
    except Unsupported as error:
        log.debug("The tokenizers library is used, because of the tokenizer's %s", error)
        return None
    if (library := load_library()) is None:
        return None
    encoder = UnigramEncoder(library, facts)
    for special in (True, False):
        expected = backend.encode_batch_fast(list(PROBES), add_special_tokens=special)
        for probe, theirs, ours in zip(
            PROBES, expected, encoder.encode(PROBES, special=special), strict=True
        ):
            if ours is not None and ours.tolist() != theirs.ids:
                log.warning("The tokenizers library is used: it reads %r otherwise", probe)
                return None
    return encoder
