"""The seed policy: by opt-in a run starts from the nearest donor's noise, and is then what that seed gives."""

from __future__ import annotations

import pytest
import torch

from carnator_core.bank import Bank
from carnator_core.mini import sample
from carnator_core.pipelines import Generator
from carnator_core.reuse.seeds import with_donors_noise

PROMPT = "one large red ball moving left over the sea, steady camera"
OTHER = PROMPT.replace("red", "blue")
SIZE, STEPS = 32, 6


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    made = Generator(Bank(tmp_path_factory.mktemp("seeds")), policy="fast")
    made(PROMPT, 7, SIZE, STEPS)
    return made


def test_by_default_the_users_own_seed_counts(generator):
    clip = generator(OTHER, 8, SIZE, STEPS)
    assert torch.equal(clip.latent, sample.sample(generator.model, [OTHER], [8], SIZE, STEPS))
    assert "another seed" in clip.report.reason
    generator.bank.remove(clip.report.written)


def test_with_the_donors_seed_the_clip_is_what_that_seed_gives(generator):
    clip = generator(OTHER, 8, SIZE, STEPS, seeds="donor")
    assert torch.equal(clip.latent, generator(OTHER, 7, SIZE, STEPS).latent)
    assert any("seed 7" in line for line in clip.report.warnings)
    assert clip.report.discrepancies.keys() > {"disagreement"}  # judged as a donor of the same noise


def test_an_empty_bank_leaves_the_users_own_seed(generator, tmp_path):
    fresh = Generator(Bank(tmp_path))
    clip = fresh(OTHER, 8, SIZE, STEPS, seeds="donor")
    assert torch.equal(clip.latent, sample.sample(fresh.model, [OTHER], [8], SIZE, STEPS))
    assert clip.report.warnings == []


def test_noise_that_is_not_the_donors_is_not_taken(generator):
    """Another version of a host may make other noise of the same seed."""
    levels = sample.sigmas(STEPS)

    def begin(seed):
        noise = sample.noise([seed + 1], SIZE)
        return noise, generator.request(OTHER, seed, noise, levels)

    assert with_donors_noise(begin(8)[1], generator.bank, begin) is None
