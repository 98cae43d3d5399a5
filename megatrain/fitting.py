"""The search for the preferred plan that fits a budget. Pure functions; loads no torch.

The plan is the first in a fixed order of preference that fits: largest micro-batch, then most blocks wholly in VRAM (in
forward order, because the update of an early block has the least time to hide), then stored inputs in VRAM, more slots,
more weights in VRAM. The order knows no limits, so a smaller limit never makes a plan larger. Where a layer's compute is
too short to hide its stored input's way to RAM, inputs come before blocks. Only when nothing fits that way does the disk
take what RAM lacks, in the order of what is missed least: moments, masters, gradients, weights; of each kind the last
layers first, because their update has the longest time to hide, and embedding and head at the very end.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, groupby, pairwise

from megatrain import costs, timing
from megatrain.config import RunConfig
from megatrain.costs import Ledger
from megatrain.errors import ConfigError
from megatrain.hardware import CPU, Machine
from megatrain.plan import Kind, Placement, Plan, Tier
from megatrain.precision import precision_named
from megatrain.shape import ModelShape
from megatrain.units import GIB, MIB
from megatrain.work import Work

MICRO_BATCH_TOKENS_GPU = 16384  # more does not fill a GPU better
MICRO_BATCH_TOKENS_CPU = 4096
WEIGHT_SLOTS = (3, 2)  # best first; two overlap copy and compute, a third absorbs jitter
GRAD_SLOTS = (2, 1)
DISK_SLOTS = (3, 2)  # three: one being read, one in use, one being written
EVICTION = (Kind.MOMENTS, Kind.MASTERS, Kind.GRADS, Kind.WEIGHTS)


@dataclass(frozen=True)
class Budget:
    """What a run may take. Without a GPU, VRAM is none and everything counts as RAM. Without an offload folder there is no disk."""

    device: str
    vram_bytes: int
    ram_bytes: int
    disk_bytes: int = 0
    vram_total_bytes: int = 0
    vram_free_bytes: int = 0
    vram_reserve_bytes: int = 0  # left free for the desktop and for what the allocator cannot use
    ram_total_bytes: int = 0
    ram_available_bytes: int = 0
    ram_reserve_bytes: int = 0  # left free so that the computer stays usable
    disk_free_bytes: int = 0  # of the offload folder
    disk_reserve_bytes: int = 0  # left free for checkpoints on the same disk, and for others

    @property
    def disk_debt_bytes(self) -> int:
        """What is lacking even for the reserve."""
        return max(0, self.disk_reserve_bytes - self.disk_free_bytes)


def budget(config: RunConfig, machine: Machine, checkpoint_bytes: int = 0) -> Budget:
    """The limits of `config` on this machine: what the user allows, and never more than is free.

    `checkpoint_bytes` is the size of one, which also needs room on the disk.
    """
    device = _device(config, machine)
    vram_limit, ram_limit = _gib(config.memory.vram_limit_gib), _gib(config.memory.ram_limit_gib)
    ram_reserve = max(2 * GIB, machine.ram_total_bytes * 8 // 100)
    ram = max(0, machine.ram_available_bytes - ram_reserve)
    limits = Budget(
        device=device,
        vram_bytes=0,
        ram_bytes=ram if ram_limit is None else min(ram, ram_limit),
        ram_total_bytes=machine.ram_total_bytes,
        ram_available_bytes=machine.ram_available_bytes,
        ram_reserve_bytes=ram_reserve,
        **_disk_limits(config, machine, checkpoint_bytes),
    )
    gpu = machine.gpu(device)
    if gpu is None:
        return limits
    reserve = max(384 * MIB, gpu.total_bytes * 3 // 100)
    vram = max(0, gpu.free_bytes - reserve)
    return replace(
        limits,
        vram_bytes=vram if vram_limit is None else min(vram, vram_limit),
        vram_total_bytes=gpu.total_bytes,
        vram_free_bytes=gpu.free_bytes,
        vram_reserve_bytes=reserve,
    )


def _disk_limits(config: RunConfig, machine: Machine, checkpoint_bytes: int) -> dict[str, int]:
    if not config.memory.offload_folder:
        return {}
    free, limit = machine.offload_free_bytes, _gib(config.memory.disk_limit_gib)
    saved = checkpoint_bytes if machine.offload_on_workspace_disk else 0  # without room for one a run could save nothing
    reserve = max(4 * GIB, machine.offload_total_bytes * 2 // 100) + saved
    may = max(0, free - reserve)
    return {"disk_bytes": may if limit is None else min(may, limit), "disk_free_bytes": free, "disk_reserve_bytes": reserve}


def _gib(value: float | None) -> int | None:
    return None if value is None else int(value * GIB)


def _device(config: RunConfig, machine: Machine) -> str:
    wanted = config.memory.device
    if wanted == "auto":
        return machine.auto_device
    if wanted == CPU:
        return CPU
    if machine.gpu(wanted) is None:
        present = ", ".join([CPU, *(gpu.device for gpu in machine.gpus)])
        raise ConfigError([("memory.device", f"{wanted!r} is not here")], f"This machine has: {present}.")
    if machine.torch_cuda is None:
        hint = "Run `python -m megatrain doctor` for the install command."
        raise ConfigError([("memory.device", f"{wanted} is here, but the installed PyTorch cannot use it")], hint)
    return wanted


# ---- the search ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Problem:
    """Everything that the search reads."""

    config: RunConfig
    work: Work
    budget: Budget
    inputs_hide: bool  # a layer's compute hides its stored input's way to RAM
    may_evict: bool = False  # the disk may take what RAM lacks

    @staticmethod
    def of(config: RunConfig, shape: ModelShape, machine: Machine) -> "Problem":
        limits = budget(config, machine, costs.checkpoint_bytes(shape, precision_named(config.precision)))
        work = Work.of(config, shape, limits.device, machine.can_compile)
        if 0 < shape.max_positions < config.data.sequence_length:
            text = f"{config.data.sequence_length} is longer than the {shape.max_positions} positions of {shape.name}"
            raise ConfigError([("data.sequence_length", text)], f"Set it to {shape.max_positions} or less.")
        rates = machine.device_rates(limits.device)
        per_layer = timing.forward_flops(work)[0] / max(1, len(shape.layers)) / rates.compute_flops_per_s[work.precision.compute_dtype]
        per_input = work.step_tokens * shape.hidden_size * work.precision.weight_bytes / rates.duplex_bytes_per_s
        return Problem(config, work, limits, work.on_gpu and 2 * per_input < per_layer)

    @property
    def num_blocks(self) -> int:
        return len(self.work.shape.blocks)

    def micro_batch_sizes(self) -> list[int]:
        """Packs of a micro-batch, largest first. Sizes that only make the last micro-batch smaller are left out."""
        if self.config.memory.micro_batch_packs:
            return [self.config.memory.micro_batch_packs]
        packs = self.work.packs_per_step
        tokens = MICRO_BATCH_TOKENS_GPU if self.work.on_gpu else MICRO_BATCH_TOKENS_CPU
        most = max(1, tokens // self.work.sequence_length)
        sizes = {-(-packs // -(-packs // size)) for size in range(1, min(most, packs) + 1)}
        if self.work.fused:  # a smaller last micro-batch would have kernels of its own
            even = [size for size in sizes if packs % size == 0]
            sizes = {size for size in sizes if size in even or not any(size // 2 < other < size for other in even)}
        return sorted(sizes, reverse=True)

    def placements(self, resident: int, weights: int, evicted: int = 0) -> tuple[Placement, ...]:
        """The first `resident` blocks wholly in VRAM, `weights` more with their compute weights there; the first `evicted`
        of what may go from RAM to the disk is there."""
        rest = self.num_blocks - resident - weights
        parts = ((resident, True, True), (weights, False, True), (rest, False, False))
        found = [placement for count, whole, light in parts for placement in (self._placement(whole, light),) * count]
        for kind, index in self.evictions[:evicted]:
            if found[index].tier(kind) is Tier.RAM:
                found[index] = self._evicted(found[index], kind)
        return tuple(found)

    @cached_property
    def evictions(self) -> list[tuple[Kind, int]]:
        """(kind, block) in the order in which they go to the disk; those that the configuration pins to a tier stay."""
        return [(kind, index) for kind, blocks in self._eviction_stretches for index in blocks]

    @cached_property
    def eviction_counts(self) -> list[range]:
        """Numbers of evictions in stretches: within each, need falls with the number once the ring of slots is paid for."""
        ends = list(accumulate((len(blocks) for _, blocks in self._eviction_stretches), initial=1))
        return [range(start, stop) for start, stop in pairwise(ends)]

    @property
    def _eviction_stretches(self) -> Iterator[tuple[Kind, Sequence[int]]]:
        """Embedding and head stand alone: they are larger than layers, and with them the slots become larger."""
        last = self.num_blocks - 1
        for kind in EVICTION:
            if self.may_evict and getattr(self.config.memory, kind.value) == "auto":
                for blocks in (range(last - 1, 0, -1), (last,), (0,)):
                    yield kind, blocks

    @staticmethod
    @cache
    def _evicted(placement: Placement, kind: Kind) -> Placement:
        return replace(placement, **{kind.value: Tier.NVME})

    def _placement(self, resident: bool, weights: bool) -> Placement:
        """Explicit tiers as asked; masters and gradients otherwise stay with the device that updates the block."""
        memory = self.config.memory
        if not self.work.on_gpu:  # one memory; only what is streamed can be on disk
            pinned = "nvme" in (memory.weights, memory.masters, memory.grads, memory.moments)
            resident = weights = not (self.may_evict or pinned)
        moments = _tier(memory.moments, resident)
        beside = resident and moments is Tier.VRAM
        return Placement(
            weights=_tier(memory.weights, weights),
            masters=_tier(memory.masters, beside),
            grads=_tier(memory.grads, beside),
            moments=moments,
        )

    def ledger(self, candidate: Plan) -> Ledger:
        return costs.ledger(self.work, candidate)

    def fits_vram(self, candidate: Plan) -> bool:
        return not self.work.on_gpu or self.ledger(candidate).vram_bytes <= self.budget.vram_bytes

    def fits_ram(self, candidate: Plan) -> bool:
        return self.ledger(candidate).ram_bytes <= self.budget.ram_bytes

    def fits(self, candidate: Plan) -> bool:
        sums = self.ledger(candidate)
        in_vram = not self.work.on_gpu or sums.vram_bytes <= self.budget.vram_bytes
        return in_vram and sums.ram_bytes <= self.budget.ram_bytes and sums.disk_bytes <= self.budget.disk_bytes


def _tier(choice: str, vram: bool) -> Tier:
    if choice != "auto":
        return Tier(choice)
    return Tier.VRAM if vram else Tier.RAM


def search(problem: Problem) -> Plan | None:
    """The preferred plan that fits, or None."""
    found = _search(problem)
    if found is None and problem.budget.disk_bytes:
        found = _search(replace(problem, may_evict=True))
    return found


def _search(problem: Problem) -> Plan | None:
    sizes = problem.micro_batch_sizes()
    filled = cache(partial(_fill, problem))
    if problem.config.memory.group_micro_batches:  # smaller micro-batches may need more groups, and with them more memory
        return next((found for size in sizes if (found := filled(size)) is not None), None)
    first = _first(len(sizes), lambda index: filled(sizes[index]) is not None)
    return None if first is None else filled(sizes[first])


def _fill(problem: Problem, packs: int) -> Plan | None:
    """The preferred plan with micro-batches of `packs`."""
    by_sums = groupby(_cuts(problem, packs), key=lambda cut: cut.accumulators_tier)
    for cuts in (list(group) for _, group in by_sums):
        # blocks in VRAM matter more than the place of inputs that compute hides, and less than anything else
        for equals in [cuts] if problem.inputs_hide else [[cut] for cut in cuts]:
            found = _most_resident(problem, equals)
            if found is not None:
                return _spend_rest(problem, *found)
    return None


def _cuts(problem: Problem, packs: int) -> Iterator[Plan]:
    """Plans with everything in RAM, in order of preference: how groups are cut and where sums and inputs rest."""
    count = -(-problem.work.packs_per_step // packs)
    wanted = problem.config.memory.group_micro_batches
    both = (Tier.VRAM, Tier.RAM)
    for sums in both if wanted and wanted < count and problem.work.on_gpu else both[:1]:
        for inputs in both if problem.work.on_gpu else both[:1]:
            yield Plan(
                placements=problem.placements(0, 0),
                micro_batch_packs=packs,
                group_micro_batches=min(wanted or count, count),
                weight_slots=WEIGHT_SLOTS[-1],
                grad_slots=GRAD_SLOTS[-1],
                inputs_tier=inputs,
                accumulators_tier=sums,
                device=problem.budget.device,
            )


def _most_resident(problem: Problem, cuts: list[Plan]) -> tuple[Plan, int] | None:
    """(plan, blocks wholly in VRAM) with the most such blocks that any cut allows; the first cut among equals."""
    best: tuple[Plan, int] | None = None
    for cut in cuts:
        resident = _most(problem.num_blocks, partial(_fits_vram, problem, cut))
        if resident is None or (best and resident <= best[1]):
            continue
        candidate = _evict(problem, cut, resident)
        if candidate is not None:
            best = candidate, resident
    return best


def _evict(problem: Problem, cut: Plan, resident: int) -> Plan | None:
    """The plan with `resident` blocks in VRAM and as little on disk as is needed; None when it does not fit anyhow."""

    for slots in DISK_SLOTS:  # a configuration may pin states to the disk
        plain = _with_evictions(problem, replace(cut, disk_slots=slots), resident, 0)
        if problem.fits(plain):
            return plain
    for counts in problem.eviction_counts:
        for slots in DISK_SLOTS:
            found = _fewest(problem, replace(cut, disk_slots=slots), resident, counts)
            if found is not None:
                return found
    return None


def _fewest(problem: Problem, cut: Plan, resident: int, counts: range) -> Plan | None:
    """With the fewest evictions of one stretch that RAM needs, if the disk has room for them."""
    first = _first(len(counts), lambda index: problem.fits_ram(_with_evictions(problem, cut, resident, counts[index])))
    if first is None:
        return None
    found = _with_evictions(problem, cut, resident, counts[first])
    return found if problem.fits(found) else None


def _with_evictions(problem: Problem, cut: Plan, resident: int, count: int) -> Plan:
    return replace(cut, placements=problem.placements(resident, 0, count))


def _fits_vram(problem: Problem, cut: Plan, resident: int) -> bool:
    return problem.fits_vram(_with_blocks(problem, cut, resident, 0))


def _spend_rest(problem: Problem, found: Plan, resident: int) -> Plan:
    """Use what is left of the limits: more slots, more weights in VRAM, groups of one micro-batch."""
    if _streams(found):
        found = _prefer(problem, found, *(replace(found, weight_slots=slots) for slots in WEIGHT_SLOTS))
    found = _prefer(problem, found, *(replace(found, grad_slots=slots) for slots in GRAD_SLOTS))
    rest = problem.num_blocks - resident
    if rest and problem.work.on_gpu and not _on_disk(found):
        more = _most(rest, lambda weights: problem.fits(_with_blocks(problem, found, resident, weights)))
        found = _with_blocks(problem, found, resident, more or 0)
    if not _streams(found) and found.group_micro_batches > 1 and not problem.config.memory.group_micro_batches:
        single = replace(found, group_micro_batches=1, accumulators_tier=Tier.VRAM, inputs_tier=Tier.VRAM, grad_slots=GRAD_SLOTS[-1])
        found = _prefer(problem, found, single)
    return found


def _with_blocks(problem: Problem, cut: Plan, resident: int, weights: int) -> Plan:
    return replace(cut, placements=problem.placements(resident, weights))


def _streams(candidate: Plan) -> bool:
    """Whether any decoder layer's weights are streamed."""
    return any(placement.weights is not Tier.VRAM for placement in candidate.placements[1:-1])


def _on_disk(candidate: Plan) -> bool:
    return any(placement.tier(kind) is Tier.NVME for _, placement in candidate.placement_runs for kind in Kind)


def _prefer(problem: Problem, otherwise: Plan, *candidates: Plan) -> Plan:
    return next((candidate for candidate in candidates if problem.fits(candidate)), otherwise)


def _most(count: int, fits: Callable[[int], bool]) -> int | None:
    """The largest of 0..count that fits: `count` itself is tried first, below it need grows with the number."""
    if fits(count):
        return count
    index = _first(count, lambda step: fits(count - 1 - step))
    return None if index is None else count - 1 - index


def _first(count: int, fits: Callable[[int], bool]) -> int | None:
    """The first index below `count` that fits, when all after it fit as well."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low if low < count else None


def least(problem: Problem) -> Ledger:
    """The smallest need that the search would accept: one that lacks no VRAM if there is one, of these the least RAM.

    With an offload folder as much as is needed is on disk, whatever its room.
    """
    tried = []
    may_evict = problem.budget.disk_free_bytes > 0
    sizes = problem.micro_batch_sizes()
    if not problem.config.memory.group_micro_batches:
        sizes = sizes[-1:]
    for variant in (problem, replace(problem, may_evict=True)) if may_evict else (problem,):
        for cut in (cut for packs in sizes for cut in _cuts(variant, packs)):
            resident = _most(variant.num_blocks, partial(_fits_vram, variant, cut)) or 0
            for evicted in (0, *(counts[-1] for counts in variant.eviction_counts)):
                tried.append(variant.ledger(_with_evictions(variant, replace(cut, disk_slots=DISK_SLOTS[-1]), resident, evicted)))
    limits = problem.budget
    smallest = min(tried, key=lambda sums: (max(0, sums.vram_bytes - limits.vram_bytes), sums.ram_bytes))
    if not may_evict:
        return smallest
    vram, ram = max(limits.vram_bytes, smallest.vram_bytes), max(limits.ram_bytes, smallest.ram_bytes)
    found = search(replace(problem, budget=replace(limits, vram_bytes=vram, ram_bytes=ram, disk_bytes=1 << 62)))
    return smallest if found is None else problem.ledger(found)
