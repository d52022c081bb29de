"""Turn text into batches: tokenizers, corpora, token files, and the pipeline that feeds a run."""
