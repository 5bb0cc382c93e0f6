"""Examples to copy from. Each file runs by itself: `python examples/train_bytes.py`."""
