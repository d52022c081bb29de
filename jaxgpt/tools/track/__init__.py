"""Send the metrics of a run to TensorBoard, W&B or trackio: readers of metrics.jsonl, with nothing in training."""
