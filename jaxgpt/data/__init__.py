"""From text to batches: tokenizers, corpora, token files, and the pipeline that feeds a run."""

from jaxgpt.data.bpe import BPETokenizer, train_bpe
from jaxgpt.data.corpus import CORPORA, Corpus
from jaxgpt.data.dataset import prepare
from jaxgpt.data.pipeline import training_batches, validation_batches
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, load_tokenizer
from jaxgpt.data.tokens import Dataset

__all__ = [
    "CORPORA",
    "BPETokenizer",
    "ByteTokenizer",
    "CharTokenizer",
    "Corpus",
    "Dataset",
    "Tokenizer",
    "load_tokenizer",
    "prepare",
    "train_bpe",
    "training_batches",
    "validation_batches",
]
