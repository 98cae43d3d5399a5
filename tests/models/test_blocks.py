"""Places in a block's flat states: apart, aligned, complete, and the same for every plan."""

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.models.blocks import ALIGN_BYTES, ALIGN_ELEMENTS, BlockLayout, lay_out, layout_from_record, layout_record

SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
BUFFERS = st.lists(st.tuples(SHAPES, st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])), max_size=3)


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    shapes = draw(st.lists(SHAPES, max_size=7))
    params = {f"p{i}": torch.empty(shape, device="meta") for i, shape in enumerate(shapes)}
    buffers = {f"b{i}": torch.empty(shape, dtype=dtype, device="meta") for i, (shape, dtype) in enumerate(draw(BUFFERS))}
    names = st.sets(st.sampled_from(sorted(params) or ["none"]))
    saved = frozenset(draw(st.sets(st.sampled_from(sorted(buffers) or ["none"]))))
    return lay_out("block", "kind", params, buffers, draw(DTYPES), frozenset(draw(names)), frozenset(draw(names)), saved)


@given(layouts())
def test_views_cover_every_element_once(layout: BlockLayout) -> None:
    """Numbered elements come back unchanged through the views: no two places touch."""
    weights = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
    written = {}
    for number, (name, view) in enumerate(layout.weight_views(weights).items()):
        view.copy_(torch.full(view.shape, number + 1 if view.dtype != torch.bool else 1))
        written[name] = view.clone()
    assert written.keys() == {entry.name for entry in (*layout.entries, *layout.buffers)}
    for name, view in layout.weight_views(weights).items():
        assert torch.equal(view, written[name]), name
        assert view.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr()
    for entry in layout.entries:
        kept = entry.segment == "b"
        assert written[entry.name].dtype is (torch.float32 if kept else layout.compute_dtype)
        assert not kept or layout.compute_dtype is torch.bfloat16
    for buffer in layout.buffers:
        assert written[buffer.name].dtype is buffer.dtype
        assert tuple(written[buffer.name].shape) == buffer.shape


@given(layouts())
def test_places_are_aligned(layout: BlockLayout) -> None:
    for entry in layout.entries:
        assert entry.offset % ALIGN_ELEMENTS == 0
    for buffer in layout.buffers:
        assert buffer.offset % ALIGN_BYTES == 0
    for size in (layout.bytes_a, layout.bytes_b, layout.weight_bytes):
        assert size % ALIGN_BYTES == 0
    assert layout.numel_a % ALIGN_ELEMENTS == layout.numel_b % ALIGN_ELEMENTS == 0
    used = sum(entry.numel for entry in layout.entries)
    assert used <= layout.numel < used + ALIGN_ELEMENTS * (len(layout.entries) + 1)


@given(layouts())
def test_flat_views_cover_gradients_once(layout: BlockLayout) -> None:
    flat = torch.zeros(layout.numel)
    for view in layout.flat_views(flat).values():
        view.add_(1)
    assert int(flat.sum()) == sum(entry.numel for entry in layout.entries)
    assert flat.max() <= 1 if flat.numel() else True


@given(layouts())
def test_decay_ranges_are_the_parameters_and_at_most_gaps(layout: BlockLayout) -> None:
    places = torch.arange(layout.numel)
    owner = torch.full((layout.numel,), -1)
    for name, view in layout.flat_views(places).items():
        owner[view.reshape(-1)] = int({entry.name: entry.decay for entry in layout.entries}[name])
    covered = torch.full((layout.numel,), -1)
    last = 0
    for start, stop, decay in layout.decay_ranges():
        assert last <= start <= stop <= layout.numel
        assert not start < layout.numel_a < stop, "a range crosses from one segment into the other"
        covered[start:stop] = int(decay)
        last = stop
    assert bool((covered[owner >= 0] == owner[owner >= 0]).all())


@given(layouts())
def test_a_layout_survives_the_manifest(layout: BlockLayout) -> None:
    assert layout_from_record(json.loads(json.dumps(layout_record(layout)))) == layout


def test_parameters_stay_in_the_order_of_the_model() -> None:
    params = {name: torch.empty(3, device="meta") for name in ("z", "a", "m")}
    layout = lay_out("block", "kind", params, {}, torch.bfloat16, frozenset("a"), frozenset(), frozenset())
    assert [(entry.name, entry.segment, entry.offset) for entry in layout.entries] == [("z", "a", 0), ("a", "b", 0), ("m", "a", 64)]
