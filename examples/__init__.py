"""Examples to copy. Each file runs by itself: `python examples/train_bytes.py`."""
