"""Writers of GGUF headers: by the format's own package, or byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Divisors as llama.cpp's converter stores them for Llama 3.1: one per pair, in float32.
DIVISORS = np.linspace(1.0, 8.0, 64, dtype=np.float32)


def write(path: Path, arch: str = "llama", **more: Any) -> Path:
    """Write a small model with the reference writer."""
    writer = gguf.GGUFWriter(str(path), arch, endianess=more.pop("order", gguf.GGUFEndian.LITTLE))
    writer.add_embedding_length(4096)
    writer.add_head_count(32)
    writer.add_context_length(131072)
    writer.add_rope_dimension_count(128)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_scaling_orig_ctx_len(8192)
    tokens = more.pop("tokens", 3)
    writer.add_token_list([f"token {index}" for index in range(tokens)])
    writer.add_token_scores([0.0] * tokens)
    writer.add_array("some.lists", ["one", "two"])
    writer.add_bool("a.switch", True)
    for name, values in more.items():
        writer.add_tensor(name.replace("__", "."), values)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def head(version: int = 3, tensors: int = 0, entries: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def listing(kind: int, count: int) -> bytes:
    return struct.pack("<IQ", kind, count)
