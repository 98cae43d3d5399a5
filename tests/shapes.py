"""Shapes of real models and made-up machines for tests that need neither torch nor a GPU."""

from megatrain.hardware import Gpu, Machine
from megatrain.rates import GpuReadings, cpu_rates, gpu_rates
from megatrain.shape import BlockShape, ModelShape
from megatrain.units import GIB

RTX_4090 = GpuReadings((8, 9), 16384, 3105, 4, 16, 384, 10501)
H200 = GpuReadings((9, 0), 16896, 1980, 5, 16, 6144, 3201)


def decoder(name: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> ModelShape:
    """A Qwen2-like model: biases on q, k and v, a gated MLP, two norms a layer."""
    head_dim = hidden // heads
    kv = kv_heads * head_dim
    linear = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate
    layer = linear + hidden + 2 * kv + 2 * hidden
    blocks = [BlockShape("embed", "embed", vocab * hidden)]
    blocks += [BlockShape(f"layer{index:03}", "layer0", layer, linear_params=linear) for index in range(layers)]
    blocks.append(BlockShape("head", "head", hidden + (0 if tied else vocab * hidden), linear_params=vocab * hidden))
    return ModelShape(
        name=name,
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        max_positions=32768,
        tied_head=tied,
        blocks=tuple(blocks),
    )


QWEN_7B = decoder("Qwen2.5-7B", 3584, 18944, 28, 28, 4, 152064, tied=False)
QWEN_1B5 = decoder("Qwen2.5-1.5B", 1536, 8960, 28, 12, 2, 151936, tied=True)
SMALL = decoder("small", 256, 640, 6, 4, 2, 8192, tied=True)


def machine(
    vram_gib: float = 0, ram_gib: float = 64, readings: GpuReadings = RTX_4090, cores: int = 8, gpus: int = 1, disk_gib: float = 500
) -> Machine:
    """A computer with nothing else running; without a GPU when `vram_gib` is 0."""
    vram, ram = int(vram_gib * GIB), int(ram_gib * GIB)
    cards = tuple(Gpu(number, "Card", f"GPU-{number}", vram, vram, gpu_rates(readings, cores)) for number in range(gpus if vram else 0))
    return Machine(
        gpus=cards,
        ram_total_bytes=ram,
        ram_available_bytes=ram,
        cpu_name="Processor",
        cpu_cores=cores,
        disk_total_bytes=1000 * GIB,
        disk_free_bytes=int(disk_gib * GIB),
        cpu_rates=cpu_rates(cores),
        driver_version="580.65" if cards else None,
        torch_cuda="13.0" if cards else None,
        offload_folder="/fast",
        offload_total_bytes=1000 * GIB,
        offload_free_bytes=int(disk_gib * GIB),
    )
