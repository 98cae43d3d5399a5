"""Attention over packed documents equals attention over each document alone."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megatrain.models import attention
from megatrain.models.attention import document_boundaries, packed_attention, packed_mask, visible

POSITIONS = np.array([[*range(11), *range(3), *range(6)], [*range(20)], [0] * 20])


def test_boundaries_are_where_positions_restart() -> None:
    found = document_boundaries(POSITIONS)
    assert found.dtype == np.int32
    assert found[:24].tolist() == [0, 11, 14, 20, *range(40, 60)]
    assert set(found[24:].tolist()) == {60}
    assert len(found) == 33, "room for a power of two of documents: most batches need equal room"


def test_a_pack_that_begins_inside_a_document_begins_one() -> None:
    assert document_boundaries(np.array([[5, 6, 7, 0]]))[:3].tolist() == [0, 3, 4]


def test_boundaries_leave_positions_alone() -> None:
    positions = POSITIONS.copy()
    document_boundaries(positions)
    assert np.array_equal(positions, POSITIONS)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("value_size", [8, 6])
def test_every_document_attends_to_itself_alone(window: int | None, value_size: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 20, 8), torch.randn(3, 2, 20, 8), torch.randn(3, 2, 20, value_size)
    boundaries = torch.from_numpy(document_boundaries(POSITIONS))
    found, _ = packed_attention(nn.Module(), query, key, value, boundaries, scaling=0.3, sliding_window=window)
    assert found.shape == (3, 20, 4, value_size)
    for row in range(3):
        starts = [*np.flatnonzero(POSITIONS[row] == 0), 20]
        for start, stop in zip(starts, starts[1:], strict=False):
            q, k, v = (states[row : row + 1, :, start:stop] for states in (query, key, value))
            distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
            seen = (distance >= 0) & (distance < (window or 99))
            alone = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), seen, scale=0.3)
            assert torch.allclose(found[row, start:stop], alone[0].transpose(0, 1), atol=1e-6)


def test_what_is_visible() -> None:
    boundaries = torch.tensor([0, 2, 4, 4, 4], dtype=torch.int32)
    assert visible(boundaries, 1, 4, None)[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize(("built", "capability", "works"), [(True, (8, 0), True), (True, (7, 5), False), (False, (9, 0), False)])
def test_old_gpus_get_masks(built: bool, capability: tuple[int, int], works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention._Current, "flash", True)
    attention.prepare_for(torch.device("cpu"))
    assert attention._Current.flash
    attention.prepare_for(torch.device("cuda", 0))
    assert attention._Current.flash == works


def test_masks_that_boundaries_cannot_describe_are_refused() -> None:
    with pytest.raises(NotImplementedError):
        packed_mask(use_vmap=True)
