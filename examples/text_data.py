"""The data of the text examples: the source code of Python's standard library, which needs no download.

For classification: docstrings and comments, labelled with the package they come from. For the language model: whole
source files. ``python examples/text_data.py`` prints a summary.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorWithPadding, PreTrainedTokenizerFast

# Packages with many texts that every Python since 3.10 has: distutils was removed, and tkinter is often not installed.
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
VOCABULARY = 4000
MAXIMUM_TOKENS = 64
TEST_SHARE = 0.2

_LIBRARY = Path(sysconfig.get_path("stdlib"))
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#.*\n)+", re.MULTILINE)
_COMMENT_SIGN = re.compile(r"^[ \t]*#+[ \t]?", re.MULTILINE)
_PACKAGE_NAME = re.compile(rf"\w*(?:{'|'.join(PACKAGES)})\w*", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]{2,}")

Example = dict[str, list[int] | int]


@dataclass(frozen=True)
class TextData:
    """Tokenized texts; ``labels`` of an example is an index into :data:`PACKAGES`, and ``test`` is held out."""

    train: list[Example]
    test: list[Example]
    tokenizer: PreTrainedTokenizerFast

    @property
    def baseline(self) -> float:
        """The test accuracy of always answering with the largest class of the training set."""
        ((largest, _),) = Counter(example["labels"] for example in self.train).most_common(1)
        return sum(example["labels"] == largest for example in self.test) / len(self.test)


def load_text_data(limit: int | None = None) -> TextData:
    """Returns the classification data; the same at every call, regardless of the training seed.

    Args:
        limit: How many of the texts to use, for a quick run; None for all.
    """
    texts = sorted(labelled_texts().items())
    random.Random(0).shuffle(texts)
    texts = texts[:limit]
    held_out = int(len(texts) * TEST_SHARE)
    test, train = texts[:held_out], texts[held_out:]
    tokenizer = train_tokenizer((text for text, _ in train), VOCABULARY)
    # BERT expects [CLS] text [SEP].
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.model_max_length = MAXIMUM_TOKENS
    return TextData(_tokenized(train, tokenizer), _tokenized(test, tokenizer), tokenizer)


def labelled_texts() -> dict[str, int]:
    """Returns docstrings and comments of at least five words, each once, with the number of their package."""
    labels: dict[str, int] = {}
    for label, package in enumerate(PACKAGES):
        for path in source_files(package):
            for text in _texts(read_source(path)):
                # "asyncio.Future" would give the answer away, so the names of all packages are removed.
                text = " ".join(_PACKAGE_NAME.sub(" ", text).split())
                if len(_WORD.findall(text)) >= 5:
                    labels.setdefault(text, label)
    return labels


def source_files(package: str = "") -> list[Path]:
    """Returns the Python files of a package and its subpackages, or the single-file modules; without tests."""
    files = (_LIBRARY / package).rglob("*.py") if package else _LIBRARY.glob("[!_]*.py")
    return sorted(path for path in files if not {"test", "tests"} & set(path.relative_to(_LIBRARY).parts))


def read_source(path: Path) -> str:
    """Returns the text of a Python file, decoded with the encoding that it declares."""
    with tokenize.open(path) as file:
        return file.read()


def _texts(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED):
            yield ast.get_docstring(node) or ""
    for block in _COMMENT_BLOCK.findall(source):
        yield _COMMENT_SIGN.sub("", block)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer, trained on the texts. It adds no special tokens."""
    # Not WordPiece: training it twice gives different vocabularies, and resuming or comparing needs the same one.
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["[PAD]", "[CLS]", "[SEP]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", eos_token="[SEP]"
    )


def _tokenized(texts: list[tuple[str, int]], tokenizer: PreTrainedTokenizerFast) -> list[Example]:
    encoded = tokenizer([text for text, _ in texts], truncation=True)
    return [
        {**{name: values[row] for name, values in encoded.items()}, "labels": label}
        for row, (_, label) in enumerate(texts)
    ]


def train_batches(data: TextData, batch_size: int, seed: int, epoch: int) -> DataLoader[BatchEncoding]:
    """Returns the training batches of an epoch in an order that only seed and epoch determine.

    Each batch is padded to its longest text. A smaller last batch is dropped.
    """
    order = torch.Generator().manual_seed(1000 * seed + epoch)
    collate = DataCollatorWithPadding(data.tokenizer)
    return DataLoader(
        data.train, batch_size=batch_size, shuffle=True, drop_last=True, collate_fn=collate, generator=order
    )


def held_out_batches(data: TextData, batch_size: int) -> DataLoader[BatchEncoding]:
    """Returns the test batches, all texts."""
    # Without a generator, the loader would use PyTorch's global one and change the dropout masks that follow.
    collate = DataCollatorWithPadding(data.tokenizer)
    return DataLoader(data.test, batch_size=batch_size, collate_fn=collate, generator=torch.Generator())


def main() -> None:
    data = load_text_data()
    counts = Counter(example["labels"] for example in data.train)
    for label, package in enumerate(PACKAGES):
        print(f"{package:16}{counts[label]:6}")
    print(
        f"{len(data.train)} training texts, {len(data.test)} test texts, {len(data.tokenizer)} tokens in the vocabulary"
    )
    print(f"always guessing the largest package: {data.baseline:.1%}")
    for example in data.train[:5]:
        print(f"{PACKAGES[example['labels']]:>16}: {data.tokenizer.decode(example['input_ids'])[:200]}")


if __name__ == "__main__":
    main()
