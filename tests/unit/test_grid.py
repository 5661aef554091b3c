from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from carnator_core.grid import TokenGrid, dilate, smooth


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_values_of_tokens_survive_the_way_to_latents_and_back(t, h, w):
    latent = torch.zeros(1, 2, t, h, w)
    grid = TokenGrid.of_latent(latent.shape)
    tokens = torch.randn(1, 2, grid.t, grid.h, grid.w)
    spread = grid.to_latent(tokens, latent.shape)
    assert spread.shape == latent.shape
    torch.testing.assert_close(grid.to_tokens(spread), tokens)


def test_lengths_are_told_on_the_papers_grid():
    assert TokenGrid(5, 22, 40).scaled(2) == 2
    assert TokenGrid(5, 8, 8).scaled(2) == 1
    assert TokenGrid(5, 45, 80).scaled(3) == 6


def test_dilation_grows_a_square_within_its_frame_only():
    mask = torch.zeros(2, 7, 7, dtype=torch.bool)
    mask[0, 3, 3] = True
    grown = dilate(mask, 2)
    assert grown[0].sum() == 25 and grown[1].sum() == 0 and grown.dtype == torch.bool
    assert torch.equal(dilate(mask, 0), mask)


def test_smoothing_keeps_constants_to_the_border():
    torch.testing.assert_close(smooth(torch.ones(2, 5, 6), 2), torch.ones(2, 5, 6))
