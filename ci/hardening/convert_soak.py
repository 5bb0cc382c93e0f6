"""Soak test of checkpoint conversion: `python -m ci.hardening.convert_soak`.

It makes a checkpoint of many shards (a random Llama in bfloat16), then checks that `tightrope convert`

1. has a memory peak, as the system reports it, of at most 1.5 times the largest tensor + 200 MB. For
   checkpoints below 1 GB, where torch itself needs far more than the largest tensor, the limit is
   instead 64 MB above the peak of `tightrope info`;
2. restores the original bytes when it converts back;
3. loses nothing when it is killed (signal 9) at random moments: the checkpoint keeps its bytes, and
   the output folder is complete, or missing.

The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MB = 1_000_000
ALLOWED = 200 * MB
ABOVE_IMPORTS = 64 * MB
COMMAND = [sys.executable, "-m", "tightrope_tools"]
MARKER = ".partial"


def make(folder: Path, size: int, seed: int = 0) -> int:
    """Write a checkpoint of about ``size`` bytes.

    Returns:
        The size of the largest tensor in bytes.
    """
    import torch  # here, because the parent process must not import it: see `run`
    from safetensors.torch import save_file

    hidden = 2048 if size >= 1e9 else 512
    vocabulary = max(int(size) // 20 // hidden, 64)
    layer = {"q": hidden, "k": hidden // 4, "v": hidden // 4, "o": hidden}
    per_layer = 2 * hidden * (sum(layer.values()) + 3 * 2 * hidden)
    count = max(-(-(size - 4 * vocabulary * hidden) // per_layer), 2)
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": count,
        "rope_theta": 1e4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": vocabulary,
    }
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)

    def random_tensor(rows: int, columns: int) -> torch.Tensor:
        bits = torch.randint(
            0x3C00, 0x3E00, (rows, columns), dtype=torch.int16, generator=generator
        )
        return bits.view(torch.bfloat16)

    weight_map, total = {}, 0
    per_shard = max(-(-count // 7), 1)
    starts = list(range(0, count, per_shard))
    for number, first in enumerate(starts):
        name = f"model-{number + 1:05d}-of-{len(starts):05d}.safetensors"
        shard = {}
        if number == 0:
            shard["model.embed_tokens.weight"] = random_tensor(vocabulary, hidden)
        if first == starts[-1]:
            shard["lm_head.weight"] = random_tensor(vocabulary, hidden)
        for index in range(first, min(first + per_shard, count)):
            place = f"model.layers.{index}"
            for projection, rows in layer.items():
                shard[f"{place}.self_attn.{projection}_proj.weight"] = random_tensor(rows, hidden)
            for projection in ("gate", "up", "down"):
                shard[f"{place}.mlp.{projection}_proj.weight"] = random_tensor(2 * hidden, hidden)
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return max(2 * vocabulary * hidden, 4 * hidden * hidden)


def digest(path: Path) -> str:
    """Return a hash of a file's bytes."""
    sha = hashlib.sha256()
    with open(path, "rb") as stream:
        while part := stream.read(1 << 20):
            sha.update(part)
    return sha.hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """Return relative path -> hash, for all files below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): digest(path) for path in paths}


def run(arguments: Sequence[object]) -> tuple[float, int]:
    """Run `tightrope` with these arguments; return (seconds, peak memory in bytes).

    The peak that the system reports for a process includes the memory that its parent had when it started
    the process. So this process stays small: only a child, which makes the checkpoint, imports torch.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    errors = process.stderr.read() if process.stderr is not None else b""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))}: {errors.decode()[-500:]}")
    return time.perf_counter() - start, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def kill_at_random(
    source: Path, out: Path, expected: dict[str, str], kills: int, seconds: float, seed: int
) -> dict[str, Any]:
    """Kill conversions at random moments and check the files that remain."""
    before, stamps = digests(source), _stamps(source)
    moments = random.Random(seed)
    seen = {"nothing": 0, "the result": 0, "left partial files": 0}
    broken = []
    for number in range(kills):
        shutil.rmtree(out, ignore_errors=True)
        arguments = ["convert", str(source), str(out), "--to", "interleaved"]
        process = subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(moments.uniform(0.0, 1.1 * seconds))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if _stamps(source) != stamps:
            broken.append(f"kill {number}: a name, size or time of the checkpoint's files changed")
        seen["the result" if out.exists() else "nothing"] += 1
        if out.exists() and digests(out) != expected:
            broken.append(f"kill {number}: the result is incomplete")
        seen["left partial files"] += any(MARKER in path.name for path in out.parent.iterdir())
    if digests(source) != before:
        broken.append("the checkpoint's bytes changed")
    shutil.rmtree(out, ignore_errors=True)
    run(["convert", source, out, "--to", "interleaved"])
    if digests(out) != expected:
        broken.append("the run after the last kill gave another result")
    left = [path.name for path in out.parent.iterdir() if MARKER in path.name]
    if left:
        broken.append(f"a successful run left the partial files {', '.join(left)}")
    return {"kills": kills, "found": seen, "broken": broken}


def _stamps(folder: Path) -> list[tuple[str, int, int]]:
    paths = sorted(folder.iterdir())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def soak(
    folder: Path, size: int, kills: int, seed: int, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Make a checkpoint in a folder and run all three checks; return the numbers and failures."""
    source, there, back = folder / "source", folder / "there", folder / "back"
    making = [sys.executable, "-m", "ci.hardening.convert_soak", "--make", source]
    done = subprocess.run(
        [*map(str, making), "--bytes", str(size), "--seed", str(seed)],
        check=True,
        capture_output=True,
    )
    largest = int(done.stdout)
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    shards = len(list(source.glob("*.safetensors")))
    say(f"{nbytes / 1e9:.3f} GB in {shards} shards, largest tensor {largest / MB:.1f} MB")
    _, baseline = run(["info"])
    seconds, peak = run(["convert", source, there, "--to", "interleaved"])
    allowed = int(1.5 * largest) + ALLOWED if size >= 1e9 else baseline + ABOVE_IMPORTS
    say(
        f"converted in {seconds:.1f} s, peak memory {peak / MB:.0f} MB of {allowed / MB:.0f} MB allowed "
        f"({baseline / MB:.0f} MB for info)"
    )
    _, peak_back = run(["convert", there, back, "--to", "half", "--verify"])
    say(f"back with --verify: peak memory {peak_back / MB:.0f} MB")
    first, last = digests(source), digests(back)
    same = first == last and digests(there) != first
    say(f"round trip: shards {'same' if same else 'DIFFER'}")
    shutil.rmtree(back)
    result = {
        "bytes": nbytes,
        "shards": shards,
        "largest_tensor": largest,
        "seconds": seconds,
        "peak_memory": {"convert": peak, "with --verify": peak_back},
        "memory_before": baseline,
        "memory_allowed": allowed,
        "round_trip_same": same,
    }
    killed = kill_at_random(source, there, digests(there), kills, seconds, seed)
    say(f"killed {kills} times: {killed['found']}, broken: {killed['broken'] or 'nothing'}")
    result["killed"] = killed
    result["holds"] = max(peak, peak_back) <= allowed and same and not killed["broken"]
    return result


def main() -> int:
    """Run the soak test; return 0 if all checks pass, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bytes", type=float, default=2.1e9, help="size of the checkpoint (2.1e9)")
    parser.add_argument("--kills", type=int, default=50, help="number of killed conversions (50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="parent of the temporary folder")
    parser.add_argument("--json", type=Path, help="JSON file to write the numbers to")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make is not None:
        print(make(options.make, int(options.bytes), options.seed))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="convert-soak-") as folder:
        result = soak(Path(folder), int(options.bytes), options.kills, options.seed)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print("all checks pass" if result["holds"] else "SOME CHECKS FAILED")
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
