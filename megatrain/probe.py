"""How fast this machine is, measured in a process of its own: `python -m megatrain.probe WORKSPACE [--device D] [--folder F]`.

Writes and reads the offload folder, computes a decoder layer, moves memory and updates parameters as the optimizer does:
a second or two each, and as long again until PyTorch is loaded (13 s on two idle cores). What was measured is kept in the
workspace (megatrain/rates.py) and replaces the estimates that plans are made with. The last line of the output is JSON.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from megatrain.engine import adamw
from megatrain.engine.adamw import Update
from megatrain.engine.nvme import OffloadFile, aligned_bytes
from megatrain.errors import MegaTrainError
from megatrain.hardware import CPU, Machine, read_machine
from megatrain.models.blocks import lay_out
from megatrain.rates import Rates, save_rates
from megatrain.units import MIB

_SECONDS = 0.35  # for each figure, unless one try takes longer
_UPDATE = Update(count=3, learning_rate=1e-5, clip=0.9, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01)


def measure(machine: Machine, device: str, folder: Path) -> Rates:
    """The rates of `device` ("cpu" or "cuda:N"), of the host beside it, and of the disk of `folder`."""
    on = torch.device(device)
    known = machine.device_rates(device)
    read, write = _disk(folder)  # first: a folder that cannot be used is told at once
    flops = {name: _layer_flops_per_s(on, getattr(torch, name)) for name in known.compute_flops_per_s}
    h2d, d2h, duplex = _bus(on)
    host = _update_bytes_per_s(torch.device(CPU))
    return dataclasses.replace(
        known,
        compute_flops_per_s=flops,
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=d2h,
        duplex_bytes_per_s=duplex,
        device_bytes_per_s=host if device == CPU else _update_bytes_per_s(on),
        host_bytes_per_s=host,
        layer_overhead_s=_layer_overhead_s(on),
        disk_read_bytes_per_s=read,
        disk_write_bytes_per_s=write,
        measured=True,
    )


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of several tries, the first left out."""
    best, started = float("inf"), time.perf_counter()
    for attempt in range(100):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        if attempt:
            best = min(best, now - start)
        if attempt and now - started > _SECONDS:
            break
    return best


# ---- computing -------------------------------------------------------------------------------------------------------
def _layer(device: torch.device, dtype: torch.dtype, hidden: int, tokens: int) -> tuple[Callable[..., torch.Tensor], torch.Tensor, int]:
    """(call, hidden states [1, tokens, hidden], weights of its matrix products) of one decoder layer with random weights."""
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=hidden * 4, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64,
        num_hidden_layers=1, attn_implementation="sdpa",
    )  # fmt: skip
    layer = Qwen2DecoderLayer(config, 0).to(device, dtype)
    states = torch.randn(1, tokens, hidden, device=device, dtype=dtype)
    positions = torch.arange(tokens, device=device)[None]
    rotary = Qwen2RotaryEmbedding(config).to(device)(states, positions)

    def call(value: torch.Tensor) -> torch.Tensor:
        found = layer(value, position_embeddings=rotary)
        return found[0] if isinstance(found, tuple) else found

    return call, states, sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)


def _layer_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Of the forward pass of one layer with its attention, as plans count it: 2 per weight and token, 2·H·S per token (causal)."""
    hidden, tokens = (4096, 8192) if device.type == "cuda" else (1024, 128)
    call, states, weights = _layer(device, dtype, hidden, tokens)
    with torch.no_grad():
        seconds = _best_s(lambda: call(states), device)
    return tokens * (2 * weights + 2 * hidden * tokens) / seconds


def _layer_overhead_s(device: torch.device) -> float:
    """What a layer's forward, recompute and backward take however few tokens there are."""
    call, states, _ = _layer(device, torch.float32, 64, 8)
    states.requires_grad_()

    def step() -> None:
        with torch.no_grad():
            call(states)
        call(states).sum().backward()

    return _best_s(step, device)


# ---- memory ----------------------------------------------------------------------------------------------------------
def _bus(device: torch.device) -> tuple[float, float, float]:
    """Bytes/s to the device, from it, and each way while both run; on the CPU memory is copied inside itself."""
    on_gpu = device.type == "cuda"
    size = (512 if on_gpu else 128) * MIB
    host = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
    down = _best_s(lambda: there[0].copy_(host[0], non_blocking=True), device)
    up = _best_s(lambda: host[1].copy_(there[1], non_blocking=True), device)
    if not on_gpu:
        return size / down, size / up, size / (down + up)
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            there[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(there[1], non_blocking=True)

    return size / down, size / up, size / _best_s(both, device)


def _update_bytes_per_s(device: torch.device) -> float:
    """Memory traffic of the optimizer's own update: weights, rest and moments read and written, gradients read."""
    count = (64 if device.type == "cuda" else 16) * 1024**2
    params = {"p": torch.empty(count, device="meta")}
    layout = lay_out("block", "kind", params, {}, torch.bfloat16, frozenset(), frozenset({"p"}), frozenset())
    weights = torch.zeros(layout.weight_bytes, dtype=torch.uint8, device=device)
    masters = torch.zeros(layout.numel_a, dtype=torch.int16, device=device)
    grads = torch.full((layout.numel,), 1e-3, dtype=torch.bfloat16, device=device)
    first, second = (torch.zeros(layout.numel, device=device) for _ in range(2))
    seconds = _best_s(lambda: adamw.update_block(layout, weights, masters, grads, first, second, _UPDATE), device)
    return count * (2 * (2 + 2 + 8) + 2) / seconds


# ---- disk ------------------------------------------------------------------------------------------------------------
def _disk(folder: Path) -> tuple[float, float]:
    """Bytes/s of reading and of writing a nameless file in `folder`, as the disk tier does it."""
    size = 128 * MIB
    memory = aligned_bytes(size)
    noise = torch.randint(256, (16 * MIB,), dtype=torch.uint8)  # some drives compress, none over so long a stretch
    memory.view(-1, noise.numel()).copy_(noise)
    with tempfile.TemporaryDirectory(dir=_made(folder), prefix=".megatrain-probe-") as inside:
        file = OffloadFile(Path(inside), size)
        try:
            cpu = torch.device(CPU)
            write = _best_s(lambda: file.write(0, memory), cpu)
            read = _best_s(lambda: file.read(0, memory), cpu)
        finally:
            file.close()
    return size / read, size / write


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main(argv: list[str] | None = None) -> int:
    """Measure, keep, and print; 2 when it cannot be done, with the reason as JSON."""
    parser = argparse.ArgumentParser(prog="python -m megatrain.probe", description="Measure how fast this machine is.")
    parser.add_argument("workspace", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, default=None, help="offload folder; by default the workspace's")
    options = parser.parse_args(argv)
    machine = read_machine(options.workspace)
    device = machine.auto_device if options.device == "auto" else options.device
    gpu = machine.gpu(device)
    try:
        rates = measure(machine, device, options.folder or Path(machine.offload_folder))
        save_rates(options.workspace, gpu.uuid if gpu else CPU, rates)
    except (MegaTrainError, OSError, RuntimeError) as error:
        print(json.dumps({"error": str(error)}))
        return 2
    print(json.dumps(dataclasses.asdict(rates)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
