"""From text to batches: tokenizers, corpora, token files, and the pipeline that feeds a run."""
