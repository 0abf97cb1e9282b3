"""Seeded texts of every length and kind, for tools that measure; STS-B and wikitext, if there."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_WORDS = {
    "English": "time people water over under house light the of a river stone walks quickly "
    "through morning letter because green tea window they found an old map which nobody could "
    "read market seventeen instruments didn't re-enter co-operate U.S. naïve café",
    "German": "Straße über Häuser der die das Zug fährt nach Übermut Donaudampfschifffahrt weiß "
    "größte Möglichkeiten und nicht schön heute Öl",
    "French": "l'été où garçon être déjà français œuvre élève naïf hôpital ça façade le la les",
    "Spanish": "¿cómo mañana niño corazón está pingüino ¡qué años el la también",
    "Turkish": "İstanbul \u0131\u011fd\u0131r çiçek şeker güneş ağaç İ \u0131",
    "Vietnamese": "tiếng Việt đường phố người nước được không",
    "Russian": "привет мир дорога ещё объект Москва читать книгу в на",
    "Greek": "καλημέρα κόσμε θάλασσα Ελλάδα λόγος ὁ ἄνθρωπος",
    "Arabic": "مرحبا بالعالم كتاب السَّلَامُ مدينة لغة",
    "Hebrew": "שלום עולם ספר שָׁלוֹם עיר",
    "Hindi": "नमस्ते दुनिया किताब हिन्दी क्षेत्र",
    "Thai": "สวัสดี ชาวโลก ภาษาไทย กรุงเทพฯ",
    "Chinese": "你好 世界 今天天气很好 图书馆 。 机器学习",
    "Japanese": "こんにちは 世界 カタカナ 東京都 です \uff8a\uff9d\uff76\uff78",
    "Korean": "안녕하세요 세계 한국어 도서관 오늘",
}
WORDS = {language: tuple(words.split()) for language, words in _WORDS.items()}
UNSPACED = ("Chinese", "Japanese", "Thai")
EMOJI = ("🙂", "🪁", "👩‍👩‍👧", "🇪🇺", "👍🏽", "❤️", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "1️⃣", "🦙🧪")
ODD = (
    "e\u0301",  # a combining accent
    "Z\u0351\u036b\u0343alg\u0328o\u0321",
    "zero\u200bwidth",
    "soft\u00adhyphen",
    "\u202eright-to-left\u202c",
    "\ufeffbom",
    "ﬁligature",
    "\uff26\uff35\uff2c\uff2c",
    "\U0001d524\U0001d52c\U0001d531\U0001d525\U0001d526\U0001d520",
    "\U00020000",
    "\ufffd",
    "\u0000nul",
    "\x1b[0m",
    "tab\there",
    "line\u2028separator",
    "\u00a0nbsp\u3000wide",
    "[CLS]",
    "<s>",
    "##ing",
    "x" * 120,  # longer than a word that WordPiece looks up
    "1234567890,5%",
    "½²①",
    "if(a&&b){c[i]=~d;}",
    "https://example.org/a?b=c#d",
)


def mixed_texts(
    count: int, seed: int = 0, extra: Sequence[str] = (), most_words: int = 600
) -> list[str]:
    """Draw texts of one word to `most_words`; short ones are more frequent.

    Args:
        count: How many.
        seed: The same seed draws the same texts.
        extra: Texts to take some from, for instance `corpus_texts`.
        most_words: Not counting emoji and oddities, which some texts get on top.
    """
    rng = np.random.default_rng(seed)
    return [_text(rng, extra, most_words) for _ in range(count)]


def _text(rng: np.random.Generator, extra: Sequence[str], most_words: int) -> str:
    length = int(np.exp(rng.uniform(0, np.log(most_words + 1))))
    if extra and rng.random() < 0.25:
        return str(rng.choice(np.array(extra, object)))
    languages = list(WORDS)
    chosen = rng.choice(languages, 1 if rng.random() < 0.7 else 3, replace=False)
    words = np.array([word for name in chosen for word in WORDS[str(name)]], object)
    out = list(rng.choice(words, length))
    for source, share in ((EMOJI, 0.3), (ODD, 0.3)):
        if rng.random() < share:
            for _ in range(1 + length // 20):
                out.insert(int(rng.integers(len(out) + 1)), str(rng.choice(source)))
    separator = "" if chosen[0] in UNSPACED else " "
    return separator.join(out)


def skewed_lengths(
    count: int, seed: int, low: int = 8, high: int = 512, mean: int = 128
) -> list[int]:
    """Draw token counts: many short, a few long."""
    rng = np.random.default_rng(seed)
    sigma = 0.8
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return [int(n) for n in np.clip(drawn, low, high)]


def text_of_tokens(
    rng: np.random.Generator, tokens: int, count_tokens: Callable[[str], int]
) -> str:
    """Draw an English text that has just so many tokens, or the nearest number below."""
    words = list(rng.choice(np.array(WORDS["English"][:20], object), tokens))
    while len(words) > 1 and (over := count_tokens(" ".join(words)) - tokens) > 0:
        del words[-over:]
    return " ".join(words)


@dataclass(frozen=True)
class SentencePairs:
    """Pairs of sentences with the similarity that people saw in them, 0 to 5."""

    left: list[str]
    right: list[str]
    scores: list[float]


def sts_pairs(data: Path, language: str, limit: int | None = None) -> SentencePairs | None:
    """The STS-B test set of a language; None if it is not in the folder `data`."""
    path = data / "stsb" / f"stsb-{language}-test.csv"
    if not path.exists():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[:limit]
    left, right, scores = zip(*rows, strict=True)
    return SentencePairs(list(left), list(right), [float(score) for score in scores])


def corpus_texts(data: Path | None) -> list[str]:
    """Sentences of STS-B and paragraphs of wikitext in the folder `data`; none if it is absent."""
    if data is None:
        return []
    texts: list[str] = []
    for language in ("en", "de", "zh"):
        if pairs := sts_pairs(data, language):
            texts += pairs.left
    wikitext = data / "wikitext-2" / "test.txt"
    if wikitext.exists():
        lines = wikitext.read_text(encoding="utf-8").splitlines()
        texts += [line.strip() for line in lines if len(line) > 40]
    return texts


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation of two rows of numbers."""
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosines of the rows of two matrices [N, D], in float64."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.asarray((a * b).sum(axis=1) / lengths)


def near_one(cosine: float) -> str:
    """Write a cosine so that one sees how far from 1 it is."""
    return f"1 - {max(0.0, 1 - cosine):.0e}" if cosine > 0.99 else f"{cosine:.4f}"
